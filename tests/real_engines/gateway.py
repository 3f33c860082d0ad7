"""``python -m tests.real_engines.gateway vllm``: april's endpoint before a real server, held to the suite for gateways.

The server has a tiny model, loads weights from disk at every update, is killed with ``kill -9``, and says what
:mod:`tests.real_engines.scripted` writes. A proxy before the server refuses with HTTP 503 when it is told to.
Writes a report into ``runs/engines``; ends with status 1 if a promise is broken. Before, what the server samples under
``constraints: enforce`` is checked.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self
from unittest import mock

import msgspec
import numpy as np
import typer
from aiohttp import web
from numpy.typing import NDArray
from openai import AsyncOpenAI
from renderers import Qwen3RendererConfig
from transformers import AutoTokenizer

import april.scheduler
from april.config.settings import Config
from april.core.tape import Float32, Int32
from april.core.versions import PolicyVersion
from april.engines.kinds.factory import create_engines
from april.engines.protocol import Chunk, Engine, Request
from april.scheduler import RolloutScheduler
from april.testing.conformance import Outcome, Report
from april.testing.conformance.reference import hugging_face
from april.testing.conformance.subject import Broken
from april.testing.recording_engine import RecordingEngine
from april.testing.records import conversation
from tests.gateway_suite.promises import PROMISES
from tests.gateway_suite.script import LONG_WORDS, MARKS, word_of
from tests.gateway_suite.subject import Attempt, Door, Row, Subject
from tests.real_engines.commands import sglang_server, vllm_server
from tests.real_engines.environments import ROOT, SGLANG_VERSION, VLLM_VERSION
from tests.real_engines.models import CONTEXT, make_models
from tests.real_engines.recording_proxy import RecordingProxy
from tests.real_engines.scripted import HOLD, LIFT
from tests.real_engines.servers import Server, emptied, program, ready, until_ready

STREAMED = 4
"""Tokens per event: so an answer that is held has begun."""
ROUTES = ("/generate", "/inference/v1/generate", "/v1/completions")


class Proxy(RecordingProxy):
    """Refuses requests for tokens, if it is told to."""

    refuses = False
    refused = 0

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        if self.refuses and request.path in ROUTES:
            self.refused += 1
            return web.json_response({"error": {"message": "generation is paused", "code": 503}}, status=503)
        return await super()._pass_on(request)


@dataclass(slots=True)
class Behind:
    """What is behind all subjects, one after another: a server, and the weights that it has."""

    kind: str
    server: Server
    proxy: Proxy
    models: tuple[str, str]
    hold: Path
    now: str = ""
    """Directory of the weights that the server has."""

    def __post_init__(self) -> None:
        self.now = self.models[0]


class WatchedEngine(RecordingEngine):
    """Knows which requests run, and which weights were loaded as which version."""

    def __init__(self, engine: Engine, behind: Behind) -> None:
        super().__init__(engine)
        self._behind = behind
        self.running: set[str] = set()
        self.paths: dict[PolicyVersion, str] = {}

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        self.running.add(request.attempt_id)
        try:
            async with aclosing(super().generate(request)) as chunks:
                async for chunk in chunks:
                    # before any update the server has what it had when april came
                    self.paths.setdefault(chunk.version, self._behind.now)
                    yield chunk
        finally:
            self.running.discard(request.attempt_id)

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        await super().update_weights(version, path)
        if path is not None:
            self._behind.now = self.paths[version] = path

    @property
    def held(self) -> int:
        """Long answers that are under way."""
        requests = [self.requests[i] for i in self.running if any(len(c.tokens) for c in self.yielded[i])]
        return sum(word_of(conversation(r).tolist()) in LONG_WORDS for r in requests)

    def attempts_of(self, sample: Any) -> list[Attempt]:
        """What was handed over for the requests of a sample."""
        found = []
        for name, request in self.requests.items():
            if request.sample_key == sample:
                chunks = self.yielded[name]
                found.append(Attempt(
                    context=request.token_ids.tolist(), tokens=[t for c in chunks for t in c.tokens.tolist()],
                    logprobs=[p for c in chunks for p in c.logprobs.tolist()],
                    versions=[c.version for c in chunks for _ in c.tokens],
                ))  # fmt: skip
        return found


def logprobs_of(logits: NDArray[np.float64], tokens: Sequence[int] | Int32) -> NDArray[np.float64]:
    """Log-probabilities of tokens, from the logits [T, V] at their positions."""
    highest = logits.max(1, keepdims=True)
    whole = logits - highest - np.log(np.exp(logits - highest).sum(1, keepdims=True))
    return np.asarray(whole[np.arange(len(tokens)), tokens])


class RealSubject(Subject):
    """april before a real server."""

    behind: ClassVar[Behind]
    patience_s: ClassVar[float] = 240.0
    outage_s: ClassVar[float] = 2.0
    tolerance: ClassVar[float] = 1e-4

    def __init__(self) -> None:
        super().__init__()
        self._watched: list[WatchedEngine] = []
        """Of all schedulers of this subject; the last one's is the last."""

    async def __aenter__(self) -> Self:
        await self.release()
        self.behind.proxy.refuses, self.behind.proxy.refused = False, 0
        await asyncio.to_thread(until_ready, [self.behind.server])
        await super().__aenter__()
        await self.update()  # a server that is started anew gets the weights again that april had it load
        return self

    def _start(self) -> RolloutScheduler:
        settings = {
            "engine": {
                "kind": self.behind.kind, "urls": [self.behind.proxy.url], "max_token_loss": STREAMED,
                "first_weights": "present",  # one server for all promises: it has those of the promise before
            },
            "max_response_len": 2000, "allow_mismatch": True, "outage_deadline_s": 600.0,
            # log-probabilities of what is lifted above all others, not what is left alone
            "sampling": {"temperature": 0.0 if self.behind.kind == "sglang" else 1.0},
        }  # fmt: skip

        def watched(*arguments: Any) -> list[Engine]:
            self._watched += [WatchedEngine(engine, self.behind) for engine in create_engines(*arguments)]
            return [*self._watched[-1:]]

        with mock.patch.object(april.scheduler, "create_engines", watched):
            return self._scheduler(settings)

    def _weights(self, update: int) -> str:
        return self.behind.models[(update + 1) % 2]

    async def record(self, door: Door) -> Sequence[Attempt]:
        """What the engines handed over."""
        return self._call(lambda: [a for engine in self._watched for a in engine.attempts_of(door.id)])

    def recompute(self, row: Row) -> Float32:
        """By the Hugging Face model, in one forward pass for each of the row's weights."""
        tokens, versions = np.array(row.tokens), row.versions
        found = np.zeros(len(tokens), np.float32)
        for version in {v for v, trained in zip(versions, row.mask, strict=True) if trained}:
            path = next(e.paths[version] for e in self._watched if version in e.paths)
            logits = np.array(hugging_face(path)(list(row.prompt), tokens.tolist()), np.float64)
            if self.behind.kind == "sglang":
                logits[np.arange(len(tokens)), tokens] = logits.max(1) + LIFT
            here = [v == version for v in versions]
            found[here] = logprobs_of(logits, tokens)[here]
        return found

    async def hold(self) -> None:
        """Slow the server's steps down."""
        self.behind.hold.touch()

    async def held(self) -> int:
        """Long answers that have begun and not ended."""
        return self._call(lambda: sum(engine.held for engine in self._watched))

    async def release(self) -> None:
        self.behind.hold.unlink(missing_ok=True)

    async def unavailable(self) -> None:
        """The proxy refuses."""
        self.behind.proxy.refuses = True

    async def refused(self) -> int:
        return self.behind.proxy.refused

    async def available(self) -> None:
        """It passes requests on again."""
        self.behind.proxy.refuses = False

    async def kill(self) -> None:
        """``kill -9`` of the server; it is started again at once."""
        await asyncio.to_thread(self.behind.server.kill)
        self.behind.now = self.behind.models[0]
        await asyncio.to_thread(self.behind.server.start)

    async def restart(self, door: Door) -> Door:
        """As april does; then wait for the session."""
        self._engines = []
        return await super().restart(door)


