"""Random lives of samples of several conversations, held to books of their own.

The books follow the rules by the tokens alone: what a call continues, what a function that begins again is answered
with, what nobody hears. Every answer, every drop by ``unheard`` and ``replay_diverged``, and every row of a batch must
be what they say.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from chain_machine import ChainMachine, Key, P, check_rows
from core_machine import EOS, A, B, settings

from april.core import commands as do
from april.core import events as ev
from april.core import snapshot
from april.core.batch import Batch
from april.core.types import (
    AttemptFailure,
    EngineFinish,
    GenerationMode,
    OnFailedSample,
    OnStale,
    Refill,
    SampleId,
    Timer,
    TimerKind,
)

ENDS = 25
"""Per cent of tokens that end their response."""
BREAKS = (AttemptFailure.BROKE_OFF, AttemptFailure.CORRUPT, AttemptFailure.BUSY)
OPEN = 4
"""Calls that a function makes side by side, at most."""


@dataclass(eq=False)
class Row:
    """What a conversation is by the books: ``ids`` with its prompt, and the calls [asked, end) in it."""

    prompt: int
    ids: list[int]
    made: list[tuple[int, int, int]] = field(default_factory=list)
    """(asked, end, number) of the present run of the function."""
    pending: list[tuple[int, int | None]] = field(default_factory=list)
    """(asked, end) of dead runs; None if there was no whole answer."""
    asked: int = 0
    """Of the open call."""
    open: int | None = None
    """Its number."""
    attempt: str = ""
    """Its request."""

    def dies(self) -> None:
        """The function begins again."""
        opened = [(self.asked, None)] if self.open is not None else []
        self.pending = [*[(asked, end) for asked, end, _ in self.made], *opened, *self.pending]
        self.made, self.open = [], None

    def cut(self, end: int) -> int:
        """Forget what follows; returns how much of it was generated."""
        mask = self.generated()
        del self.ids[end:]
        return sum(mask[end:])

    def generated(self) -> list[bool]:
        """Of each token, whether it was."""
        spans = [*[(asked, end) for asked, end, _ in self.made], *self.pending]
        if self.open is not None:
            spans.append((self.asked, None))
        mask = [False] * len(self.ids)
        for start, end in spans:
            stop = len(self.ids) if end is None else end
            mask[start:stop] = [True] * (stop - start)
        return mask


class Books:
    """The rows of every sample, and what was dropped, by reason."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.rows: defaultdict[Key, list[Row]] = defaultdict(list)
        self.restarts: Counter[Key] = Counter()
        self.dropped: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()

    def limit(self, row: Row) -> int:
        """The most tokens that it may have."""
        return min(row.prompt + self.longest, 4096)

    def ask(self, of: Key, ids: list[int], number: int) -> None:
        """The call goes to the row in which it was asked before, else to the longest that it continues, or its own."""
        rows = self.rows[of]
        again = [(heard, i) for i, row in enumerate(rows) if (heard := self.heard_before(row, ids)) is not None]
        free = [r for r in rows if r.made and not r.pending and r.open is None and ids[: len(r.ids)] == r.ids]
        longest = max((len(row.ids) for row in free), default=-1)
        if again and min(again)[0] and longest >= (rows[min(again)[1]].pending[min(again)[0] - 1][1] or 0):
            again = []  # this run has heard as much elsewhere
            self.seen["heard elsewhere"] += 1
        if again:
            heard, i = min(again)
            row = rows[i]
            for asked, end in row.pending[:heard]:
                assert end is not None
                row.made.append((asked, end, 0))
            del row.pending[:heard]
            self.seen["heard before"] += heard > 0
            self.seen["asked again"] += 1
            if not row.pending:
                row.ids = ids[: self.limit(row)]
                row.asked, row.open = len(row.ids), number
                return
            asked, end = row.pending.pop(0)
            if end is None:
                row.asked, row.open = asked, number
            else:
                row.made.append((asked, end, number))
            return
        if free:
            row = max(free, key=lambda r: len(r.ids))
            self.seen["one of several"] += len(free) > 1
            row.ids = ids[: self.limit(row)]
        else:
            row = Row(len(ids), list(ids))
            if rows and not rows[0].made and not rows[0].pending and rows[0].open is None:
                rows[0] = row
            else:
                rows.append(row)
            self.seen["another"] += len(rows) > 1
        row.asked, row.open = len(row.ids), number

    def heard_before(self, row: Row, ids: list[int]) -> int | None:
        """How many answers of a dead run stand in what is asked; None if it is not of this row."""
        cut = ids[: self.limit(row)]
        for heard, (asked, _) in enumerate(row.pending):
            if asked == len(cut) and row.ids[:asked] == cut:
                return heard
        end = row.pending[-1][1] if row.pending else None
        return None if end is None or ids[:end] != row.ids[:end] else len(row.pending)

    def answer(self, of: Key, number: int) -> list[int]:
        """What a complete call must be answered with."""
        for row in self.rows[of]:
            if row.open == number:
                row.made.append((row.asked, len(row.ids), number))
                row.open = None
            for asked, end, made in row.made:
                if made == number:
                    return row.ids[asked:end]
        raise AssertionError(f"nobody asked for call {number} of {of}")

    def unheard(self, of: Key, number: int) -> None:
        """The last call of a row leaves it."""
        for row in self.rows[of]:
            if row.open == number:
                self.dropped["unheard"] += row.cut(row.asked)
                row.open, row.attempt = None, ""
            elif row.open is None and row.made and row.made[-1][2] == number:
                self.dropped["replay_diverged"] += row.cut(row.made[-1][1])
                row.pending = []
                self.dropped["unheard"] += row.cut(row.made[-1][0])
                row.made.pop()
            else:
                continue
            self.seen["unheard"] += 1
            row.cut(row.made[-1][1] if row.made else row.prompt)
            if not row.made and row is not self.rows[of][0]:
                self.rows[of].remove(row)
            return

    def returned(self, of: Key) -> None:
        """What was not asked for again is dropped."""
        for row in self.rows[of]:
            if row.pending:
                self.dropped["replay_diverged"] += row.cut(row.made[-1][1] if row.made else row.prompt)
                row.pending = []
                self.seen["dropped"] += 1
        first, *others = self.rows[of]
        self.rows[of] = [first, *[row for row in others if row.made]]

    def started(self, of: Key, restarts: int) -> None:
        """The function begins, or begins again: from nothing, or from what its calls had."""
        if restarts != self.restarts[of]:
            self.restarts[of] = restarts
            self.rows[of] = []
        for row in self.rows[of]:
            row.dies()
        self.seen["begins again"] += bool(self.rows[of])

    def check(self, batch: Batch) -> None:
        """Every row of a batch is one of the books, mask and all."""
        for number in range(len(set(batch.sample_numbers.tolist()))):
            found = [row for row, n in zip(batch.samples, batch.sample_numbers.tolist(), strict=True) if n == number]
            rows = self.rows[tuple(found[0].id)]
            rows = [row for row in rows if any(row.generated())] or rows[:1]
            assert len(found) == len(rows)
            self.seen["rows"] += len(rows) > 1
            for row, book in zip(found, rows, strict=True):
                assert [*row.prompt.token_ids, *row.tokens] == book.ids
                assert len(row.prompt.token_ids) == book.prompt
                assert (row.logprobs != 0).tolist() == book.generated()[book.prompt :]


