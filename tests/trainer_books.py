"""What a run around the core must come to: every prompt, sample and token of it, and what each batch must hold."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from april.core.batch import Batch, DeliveredSample
from april.core.settings import CoreSettings
from april.core.tape import SegmentKind
from april.core.types import OnStale

Key = tuple[int, int]
"""(group, index)"""
Version = tuple[int, int]
"""(incarnation, n)"""


class Token(NamedTuple):
    """One token of a response, and by which weights it was really generated; the environment's have no version."""

    id: int
    logprob: float
    version: Version | None
    weights: str


def generated(tape: Iterable[Token]) -> list[Token]:
    """The tokens that the policy wrote."""
    return [token for token in tape if token.version is not None]


@dataclass
class GroupBook:
    """A prompt that was drawn."""

    prompt: int
    samples: int
    """Numbers given to samples so far, those that took the place of others included."""
    members: set[int]
    """Samples that are neither delivered nor given up."""
    finishers: list[int] = field(default_factory=list)
    """Samples that have their reward, delivered ones too, in the order in which they got it."""
    delivered: set[int] = field(default_factory=set)
    cohort: tuple[tuple[int, float], ...] = ()
    """Once it counts: (index, reward) of the first k finishers."""
    bound: float = inf
    """Of its staleness, if that was lowered before its prompt was asked for."""

    def copy(self) -> GroupBook:
        return replace(
            self, members=set(self.members), finishers=list(self.finishers), delivered=set(self.delivered)
        )


