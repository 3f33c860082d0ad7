"""One scripted engine, a scheduler before it, and every client as a sample of its own: a run with no cut, and one whose
calls are cut in their middle, each cut followed by a weight update.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web
from renderers import Qwen3RendererConfig

import april.agents.endpoint
from april.agents.chat import RequestError
from april.agents.endpoint import Endpoint
from april.config.settings import Config
from april.core.batch import DeliveredSample
from april.core.types import Prompt, SampleId
from april.driver.llm import LLM, RolloutFunction
from april.engines.protocol import Request
from april.errors import SchedulerClosed
from april.scheduler import RolloutScheduler
from april.testing.records import AttemptRecord, conversation
from tests.gateway_suite.script import EOS, MARKS, TOKENIZER
from tests.gateway_suite.subject import HeldEngine

LOOK_S = 0.002
PATIENCE_S = 600.0
"""The longest that a run may take."""
TURN = "<|im_start|>assistant\n"
Script = Callable[[str], str]
"""What the model says to a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A client in a rollout function, what the model says to it, and what it tells of itself at its end.

    Of what the rollout function returned, ``seen`` makes what the client saw, and ``tells`` its own counts of calls and
    requests, if it has any, and the versions of its packages.
    """

    name: str
    rollout: RolloutFunction
    script: Script
    seen: Callable[[Any], Any]
    tells: Callable[[Any], Mapping[str, Any]] = lambda output: {}
    data: Mapping[str, Any] = field(default_factory=dict)
    of_the_moment: str = "(?!)"
    """What its requests have that is another in each run, as a regular expression."""


@dataclass(slots=True)
class Wire:
    """A request as it came in, and its end."""

    route: str
    retry: str
    body: Any
    status: int = 0
    said: str = ""


@dataclass(slots=True, kw_only=True)
class Seen:
    """What there is of a case after a run."""

    output: Any
    sample: list[DeliveredSample]
    wires: list[Wire]
    attempts: list[AttemptRecord]


class Listening(Endpoint):
    """An endpoint that writes down what arrives."""

    wires: dict[str, list[Wire]]

    def _handler(self, dialect: Any) -> Callable[[web.Request], Any]:
        handle = super()._handler(dialect)

        async def listen(request: web.Request) -> web.StreamResponse:
            raw = await request.read()
            retry = request.headers.get("x-stainless-retry-count", "0")
            wire = Wire(request.path.rpartition("/v1/")[2], retry, json.loads(raw))
            name = request.headers.get("X-Session-ID") if "/by-name/" in request.path else None
            door = self._sessions_by_name.get(name) if name else self._sessions_by_path.get(request.match_info["path"])
            LOG.setdefault("" if door is None else door.key, []).append(wire)
            try:
                response: web.StreamResponse = await handle(request)
            except RequestError as error:
                wire.status, wire.said = error.status, str(error)[:300]
                raise
            wire.status = response.status
            return response

        return listen


LOG: dict[str, list[Wire]] = {}
"""By the key of a sample's endpoint."""
april.agents.endpoint.Endpoint = Listening  # type: ignore[misc]


class Run:
    """All cases once; ``cuts`` says whether their calls are cut."""

    def __init__(self, cases: Sequence[Case], *, cuts: bool) -> None:
        self.cases = list(cases)
        self.cuts = cuts
        self.outputs: dict[str, Any] = {}
        self._keys: dict[str, str] = {}
        self._of: dict[SampleId, Case] = {}
        self._fillers: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._delivered: dict[SampleId, list[DeliveredSample]] = {}
        self.updates = 0
        self._failure: BaseException | None = None
        self.engine = HeldEngine("scripted", self._says, lambda request: request.sample_key in self._of)
        self.engine.holds = cuts

    def _says(self, request: Request) -> list[int]:
        case = self._of.get(SampleId(*request.sample_key))  # type: ignore[misc]  # the training's have one
        text = TOKENIZER.decode(conversation(request).tolist())
        said = (case.script(text) if case else "hm") + MARKS[EOS]
        # "th" is one token to the tokenizer, and two where a model writes it: text does not tell the tokens
        return [token for piece in re.split("(?<=t)(?=h)", said) for token in TOKENIZER.encode(piece)]

    def _prompts(self) -> Iterator[Prompt]:
        for number in itertools.count():
            case = self.cases[number] if number < len(self.cases) else None
            data = {"case": number, **case.data} if case else {}
            yield Prompt(np.array(TOKENIZER.encode(f"{number}"), np.int32), data)

    async def _rollout(self, prompt: Prompt, llm: LLM) -> Any:
        if "case" in prompt.data:
            case = self.cases[prompt.data["case"]]
            self._of[llm.sample_id] = case
            self._keys[case.name] = llm.api_key
            self.outputs[case.name] = await case.rollout(prompt, llm)
            return None
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        self._fillers.append((loop, over))
        await over
        await llm.generate(prompt.token_ids)
        return None

    def _train(self, rollouts: RolloutScheduler) -> None:
        try:
            with suppress(SchedulerClosed):
                while True:
                    for sample in rollouts.next_batch().samples:
                        self._delivered.setdefault(sample.id, []).append(sample)
                    if self.cuts:
                        rollouts.weight_update(path=f"/{self.updates}")
                    self.updates += 1
        except BaseException as error:
            self._failure = error

    def play(self) -> dict[str, Seen]:
        """What was seen of each case, by its name."""
        LOG.clear()
        count = len(self.cases)
        config = Config(
            rollout_batch_size=1 if self.cuts else count, over_sampling_batch_size=count + 8 if self.cuts else count,
            n_samples_per_prompt=1, max_response_len=200_000, max_staleness=100_000, max_in_flight=256,
        )  # fmt: skip
        with RolloutScheduler(
            config, prompts=self._prompts(), reward=lambda prompt, response: 1.0, rollout=self._rollout,
            engines=[self.engine], check=True, tokenizer=TOKENIZER, progress=False,
            renderer=Qwen3RendererConfig(enable_thinking=False), commit_s=0.02, alive_s=0.02,
        ) as rollouts:  # fmt: skip
            trainer = threading.Thread(target=self._train, args=(rollouts,), name="trainer", daemon=True)
            trainer.start()
            self._wait(rollouts)
            found = rollouts._thread.call(self._found)
        trainer.join()
        return found

    def _over(self) -> bool:
        delivered = set(self._delivered)
        return sum(sample in delivered for sample in list(self._of)) == len(self.cases)

    def _wait(self, rollouts: RolloutScheduler) -> None:
        """Cut what stands in the middle of its answer, again and again, until all have ended."""
        until = time.monotonic() + PATIENCE_S
        while not self._over():
            if self._failure is not None:
                raise RuntimeError("the trainer has failed") from self._failure
            if time.monotonic() > until:
                open_ones = [case.name for sample, case in self._of.items() if sample not in self._delivered]
                raise TimeoutError(f"{', '.join(open_ones)} did not end in {PATIENCE_S:g} s")
            time.sleep(LOOK_S)
            if self.cuts and self._fillers and rollouts._thread.call(lambda: len(self.engine.standing)):
                before = self.updates
                loop, over = self._fillers.pop(0)
                loop.call_soon_threadsafe(over.set_result, None)
                while self.updates == before and self._failure is None and time.monotonic() < until:
                    time.sleep(LOOK_S)

    def _found(self) -> dict[str, Seen]:
        return {
            case.name: Seen(
                output=self.outputs.get(case.name), sample=self._delivered[sample],
                wires=LOG.get(self._keys[case.name], []), attempts=self.engine.attempts_of(sample),
            )
            for sample, case in self._of.items()
        }  # fmt: skip
