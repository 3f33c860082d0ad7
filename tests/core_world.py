"""What must be true of the core, kept from the outside: from tokens handed over, commands seen and events sent.

Nothing here is read from the core. The world is plain data, so that it can be copied with a checkpoint and go back
to it, as everything outside of the process does that crashed.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from april.core.sampling import SamplingParams
from april.core.settings import CoreSettings
from april.core.types import OnStale

EOS = 1
Key = tuple[int, int]
"""(group, index)"""


class Token(NamedTuple):
    """One token of a response; ``version`` None: written by the environment."""

    id: int
    logprob: float
    version: tuple[int, int] | None


@dataclass
class Life:
    """One sample. ``where``: new, started, outside, waiting, scoring, finished."""

    where: str = "new"
    tape: list[Token] = field(default_factory=list)
    calls: list[tuple[int, int, str]] = field(default_factory=list)
    """Complete generate calls and why they ended, also those of before a restart."""
    open: int | None = None
    """Start of the call that is not complete."""
    asked: int = 0
    """Calls of the present run of its function."""
    sampling: SamplingParams | None = None
    """Of that call."""
    run: int = 0
    """Runs of its function; what an older one still says is not passed on."""
    attempt: str | None = None
    failures: int = 0
    """Of its functions."""
    attempt_failures: int = 0
    """Requests in a row that broke off and brought nothing."""
    avoid: str = ""
    """Engine on which the latest request broke off."""
    finish: str = ""
    """Why the open call is complete; empty as long as it is not."""
    outlived: bool = False
    """It finished in an older process; what its function returned is gone."""
    reward: float | None = None

    def begin_again(self) -> None:
        """Everything it had is gone."""
        self.where, self.tape, self.calls, self.open, self.asked = "new", [], [], None, 0
        self.attempt, self.reward, self.outlived = None, None, False
        self.attempt_failures, self.avoid, self.finish = 0, "", ""
        self.run += 1

    def ask_again(self) -> None:
        """Its function runs anew, and is answered from the tape."""
        self.where, self.asked, self.reward, self.outlived = "new", 0, None, False
        self.run += 1

    @property
    def told(self) -> int:
        """Tokens that its function knows of."""
        return self.calls[self.asked - 1][1] if self.asked else 0

    @property
    def replaying(self) -> bool:
        """Its function has not yet asked everything that it had asked before the restart."""
        return self.asked < len(self.calls) or (self.open is not None and self.where != "waiting")


@dataclass
class Held:
    """One group."""

    prompt: int
    lives: list[Life]
    accepted: bool = False
    judgement: int | None = None
    filter_failures: int = 0


@dataclass
class Running:
    """One request at an engine."""

    key: Key
    engine: str
    budget: int
    tokens: list[Token] = field(default_factory=list)
    dropped: str | None = None
    stopped: bool = False
    """Its text has a stop string, which ends with its last token."""
    after_stop: int = 0
    """Tokens that came after it."""
    stalled: bool = False
    """It was silent for too long."""
    doubtful: bool = False
    """Nobody knows which weights write its tokens."""


@dataclass
class World:
    """Prompts, groups, tokens and batches of the history that is kept."""

    available: int
    """Prompts in the source so far."""
    keeps_finished: bool
    """Finished samples of unfinished groups survive a restart."""
    position: int = 0
    exhausted: bool = False
    drawn: int = 0
    held: dict[int, Held] = field(default_factory=dict)
    running: dict[str, Running] = field(default_factory=dict)
    leased: dict[int, dict[int, Held]] = field(default_factory=dict)
    batches: int = 0
    committed: int = -1
    settled: dict[int, str] = field(default_factory=dict)
    """How each prompt ended."""
    observed: int = 0
    delivered: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    version: tuple[int, int] = (0, 0)
    fresh: bool = True
    """No batch was delivered under this version."""

    def life(self, key: Key) -> Life:
        """One held sample."""
        return self.held[key[0]].lives[key[1]]

    def settle(self, prompt: int, how: str) -> None:
        """A prompt is done with, once."""
        assert prompt not in self.settled, f"prompt {prompt} was {self.settled[prompt]}, and now is {how}"
        self.settled[prompt] = how

    # ---------------------------------------------------------------- failures

    def _abandon(self, life: Life, reason: str) -> None:
        self.dropped[reason] += generated(life.tape)
        if life.attempt is not None:
            self.running[life.attempt].dropped = reason

    def begin_again(self, key: Key, reason: str) -> None:
        """A sample starts anew; a verdict on its group is void."""
        group, life = self.held[key[0]], self.life(key)
        self._abandon(life, reason)
        if life.where == "finished":
            group.accepted, group.judgement = False, None
            for sibling in group.lives:
                if sibling.outlived and not self.keeps_finished:
                    sibling.ask_again()
        life.begin_again()

    def drop_group(self, group_id: int, reason: str) -> None:
        """A whole group is given up."""
        group = self.held.pop(group_id)
        for life in group.lives:
            self._abandon(life, reason)
        self.settle(group.prompt, f"dropped ({reason})")

    def drop_too_old(self, settings: CoreSettings) -> None:
        """What is too old is treated as the settings say."""
        if settings.on_stale not in (OnStale.RESTART, OnStale.DROP):
            return
        for key in self.too_old(settings.max_staleness):
            if settings.on_stale is OnStale.RESTART:
                self.begin_again(key, "stale")
            elif key[0] in self.held:
                self.drop_group(key[0], "stale")

    def too_old(self, bound: int) -> list[Key]:
        """Samples whose oldest token is more than ``bound`` updates old when the next batch is trained."""
        return [
            (g, i) for g, group in self.held.items() for i, life in enumerate(group.lives) if self.age(life) > bound
        ]

    def age(self, life: Life) -> int:
        """Updates between the oldest token and the training of the next batch: one for each batch that is out."""
        at = self.version[1] + len(self.leased)
        return max((at - t.version[1] for t in life.tape if t.version is not None), default=0)

    # ---------------------------------------------------------------- the end of a request

    def keep(self, attempt_id: str, *, corrupt: bool = False) -> Running:
        """A request is over; its tokens are the sample's, or dropped for the reason there is."""
        running = self.running.pop(attempt_id)
        self.dropped["after_stop"] += running.after_stop
        reason = "corrupt" if corrupt else running.dropped or ("unknown_weights" if running.doubtful else None)
        if reason is not None:
            self.dropped[reason] += len(running.tokens)
        else:
            self.life(running.key).tape += running.tokens
        if running.dropped is None:
            self.life(running.key).attempt = None
        return running

    # ---------------------------------------------------------------- the trainer

    def new_weights(self, trained: int | None) -> None:
        """An update; with ``trained``, from this batch and those before."""
        self.version, self.fresh = (self.version[0], self.version[1] + 1), True
        for out in [b for b in self.leased if trained is not None and b <= trained]:
            del self.leased[out]
            self.committed = max(self.committed, out)

    # ---------------------------------------------------------------- restarts

    def restarted(self, trained_through: int | None) -> World:
        """What a process that loads a checkpoint taken now finds."""
        world = copy.deepcopy(self)
        last = world.committed if trained_through is None else trained_through
        for attempt_id in list(world.running):
            running = world.keep(attempt_id)
            if running.stopped and running.dropped is None and not running.doubtful:
                life = world.life(running.key)
                assert life.open is not None
                life.calls.append((life.open, len(life.tape), "stop"))
                life.open = None
        again = [b for b in world.leased if trained_through is None or b > last]
        for batch_id in again:
            for group_id, group in world.leased[batch_id].items():
                world.held[group_id] = group
                del world.settled[group.prompt]
                world.delivered -= sum(generated(life.tape) for life in group.lives)
        trained = len(world.leased) - len(again)
        world.leased.clear()
        n = world.version[1] + trained  # the trainer's weights are those of the updates that follow from these
        if trained or again:
            world.fresh = True
        world.version = (world.version[0] + 1, n)
        world.batches, world.committed, world.exhausted = last + 1, last, False
        for group in world.held.values():
            group.judgement, group.filter_failures = None, 0
            for life in group.lives:
                life.attempt_failures, life.avoid = 0, ""
                if group.accepted or (life.where == "finished" and world.keeps_finished):
                    life.outlived = True
                else:
                    life.ask_again()
        return world


def generated(tape: list[Token]) -> int:
    """Tokens that the policy wrote."""
    return sum(t.version is not None for t in tape)


def one_of(choices: Any, pick: int) -> Any:
    """One of a list."""
    return choices[pick % len(choices)]