ARGUMENTS = {
    "type": "object", "properties": {"odd": {"type": "boolean"}, "count": {"enum": [1, 7, 49]}},
    "required": ["odd", "count"], "additionalProperties": False,
}  # fmt: skip
DEMANDS: Sequence[dict[str, Any]] = (
    {"max_tokens": 30},
    {
        "tools": [
            {"type": "function", "function": {"name": name, "parameters": ARGUMENTS}} for name in ("add", "halve")
        ],
        "tool_choice": {"type": "function", "function": {"name": "halve"}}, "parallel_tool_calls": False,
    },
    {"response_format": {"type": "json_schema", "json_schema": {"name": "arguments", "schema": ARGUMENTS}}},
)  # fmt: skip
"""What a client asks for beside the messages: a free answer, a call of the second tool, and JSON of a schema."""


async def _demanding(prompt: Any, llm: Any) -> list[Any]:
    """The answers to DEMANDS, as choices."""
    async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0) as client:
        asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "a tiny model counts"}]}
        replies = [await client.chat.completions.create(**asked, **{"max_tokens": 200, **more}) for more in DEMANDS]
    return [reply.choices[0] for reply in replies]


def _is_demanded(message: Any, tool: str) -> bool:
    """Whether a message is one call of the tool, or text if that is empty, with JSON of ARGUMENTS."""
    functions = [call.function for call in message.tool_calls or ()]
    if [function.name for function in functions] != [tool] * bool(tool):
        return False
    value = json.loads(functions[0].arguments if tool else message.content)
    return {*value} == {"odd", "count"} and value["odd"] in (True, False) and value["count"] in (1, 7, 49)