class Kept(NamedTuple):
    """A state, and what is true of the history that it is of."""

    state: snapshot.State
    books: Books
    memory: defaultdict[Key, list[list[int]]]
    generated: int


class ChainLife(ChainMachine):
    """A core, functions that ask for any conversation, engines, and a trainer; ``books`` are those of all processes."""

    ends = ENDS

    def __init__(self, core_settings: Any, books: Books, rng: random.Random, **options: Any) -> None:
        self.books, self.rng = books, rng
        self.memory: defaultdict[Key, list[list[int]]] = defaultdict(list)
        """Conversations that dead runs of a function had asked for."""
        self.kept: Kept | None = None
        self.timers: list[Timer] = []
        super().__init__(core_settings, engines=(A, B), **options)

    # ---------------------------------------------------------------- what the core wants

    def _execute(self, command: do.Command) -> None:
        match command:
            case do.Submit(attempt):
                super()._execute(command)
                (row,) = [r for r in self.books.rows[tuple(attempt.sample.id)] if r.open == attempt.call.number]
                assert attempt.request.token_ids.tolist() == row.ids, "a request is not what its conversation is"
                row.attempt = attempt.id
            case do.CallCompleted(call):
                super()._execute(command)
                key = tuple(call.sample.id)
                heard = self.heard[key, call.number]
                assert heard.tokens == self.books.answer(key, call.number)
            case do.StartTimer(timer):
                self.commands.append(command)
                if timer.kind is not TimerKind.OUTAGE:
                    self.timers.append(timer)
            case do.Fence(_, attempt_ids):
                for attempt_id in attempt_ids:
                    self.keep(attempt_id)
                self.books.seen["fenced"] += len(attempt_ids)
                super()._execute(command)
            case do.ProbeEngine(engine, probe):
                self.commands.append(command)
                well = ev.EngineProbed(engine=engine, probe=probe, answered=True, ok=True, current=True)
                self._pump.post(well)
            case do.JudgeGroup(group, judgement):
                self.commands.append(command)
                self._pump.post(ev.GroupJudged(group=group.id, judgement=judgement, keep=True))
            case do.Deliver(batch):
                super()._execute(command)
                check_rows(batch, self.ends)
                self.books.check(batch)
            case do.StartSample(sample):
                self.books.started(tuple(sample.id), sample.restarts)
                super()._execute(command)
            case do.CancelSample(sample):
                super()._execute(command)
                if sample.restarts != self.books.restarts[tuple(sample.id)]:
                    self.books.rows[tuple(sample.id)] = []
            case _:
                super()._execute(command)

    def gone(self, key: Key) -> None:
        """What it has asked for is asked again."""
        self.remembers(key)
        super().gone(key)

    def remembers(self, key: Key) -> None:
        """Its next run asks for what it has asked, then for what it was still to ask again."""
        asked = [heard.ids for (of, _), heard in self.heard.items() if of == key]
        asked += [ids for (of, _), ids in self.asked.items() if of == key]
        self.memory[key] = [*asked, *[ids for ids in self.memory[key] if ids not in asked]]

    # ---------------------------------------------------------------- what happens

    def act(self) -> None:
        """One thing happens, of those that can."""
        rng = self.rng
        alive = sorted(key for key in self.alive if self.core.context.group(key[0]) is not None)
        can: list[tuple[float, Any]] = [(8, self.engine_works)] * bool(self.in_flight)
        if alive:
            key = rng.choice(alive)
            can += [(4, lambda: self.asks(key)), (2, lambda: self.function_returns(key))]
            can += [(0.5, lambda: self.stops_hearing(key)), (0.1, lambda: self.function_fails(key))]
            can += [(0.15, lambda: self.host_dies({key[0], rng.choice(alive)[0]}))]
        can += [(3, self.trainer_goes_on)] * (not self.core.batch_wanted)
        can += [(0.3 if self.in_flight else 3, self.time_passes)] * bool(self.timers)
        assert can, f"stuck: {self.core!r}"
        weights, actions = zip(*can, strict=True)
        rng.choices(actions, weights)[0]()

    def trainer_goes_on(self) -> None:
        for batch_id in list(self.core.leased):
            self.post(ev.BatchCommitted(batch_id))
        self.post(ev.PauseRequested())
        while self.in_flight:
            self.engine_works()
        self.update()
        self.post(ev.Resumed())
        self.ask()

    def engine_works(self) -> None:
        """A request gains tokens, ends, stalls, or breaks off where only its tokenizer is to blame."""
        rng = self.rng
        attempt_id = rng.choice(sorted(self.in_flight))
        if rng.random() < 0.05:
            self.broke_off(attempt_id, rng.choice([AttemptFailure.NO_TEXT, AttemptFailure.NO_TEXT, *BREAKS]))
        elif rng.random() < 0.05:
            self.post(ev.AttemptStalled(attempt_id, 5.0))
        elif attempt_id in self.abort_asked:
            self.request_ends(attempt_id, rng.choice([0, 0, 1, 3]))
        elif self.tokens(attempt_id, rng.randint(1, 4)):
            self.request_ends(attempt_id, 0)

    def request_ends(self, attempt_id: str, count: int) -> None:
        """A request ends, with so many more tokens."""
        attempt, complete = self.in_flight[attempt_id], self.complete_with(attempt_id, count)
        self.keep(attempt_id)
        last = attempt.tape.last_token if attempt.tape.count else 0
        whole = EngineFinish.STOP if last == EOS else EngineFinish.LENGTH
        del self.in_flight[attempt_id]
        self.abort_asked.discard(attempt_id)
        self.post(ev.AttemptEnded.of(attempt, whole if complete else EngineFinish.ABORT))

    def complete_with(self, attempt_id: str, count: int) -> bool:
        """Gain so many tokens, unless its end has come already."""
        attempt = self.in_flight[attempt_id]
        if attempt.tape.count and attempt.tape.last_token == EOS:
            return True
        return self.tokens(attempt_id, count)

    def broke_off(self, attempt_id: str, kind: AttemptFailure) -> None:
        """What has come is kept, unless it cannot be true."""
        self.books.seen[str(kind)] += 1
        self.keep(attempt_id, corrupt=kind is AttemptFailure.CORRUPT)
        self.fail(self.in_flight[attempt_id], "reset", kind=kind)

    def time_passes(self) -> None:
        """A timer runs out: aborts are asked for again, or given up; engines are asked whether they are well."""
        self.post(ev.TimerFired(self.timers.pop(self.rng.randrange(len(self.timers)))))

    def keep(self, attempt_id: str, *, corrupt: bool = False, ended: bool = True) -> None:
        """By the books, the tokens of a request go to the row that waits for it; those of no row are unheard.

        One that ``ended`` with a whole answer, when its function was lost, has been answered to nobody.
        """
        attempt = self.in_flight[attempt_id]
        tokens = [] if corrupt else attempt.tape.packed()[0].tolist()
        for rows in self.books.rows.values():
            for row in rows:
                if row.attempt == attempt_id:
                    row.ids += tokens
                    row.attempt = ""
                    whole = tokens[-1:] == [EOS] or len(tokens) == attempt.request.sampling.max_tokens
                    if ended and whole and tuple(attempt.sample.id) not in self.alive:
                        row.made.append((row.asked, len(row.ids), 0))
                        row.open = None
                    return
        if attempt.drop_reason == "unheard":
            self.books.dropped["unheard"] += len(tokens)

    def asks(self, key: Key) -> None:
        """A function asks again what a dead one had asked, goes on, forks, rewrites, or asks the same twice."""
        rng = self.rng
        opened = [number for of, number in self.asked if of == key]
        if len(opened) >= OPEN:
            return
        heard = [h for (of, _), h in self.heard.items() if of == key]
        asked = [ids for (of, _), ids in self.asked.items() if of == key]
        choice = rng.random()
        if self.memory[key] and choice < 0.7:
            ids = self.memory[key].pop(0 if rng.random() < 0.8 else rng.randrange(len(self.memory[key])))
        elif heard and choice < 0.8:
            ids = [*rng.choice(heard).conversation, *self.said(rng.randint(0, 3))]
        elif heard and choice < 0.87:
            whole = rng.choice(heard).conversation
            ids = [*whole[: rng.randint(1, len(whole))], *self.said(rng.randint(0, 2))]
        elif asked and choice < 0.93:
            ids = list(rng.choice(asked))
        else:
            ids = [*P, *self.said(rng.randint(0, 2))]
        self.books.ask(key, ids, self.made[key] + 1)
        self.call(ids, key, max_tokens=1 + sum(ids) % 9)

    def said(self, count: int) -> list[int]:
        """Tokens of users and tools: few, so that conversations meet."""
        return [self.rng.choice([3, 4]) for _ in range(count)]

    def stops_hearing(self, key: Key) -> None:
        """A client leaves: before its answer, or after."""
        numbers = [number for book in (self.asked, self.heard) for of, number in book if of == key]
        if numbers:
            self.leaves(key, self.rng.choice(numbers))

    def leaves(self, key: Key, number: int) -> None:
        before = [row.made and row.made[-1][2] == number for row in self.books.rows[key]]
        self.books.unheard(key, number)
        if any(before):
            self.heard.pop((key, number), None)
        self.unheard(number, of=key)

    def function_returns(self, key: Key) -> None:
        """It has heard something; what it still waits for is heard by nobody."""
        heard = [number for of, number in self.heard if of == key]
        asked = [number for of, number in self.asked if of == key]
        if not heard or (asked and self.rng.random() < 0.6) or (self.memory[key] and self.rng.random() < 0.7):
            return
        for number in asked:
            self.leaves(key, number)
        if any(row.made for row in self.books.rows[key]):
            self.books.returned(key)
            self.memory[key] = [h.ids for (of, _), h in self.heard.items() if of == key]
            self.returns(key)

    def function_fails(self, key: Key) -> None:
        """Its sample begins again."""
        self.books.rows[key] = []
        self.gone(key)
        self.memory[key] = []
        self.post(ev.SampleFailed(SampleId(*key), "boom"))

    # ---------------------------------------------------------------- restarts

    def host_dies(self, groups: set[int]) -> None:
        """The functions of these groups are lost; that nobody hears their calls is told too late."""
        lost = [key for key in sorted(self.alive) if key[0] in groups]
        numbers = {key: self.made[key] for key in lost}
        self.lose(*groups)
        for key in lost:
            if self.core.context.group(key[0]) is not None and not self.made[key]:
                self.unheard(numbers[key], of=key)

    def keeps(self) -> None:
        """The trainer saves a state; requests that run are in it."""
        assert self.core.observed_tokens() == self.generated
        state, books, memory = self.saved(), self.books, self.memory
        self.books, self.memory = deepcopy((books, memory))
        for attempt_id in sorted(self.in_flight):
            self.keep(attempt_id, ended=False)
        for key in sorted(self.alive):
            self.remembers(key)
        self.kept = Kept(state, self.books, self.memory, self.generated)
        self.books, self.memory = books, memory

    def restart(self) -> ChainLife:
        """The process ends, and another one goes on from the last state."""
        if self.kept is None or self.rng.random() < 0.5:
            self.keeps()
        kept = self.kept
        assert kept is not None
        books, memory = deepcopy((kept.books, kept.memory))
        books.seen = self.books.seen
        again = ChainLife(self.core.settings, books, self.rng)
        again.memory, again.kept, again.generated = memory, kept, kept.generated
        snapshot.restore(again.core, kept.state)
        again.check_books()
        again.restored()
        again.ask()
        return again

    def check_books(self) -> None:
        """The ledger names what the books do."""
        self.check_ledger()
        for reason in ("unheard", "replay_diverged"):
            assert self.dropped.get(reason, 0) == self.books.dropped[reason], reason


