"""Staleness: the bound, the four ways to keep it, and versions over restarts."""

from __future__ import annotations

import pytest
from core_machine import PROMPT, CoreMachine, settings

from april.core import commands as do
from april.core import events as ev
from april.core.types import OnStale, Refill, SampleState
from april.core.versions import PolicyVersion, VersionClock
from april.errors import InvariantError


def one_long_group(on_stale: OnStale, bound: int = 1) -> CoreMachine:
    """Group 0 gains 10 tokens an update and never ends; weights change while the step waits for it. It is paused."""
    m = CoreMachine(settings(n=1, samples=1, over=2, on_stale=on_stale, max_staleness=bound), {0: 500})
    for _ in range(bound + 1):
        m.post(ev.Resumed())
        if m.core.step is None:
            m.ask()
        for attempt in list(m.in_flight.values()):
            if attempt.sample.id.group == 0:
                m.tokens(attempt.id, 10)
            elif not m.sample(0).urgent:
                m.end(attempt.id)
        m.post(ev.PauseRequested())
        m.finish_aborts()
        m.update()
    return m


def test_restart_drops_the_tokens_and_begins_again() -> None:
    """on_stale: restart counts the tokens as dropped and starts the sample anew."""
    m = one_long_group(OnStale.RESTART)
    assert (m.sample(0).state, len(m.sample(0).chains[0].tape)) == (SampleState.NEW, 0)
    assert (m.dropped, m.prompts_dropped) == ({"stale": 20}, {})


def test_mask_takes_the_loss_off_too_old_tokens_only() -> None:
    """on_stale: mask leaves younger tokens of the same sample trained, and the sample in the batch."""
    m = one_long_group(OnStale.MASK)
    m.post(ev.Resumed())
    m.finish(0)
    m.finish_aborts()
    sample = next(s for s in m.batches[-1].samples if s.id.group == 0)
    assert sample.staleness == 2
    assert sample.versions[sample.loss_mask == 0, 1].tolist() == [0] * 10
    assert set(sample.versions[sample.loss_mask == 1, 1].tolist()) == {1, 2}
    assert m.batches[-1].metrics["masked_tokens"] == 10


def test_weights_never_go_back() -> None:
    """A version older than the current one is refused."""
    m = CoreMachine(settings(), lambda g, i: 3)
    m.update()
    with pytest.raises(InvariantError, match="went back"):
        m.update(PolicyVersion(0, 0))


def test_staleness_over_a_restart_counts_the_way_back_to_the_branch_point() -> None:
    """Tokens of an abandoned branch: distance to the branch point plus the distance since."""
    clock = VersionClock(PolicyVersion(0, 7))
    clock.restart(at=4)
    for _ in range(3):
        clock.advance()
    assert clock.current == PolicyVersion(1, 7)
    for version, staleness in (((0, 3), 4), ((0, 4), 3), ((0, 6), 2 + 3), ((1, 5), 2)):
        assert clock.staleness(PolicyVersion(*version)) == staleness
    clock.restart(at=5)
    for version, staleness in (((0, 6), 2 + 1), ((1, 7), 2), ((2, 5), 0)):
        assert clock.staleness(PolicyVersion(*version)) == staleness


@pytest.mark.parametrize("version", [PolicyVersion(0, 9), PolicyVersion(1, 0), PolicyVersion(3, 0)])
def test_versions_of_the_future_are_refused(version: PolicyVersion) -> None:
    """A stamp newer than the current version is a lie."""
    with pytest.raises(ValueError, match="newer"):
        VersionClock(PolicyVersion(0, 8)).staleness(version)


def test_prompts_that_were_asked_for_keep_the_bound_of_then() -> None:
    """As many were asked for as that bound has room for; those that are asked for later have the lowered one."""
    m = CoreMachine(settings(n=1, samples=1, over=2, max_staleness=3, refill=Refill.GROUP), lambda g, i: 9)
    (draw,) = m.core.handle(ev.StepRequested())
    assert isinstance(draw, do.DrawPrompts)
    m.core.handle(ev.StalenessLowered(1))
    m.core.handle(ev.PromptsDrawn([PROMPT] * draw.count, False))
    assert [m.core.buffer.bound(group) for group in m.core.buffer] == [3, 3]
    m.core.handle(ev.StalenessLowered(0))
    assert m.core.buffer.capacity == 1
    with pytest.raises(InvariantError, match="the bound of 0 was lowered to 1"):
        m.core.handle(ev.StalenessLowered(1))
