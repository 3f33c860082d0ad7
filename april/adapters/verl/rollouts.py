"""Connects april's scheduler to verl, in the scheduler's process: prompts, servers, agent loops, batches, checkpoints.

Each sample has a session with one of verl's workers, which runs its agent loop. Imports neither verl nor Ray.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from april.adapters.common.deliveries import Deliveries, checkpoint_errors, saved_groups
from april.adapters.common.placed_media import MEDIA_KINDS
from april.adapters.common.samples import is_masked
from april.adapters.common.trainer_servers import ServerResult, TrainerServers
from april.adapters.verl.agent_calls import AgentLoopResult, LLMCall, LLMResult, result_of
from april.adapters.verl.settings import RunSettings
from april.core.batch import Batch
from april.core.state_checksum import seal, verify_checksum
from april.core.tape import Int32
from april.core.types import FinishReason, Prompt, Work
from april.core.value_checks import float32_reward, wrong_reward
from april.driver.llm import LLM, Completion
from april.driver.rewards import Response
from april.driver.rollout_driver import KIND
from april.driver.user_code import RemoteFunctionError, describe
from april.errors import CheckpointError, RolloutError
from april.serialization.state_file import read_state, write_state

log = logging.getLogger("april")

STATE_FILE, FILE_KIND = "april_state.msgpack", "verl"
Rollout = tuple[str, int]
"""Identity of a sample in verl: (uid of its prompt, index in the group)."""


class VerlPrompts:
    """Iterates over verl's prompts, as uids without tokens; ``fetch(count)`` makes verl :meth:`offer` more of them."""

    resumes = True
    attachments = MEDIA_KINDS

    def __init__(self, fetch: Callable[[int], None]) -> None:
        self._fetch = fetch
        self.offered: deque[tuple[str, Any]] = deque()
        """Prompts that verl has submitted and april has not drawn, as (uid, verl's row)."""
        self.rows: dict[str, Any] = {}
        """verl's row of each prompt, by uid, from the draw until the prompt is delivered or dropped."""

    def offer(self, rows: Iterable[tuple[str, Any]]) -> None:
        """Add (uid, row) pairs of prompts that verl has submitted."""
        self.offered.extend(rows)

    def expect(self, count: int) -> None:
        """Make verl submit prompts until ``count`` can be drawn."""
        if (missing := count - len(self.offered)) > 0:
            self._fetch(missing)

    def __iter__(self) -> VerlPrompts:
        return self

    def __next__(self) -> dict[str, Any]:
        if not self.offered:
            raise StopIteration
        uid, row = self.offered.popleft()
        self.rows[uid] = row
        return {"uid": uid}


class _Worker:
    """Proxy of one of verl's workers: starts its sessions, polls its messages and sends it answers."""

    def __init__(self, calls: Any) -> None:
        self._remote = calls
        self.sessions: dict[int, _Session] = {}
        self._listening: asyncio.Task[None] | None = None
        self._answers: list[tuple[int, LLMResult | str | None]] = []
        self.tasks: set[asyncio.Task[None]] = set()

    def begin(self, session: _Session, row: Any, stored: Sequence[str]) -> None:
        self.sessions[session.number] = session
        if self._listening is None:
            self._listening = self._spawn(self._listen())
        llm, uid = session.llm, session.uid
        self._spawn(self._remote.begin(row, session.number, uid, llm.sample_id.index, stored), session)

    def answer(self, number: int, answer: LLMResult | str | None) -> None:
        """Queue an answer; all answers of one iteration of the event loop are sent in a single call."""
        if not self._answers:
            asyncio.get_running_loop().call_soon(self._send)
        self._answers.append((number, answer))

    def _send(self) -> None:
        answers, self._answers = self._answers, []
        self._spawn(self._remote.answer(answers))

    async def _listen(self) -> None:
        try:
            while True:
                for number, message in await self._remote.messages():
                    if (session := self.sessions.get(number)) is not None:
                        session.receive(message)
        finally:
            self._listening = None

    def _spawn(self, work: Any, session: _Session | None = None) -> asyncio.Task[None]:
        """Run a call to the worker as a task. If it fails, ``session`` fails too, or all sessions if it is None."""

        async def called() -> None:
            try:
                await work
            except Exception as error:
                log.warning("a worker of verl could not be called: %s", describe(error))
                for one in [session] if session is not None else [*self.sessions.values()]:
                    one.fail(f"verl's worker could not be called: {type(error).__name__}", "")

        task = asyncio.get_running_loop().create_task(called())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


