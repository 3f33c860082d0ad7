"""The coordinator: april's core behind questions. Rollouts ask it from wherever they run, and so does the trainer.

Each of a prompt's n rollouts asks the coordinator one thing at a time and waits for the answer. Rollout i runs sample
i, and if that is given up, the one that takes its place.
Invariant: everything a rollout says carries the life that it was started with; one whose sample went on without it is
told so and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from april.core import events as ev
from april.core import snapshot
from april.core.sampling import SamplingParams
from april.core.settings import CoreSettings, EngineLimits
from april.core.state import RolloutCore
from april.core.tape import Int32
from april.core.types import SETTLED, DropReason, Prompt, Sample, SampleId, SampleState
from april.errors import CheckpointError
from april.processes.coordinator.execution import Execution, take
from april.processes.coordinator.messages import GivenUp, Message, Order, Result, Settled


class Coordinator:
    """A run's core behind questions.

    Args:
        settings: of the core.
        limits: of all servers together.
        filter_name: of what groups must not have the same value of for all their samples, in messages.
        accepts: says instead whether the group of a prompt is kept; for a coordinator in the trainer's own process.
        check: cross-check the core's books after every event.
    """

    def __init__(
        self, settings: CoreSettings, limits: EngineLimits, filter_name: str = "the filter's value",
        accepts: Callable[[str], bool] | None = None, *, check: bool = False,
    ) -> None:  # fmt: skip
        self._execution = Execution(settings, limits, filter_name, accepts, check=check)
        self._position = 0
        self._validated: deque[str] = deque()
        self._validates = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Coordinator {self.core!r} waiting={len(self._execution.host.mailboxes)}>"

    @property
    def core(self) -> RolloutCore:
        """The core, for looking."""
        return self._execution.core

    # ---------------------------------------------------------------- the trainer asks

    async def begin(self, label: int) -> None:
        """The trainer wants a batch, under the weights that it calls ``label``; stepwise, it has trained on the last.

        Raises:
            RolloutError: with continuous generation, the weights have changed without a pause.
        """
        self._execution.begin(label)

    async def pause(self) -> None:
        """End what is at the servers, and begin nothing: the order ``paused`` says when. Weights may change then."""
        self._execution.post(ev.PauseRequested())

    async def resume(self, label: int) -> None:
        """Go on under the weights that the trainer calls ``label``; if they are new, it has trained on all batches."""
        self._execution.resume(label)

    async def close(self) -> None:
        """The order ``closed`` ends whoever carries out orders."""
        self._execution.close()

    async def orders(self) -> list[Order]:
        """Return what the trainer is to do, in order; wait until there is something.

        Raises:
            InvariantError: april's books do not balance.
        """
        return await self._execution.orders()

    async def drawn(self, uids: list[str]) -> None:
        """Prompts for an order to draw; their rollouts are started when the trainer has dispatched them."""
        # rollouts make the token ids; they come with the first call
        first, self._position = self._position, self._position + len(uids)
        empty = np.empty(0, np.int32)
        self._execution.draw([Prompt(empty, {"uid": uid}, 0, first + i) for i, uid in enumerate(uids)])

    async def closed(self, uid: str) -> bool:
        """Return whether this prompt, whose rollouts have all ended, was dropped."""
        if uid in self._execution.dropped:
            self._execution.dropped.discard(uid)
            return True
        return False

    async def validated(self, uid: str) -> None:
        """All rollouts of a prompt of the validation set have ended."""
        self._validated.append(uid)
        self._validates.set()

    async def validation(self, count: int) -> list[str]:
        """The next ``count`` prompts of the validation set that are complete; waits until there are so many."""
        while len(self._validated) < count:
            self._validates.clear()
            await self._validates.wait()
        return [self._validated.popleft() for _ in range(count)]

    async def story(self, uid: str, index: int) -> str:
        """Return what happened to one held sample, one line per transition."""
        sample = self._execution.host.sample_of(uid, index)
        return f"no prompt {uid} is held" if sample is None else self.core.story(sample.id)

    async def ledgers(self) -> dict[str, dict[str, object]]:
        """Return where every token and every prompt went."""
        return {"tokens": self.core.tokens.as_dict(), "prompts": self.core.prompts.as_dict()}

    # ---------------------------------------------------------------- rollouts ask

    async def start(self, uid: str, index: int) -> Message:
        """Start, when the core wants the sample of this rollout (again), or Settled."""
        sample = self._execution.host.sample_of(uid, index)
        if sample is None:
            return Settled()
        if sample.state in SETTLED:
            return Settled(dropped=sample.state is SampleState.DROPPED)
        return await self._answer(sample.id, for_start=True)

    async def call(
        self, uid: str, index: int, life: int, token_ids: Int32, max_tokens: int, temperature: float
    ) -> Message:
        """A rollout wants its conversation, int32 [T], continued by at most ``max_tokens``: Go, Done or GivenUp."""
        sample = self._alive(uid, index, life)
        if sample is None:
            return GivenUp()
        if self._left_a_call(sample):
            return GivenUp()
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)
        self._execution.post(ev.CallMade(sample.id, sampling, np.asarray(token_ids, np.int32)))
        return await self._answer(sample.id)

    async def ended(self, uid: str, index: int, life: int, result: Result) -> Message:
        """Take the result of a Go; return the next Go, Done or GivenUp."""
        if result.unused is not None:
            self._execution.post(ev.TokensUnused(*result.unused))
        sample = self._alive(uid, index, life)
        if sample is None:
            self._late(result)
            return GivenUp()
        rollout = self._execution.host.rollout_of(sample.id)
        self._execution.host.mailboxes.unsay(rollout)
        attempt = sample.open_call.attempt if sample.open_call is not None else None
        if attempt is not None:
            self._execution.post(take(attempt, result, self.core.clock.current))
        elif result.label is None:
            self._late(result)  # nobody knows by which weights
        else:
            self._execution.host.mailboxes.late[rollout] = result
        return await self._answer(sample.id)

    async def broke(self, uid: str, index: int, life: int, error: str) -> Message:
        """The request of a Go failed: the next Go, or GivenUp."""
        sample = self._alive(uid, index, life)
        if sample is None:
            return GivenUp()
        attempt = sample.open_call.attempt if sample.open_call is not None else None
        if attempt is not None:
            self._execution.host.mailboxes.unsay(self._execution.host.rollout_of(sample.id))
            self._execution.post(ev.AttemptFailed(attempt_id=attempt.id, error=error))
        return await self._answer(sample.id)

    async def returned(self, uid: str, index: int, life: int, reward: float | None, value: float | None) -> None:
        """A rollout has returned, and its trajectory is stored; ``value`` is that of the filter's metric."""
        sample = self._alive(uid, index, life)
        if sample is None or self._left_a_call(sample):
            return
        if reward is None and self.core.settings.has_reward:
            self._execution.post(ev.SampleFailed(sample.id, "it has no reward"))
            return
        self._execution.host.scores[sample.id] = (reward, value)
        self._execution.post(ev.SampleReturned(sample.id))

    async def failed(self, uid: str, index: int, life: int, error: str, kind: str = "") -> None:
        """A rollout, or its reward, raised; ``kind`` as in SampleFailed."""
        sample = self._alive(uid, index, life)
        if sample is not None:
            self._execution.post(ev.SampleFailed(sample.id, error, kind))

    def _left_a_call(self, sample: Sample) -> bool:
        """Return whether its rollout goes on though a call is unfinished (after its own timeout); it has failed then.
        """
        if sample.state is SampleState.RUNNING and sample.open_call is None:
            return False
        self._execution.post(ev.SampleFailed(sample.id, "it went on while a call of generate was unfinished"))
        return True

    def _late(self, result: Result) -> None:
        if len(result.tokens):
            self._execution.post(ev.TokensUnused(len(result.tokens), DropReason.LATE))

    def _alive(self, uid: str, index: int, life: int) -> Sample | None:
        """The sample of a rollout, if this ``life`` is its present one."""
        execution = self._execution
        sample = execution.host.sample_of(uid, index)
        alive = sample is not None and execution.host.mailboxes.is_alive(execution.host.rollout_of(sample.id), life)
        return sample if alive else None

    async def _answer(self, sample: SampleId, *, for_start: bool = False) -> Message:
        """Return what its rollout is told next; it may have another sample by then."""
        self._execution.raise_if_failed()
        rollout = self._execution.host.rollout_of(sample)
        return await self._execution.host.mailboxes.answer(rollout, for_start=for_start)

    # ---------------------------------------------------------------- checkpoints

    async def state(self) -> dict[str, Any]:
        """Everything that is not in the batches delivered so far, as plain data.

        Raises:
            RolloutError: april has stopped; its books could not be trusted.
        """
        self._execution.raise_if_failed()
        late = self._execution.host.mailboxes.late
        return {
            "position": self._position,
            "rollouts": snapshot.take(self.core, self._execution.last_batch),
            "late": [_plain(i, r, self.core.clock.current.incarnation) for i, r in late.items()],
            "dropped": sorted({*self._execution.dropped, *self._execution.host.ended}),
            "stand_ins": [[*sample, rollout] for sample, rollout in self._execution.host.stand_ins.items()],
        }

    async def restore(self, state: dict[str, Any], stored: dict[str, list[int]]) -> list[str]:
        """Go on from a saved state; the prompts whose rollouts are to be started, oldest first: all that are held.

        ``stored``: rollouts of each held prompt whose trajectory is in the trainer's checkpoint. Trajectories are saved
        a moment before april's state: a sample that was finished in between runs again, answered from its tape.

        Raises:
            CheckpointError: not such a state, or prompts of it are not in the trainer's checkpoint.
        """
        rollouts = state["rollouts"]
        groups = [*rollouts["ready"], *rollouts["waiting"]]
        missing = [g["data"]["uid"] for g in groups if g["data"]["uid"] not in stored]
        if missing:
            raise CheckpointError(
                f"{len(missing)} prompts of april's state (the first is {missing[0]}) are not in the trainer's "
                "checkpoint: the two do not belong together"
            )
        try:
            stand_ins = {SampleId(group, index): rollout for group, index, rollout in state.get("stand_ins", ())}
            unstored = []
            for group in groups:
                there = stored[group["data"]["uid"]]
                for index, sample in enumerate(group["samples"]):
                    rollout = stand_ins.get(SampleId(group["id"], index), index)
                    if sample.get("finished") and rollout not in there:
                        sample["finished"] = False
                        unstored.append(group["id"])
            if self.core.settings.whole_groups:
                again = [g for g in rollouts["ready"] if g["id"] in unstored]
                rollouts["ready"] = [g for g in rollouts["ready"] if g["id"] not in unstored]
                rollouts["waiting"] = [*rollouts["waiting"], *again]
            late = dict(_result(*saved) for saved in state["late"])
        except (TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"the state is damaged: {type(error).__name__}: {error}") from error
        snapshot.restore(self.core, rollouts)
        self._position = state["position"]
        self._execution.host.know(g.id for g in self.core.buffer)
        for stand_in, rollout in stand_ins.items():
            if stand_in.group in self.core.buffer.groups:
                self._execution.host.runs_for(stand_in, rollout)
        self._execution.host.mailboxes.late.update(late)
        return [str(g.prompt.data["uid"]) for g in sorted(self.core.buffer, key=lambda g: g.id)]

    async def held(self) -> dict[str, list[int]]:
        """The prompts that are held, each with its rollouts whose sample is neither delivered nor dropped."""
        return {
            uid: sorted(self._execution.host.rollout_of(sample.id).index for sample in group.members)
            for uid, group in self._execution.host.groups.items()
        }


def _plain(sample: SampleId, r: Result, incarnation: int) -> list[Any]:
    """A late result for a checkpoint."""
    of = incarnation if r.incarnation is None else r.incarnation
    ends = [list(r.stop_token_ids), r.ends_anywhere]
    return [*sample, r.offset, r.tokens.tolist(), r.logprobs.tolist(), r.label, r.aborted, of, *ends]


def _result(
    group: int, index: int, offset: int, tokens: list[int], logprobs: list[float], label: int, aborted: bool, of: int,
    stop_token_ids: Sequence[int] = (), ends_anywhere: bool = True,
) -> tuple[SampleId, Result]:  # fmt: skip
    made = Result(
        offset=offset,
        tokens=np.array(tokens, np.int32),
        logprobs=np.array(logprobs, np.float32),
        label=label,
        aborted=aborted,
        incarnation=of,
        stop_token_ids=tuple(stop_token_ids),
        ends_anywhere=ends_anywhere,
    )
    return SampleId(group, index), made
