"""verifiers' interception server with its TrainClient under the suite: ``pip install verifiers``, run this file."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, ClassVar

import renderers.base
from renderers import Qwen3RendererConfig
from with_engine import EngineSubject, main

from april.testing.gateway import Door, Ended, Row
from april.testing.gateway.script import TOKENIZER

renderers.base.load_tokenizer = lambda _name: TOKENIZER  # no download

from verifiers.v1.clients import ModelContext, TrainClientConfig  # noqa: E402
from verifiers.v1.configs.agent import AgentConfig  # noqa: E402
from verifiers.v1.interception.server import InterceptionServer  # noqa: E402
from verifiers.v1.session import RolloutSession  # noqa: E402
from verifiers.v1.task import TaskData  # noqa: E402
from verifiers.v1.trace import AgentInfo, Trace, TraceTask  # noqa: E402
from verifiers.v1.types import Sampling  # noqa: E402


class Verifiers(EngineSubject):
    """A session is a rollout; its trace's branches are what would be trained."""

    name: ClassVar[str] = "verifiers TrainClient"
    version: ClassVar[str] = version("verifiers")
    dialects: ClassVar[Sequence[str]] = ("chat",)
    patience_s: ClassVar[float] = 10.0
    outage_s: ClassVar[float] = 8.0

    async def __aenter__(self) -> Any:
        await self.engine.start()
        self.server = InterceptionServer()
        await self.server.__aenter__()
        self.sessions: dict[str, tuple[RolloutSession, str, str]] = {}
        return self

    async def __aexit__(self, *_: object) -> None:
        self.engine.release()
        for session, *secrets in self.sessions.values():
            self.server.unregister(*secrets)
            del session
        await self.server.__aexit__(None, None, None)
        await self.engine.stop()

    async def open(self, max_tokens: int | None = None) -> Door:
        client = TrainClientConfig(
            base_url=self.engine.url + "/v1",
            renderer=Qwen3RendererConfig(enable_thinking=False),
            renderer_model_name="toy",
        )
        trace = Trace(
            task=TraceTask(type="toy", data=TaskData(idx=len(self.sessions))), agent=AgentInfo(config=AgentConfig())
        )
        session = RolloutSession(ctx=ModelContext("tiny", client, Sampling(max_tokens=max_tokens)), trace=trace)
        secrets = self.server.register(session)
        self.sessions[trace.id] = session, *secrets
        return Door(self.server.base_url + "/v1", secrets[0], trace.id)

    async def end(self, door: Door, reward: float = 1.0) -> Ended:
        rows, seen = [], set()
        for branch in self.sessions[door.id][0].trace.branches:
            if not branch.trainable:
                continue
            ids, mask = branch.token_ids, []
            for node in branch.nodes:  # a node that several branches have is trained with the first
                mask += [int(m) for m in node.mask] if id(node) not in seen else [0] * len(node.mask)
                seen.add(id(node))
            first = mask.index(1) if 1 in mask else len(mask)
            logprobs = branch.spread(lambda node: node.logprobs)
            rows.append(Row(prompt=ids[:first], tokens=ids[first:], logprobs=logprobs[first:], mask=mask[first:]))
        return Ended(rows)


if __name__ == "__main__":
    main(Verifiers)