def check_enforced(kind: str, server: Server, model: str, samples: int = 8) -> dict[str, Any]:
    """Put ``constraints: enforce`` to the test before a server with the weights in ``model``; returns figures.

    Raises Broken unless whole answers are as demanded, the log-probabilities of free tokens are the model's, and those
    of tokens that a grammar allowed are not lower than the model's, since a grammar excludes other tokens. An answer
    that is cut by its limit has no form: the grammar of a call allows white space, which a random model may repeat.
    """
    config = Config.from_mapping({
        "engine": {"kind": kind, "urls": [server.url]}, "constraints": "enforce", "allow_mismatch": True,
        "rollout_batch_size": samples, "n_samples_per_prompt": 1, "max_response_len": 400,
    })  # fmt: skip
    with RolloutScheduler(
        config, prompts=({"number": number} for number in itertools.count()), rollout=_demanding,
        reward=lambda prompt, response: 1.0, tokenizer=AutoTokenizer.from_pretrained(model), progress=False,
        renderer=Qwen3RendererConfig(enable_thinking=False),
    ) as rollouts:  # fmt: skip
        rows = rollouts.next_batch().samples
    answers = {row.id: row.output for row in rows}.values()
    whole: dict[str, int] = {}
    for number, tool in ((1, "halve"), (2, "")):
        found = [answer[number].message for answer in answers if answer[number].finish_reason != "length"]
        whole[tool or "JSON"] = len(found)
        if wrong := [message for message in found if not _is_demanded(message, tool)]:
            raise Broken(f"{tool or 'JSON'} was demanded, and the answers are {wrong}")
    if min(whole.values()) < samples // 4:
        raise Broken(f"{whole} of {samples} answers are whole")
    differences: tuple[list[float], list[float]] = ([], [])
    logits = hugging_face(model)
    for row in rows:
        tokens = row.tokens.tolist()
        own = logprobs_of(np.array(logits(row.prompt.token_ids.tolist(), tokens), np.float64), tokens)
        for listed, mask in zip(differences, (0, 1), strict=True):
            listed += (row.logprobs - own)[(row.loss_mask == 1) & (row.constrained_mask == mask)].tolist()
    free, constrained = map(np.array, differences)
    if np.abs(free).max() > RealSubject.tolerance or constrained.min() < -RealSubject.tolerance:
        raise Broken(f"log-probabilities differ by {np.abs(free).max():.2g} (free), {constrained.min():.2g} (grammar)")
    return {**whole, "free tokens": len(free), "largest error": float(np.abs(free).max()), "others": len(constrained)}


def scripted_server(kind: str, model: Path, out: Path, hold: Path | None = None) -> Server:
    if kind == "vllm":
        server = vllm_server(kind, model, out, open_routes=True, context=CONTEXT)
        outputs = {"backend": "xgrammar", "disable_any_whitespace": True}
        script = ["--logits-processors", "tests.real_engines.scripted:VllmScript"]
        server.command = [*server.command, *script, "--structured-outputs-config", json.dumps(outputs)]
    elif kind != "sglang":
        raise typer.BadParameter(f"there are servers of kind vllm and sglang, not of kind {kind}")
    else:
        server = sglang_server(kind, model, out, context=CONTEXT, room=64 * CONTEXT)
        command = ["tests.real_engines.scripted" if word == "sglang.launch_server" else word for word in server.command]
        flags = "--enable-custom-logit-processor --disable-overlap-schedule --constrained-json-disable-any-whitespace"
        server.command = [*command, *flags.split()]
    server.environment["PYTHONPATH"] += f":{ROOT}"
    server.environment[HOLD] = str(hold or "")
    return server


async def _suite(kind: str, server: Server, models: dict[str, Path], hold: Path, only: list[int]) -> Report:
    async with Proxy(server.url) as proxy:
        behind = Behind(kind, server, proxy, (str(models["first"]), str(models["second"])), hold)
        subject, verdicts = type("Subject", (RealSubject,), {"behind": behind}), []
        for promise in PROMISES:
            if not only or promise.number in only:
                verdicts.append(await promise.on(subject))
                print(f"  {verdicts[-1]} [{verdicts[-1].wall_s:.1f} s]", flush=True)
    version = VLLM_VERSION if kind == "vllm" else SGLANG_VERSION
    return Report(engine=f"april before {kind}", version=version, verdicts=tuple(verdicts))


def main(
    kind: Annotated[str, typer.Argument(help="vllm or sglang")],
    only: Annotated[list[int] | None, typer.Option(help="Numbers of promises.")] = None,
    out: Annotated[Path, typer.Option(help="Where report and logs go.")] = ROOT / "runs" / "engines",
) -> None:
    """The twenty promises on one server, and ``constraints: enforce`` unless some promises are chosen."""
    out = out.resolve() / f"gateway-{kind}"
    emptied(out)
    hold = out / "hold"
    models = make_models(out / "models", marks=MARKS)
    with program():
        server = scripted_server(kind, models["first"], out, hold)
        with ready(server):
            if not only:
                print(f"  constraints: enforce {check_enforced(kind, server, str(models['first']))}", flush=True)
            report = asyncio.run(_suite(kind, server, models, hold, only or []))
    (out / "report.json").write_bytes(msgspec.json.encode(report))
    passed = sum(v.outcome is Outcome.PASSED for v in report.verdicts)
    print(f"{report.engine}: {passed} of {len(report.verdicts)} kept")
    raise typer.Exit(0 if passed == len(report.verdicts) else 1)


if __name__ == "__main__":
    typer.run(main)