class _Session:
    """The scheduler's side of one agent loop, which runs in a worker: answers its calls and awaits its end."""

    def __init__(self, number: int, uid: str, llm: LLM, servers: TrainerServers, worker: _Worker) -> None:
        self.number, self.uid, self.llm = number, uid, llm
        self._servers, self._worker = servers, worker
        self.outcome: asyncio.Future[AgentLoopResult] = asyncio.get_running_loop().create_future()
        self._calls: set[asyncio.Task[None]] = set()

    def receive(self, message: LLMCall | AgentLoopResult | tuple[str, str]) -> None:
        if isinstance(message, LLMCall):
            task = asyncio.get_running_loop().create_task(self._answer(message))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
        elif not isinstance(message, AgentLoopResult):
            self.fail(*message)
        elif not self.outcome.done():
            self.outcome.set_result(message)

    def fail(self, text: str, kind: str) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(RemoteFunctionError(text, kind))

    async def _answer(self, asked: LLMCall) -> None:
        self._servers.requests[self.llm.sample_id] = asked
        try:
            completion = await self.llm.forward(asked.token_ids, asked.sampling, asked.attached)
            answer: LLMResult | str = _llm_result(completion)
        except Exception as error:
            answer = describe(error)
        self._worker.answer(self.number, answer)

    def end(self) -> None:
        """Stop receiving messages, and tell the agent loop to give up if it is still running."""
        for call in self._calls:
            call.cancel()
        del self._worker.sessions[self.number]
        if not self.outcome.done() or self.outcome.cancelled():
            self._worker.answer(self.number, None)
        self._servers.forget(self.llm.sample_id)


