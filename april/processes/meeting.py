"""The ranks' meeting: an account of who has come to which call, and what a rank that begins anew has missed.

The rule: a call that changes something is made by every rank, in the same order, with the same arguments. It begins
when all have come. What breaks the rule breaks the meeting for all, with one sentence, for good. No asyncio, no clock:
time is given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from april.errors import RankError
from april.processes.rank_messages import Answer


class Meeting:
    """The meeting of a group of ranks. Calls are numbered from 0; whoever carries one out says when it has ended.

    Args:
        ranks: how many.
        timeout_s: how long those that have come to a call wait for the others.
        returns: a rank that is lost may come back within ``timeout_s``; otherwise its loss breaks the meeting.
    """

    def __init__(self, ranks: int, timeout_s: float, *, returns: bool = False) -> None:
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.call = 0
        self.began = False
        """All have come to the call, which is carried out."""
        self.step: str | None = None
        """The step that all ranks carry out now, in the middle of the call."""
        self.step_failed: RankError | None = None
        self.broken: RankError | None = None
        self._last = ""
        """The call before this one."""
        self._what: dict[int, str] = {}
        """The call of each rank that has come."""
        self._early: dict[int, str] = {}
        """The calls of ranks that have come to the next one already."""
        self._done: set[int] = set()
        """The ranks that have carried out the step."""
        self.closed: set[int] = set()
        """The ranks that have closed their scheduler."""
        self._returns = returns
        self._missed: dict[int, tuple[float, str]] = {}
        """Since when ranks are lost that may come back, and why."""
        self._since: float | None = None
        """Since when some wait for others."""

    # ---------------------------------------------------------------- a call

    @property
    def what(self) -> str:
        """The call that is made now; empty if nobody has come yet."""
        return next(iter(self._what.values()), "")

    def arrive(self, rank: int, call: int, what: str, now: float) -> bool:
        """A rank makes a call; whether it is the last one to come. One that comes again changes nothing."""
        if self.broken is not None:
            return False
        before = self._last if call == self.call - 1 else self._what.get(rank, what) if call == self.call else what
        if what != before:
            self._break(
                f"rank {rank} was interrupted in {before} and called {what} instead, which the others did not; a call "
                "that was interrupted must be made again",
                (rank,),
            )
        if self.broken is not None or call < self.call:
            return False
        if call > self.call:  # a step of the call before has failed there, and not all have heard it
            self._early[rank] = what
            return False
        differ = next((other for other, text in self._what.items() if text != what), None)
        if differ is not None:
            self._break(
                f"the ranks make different calls at the same place: rank {differ} {self._what[differ]}, rank {rank} "
                f"{what}. Every rank must make the same calls, in the same order and with the same arguments",
                (differ, rank),
            )
            return False
        if self.closed:
            self._break(f"{_names(self.closed)} closed before {what}, which {_names({rank})} waits for", self.closed)
            return False
        if self.began:
            return False
        self._what[rank] = what
        if self._since is None:
            self._since = now
        if len(self._what) < self.ranks:
            return False
        self.began, self._since = True, None
        return True

    def leave(self, rank: int, call: int) -> None:
        """An interrupt has taken a rank out of a call: it is waited for as if it had not come."""
        if call > self.call:
            self._early.pop(rank, None)
        if self.broken is None and call == self.call and not self.began:
            self._what.pop(rank, None)
            if not self._what:
                self._since = None

    def open_step(self, step: str) -> None:
        """All ranks are to carry something out."""
        self.step, self.step_failed = step, None
        self._done.clear()

    def done(self, rank: int, call: int, step: str, error: str, now: float) -> bool:
        """A rank has; whether the step is over: all have carried it out, or one could not."""
        if self.broken is not None or call != self.call or step != self.step:
            return False
        self._done.add(rank)
        if error:
            self.step_failed = RankError(f"the {step} of rank {rank} raised {error}", (rank,))
        elif self._since is None:
            self._since = now
        if self.step_failed is None and len(self._done) < self.ranks:
            return False
        self.step, self._since = None, None
        return True

    def end_call(self, now: float) -> None:
        """The call is carried out, well or badly."""
        self.call += 1
        self._last = self.what
        self.began, self.step, self.step_failed, self._since = False, None, None, None
        self._what.clear()
        self._done.clear()
        early, self._early = self._early, {}
        for rank, what in early.items():
            self.arrive(rank, self.call, what, now)

    # ---------------------------------------------------------------- what breaks it

    def lost(self, rank: int, why: str, now: float) -> bool:
        """A rank does not answer any more; whether that ends a step that all carry out."""
        if self.broken is not None or rank in self.closed:
            return False
        if not self._returns:
            self._break(f"rank {rank} is gone: {why}", (rank,))
            return False
        self._missed[rank] = now, why
        self.leave(rank, self.call)
        if self.step is None or rank in self._done:
            return False
        self.step_failed = RankError(f"rank {rank} was lost in its {self.step}: {why}", (rank,))
        self.step = self._since = None
        return True

    def back(self, rank: int) -> None:
        """Note that a rank is there, for the first time or again."""
        self._missed.pop(rank, None)
        self.closed.discard(rank)

    def close(self, rank: int, error: str) -> None:
        """A rank has closed its scheduler; nobody misses it before the next call."""
        self.closed.add(rank)
        if error:
            self._break(f"rank {rank} has ended with an error: {error}", (rank,))
        elif self._what:
            (waits, what), *_ = self._what.items()
            self._break(f"rank {rank} closed its scheduler in the middle of {what} of rank {waits}", (rank,))

    def tick(self, now: float) -> None:
        """Time has gone by; whoever is late breaks it."""
        for rank, (since, why) in self._missed.items():
            if now - since >= self.timeout_s:
                again = f"it has not come back within {self.timeout_s:g} s (rank_timeout_s)"
                self._break(f"rank {rank} is gone: {why}; {again}", (rank,))
        if self.broken is not None or self._since is None or now - self._since < self.timeout_s:
            return
        if self.step is not None:
            missing, where = self._all - self._done, f"the end of its {self.step}"
        else:
            missing, where = self._all - self._what.keys(), next(iter(self._what.values()))
        self._break(f"{_names(missing)} did not come to {where} within {self.timeout_s:g} s (rank_timeout_s)", missing)

    @property
    def _all(self) -> set[int]:
        return set(range(self.ranks))

    def _break(self, sentence: str, ranks: Iterable[int]) -> None:
        if self.broken is None:
            self.broken = RankError(sentence, tuple(sorted(set(ranks))))


def _names(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in sorted(ranks)]
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(numbers)}"


@dataclass(frozen=True, slots=True)
class EndedCall:
    """A call that all ranks have made."""

    what: str
    """its name and arguments"""
    answer_of: Callable[[int], Answer]
    """what a rank was answered"""
    batch: int | None
    """the batch that it has delivered"""


class Journal:
    """The calls that have ended since the oldest batch was delivered that is out; they are numbered from 0.

    A rank that was started anew asks for a batch first. It gets its share of the oldest one that is still out, and what
    all ranks were answered after that, as long as it makes the same calls; then it is where they are.
    """

    def __init__(self) -> None:
        self._first = 0
        self._calls: list[EndedCall] = []

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def begins(self) -> int:
        """Number of the call with which a rank that begins anew goes on."""
        return self._first

    def ended(self, call: EndedCall, out: Collection[int]) -> None:
        """The next call has ended, and these batches are delivered and not trained."""
        self._calls.append(call)
        kept = next((i for i, c in enumerate(self._calls) if c.batch is not None and c.batch in out), len(self._calls))
        self._first += kept
        del self._calls[:kept]

    def find(self, number: int) -> EndedCall | None:
        """A call that is kept; None: it is yet to come, or nobody needs it any more."""
        place = number - self._first
        return self._calls[place] if 0 <= place < len(self._calls) else None
