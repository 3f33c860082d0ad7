"""The rule of the ranks, on given time: one call at a time, made by all, and whoever breaks it is named."""

from __future__ import annotations

import pytest

from april.errors import LinkError
from april.processes import rank_messages as say
from april.processes.link import Heartbeats
from april.processes.meeting import Meeting


def meeting(ranks: int = 3) -> Meeting:
    return Meeting(ranks, timeout_s=10.0)


def all_come(met: Meeting, what: str, now: float = 0.0) -> None:
    """To the next call."""
    assert [met.arrive(rank, met.call, what, now) for rank in range(met.ranks)] == [False] * (met.ranks - 1) + [True]
    assert met.began


def test_a_call_begins_when_all_have_come() -> None:
    """In any order; the next one has the next number."""
    met = meeting()
    assert not met.arrive(2, 0, "next_batch()", 0.0)
    assert not met.arrive(0, 0, "next_batch()", 1.0)
    assert not met.began
    assert met.arrive(1, 0, "next_batch()", 9.0)
    assert met.began
    met.tick(1000.0)  # the call may take as long as it wants
    met.end_call(1000.0)
    all_come(met, "evaluate()")
    assert (met.call, met.broken) == (1, None)


def test_who_does_not_come_is_named_when_the_others_have_waited_long_enough() -> None:
    """Counted from the first that came; nobody is late where nobody waits."""
    met = meeting()
    met.tick(500.0)
    met.arrive(1, 0, "next_batch()", 500.0)
    met.tick(509.9)
    assert met.broken is None
    met.tick(510.0)
    assert str(met.broken) == "ranks 0, 2 did not come to next_batch() within 10 s (rank_timeout_s)"
    assert met.broken is not None
    assert met.broken.ranks == (0, 2)


def test_steps_are_carried_out_by_all() -> None:
    """Over when all have; who is late is named."""
    met = meeting(2)
    all_come(met, "weight_update()")
    met.open_step("transfer")
    assert not met.done(1, 0, "transfer", "", 5.0)
    assert met.done(0, 0, "transfer", "", 14.0)
    met.end_call(14.0)
    all_come(met, "weight_update()", 20.0)
    met.open_step("transfer")
    assert not met.done(0, 1, "transfer", "", 20.0)
    met.tick(30.0)
    assert str(met.broken) == "rank 1 did not come to the end of its transfer within 10 s (rank_timeout_s)"


def test_an_interrupted_rank_comes_again() -> None:
    """Before all have come, it is missed; in the middle of a call it is not; another call instead is refused."""
    met = meeting(2)
    met.arrive(1, 0, "next_batch()", 0.0)
    met.leave(1, 0)
    met.tick(100.0)
    all_come(met, "next_batch()", 100.0)
    met.leave(0, 0)
    met.tick(200.0)
    assert not met.arrive(0, 0, "next_batch()", 201.0)
    assert met.broken is None

    met = meeting(2)
    all_come(met, "next_batch()")
    met.arrive(0, 0, "evaluate()", 1.0)
    assert "rank 0 was interrupted in next_batch() and called evaluate() instead" in str(met.broken)

    met = meeting(2)
    all_come(met, "next_batch()")
    met.end_call(1.0)
    met.arrive(1, 0, "next_batch()", 2.0)
    assert met.broken is None
    met.arrive(1, 0, "evaluate()", 2.0)
    assert "rank 1 was interrupted in next_batch() and called evaluate() instead" in str(met.broken)


def test_who_closes_is_missed_by_the_next_call_only() -> None:
    """That its connection ends then, is no news; the first sentence stays."""
    met = meeting()
    met.close(1, "ValueError: no")
    met.lost(2, "the connection was closed", 0.0)
    assert str(met.broken) == "rank 1 has ended with an error: ValueError: no"

    met = meeting()
    met.close(1, "")
    met.lost(1, "the connection was closed", 0.0)
    assert met.broken is None
    met.arrive(0, 0, "next_batch()", 0.0)
    assert "rank 1 closed before next_batch(), which rank 0 waits for" in str(met.broken)

    met = meeting()
    met.arrive(0, 0, "next_batch()", 0.0)
    met.close(1, "")
    assert "rank 1 closed its scheduler in the middle of next_batch() of rank 0" in str(met.broken)


def test_silence_is_death_after_the_deadline() -> None:
    """One is silent, another beats; if this process itself stood still, all begin anew."""
    beats = Heartbeats[int](6.0)
    beats.hear(1, 0.0)
    beats.hear(2, 0.0)
    for now in range(1, 9):
        beats.hear(2, float(now))
        assert list(beats.silent(float(now))) == ([1] if now >= 6 else [])
    beats.forget(1)
    assert list(beats.silent(9.0)) == []
    assert list(beats.silent(100.0)) == []
    assert list(beats.silent(102.0)) == []
    assert list(beats.silent(104.0)) == []
    assert list(beats.silent(106.5)) == [2]


def test_frames_that_are_no_messages() -> None:
    """Refused by name of what is wrong, and never executed."""
    assert say.decode(say.encode(say.Arrive(3, "next_batch()"))) == say.Arrive(3, "next_batch()")
    for frame in (b"", b"\xc1", b"\x93\x01\x02\x03", say.encode(say.Beat())[:-1]):
        with pytest.raises(LinkError, match="what is no message"):
            say.decode(frame)


def test_a_rank_that_died_has_not_come() -> None:
    """Its call does not count: the others wait for the process that comes in its place."""
    met = Meeting(2, 10.0, returns=True)
    met.back(0)
    met.back(1)
    assert not met.arrive(1, 0, "next_batch()", 0.0)
    assert not met.lost(1, "it died", 1.0)
    assert not met.arrive(0, 0, "next_batch()", 2.0)
    met.back(1)
    assert met.arrive(1, 0, "next_batch()", 3.0)


def test_a_rank_that_does_not_come_back_in_time() -> None:
    """It is named with the reason; one that is back is waited for as all are."""
    met = Meeting(3, 10.0, returns=True)
    met.lost(1, "it died", 1.0)
    met.lost(2, "it died, too", 2.0)
    met.tick(10.9)
    assert met.broken is None
    met.back(1)
    met.tick(11.9)
    assert met.broken is None
    met.tick(12.0)
    assert str(met.broken) == (
        "rank 2 is gone: it died, too; it has not come back within 10 s (rank_timeout_s)"
    )  # fmt: skip


@pytest.mark.parametrize("had_done", [False, True])
def test_a_rank_that_dies_in_a_step_fails_it_unless_it_was_done(had_done: bool) -> None:
    """The step ends for all at once, and the meeting goes on."""
    met = Meeting(2, 10.0, returns=True)
    for rank in range(2):
        met.arrive(rank, 0, "weight_update()", 0.0)
    met.open_step("transfer")
    if had_done:
        met.done(1, 0, "transfer", "", 1.0)
    assert met.lost(1, "it died", 2.0) is not had_done
    assert (met.step_failed is None) is had_done
    assert met.broken is None
    if had_done:
        assert met.done(0, 0, "transfer", "", 3.0)
    met.end_call(4.0)
    assert met.call == 1


def test_a_rank_that_closed_is_not_missed_until_it_comes_back() -> None:
    """And then it is one of them again."""
    met = Meeting(2, 10.0, returns=True)
    met.close(1, "")
    assert not met.lost(1, "its process ended", 1.0)
    met.tick(100.0)
    assert met.broken is None
    met.back(1)
    assert not met.arrive(0, 0, "next_batch()", 101.0)
    assert met.arrive(1, 0, "next_batch()", 102.0)