def _llm_result(completion: Completion) -> LLMResult:
    at = len(completion.conversation) - len(completion.tokens)
    changes = np.flatnonzero(np.any(np.diff(completion.versions, axis=0), axis=1)) + 1
    ends = [0, *changes.tolist(), len(completion.tokens)]
    spans = tuple(
        (at + start, at + end, *completion.versions[start].tolist())
        for start, end in itertools.pairwise(ends) if start < end
    )  # fmt: skip
    return LLMResult(
        tokens=completion.tokens, logprobs=completion.logprobs, spans=spans, resumes=completion.resumes,
        by_length=completion.finish is FinishReason.LENGTH, extras=completion.extras,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredRows:
    """Description of a delivered batch; verl's queue holds the trajectories themselves."""

    batch: Batch
    rollouts: tuple[Rollout, ...]
    """Samples of the batch, group by group, in the order in which groups were completed."""
    settled: tuple[str, ...]
    """Uids of prompts that have been delivered or dropped since the previous batch."""
    held: Collection[str]
    """Uids of prompts in progress: an agent loop has begun, and the prompt is neither delivered nor dropped."""
    metrics: dict[str, float]
    masked: dict[Rollout, Any]
    """Loss masks, uint8 [T], of responses with generated tokens that april excludes from the loss; by sample."""


class VerlRollouts:
    """Provides the scheduler's arguments and describes its batches.

    ``send`` sends a single request to verl's servers and returns verl's TokenOutput, and ``end_all`` ends all requests
    there. ``workers`` have the methods of WorkerCalls.
    """

    def __init__(
        self, settings: RunSettings, send: Callable[[LLMCall, list[int], int], Awaitable[Any]],
        end_all: Callable[[], Awaitable[None]], eos_token_ids: Sequence[int], fetch: Callable[[int], None],
        workers: Sequence[Any],
    ) -> None:  # fmt: skip
        async def ask(asked: LLMCall, token_ids: Int32, max_tokens: int) -> ServerResult:
            return result_of(len(token_ids), await send(asked, token_ids.tolist(), max_tokens), asked.options)

        self._settings = settings
        self._servers = TrainerServers(
            "verl", ask, end_all, max_context=settings.context - 1, max_in_flight=settings.places,
            eos_token_ids=eos_token_ids, attachments=MEDIA_KINDS, extras=settings.config.extras,
        )  # fmt: skip
        self.prompts = VerlPrompts(fetch)
        self._workers = [_Worker(calls) for calls in workers]
        self._next_worker = itertools.cycle(self._workers)
        self._groups: dict[int, str] = {}
        """Uids by group number, of prompts whose agent loop has begun or that a checkpoint held."""
        self._worker_of: dict[str, _Worker] = {}
        self._numbers = itertools.count()
        self.stored: dict[Rollout, Sequence[str]] = {}
        """Keys under which a sample's trajectory is in verl's queue, by sample."""
        self.deliveries = Deliveries()

    @property
    def parts(self) -> dict[str, Any]:
        """Keyword arguments for the RolloutScheduler."""
        s = self._settings
        return {
            "prompts": self.prompts, "engines": [self._servers], "rollout": self.rollout, "check": s.check,
            "reward": self._reward if s.has_reward else None,
            "filter": None if s.filter_metric is None else self._differs, "progress": False,
        }  # fmt: skip

    async def rollout(self, prompt: Prompt, llm: LLM) -> AgentLoopResult:
        """Run the agent loop of a sample in one of verl's workers; this is the scheduler's rollout function."""
        uid = self._groups[llm.sample_id.group] = str(prompt.data["uid"])
        if uid not in self._worker_of:
            self._worker_of[uid] = next(self._next_worker)
        worker, rollout = self._worker_of[uid], (uid, llm.sample_id.index)
        session = _Session(next(self._numbers), uid, llm, self._servers, worker)
        worker.begin(session, self.prompts.rows[uid], self.stored.pop(rollout, ()))
        try:
            ended = await session.outcome
        finally:
            session.end()
        self.stored[rollout] = ended.keys
        if ended.reward is None and self._settings.has_reward:
            raise RolloutError("it has no reward")
        return ended

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Tasks of all calls to workers that are still running."""
        return [task for worker in self._workers for task in worker.tasks]

    async def _reward(self, prompt: Prompt, response: Response) -> float:
        return float(response.output.reward)

    async def _differs(self, prompt: Prompt, responses: Sequence[Response]) -> bool:
        """Return True if the samples of a group differ in the filter's metric; fewer than two samples always pass."""
        values = [response.output.value for response in responses]
        known = [v for v in values if v is not None and wrong_reward(v) is None]
        if len(known) < len(values):
            metric = self._settings.filter_metric
            raise RolloutError(f"algorithm.filter_groups.metric={metric} is not a number of every sample")
        return len(known) < 2 or len(set(map(float32_reward, known))) > 1

    # ---------------------------------------------------------------- batches

    def delivered(self, batch: Batch, scheduler: Any) -> DeliveredRows:
        """Describe a batch for verl, and forget the prompts that were delivered or dropped since the last one."""
        rollouts = [(str(s.prompt.data["uid"]), s.id.index) for s in batch.samples]
        pairs = zip(batch.samples, rollouts, strict=True)
        masked = {rollout: sample.loss_mask for sample, rollout in pairs if is_masked(sample)}
        present = scheduler.held_groups()
        settled = tuple(uid for group, uid in self._groups.items() if group not in present)
        self._groups = {group: uid for group, uid in self._groups.items() if group in present}
        for uid in settled:
            self._worker_of.pop(uid, None)
            self.prompts.rows.pop(uid, None)
        held = set(self._groups.values())
        self.stored = {rollout: keys for rollout, keys in self.stored.items() if rollout[0] in held}
        return DeliveredRows(
            batch=batch, rollouts=tuple(rollouts), settled=settled, held=held, masked=masked,
            metrics=self.deliveries.metrics(batch, scheduler.ledger()),
        )  # fmt: skip

    # ---------------------------------------------------------------- checkpoints

    def save(self, folder: Path, scheduler: Any) -> None:
        """Write april's state into the folder of verl's checkpoint. Raises CheckpointError if that fails."""
        state = scheduler.state_dict(self.deliveries.last)
        known = {*self._groups.values(), *(group["data"]["uid"] for group in saved_groups(state))}
        waiting = [uid for uid in self.prompts.rows if uid not in known]
        waiting += [uid for uid, _ in self.prompts.offered]
        late = self._servers.late_responses()
        write_state(folder / STATE_FILE, FILE_KIND, {"state": state, "late": late, "waiting": waiting})

    def read(self, folder: Path, stored: Mapping[str, Mapping[int, Sequence[str]]]) -> tuple[dict[str, Any], list[str]]:
        """Return the scheduler's saved state, and the uids of prompts that were offered but not drawn.

        ``stored`` holds the keys of verl's trajectories, by prompt and sample. verl saves trajectories shortly before
        april's state. A sample that finished in between runs again, and its calls get the recorded responses.

        Raises CheckpointError if the state is damaged or belongs to another checkpoint.
        """
        saved = read_state(folder / STATE_FILE, FILE_KIND)
        with checkpoint_errors("the state"):
            verify_checksum(KIND, saved["state"])
            core, groups = saved["state"]["core"], saved_groups(saved["state"])
            if missing := [uid for g in groups if (uid := g["data"]["uid"]) not in stored]:
                raise CheckpointError(
                    f"{len(missing)} prompts of april's state (the first is {missing[0]}) are not in the trainer's "
                    "checkpoint, so the two do not belong together"
                )
            again = []
            for group in groups:
                for index, sample in enumerate(group["samples"]):
                    if sample.get("finished") and index not in stored[group["data"]["uid"]]:
                        sample["finished"] = False
                        again.append(group)
            if core["settings"]["group_quorum"] == 1 and Work.QUORUM not in core["settings"]["auto"]:
                core["waiting"] += [g for g in core["ready"] if g in again]
                core["ready"] = [g for g in core["ready"] if g not in again]
            self._servers.restore(saved["late"])
            parts = {name: saved["state"][name] for name in ("core", "prompts", "sampling")}
            waiting = [str(uid) for uid in saved["waiting"]]
            self._groups = {group["id"]: group["data"]["uid"] for group in groups}
        self.stored = {(uid, index): keys for uid, there in stored.items() for index, keys in there.items()}
        return seal(KIND, parts), waiting

    def restored(
        self, scheduler: Any, rows: Callable[[list[str]], Iterable[Any]], waiting: list[str]
    ) -> Collection[str]:
        """Get verl's ``rows`` for the prompts of a loaded state; return the uids of prompts that are in progress."""
        held = list(self._groups.values())
        self.prompts.rows = dict(zip(held, rows(held), strict=True))
        self.prompts.offer(zip(waiting, rows(waiting), strict=True))
        self.deliveries.skip_dropped(scheduler.ledger())
        log.info("april continues with %d prompts", len(held))
        return held