@dataclass
class Books:
    """Prompts, groups, tokens and batches of the history that is kept."""

    samples: int
    """Per group."""
    quorum: float = 1.0
    """Share of them that makes a group count; 1: what is left of it, and it is delivered whole."""
    bound: float = inf
    """What the trainer has lowered the bound of the staleness to."""
    position: int = 0
    """Prompts drawn."""
    drawn: int = 0
    """Groups drawn."""
    groups: dict[int, GroupBook] = field(default_factory=dict)
    """All that were drawn."""
    tapes: dict[Key, list[Token]] = field(default_factory=dict)
    """What every member has by rights."""
    finished: set[Key] = field(default_factory=set)
    """Members that have their reward."""
    out: dict[int, dict[Key, list[Token]]] = field(default_factory=dict)
    """Batches that are delivered and not trained."""
    batches: int = 0
    committed: int = -1
    settled: dict[int, str] = field(default_factory=dict)
    """How each prompt ended."""
    sent: int = 0
    delivered: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    """Number of samples that were delivered, by their length."""
    dropped: Counter[str] = field(default_factory=Counter)
    version: Version = (0, 0)
    weights: dict[Version, str] = field(default_factory=lambda: {(0, 0): "start"})
    """What each version stands for."""
    as_promised: bool = True
    """One update at most per batch so far, and on_stale has always been finish: no token is trained too old."""
    oldest: int = 0
    """Greatest age of a token at the moment of its training, in this process."""

    # ---------------------------------------------------------------- prompts and tokens

    @property
    def held(self) -> dict[int, int]:
        """Prompt of every group that is not settled."""
        return {number: group.prompt for number, group in self.groups.items() if group.members}

    @property
    def accepted(self) -> set[int]:
        return {number for number in self.held if self.groups[number].cohort}

    @property
    def whole(self) -> bool:
        """Groups are delivered whole."""
        return self.quorum == 1.0

    @property
    def countable(self) -> set[Key]:
        """What the next batch can be made of."""
        return {key for key in self.finished if self.groups[key[0]].cohort}

    def bound_of(self, group: int, settings: CoreSettings) -> float:
        """Oldest that its tokens may be when they are trained."""
        return min(settings.max_staleness, self.groups[group].bound)

    def k(self, group: int) -> int:
        """Finishers that make a group count."""
        book = self.groups[group]
        size = len(book.members) + len(book.delivered)
        return size if self.whole else min(size, ceil(round(self.quorum * self.samples, 6)))

    def complete(self, group: int) -> bool:
        """Whether there are as many."""
        return len(self.groups[group].finishers) >= self.k(group)

    def draw(self, prompts: Iterable[int], bound: float) -> None:
        """These prompts are groups now."""
        for prompt in prompts:
            self.groups[self.drawn] = GroupBook(prompt, 0, set(), bound=bound)
            for _ in range(self.samples):
                self.join(self.drawn)
            self.drawn += 1
            self.position += 1

    def join(self, group: int) -> Key:
        """A sample of a group, perhaps in the place of another one."""
        book = self.groups[group]
        key = group, book.samples
        book.members.add(book.samples)
        book.samples += 1
        self.tapes[key] = []
        return key

    def finish(self, key: Key) -> None:
        self.finished.add(key)
        self.groups[key[0]].finishers.append(key[1])

    def accept(self, group: int, rewards: Callable[[Key], float]) -> None:
        """It counts from now on, with this cohort for ever."""
        book = self.groups[group]
        book.cohort = tuple((index, rewards((group, index))) for index in book.finishers[: self.k(group)])

    def lose(self, tokens: int, reason: str) -> None:
        """Tokens are given up by name."""
        self.dropped[reason] += tokens

    def unfinish(self, key: Key) -> None:
        """It has no reward any more; a whole group does not count without it."""
        if key in self.finished:
            self.finished.discard(key)
            self.groups[key[0]].finishers.remove(key[1])
            if self.whole:
                self.groups[key[0]].cohort = ()

    def begin_again(self, key: Key, reason: str) -> None:
        """A sample loses what it had."""
        self.lose(len(generated(self.tapes[key])), reason)
        self.tapes[key] = []
        self.unfinish(key)

    def give_up(self, key: Key, reason: str) -> None:
        """A sample is given up by name; its group goes on with the others."""
        self.begin_again(key, reason)
        del self.tapes[key]
        self._left(key, reason)

    def drop(self, group: int, reason: str) -> None:
        """A group is given up by name."""
        for index in sorted(self.groups[group].members):
            self.give_up((group, index), reason)

    def _left(self, key: Key, reason: str) -> None:
        """One member less; with the last one the prompt is settled."""
        book = self.groups[key[0]]
        book.members.discard(key[1])
        if not book.members:
            assert book.prompt not in self.settled, f"prompt {book.prompt} was {self.settled[book.prompt]} before"
            self.settled[book.prompt] = "delivered" if book.delivered else reason

    @property
    def tokens_held(self) -> int:
        """Of undelivered samples."""
        return sum(len(generated(tape)) for tape in self.tapes.values())

    # ---------------------------------------------------------------- batches

    @property
    def trained_at(self) -> int:
        """Version n at which the next batch is trained: each that is out brings one update before."""
        return self.version[1] + len(self.out)

    def age(self, tape: list[Token]) -> int:
        """Updates between its oldest token and the training of the next batch; 0 without tokens."""
        return max((self.trained_at - token.version[1] for token in generated(tape)), default=0)

    def deliver(self, batch: int, keys: Iterable[Key]) -> None:
        """These samples are in a batch."""
        assert batch == self.batches
        leased = {}
        for key in keys:
            assert key in self.countable, f"{key} is delivered, and does not count"
            self.finished.discard(key)
            leased[key] = self.tapes.pop(key)
            self.groups[key[0]].delivered.add(key[1])
            self._left(key, "delivered")
            self.delivered += len(generated(leased[key]))
            self.lengths[len(generated(leased[key]))] += 1
        self.out[batch] = leased
        self.batches += 1

    def train(self, batches: Iterable[int]) -> None:
        """These were trained under the present version: how old was each token really?"""
        for batch in batches:
            tapes = self.out.pop(batch).values()
            ages = (self.version[1] - token.version[1] for tape in tapes for token in generated(tape))
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
        return replace(
            self, groups={number: group.copy() for number, group in self.groups.items()},
            tapes={key: list(tape) for key, tape in self.tapes.items()}, finished=set(self.finished),
            out=dict(self.out), settled=dict(self.settled), dropped=self.dropped.copy(), weights=dict(self.weights),
            lengths=self.lengths.copy(),
        )  # fmt: skip

    def saved(
        self, trained_through: int | None, running: Iterable[tuple[Key, list[Token], str | None]], *, keeps: bool
    ) -> Books:
        """What a process finds that goes on from a checkpoint taken now.

        ``running``: tokens of requests, and why they are lost; ``keeps``: finished samples of groups that do not
        count are.
        """
        last = self.committed if trained_through is None else trained_through
        books = self.copy()
        books.batches, books.committed, books.out, books.oldest = last + 1, last, {}, 0
        if not keeps:
            for key in self.finished - self.countable:
                books.unfinish(key)
        for key, tokens, lost in running:
            if lost is None:
                books.tapes[key] += tokens
            else:
                books.lose(len(tokens), lost)
        trained = 0
        for batch, leased in self.out.items():
            if trained_through is not None and batch <= last:
                trained += 1
                continue
            for key, tape in leased.items():
                group = books.groups[key[0]]
                if not group.members:
                    del books.settled[group.prompt]
                group.members.add(key[1])
                group.delivered.discard(key[1])
                books.tapes[key] = list(tape)
                books.finished.add(key)
                books.delivered -= len(generated(tape))
                books.lengths[len(generated(tape))] -= 1
        books.version = (self.version[0] + 1, self.version[1] + trained)
        return books