def a_life(seed: int, actions: int = 120) -> Counter[str]:
    """Run one from a seed; returns what has happened in it."""
    rng = random.Random(seed)
    samples = rng.choice([1, 2])
    changes: dict[str, Any] = {
        "n": 2, "samples": samples, "over": rng.choice([2, 3]), "max_in_flight": rng.choice([2, 4, 12]),
        "max_response_len": rng.choice([12, 1000]), "on_stale": rng.choice(list(OnStale)),
        "max_staleness": rng.choice([1, 2, 4]), "refill": rng.choice([Refill.NONE, Refill.GROUP]),
        "has_filter": rng.random() < 0.3, "max_attempt_failures": 10**6, "max_failed_groups": 10**6,
        "group_quorum": rng.choice([1.0, 0.5]), "retry_pause_s": 0.0, "abort_deadline_s": 1.0,
        "max_chains": rng.choice([4, 64]), "max_sample_tokens": rng.choice([None, None, 40]),
        "on_failed_sample": rng.choice(list(OnFailedSample)), "generation": rng.choice(list(GenerationMode)),
    }  # fmt: skip
    if changes["has_filter"]:
        changes["group_quorum"] = 1.0
    books = Books(changes["max_response_len"])
    life = ChainLife(settings(**changes), books, rng)
    life.ask()
    restarts = rng.choice([0.0, 0.01, 0.03])
    for _ in range(actions):
        life.act()
        life.check_books()
        if rng.random() < 0.02:
            life.keeps()
        if rng.random() < restarts:
            books.seen["restarts"] += 1
            life = life.restart()
        books.seen["batches"] += len(life.batches)
        life.batches.clear()
    return books.seen
