"""april's gateway under test: a RolloutScheduler on fake engines, and a trainer that updates in mid-call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from april.config.settings import Config
from april.core.batch import DeliveredSample
from april.core.tape import Float32
from april.core.types import Prompt, SampleId
from april.core.versions import PolicyVersion
from april.driver.llm import LLM
from april.engines.protocol import Chunk, Health, Request
from april.errors import EngineError, RolloutError, SchedulerClosed
from april.scheduler import RolloutScheduler
from april.testing.fake_engine import FakeEngine
from april.testing.records import conversation, fake_logprobs
from tests.gateway_suite.script import EOS, LONG_WORDS, TOKENIZER, VOCAB, reply, word_of

T = TypeVar("T")
SESSIONS = 32
"""Sessions that are there to be opened at any time."""
LOOK_S = 0.001
ALIVE_S = 0.02
"""Answers begin at once, and show life all the time."""


class HeldEngine(FakeEngine):
    """A fake engine with a scripted model, that can be held in the middle of long answers, and can refuse.

    Args:
        name: unique label.
        says: the tokens of the answer to a request; the script's without.
        long: whether the engine can be held in it; the script's long answers without.
    """

    def __init__(
        self, name: str, says: Callable[[Request], Sequence[int]] | None = None,
        long: Callable[[Request], bool] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            name, responses=says or (lambda request: reply(conversation(request).tolist())), seconds_per_token=1e-5,
            chunk_tokens=8, vocab_size=VOCAB, eos_token_id=EOS,
        )  # fmt: skip
        self.holds = self.refuses = False
        self.refused = 0
        self.standing: dict[str, asyncio.Future[None]] = {}
        self._told: set[str] = set()
        self._long = long or (lambda request: word_of(conversation(request).tolist()) in LONG_WORDS)

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Serve one request; a long answer stands still behind each chunk while the engine is held."""
        if self.refuses:
            self.refused += 1
            raise EngineError(f"engine {self.name}: HTTP 503, generation is paused")
        long = self._long(request)
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk
                if long and self.holds and chunk.finish is None and request.attempt_id not in self._told:
                    await self._stand(request.attempt_id)

    async def _stand(self, attempt_id: str) -> None:
        self.standing[attempt_id] = asyncio.get_running_loop().create_future()
        try:
            await self.standing[attempt_id]
        finally:
            del self.standing[attempt_id]

    def go_on(self) -> None:
        for waiting in self.standing.values():
            if not waiting.done():
                waiting.set_result(None)

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """End requests, those that stand too."""
        await super().abort(attempt_ids)
        self._told.update(self.standing if attempt_ids is None else attempt_ids)
        self.go_on()

    def die(self, seconds: float = 0.0) -> None:
        """Break all streams, those that stand too."""
        super().die(seconds)
        self.go_on()

    async def health(self) -> Health:
        """As any engine that refuses: unwell."""
        return Health(ok=False, detail="paused") if self.refuses else await super().health()

    async def close(self) -> None:
        await super().close()
        self.go_on()


@dataclass(frozen=True, slots=True)
class Door:
    """The address of a session, up to and with ``/v1``, its key, and its sample."""

    base_url: str
    api_key: str
    id: SampleId


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A sequence of tokens that would be trained.

    ``versions`` are those of the weights by token; ``mask`` is 1 for what the policy has written. Rows with the same
    ``sample`` share one reward.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    mask: Sequence[int]
    versions: Sequence[PolicyVersion]
    sample: SampleId
    reward: float | None


@dataclass(frozen=True, slots=True)
class Ended:
    """A session that has ended: its rows, and by reason the number of generated tokens that are in none."""

    rows: Sequence[Row]
    dropped: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A request in the engine's own record: the tokens it was given, and what it has handed over for them."""

    context: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[Any]


class _Session:
    """A sample whose rollout function waits for its session to end."""

    def __init__(self, llm: LLM) -> None:
        self.door = Door(llm.base_url, llm.api_key, llm.sample_id)
        self.llm = llm
        self.loop = asyncio.get_running_loop()
        self.over: asyncio.Future[float | None] = self.loop.create_future()


