"""Requests that live through weight updates, in the core: which go on, which end, and what their tokens are called.

test_core_weight_updates plays them at random.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_machine import CoreMachine, settings
from update_player import limits_of

from april.core import commands as do
from april.core import events as ev
from april.core import snapshot
from april.core.rollout_core import RolloutCore
from april.core.types import GenerationMode, OnWeightUpdate
from april.core.versions import PolicyVersion
from april.core.weight_updates import Phase

KEEP, RECOMPUTE = OnWeightUpdate.KEEP, OnWeightUpdate.RECOMPUTE
V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)
CALLS = (do.PauseEngine, do.LoadEngine, do.ResumeEngine)


class Kept(CoreMachine):
    """Engines a and b, three requests of which the first two have tokens; ``calls`` are those that run."""

    def __init__(self, in_flight: OnWeightUpdate = KEEP, **changes: Any) -> None:
        self.calls: dict[str, Any] = {}
        values = {"n": 1, "samples": 3, "generation": GenerationMode.CONTINUOUS, "on_weight_update": in_flight}
        super().__init__(settings(**(values | changes)), 20, engines=(limits_of("a"), limits_of("b")))
        self.ask()
        self.first, self.second, self.silent = self.in_flight.values()
        self.tokens(self.first.id, 5)
        self.tokens(self.second.id, 4)
        self.generates_under = V0

    def version_at(self, attempt: Any) -> PolicyVersion:
        return getattr(self, "generates_under", V0)

    def _execute(self, command: do.Command) -> None:
        super()._execute(command)
        if isinstance(command, CALLS):
            self.calls[command.engine] = command

    def update(self, **how: Any) -> None:
        """The trainer has new weights, in a directory unless ``how`` says otherwise."""
        self.post(ev.UpdateRequested(update=1, **({"path": "/1"} | how)))

    def answer(self, result: ev.CallResult = ev.CallResult.DONE, *names: str) -> None:
        """The calls that run end (of these engines, or of all)."""
        for name in names or sorted(self.calls):
            call = self.calls.pop(name)
            silent = tuple(i for i, a in self.in_flight.items() if a.engine == name and not a.tape.count)
            silent = silent if isinstance(call, do.PauseEngine) and call.in_flight is KEEP else ()
            self.post(ev.EngineCallEnded(name, call.call, result, "no", "", silent))

    @property
    def phase(self) -> Phase:
        return self.core.updates.phase


@pytest.mark.parametrize("streams", [True, False])
def test_who_answers_whole_is_asked_for_no_stream(streams: bool) -> None:
    """Tokens that arrive one by one cost april more than all that it does otherwise."""
    config = settings(n=1, samples=1, generation=GenerationMode.CONTINUOUS, on_weight_update=KEEP)
    m = CoreMachine(config, 20, engines=(replace(limits_of("a"), streams=streams),))
    m.ask()
    assert [attempt.request.stream for attempt in m.in_flight.values()] == [streams]


def test_kept_tokens_are_marked_through_batches_and_saved_states() -> None:
    """Tokens over keys of older weights say of which; so does a state that is saved in the middle, and its batch."""
    m = Kept()
    m.update()
    m.answer()
    m.finish_aborts()
    m.answer()
    m.answer()
    m.generates_under = V1
    m.tokens(m.first.id, 3)
    state = snapshot.take(m.core, None)
    restored = RolloutCore(m.core.settings, [limits_of("a"), limits_of("b")], check=True)
    snapshot.restore(restored, state)
    (group,) = restored.buffer
    parts = group.samples[m.first.sample.id.index].segments
    assert [(part.version, part.count, part.over) for part in parts] == [(V0, 5, None), (V1, 3, V0)]
    for attempt in list(m.in_flight):
        m.end(attempt)
    (batch,) = m.batches
    rows = {sample.id.index: sample for sample in batch.samples}
    assert rows[m.first.sample.id.index].kept_mask.tolist() == [0] * 5 + [1] * 15
    assert rows[m.silent.sample.id.index].kept_mask.tolist() == [0] * 20
    assert batch.metrics["kept_share"] == pytest.approx((15 + 16) / 60)
    assert batch.padded()["kept_mask"].sum() == batch.ragged()["kept_mask"].sum() == 31


@pytest.mark.parametrize("result", [ev.CallResult.BUSY, ev.CallResult.OTHER_CONTENT, ev.CallResult.REFUSED])
def test_who_was_written_to_and_does_not_take_the_name_has_not_its_old_weights(result: ev.CallResult) -> None:
    """An engine that is busy has what it had before it was asked, and that is what the transfer has left there."""
    m = Kept()
    m.update(path=None, transfers=True)
    m.answer()
    m.finish_aborts()
    m.post(ev.HandedOver(1))
    m.answer(result)
    assert (m.phase, m.abort_asked) == (Phase.RECALLING, {m.first.id, m.second.id})
    m.finish_aborts()
    m.answer()
    assert (m.phase, m.core.clock.current, m.in_flight) == (Phase.IDLE, V0, {})
    assert not any(state.loaded for state in m.core.engines.states.values())
    assert m.core.updates.half_updated


def test_what_a_request_has_generated_counts_for_its_age() -> None:
    """A request that lives through updates gets older with them, before its tokens are in anybody's books."""
    m = Kept(max_staleness=1)
    assert m.core.buffer.slack(m.first.sample.group) == 1
    m.update()
    m.answer()
    m.finish_aborts()
    m.answer()
    m.answer()
    assert m.core.buffer.age(m.first.sample) == 1
    assert m.core.buffer.slack(m.first.sample.group) == 0
    assert m.first.sample.urgent


def test_tokens_whose_version_nobody_has_named_are_dropped_by_name() -> None:
    """A server dies after an update: what came before it is kept, the rest is of unknown weights."""
    m = Kept()
    tape = m.first.tape
    tokens, logprobs, _ = tape.packed()
    tape.append(tokens[:2].copy(), logprobs[:2].copy(), V1, sure=False)
    m.generated += 2
    assert tape.sure().count == 5
    tape.drop_unnamed()
    m.fail(m.first)
    assert m.dropped == {"unknown_weights": 2}
    assert m.core.tokens.held == 5
    m.check_ledger()
