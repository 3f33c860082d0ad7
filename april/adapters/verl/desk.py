"""The desk: april's core behind verl's rollouts. It runs in an actor of its own; agent loops and the sampler ask it.

Each sample has one agent loop, in some worker process, that asks the desk one thing at a time and waits for the answer.
Invariant: everything an agent loop says carries the life that it was started with; a loop whose sample went on without
it is told so and changes nothing. Nothing here knows Ray or verl.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from april.adapters.verl.answers import Answer, Done, GivenUp, Go, Result, Settled, Span, Start
from april.core import commands as do
from april.core import events as ev
from april.core import snapshot
from april.core.batch import Batch
from april.core.sampling import SamplingParams
from april.core.settings import CoreSettings, EngineLimits
from april.core.state import RolloutCore
from april.core.tape import Int32, SegmentKind
from april.core.types import Attempt, FinishReason, Group, Prompt, Sample, SampleId, SampleState
from april.core.versions import PolicyVersion
from april.driver.busy_time import BusyTime
from april.driver.wire_checks import check_chunk
from april.engines.protocol import Chunk
from april.errors import CheckpointError, RolloutError, WireError

SERVERS = "verl"
"""verl balances the load of its replicas itself, so they are one engine to the core."""
ANY_TOKEN = 2**31 - 1
PROBE_S = 1.0
"""verl brings its servers back itself, or ends: after this time they count as well again."""
FORMAT = 1
Order = tuple[Any, ...]
"""For the sampler: ("draw", count), ("abort",), ("deliver", Delivery) or ("fail", error)."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A batch: ``uids`` of its prompts, oldest completion first."""

    batch: int
    uids: tuple[str, ...]
    metrics: dict[str, float]
    masked: dict[tuple[str, int], Any]
    """By (uid, sample): loss mask uint8 [T] over the conversation, where the core took the loss off a token."""