def _prompts() -> Iterator[Prompt]:
    number = 0
    while True:
        text = f"<|im_start|>user\n{number} #hello<|im_end|>\n<|im_start|>assistant\n"
        yield Prompt(np.array(TOKENIZER.encode(text), np.int32))
        number += 1


class Subject:
    """A gateway with the scripted model behind it, on fake engines; one object serves one promise.

    An async context manager: it is ready inside.
    """

    dialects: ClassVar[Sequence[str]] = ("chat", "text", "messages", "responses")
    """Those it is asked in; one that has messages first."""
    patience_s: ClassVar[float] = 20.0
    """The longest wait for anything to happen."""
    outage_s: ClassVar[float] = 0.0
    """How long the engine refuses: beyond the first refusal, which is enough where nothing is timed."""
    tolerance: ClassVar[float] = 1e-5
    """The largest difference, in nats, between a log-probability and the same computed again."""

    def __init__(self) -> None:
        self._engines: list[HeldEngine] = []
        self._dead: list[HeldEngine] = []
        """Those of schedulers before a restart."""
        self._sessions: dict[SampleId, _Session] = {}
        self._taken: set[SampleId] = set()
        self._delivered: list[DeliveredSample] = []
        self._updates = 0
        self._holds = False
        self._failure: BaseException | None = None

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._begin, None)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self._stop)

    # ---------------------------------------------------------------- the trainer

    def _begin(self, state: dict[str, Any] | None) -> None:
        self._rollouts = self._start()
        if state is not None:
            self._rollouts.load_state_dict(state, path=self._weights(-1))
        self._trainer = threading.Thread(target=self._train, args=(self._rollouts,), name="trainer", daemon=True)
        self._trainer.start()

    def _start(self) -> RolloutScheduler:
        """A scheduler on engines of its own."""
        engines = [HeldEngine(f"e{i}") for i in range(2)]
        for engine in engines:
            engine.holds = self._holds
        self._engines = engines
        return self._scheduler({}, engines=engines)

    def _scheduler(self, settings: dict[str, Any], **arguments: Any) -> RolloutScheduler:
        from renderers import Qwen3RendererConfig

        config = Config.from_mapping({
            "rollout_batch_size": 1, "n_samples_per_prompt": 1, "over_sampling_batch_size": SESSIONS,
            "max_response_len": 4000, "max_staleness": 1000, "max_in_flight": 4 * SESSIONS, **settings,
        })  # fmt: skip
        return RolloutScheduler(
            config, prompts=_prompts(), reward=_reward, rollout=self._rollout, check=True, tokenizer=TOKENIZER,
            renderer=Qwen3RendererConfig(enable_thinking=False), progress=False, commit_s=ALIVE_S, alive_s=ALIVE_S,
            **arguments,
        )  # fmt: skip

    def _weights(self, update: int) -> str:
        """Where the weights of an update are; -1: those of a restart."""
        return f"/{update}"

    def _stop(self) -> None:
        self._rollouts.close()
        self._trainer.join()

    def _train(self, rollouts: RolloutScheduler) -> None:
        try:
            with suppress(SchedulerClosed):
                while True:
                    self._delivered += rollouts.next_batch().samples
                    rollouts.weight_update(path=self._weights(self._updates))
                    self._updates += 1
        except BaseException as error:
            self._failure = error

    async def _rollout(self, prompt: Prompt, llm: LLM) -> float:
        session = self._sessions[llm.sample_id] = _Session(llm)
        reward = await session.over
        if reward is not None:
            return reward
        await llm.generate(prompt.token_ids)
        return 0.0

    async def _until(self, found: Callable[[], T | None]) -> T:
        """Wait for something that this process brings about."""
        while (value := found()) is None or value is False:
            if self._failure is not None:
                raise RolloutError("the trainer has failed") from self._failure
            await asyncio.sleep(LOOK_S)
        return value

    def _call(self, function: Callable[[], T]) -> T:
        """Call something on the engines' loop."""
        return self._rollouts._thread.call(function)

    # ---------------------------------------------------------------- sessions

    async def open(self) -> Door:
        """The first sample that nobody has; its clients say how long their answers may be."""

        def free() -> _Session | None:
            return next((s for i, s in sorted(self._sessions.items()) if i not in self._taken), None)

        session = await self._until(free)
        self._taken.add(session.door.id)
        return session.door

    def _tell(self, door: Door, reward: float | None) -> None:
        session = self._sessions[door.id]
        session.loop.call_soon_threadsafe(session.over.set_result, reward)

    async def end(self, door: Door, reward: float = 1.0) -> Ended:
        """Let the rollout function return, and wait for the batch and the weight update that it brings."""
        updates = self._updates
        self._tell(door, reward)
        rows = await self._until(lambda: [s for s in list(self._delivered) if s.id == door.id] or None)
        await self._until(lambda: self._updates > updates)
        dropped = {str(why): count for why, count in self._rollouts.ledger()["tokens"].dropped.items() if count}
        return Ended([self._row(sample) for sample in rows], dropped)

    @staticmethod
    def _row(sample: DeliveredSample) -> Row:
        return Row(
            prompt=list(sample.prompt.token_ids), tokens=sample.tokens.tolist(), logprobs=sample.logprobs.tolist(),
            mask=sample.loss_mask.tolist(), versions=[PolicyVersion(*v) for v in sample.versions.tolist()],
            sample=sample.id, reward=sample.reward,
        )  # fmt: skip

    async def fail(self, door: Door) -> None:
        session = self._sessions[door.id]
        session.loop.call_soon_threadsafe(session.over.set_exception, RolloutError("the environment is gone"))

    # ---------------------------------------------------------------- the engines

    async def record(self, door: Door) -> Sequence[Attempt]:
        """What the fake engines have written down."""

        def attempts() -> list[Attempt]:
            return [
                Attempt(
                    context=a.request.token_ids.tolist(), tokens=a.tokens.tolist(), logprobs=a.logprobs.tolist(),
                    versions=[chunk.version for chunk in a.chunks for _ in chunk.tokens],
                )
                for engine in (*self._dead, *self._engines)
                for a in sorted(engine.attempts_of(door.id), key=lambda a: a.started_s)
            ]  # fmt: skip

        return self._call(attempts)

    def recompute(self, row: Row) -> Float32:
        """As a fake engine makes them."""
        pairs = zip(row.tokens, row.versions, strict=True)
        return np.array([fake_logprobs([token], version)[0] for token, version in pairs], np.float32)

    async def hold(self) -> None:
        """Stand still behind the first chunk of each long answer."""
        self._holds = True
        for engine in self._engines:
            engine.holds = True

    async def held(self) -> int:
        """Requests that do."""
        engines = self._engines
        return self._call(lambda: sum(not waiting.done() for e in engines for waiting in e.standing.values()))

    async def release(self) -> None:
        """Let them go on."""
        self._holds = False

        def release() -> None:
            for engine in self._engines:
                engine.holds = False
                engine.go_on()

        self._call(release)

    async def update(self) -> None:
        """Another sample ends, and with it the step: requests are aborted, and weights updated."""
        updates = self._updates
        self._tell(await self.open(), None)
        await self._until(lambda: self._updates > updates)

    async def unavailable(self) -> None:
        for engine in self._engines:
            engine.refuses = True

    async def refused(self) -> int:
        return sum(engine.refused for engine in self._engines)

    async def available(self) -> None:
        for engine in self._engines:
            engine.refuses = False

    async def kill(self) -> None:
        """The engines with long answers under way die, and come back at once."""

        def die() -> None:
            for engine in self._engines:
                if engine.standing:
                    engine.die()

        self._call(die)

    async def restart(self, door: Door) -> Door:
        """Save, end, and begin again from the state."""
        state = await asyncio.to_thread(self._rollouts.state_dict)
        await asyncio.to_thread(self._stop)
        self._sessions.clear()
        self._dead += self._engines
        await asyncio.to_thread(self._begin, state)
        return (await self._until(lambda: self._sessions.get(door.id))).door


def _reward(prompt: Prompt, response: Any) -> float:
    return float(response.output)
