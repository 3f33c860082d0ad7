"""What is true of a run, counted outside of the core: what engines sent, what is whose, what was trained under what.

Nothing here is read from the core. The books are plain data: a checkpoint of the trainer has a copy of them, and what
comes after a crash is held to that copy, as everything is that outlives a process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

Key = tuple[int, int]
"""(group, index)"""
Version = tuple[int, int]
"""(incarnation, n)"""


class Token(NamedTuple):
    """One token that an engine sent for training, and by which weights it was really generated."""

    id: int
    logprob: float
    version: Version
    weights: str


@dataclass
class Books:
    """Prompts, groups, tokens and batches of the history that is kept."""

    samples: int
    """Per group."""
    position: int = 0
    """Prompts drawn."""
    drawn: int = 0
    """Groups drawn."""
    held: dict[int, int] = field(default_factory=dict)
    """Prompt of every undelivered group."""
    tapes: dict[Key, list[Token]] = field(default_factory=dict)
    """What every undelivered sample has by rights."""
    finished: set[Key] = field(default_factory=set)
    """Undelivered samples that have their reward."""
    accepted: set[int] = field(default_factory=set)
    """Undelivered groups that count."""
    out: dict[int, dict[int, tuple[int, list[list[Token]]]]] = field(default_factory=dict)
    """Batches that are delivered and not trained: prompt and tapes by group."""
    batches: int = 0
    committed: int = -1
    settled: dict[int, str] = field(default_factory=dict)
    """How each prompt ended."""
    sent: int = 0
    delivered: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    version: Version = (0, 0)
    weights: dict[Version, str] = field(default_factory=lambda: {(0, 0): "start"})
    """What each version stands for."""
    as_promised: bool = True
    """One update at most per batch so far, and on_stale has always been finish: no token is trained too old."""
    oldest: int = 0
    """Greatest age of a token at the moment of its training, in this process."""

    # ---------------------------------------------------------------- prompts and tokens

    def draw(self, prompts: Iterable[int]) -> None:
        """These prompts are groups now."""
        for prompt in prompts:
            self.held[self.drawn] = prompt
            for index in range(self.samples):
                self.tapes[self.drawn, index] = []
            self.drawn += 1
            self.position += 1

    def lose(self, tokens: int, reason: str) -> None:
        """Tokens are given up by name."""
        self.dropped[reason] += tokens

    def begin_again(self, key: Key, reason: str) -> None:
        """A sample loses what it had."""
        self.lose(len(self.tapes[key]), reason)
        self.tapes[key] = []
        self.finished.discard(key)
        self.accepted.discard(key[0])

    def drop(self, group: int, reason: str) -> None:
        """A group is given up by name."""
        for index in range(self.samples):
            self.begin_again((group, index), reason)
            del self.tapes[group, index]
        self._settle(self.held.pop(group), reason)

    def _settle(self, prompt: int, how: str) -> None:
        assert prompt not in self.settled, f"prompt {prompt} was {self.settled[prompt]}, and now is {how}"
        self.settled[prompt] = how

    @property
    def tokens_held(self) -> int:
        """Of undelivered samples."""
        return sum(map(len, self.tapes.values()))

    # ---------------------------------------------------------------- batches

    @property
    def trained_at(self) -> int:
        """Version n at which the next batch is trained: each that is out brings one update before."""
        return self.version[1] + len(self.out)

    def age(self, tape: list[Token]) -> int:
        """Updates between its oldest token and the training of the next batch; 0 without tokens."""
        return max((self.trained_at - token.version[1] for token in tape), default=0)

    def deliver(self, batch: int, groups: Iterable[int]) -> None:
        """These groups are in a batch, in this order."""
        assert batch == self.batches
        leased = {}
        for group in groups:
            tapes = [self.tapes.pop((group, index)) for index in range(self.samples)]
            assert group in self.accepted, f"group {group} is delivered, and not complete"
            self.accepted.discard(group)
            self.finished -= {(group, index) for index in range(self.samples)}
            leased[group] = (self.held.pop(group), tapes)
            self._settle(leased[group][0], f"delivered in {batch}")
            self.delivered += sum(map(len, tapes))
        self.out[batch] = leased
        self.batches += 1

    def train(self, batches: Iterable[int]) -> None:
        """These were trained under the present version: how old was each token really?"""
        for batch in batches:
            for _, tapes in self.out.pop(batch).values():
                ages = (self.version[1] - token.version[1] for tape in tapes for token in tape)
                self.oldest = max(self.oldest, *ages, 0)
            self.committed = max(self.committed, batch)

    def update(self, trained: int | None, weights: str) -> None:
        """New weights, from these batches and those before."""
        self.as_promised &= trained in self.out
        self.train([batch for batch in self.out if trained is not None and batch <= trained])
        self.version = (self.version[0], self.version[1] + 1)
        self.weights[self.version] = weights

    # ---------------------------------------------------------------- restarts

    def copy(self) -> Books:
        """The same, apart."""
        return replace(
            self, held=dict(self.held), tapes={key: list(tape) for key, tape in self.tapes.items()},
            finished=set(self.finished), accepted=set(self.accepted), out=dict(self.out), settled=dict(self.settled),
            dropped=self.dropped.copy(), weights=dict(self.weights),
        )  # fmt: skip

    def saved(
        self, trained_through: int | None, running: Iterable[tuple[Key, list[Token], str | None]], *, keeps: bool
    ) -> Books:
        """What a process finds that goes on from a checkpoint taken now.

        ``running``: tokens of requests, and why they are lost; ``keeps``: finished samples of unfinished groups are.
        """
        last = self.committed if trained_through is None else trained_through
        books = self.copy()
        books.batches, books.committed, books.out, books.oldest = last + 1, last, {}, 0
        if not keeps:
            books.finished = {key for key in self.finished if key[0] in self.accepted}
        for key, tokens, lost in running:
            if lost is None:
                books.tapes[key] += tokens
            else:
                books.lose(len(tokens), lost)
        trained = 0
        for batch, groups in self.out.items():
            if trained_through is not None and batch <= last:
                trained += 1
                continue
            for group, (prompt, tapes) in groups.items():
                books.held[group] = prompt
                books.tapes |= {(group, index): list(tape) for index, tape in enumerate(tapes)}
                books.finished |= {(group, index) for index in range(self.samples)}
                books.accepted.add(group)
                del books.settled[prompt]
                books.delivered -= sum(map(len, tapes))
        books.version = (self.version[0] + 1, self.version[1] + trained)
        return books
