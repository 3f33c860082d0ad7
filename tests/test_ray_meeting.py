"""What a rank that comes back is told, and how long it is waited for: the journal and the meeting, times given."""

from __future__ import annotations

import pytest

from april.processes.journal import EndedCall, Journal
from april.processes.rank_messages import Answer
from april.processes.returning_meeting import ReturningMeeting


def ended(what: str, batch: int | None = None) -> EndedCall:
    """A call of which rank r was answered ``what r``."""
    return EndedCall(what, lambda rank: Answer(0, f"{what} {rank}".encode()), batch)


def test_the_journal_begins_with_the_oldest_batch_that_is_out() -> None:
    """What came before has been trained; what came after is told again, to each rank its own."""
    journal = Journal()
    journal.ended(ended("evaluate"), [])
    assert (journal.begins, len(journal)) == (1, 0)
    journal.ended(ended("next_batch", 0), [0])
    journal.ended(ended("next_batch", 1), [0, 1])
    assert (journal.begins, len(journal)) == (1, 2)
    journal.ended(ended("weight_update"), [1])
    assert (journal.begins, len(journal)) == (2, 2)
    found = journal.find(2)
    assert found is not None
    assert found.answer_of(3).content == b"next_batch 3"
    assert journal.find(1) is None
    assert journal.find(4) is None
    journal.ended(ended("weight_update"), [])
    assert (journal.begins, len(journal)) == (5, 0)


def test_a_rank_that_died_has_not_come() -> None:
    """Its call does not count: the others wait for the process that comes in its place."""
    meeting = ReturningMeeting(2, 10.0)
    meeting.back(0)
    meeting.back(1)
    assert not meeting.arrive(1, 0, "next_batch()", 0.0)
    assert not meeting.miss(1, "it died", 1.0)
    assert not meeting.arrive(0, 0, "next_batch()", 2.0)
    meeting.back(1)
    assert meeting.arrive(1, 0, "next_batch()", 3.0)


def test_a_rank_that_does_not_come_back_in_time() -> None:
    """It is named with the reason; one that is back is waited for as all are."""
    meeting = ReturningMeeting(3, 10.0)
    meeting.miss(1, "it died", 1.0)
    meeting.miss(2, "it died, too", 2.0)
    meeting.tick(10.9)
    assert meeting.broken is None
    meeting.back(1)
    meeting.tick(11.9)
    assert meeting.broken is None
    meeting.tick(12.0)
    assert str(meeting.broken) == (
        "rank 2 is gone: it died, too; it has not come back within 10 s (rank_timeout_s)"
    )  # fmt: skip


@pytest.mark.parametrize("had_done", [False, True])
def test_a_rank_that_dies_in_a_step_fails_it_unless_it_was_done(had_done: bool) -> None:
    """The step ends for all at once, and the meeting goes on."""
    meeting = ReturningMeeting(2, 10.0)
    for rank in range(2):
        meeting.arrive(rank, 0, "weight_update()", 0.0)
    meeting.open_step("transfer")
    if had_done:
        meeting.done(1, 0, "transfer", "", 1.0)
    assert meeting.miss(1, "it died", 2.0) is not had_done
    assert (meeting.step_failed is None) is had_done
    assert meeting.broken is None
    if had_done:
        assert meeting.done(0, 0, "transfer", "", 3.0)
    meeting.end_call(4.0)
    assert meeting.call == 1


def test_a_rank_that_closed_is_not_missed_until_it_comes_back() -> None:
    """And then it is one of them again."""
    meeting = ReturningMeeting(2, 10.0)
    meeting.close(1, "")
    assert not meeting.miss(1, "its process ended", 1.0)
    meeting.tick(100.0)
    assert meeting.broken is None
    meeting.back(1)
    assert not meeting.arrive(0, 0, "next_batch()", 101.0)
    assert meeting.arrive(1, 0, "next_batch()", 102.0)