def check_batch(batch: Batch, books: Books, settings: CoreSettings, seen: Counter[str]) -> list[Key]:
    """So many groups, or samples, that count, or all there is; returns whose samples they are."""
    assert batch.trained_at == (books.version[0], books.trained_at)
    keys: list[Key] = [tuple(sample.id) for sample in batch.samples]
    parts = [(group, [index for _, index in rows]) for group, rows in groupby(keys, lambda key: key[0])]
    assert len({group for group, _ in parts}) == len(parts), "a group in two places of a batch"
    assert batch.group_sizes == tuple(len(indices) for _, indices in parts)
    if books.whole:
        assert all(indices == sorted(books.groups[group].members) for group, indices in parts)
        assert len(parts) <= settings.rollout_batch_size
        short = len(parts) < settings.rollout_batch_size
    else:
        assert len(keys) <= settings.rollout_batch_size * books.samples
        short = len(keys) < settings.rollout_batch_size * books.samples
    assert not short or set(keys) == set(books.tapes), "a short batch leaves something behind"
    for key, sample in zip(keys, batch.samples, strict=True):
        check_sample(key, sample, books, settings)
        seen["resumed"] += sample.resumes > 0
        seen["of several versions"] += len({token.version for token in generated(books.tapes[key])}) > 1
        seen["straggler"] += key[1] not in [index for index, _ in sample.cohort]
        seen["part of a group"] += bool(books.groups[key[0]].delivered)
    seen["batches"] += 1
    seen["batches beside others"] += bool(books.out)
    return keys


def number_of(attempt_id: str) -> int:
    """Stands for an attempt in the rows that it gives."""
    return zlib.crc32(attempt_id.encode()) & 0x7FFFFFFF


def check_rows(sample: DeliveredSample, settings: CoreSettings) -> None:
    """Each token has the row that its attempt has given with it, and what no attempt has made that of the next one."""
    assert set(sample.extras) == set(settings.extras)
    ids, prompt = np.concatenate((sample.prompt.token_ids, sample.tokens)), len(sample.prompt.token_ids)
    for rows in sample.extras.values():
        made = [s for s in sample.segments if s.kind is SegmentKind.GENERATED]
        end = prompt + made[-1].start + made[-1].count - 1
        assert rows[:end, 0].tolist() == ids[:end].tolist()
        assert (rows[end:] == rows[end - 1]).all()
        for s in made:
            by = rows[prompt + s.start - 1 : prompt + s.start + s.count - 1, 1]
            assert set(by.tolist()) == {number_of(s.attempt_id)}, "a row is of another attempt than its token"


def check_sample(key: Key, sample: DeliveredSample, books: Books, settings: CoreSettings) -> None:
    """Every token as it was sent, nothing masked that is not too old, and the cohort that its group has for ever."""
    tape, cohort, ages = books.tapes[key], books.groups[key[0]].cohort, []
    assert sample.prompt.position == books.held[key[0]]
    assert sample.cohort == cohort
    others = [np.float32(reward) for index, reward in cohort if index != key[1]]
    assert sample.baseline_rewards.tolist() == others[: len(cohort) - 1]
    assert sample.tokens.tolist() == [t.id for t in tape]
    assert sample.logprobs.tolist() == [t.logprob for t in tape]
    check_rows(sample, settings)
    for token, version in zip(tape, sample.versions.tolist(), strict=True):
        if token.version is None:
            ages.append(None)
            continue
        assert token.version == tuple(version)
        assert token.weights == books.weights[token.version], "its version is not that of its weights"
        ages.append(books.trained_at - token.version[1])
    oldest = max(age for age in ages if age is not None)
    assert sample.staleness == oldest
    masks, bound = settings.on_stale in (OnStale.MASK, OnStale.FINISH), books.bound_of(key[0], settings)
    assert sample.loss_mask.tolist() == [age is not None and not (masks and age > bound) for age in ages]
    assert not books.as_promised or oldest <= bound