class Desk:
    """One run.

    Args:
        settings: of the core.
        limits: of all servers together.
        filter_metric: groups whose samples all have the same value of it are replaced; None: no filter.
        check: cross-check the core's books after every event.
    """

    def __init__(
        self, settings: CoreSettings, limits: EngineLimits, filter_metric: str | None = None, *, check: bool = False
    ) -> None:
        self.core = RolloutCore(settings, [limits], check=check)
        self._metric = filter_metric
        self._slots = settings.max_in_flight
        self._groups: dict[str, Group] = {}
        """Held prompts by uid."""
        self._lives: dict[SampleId, int] = {}
        self._answers: dict[SampleId, deque[Answer]] = {}
        self._waiting: dict[SampleId, tuple[bool, asyncio.Future[Answer]]] = {}
        """(whether it waits for its start, who waits)"""
        self._late: dict[SampleId, Result] = {}
        """Results of requests that the core had stopped waiting for; the next attempt may begin with them."""
        self._rewards: dict[SampleId, float | None] = {}
        self._values: dict[SampleId, float | None] = {}
        self._dropped: set[str] = set()
        self._events: deque[ev.Event] = deque()
        self._orders: list[Order] = []
        self._called: asyncio.Event | None = None
        self._validated: deque[str] = deque()
        self._busy: BusyTime | None = None
        self._in_flight = 0
        self._last_batch: int | None = None
        self._position = 0
        self._failed: BaseException | None = None

    def __repr__(self) -> str:
        return f"<Desk {self.core!r} orders={len(self._orders)} waiting={len(self._waiting)}>"

    # ---------------------------------------------------------------- the sampler asks

    async def begin(self, label: int) -> None:
        """A step begins, under the weights that the trainer calls ``label``; the batch before is trained on."""
        if self._last_batch is not None and self._last_batch in self.core.leased:
            self._post(ev.BatchCommitted(self._last_batch))
        version = PolicyVersion(self.core.clock.current.incarnation, label)
        self._post(ev.WeightsUpdated(version))
        if self._busy is None:
            self._busy = BusyTime(self._slots)
        self._busy.step_started(asyncio.get_running_loop().time())
        self._post(ev.StepRequested())

    async def orders(self) -> list[Order]:
        """What the sampler is to do, in order; waits until there is something.

        Raises:
            InvariantError: april's books do not balance.
        """
        if self._called is None:
            self._called = asyncio.Event()
        while not self._orders and self._failed is None:
            self._called.clear()
            await self._called.wait()
        if self._failed is not None:
            raise self._failed
        orders, self._orders = self._orders, []
        return orders

    async def drawn(self, uids: list[str]) -> None:
        """Prompts for an order to draw; their agent loops are started when the sampler has dispatched them."""
        prompts = []
        for uid in uids:
            # agent loops make the token ids; they come with the first call
            prompts.append(Prompt(np.empty(0, np.int32), {"uid": uid}, 0, self._position))
            self._position += 1
        first = self.core.books.groups_drawn
        self._events.append(ev.PromptsDrawn(prompts, exhausted=False))
        # known before the core starts them
        self._work(lambda: self._know(range(first, first + len(uids))))

    async def closed(self, uid: str) -> bool:
        """Whether this prompt, whose agent loops have all ended, was dropped."""
        if uid in self._dropped:
            self._dropped.discard(uid)
            return True
        return False

    async def validated(self, uid: str) -> None:
        """All agent loops of a prompt of the validation set have ended."""
        self._validated.append(uid)
        self._call()

    async def validation(self, count: int) -> list[str]:
        """The next ``count`` prompts of the validation set that are complete; waits until there are so many."""
        if self._called is None:
            self._called = asyncio.Event()
        while len(self._validated) < count:
            self._called.clear()
            await self._called.wait()
        return [self._validated.popleft() for _ in range(count)]

    async def story(self, uid: str, index: int) -> str:
        """What happened to one held sample, one line per transition."""
        group = self._groups.get(uid)
        return f"no prompt {uid} is held" if group is None else self.core.story(group.samples[index].id)

    async def ledgers(self) -> dict[str, dict[str, object]]:
        """Where every token and every prompt went."""
        return {"tokens": self.core.tokens.as_dict(), "prompts": self.core.prompts.as_dict()}

    # ---------------------------------------------------------------- agent loops ask

    async def start(self, uid: str, index: int) -> Answer:
        """Start, when the core wants this sample (again), or Settled."""
        while (sample := self._sample(uid, index)) is not None:
            answer = await self._answer(sample.id, for_start=True)
            if not isinstance(answer, GivenUp):
                return answer
        return Settled()

    async def call(
        self, uid: str, index: int, life: int, token_ids: Int32, max_tokens: int, temperature: float
    ) -> Answer:
        """An agent loop wants its conversation, int32 [T], continued by at most ``max_tokens``: Go, Done or GivenUp."""
        sample = self._alive(uid, index, life)
        if sample is None:
            return GivenUp()
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)
        self._post(ev.CallMade(sample.id, sampling, np.asarray(token_ids, np.int32)))
        return await self._answer(sample.id)

    async def ended(self, uid: str, index: int, life: int, result: Result) -> Answer:
        """What came of a Go: the next Go, Done or GivenUp."""
        sample = self._alive(uid, index, life)
        if sample is None:
            return GivenUp()
        self._answers.pop(sample.id, None)
        attempt = self.core.attempts.get(sample.attempt_id) if sample.state is SampleState.IN_FLIGHT else None
        if attempt is None:
            self._late[sample.id] = result
        else:
            self._take(attempt, result)
        return await self._answer(sample.id)

    async def broke(self, uid: str, index: int, life: int, error: str) -> Answer:
        """The request of a Go failed: the next Go, or GivenUp."""
        sample = self._alive(uid, index, life)
        if sample is None:
            return GivenUp()
        if sample.state is SampleState.IN_FLIGHT:
            self._answers.pop(sample.id, None)
            self._post(ev.AttemptFailed(sample.attempt_id, error))
        return await self._answer(sample.id)

    async def returned(self, uid: str, index: int, life: int, reward: float | None, value: float | None) -> None:
        """An agent loop has returned, and its trajectory is stored; ``value`` is that of the filter's metric."""
        sample = self._alive(uid, index, life)
        if sample is None:
            return
        if reward is None and self.core.settings.has_reward:
            self._post(ev.SampleFailed(sample.id, "it has no reward"))
            return
        self._rewards[sample.id], self._values[sample.id] = reward, value
        self._post(ev.SampleReturned(sample.id))

    async def failed(self, uid: str, index: int, life: int, error: str) -> None:
        """An agent loop, or its reward, raised."""
        sample = self._alive(uid, index, life)
        if sample is not None:
            self._post(ev.SampleFailed(sample.id, error))

    # ---------------------------------------------------------------- checkpoints

    async def state(self) -> dict[str, Any]:
        """Everything that is not in the batches delivered so far, as plain data."""
        return {
            "format": FORMAT,
            "position": self._position,
            "rollouts": snapshot.take(self.core, self._last_batch),
        }

    async def restore(self, state: dict[str, Any], stored: dict[str, list[int]]) -> list[str]:
        """Go on from a saved state; the prompts whose agent loops are to be started, oldest first.

        ``stored``: samples of each held prompt whose trajectory is in verl's checkpoint. verl's queue is saved a moment
        before april's state: a sample that was finished in between runs again, answered from its tape.

        Raises:
            CheckpointError: not such a state, or prompts of it are not in verl's checkpoint.
        """
        if state.get("format") != FORMAT:
            raise CheckpointError(f"april's state has format {state.get('format')}; this version reads {FORMAT}")
        rollouts = state["rollouts"]
        groups = [*rollouts["ready"], *rollouts["waiting"]]
        missing = [g["data"]["uid"] for g in groups if g["data"]["uid"] not in stored]
        if missing:
            raise CheckpointError(
                f"{len(missing)} prompts of april's state (the first is {missing[0]}) are not in the checkpoint's "
                "transfer_queue directory: the two do not belong together"
            )
        unstored = []
        for group in groups:
            there = stored[group["data"]["uid"]]
            for index, sample in enumerate(group["samples"]):
                if sample["finished"] and index not in there:
                    sample["finished"] = False
                    unstored.append(group["id"])
        again = [g for g in rollouts["ready"] if g["id"] in unstored]
        rollouts["ready"] = [g for g in rollouts["ready"] if g["id"] not in unstored]
        rollouts["waiting"] = [*rollouts["waiting"], *again]
        snapshot.restore(self.core, rollouts)
        self._position = state["position"]
        self._know([g.id for g in self.core.buffer])
        ready = {g.id for g in self.core.monitor}
        return [str(g.prompt.data["uid"]) for g in sorted(self.core.buffer, key=lambda g: g.id) if g.id not in ready]

    # ---------------------------------------------------------------- the core

    def _know(self, groups: Any) -> None:
        for number in groups:
            group = self.core.buffer.groups.get(number)
            if group is not None:
                self._groups[str(group.prompt.data["uid"])] = group

    def _post(self, event: ev.Event) -> None:
        self._events.append(event)
        self._work()

    def _work(self, after_first: Any = None) -> None:
        """Give the core what has happened, and do what it wants, until nothing is left."""
        try:
            while self._events:
                commands = self.core.handle(self._events.popleft())
                if after_first is not None:
                    after_first()
                    after_first = None
                for command in commands:
                    self._do(command)
        except BaseException as error:
            self._failed = error
            self._call()
            raise
        finally:
            if self._busy is not None:
                now = len(self.core.attempts)
                self._busy.change(now - self._in_flight, asyncio.get_running_loop().time())
                self._in_flight = now

    def _do(self, command: do.Command) -> None:
        match command:
            case do.StartSample(sample):
                life = self._lives[sample.id] = self._lives.get(sample.id, 0) + 1
                self._say(sample.id, Start(life))
            case do.Submit(attempt):
                self._submit(attempt)
            case do.CallCompleted(sample):
                self._say(sample.id, _done(sample))
            case do.CancelSample(sample):
                self._cancel(sample.id)
            case do.ScoreSample(sample):
                self._events.append(ev.Scored(sample.id.group, [(sample.id.index, self._rewards[sample.id] or 0.0)]))
            case do.JudgeGroup(group, judgement):
                self._events.append(self._verdict(group, judgement))
            case do.DrawPrompts(count):
                self._order("draw", count)
            case do.Abort(_, _, everything):
                # verl ends all requests or none; a single one that nobody wants runs to its end
                if everything:
                    self._order("abort")
            case do.StartTimer(timer, seconds, _):
                asyncio.get_running_loop().call_later(seconds, self._post, ev.TimerFired(timer))
            case do.ProbeEngine(engine):
                asyncio.get_running_loop().call_later(PROBE_S, self._post, ev.EngineReady(engine))
            case do.ReportDrop(group, reason, why):
                self._dropped.add(str(group.prompt.data["uid"]))
                self._order("dropped", str(reason), why)
                self._retire(group)
            case do.Deliver(batch):
                self._deliver(batch)
            case do.Fail(error):
                self._order("fail", error)
            case _:
                pass  # a fenced request is taken when it comes after all; there is no end of the data and no pause

    def _submit(self, attempt: Attempt) -> None:
        late = self._late.pop(attempt.sample.id, None)
        if late is not None and late.offset == len(attempt.token_ids):
            self._take(attempt, late, queue=True)
            return
        self._say(attempt.sample.id, Go(attempt.token_ids, attempt.sampling.max_tokens))

    def _take(self, attempt: Attempt, result: Result, *, queue: bool = False) -> None:
        """A server's result becomes the attempt's, if it can be true."""
        current = self.core.clock.current
        event: ev.Event
        version = current if result.label is None else PolicyVersion(current.incarnation, result.label)
        room = attempt.sampling.max_tokens
        try:
            if result.offset != len(attempt.token_ids):
                raise WireError(f"an answer to {result.offset} tokens came where {len(attempt.token_ids)} were sent")
            chunk = Chunk(result.tokens, result.logprobs, version)
            check_chunk(chunk, ANY_TOKEN, room, attempt.sample.tape.newest_version, current)
        except WireError as error:
            event = ev.AttemptFailed(attempt.id, str(error), corrupt=True, rejected=len(result.tokens))
        else:
            attempt.tape.append(result.tokens, result.logprobs, version)
            full = len(result.tokens) >= room
            event = ev.AttemptEnded(attempt.id, "abort" if result.aborted else "length" if full else "stop")
        if queue:
            self._events.append(event)
        else:
            self._post(event)

    def _verdict(self, group: Group, judgement: int) -> ev.Event:
        values = [self._values.get(s.id) for s in group.samples]
        known = [v for v in values if v is not None and math.isfinite(v)]
        if len(known) < len(values):
            error = f"algorithm.filter_groups.metric={self._metric} is not a number of every sample"
            return ev.GroupJudged(group.id, judgement, keep=False, error=error)
        return ev.GroupJudged(group.id, judgement, keep=len(known) < 2 or float(np.std(known)) > 0.0)

    def _deliver(self, batch: Batch) -> None:
        masked: dict[tuple[str, int], Any] = {}
        uids: dict[str, None] = {}
        for sample in batch.samples:
            uid = str(sample.prompt.data["uid"])
            uids[uid] = None
            written = sum(s.count for s in sample.segments if s.kind is SegmentKind.GENERATED)
            if int(np.count_nonzero(sample.loss_mask)) < written:
                masked[uid, sample.id.index] = sample.loss_mask
        metrics = {k: v for k, v in batch.metrics.items() if not k.startswith(("response_len", "reward_"))}
        if self._busy is not None:
            metrics |= self._busy.step_ended(asyncio.get_running_loop().time())
        self._last_batch = batch.id
        for uid in uids:
            self._retire(self._groups[uid])
        self._order("deliver", Delivery(batch.id, tuple(uids), metrics, masked))

    # ---------------------------------------------------------------- who waits for what

    def _order(self, *order: Any) -> None:
        self._orders.append(order)
        self._call()

    def _call(self) -> None:
        if self._called is not None:
            self._called.set()

    def _sample(self, uid: str, index: int) -> Sample | None:
        group = self._groups.get(uid)
        return None if group is None else group.samples[index]

    def _alive(self, uid: str, index: int, life: int) -> Sample | None:
        """The sample, if the agent loop with this ``life`` is the one it runs by."""
        sample = self._sample(uid, index)
        return sample if sample is not None and self._lives.get(sample.id) == life else None

    async def _answer(self, sample: SampleId, *, for_start: bool = False) -> Answer:
        if self._failed is not None:
            raise RolloutError(f"april has stopped: {self._failed}")
        waiting = self._answers.get(sample)
        if waiting:
            return waiting.popleft()
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[sample] = (for_start, future)
        return await future

    def _say(self, sample: SampleId, answer: Answer) -> None:
        _, future = self._waiting.pop(sample, (False, None))
        if future is not None and not future.done():
            future.set_result(answer)
        else:
            self._answers.setdefault(sample, deque()).append(answer)

    def _cancel(self, sample: SampleId) -> None:
        """The sample goes on without its agent loop: what that one is told or says from now on is void."""
        self._answers.pop(sample, None)
        self._late.pop(sample, None)
        self._lives[sample] = self._lives.get(sample, 0) + 1
        for_start, future = self._waiting.get(sample, (True, None))
        if future is not None and not for_start:
            del self._waiting[sample]
            if not future.done():
                future.set_result(GivenUp())

    def _retire(self, group: Group) -> None:
        """A group was settled."""
        self._groups.pop(str(group.prompt.data["uid"]), None)
        for sample in group.samples:
            self._lives.pop(sample.id, None)
            self._answers.pop(sample.id, None)
            self._late.pop(sample.id, None)
            self._rewards.pop(sample.id, None)
            self._values.pop(sample.id, None)
            for_start, future = self._waiting.pop(sample.id, (True, None))
            if future is not None and not future.done():
                future.set_result(Settled() if for_start else GivenUp())


def _done(sample: Sample) -> Done:
    """The latest call of a sample, complete."""
    call, tape = sample.calls[-1], sample.tape
    spans: list[Span] = []
    for s in tape.segments:
        if s.kind is not SegmentKind.GENERATED or s.start >= call.end:
            continue
        end = min(s.start + s.count, call.end)
        if spans and spans[-1][1] == s.start and spans[-1][2:] == tuple(s.version):
            spans[-1] = (spans[-1][0], end, *s.version)
        else:
            spans.append((s.start, end, *s.version))
    part = slice(call.start, call.end)
    by_length = call.finish is FinishReason.LENGTH
    return Done(tape.tokens[part], tape.logprobs[part], tuple(spans), sample.resumes, by_length)
