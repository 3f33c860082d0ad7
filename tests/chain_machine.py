"""The core of the tests for functions that ask for any conversation: several at a time, forked, rewritten.

A token follows from all tokens before it and from the version of the weights, so a test knows what each call must be
answered with, and whether a row of a batch is what the weights wrote.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from core_machine import EOS, PROMPT, CoreMachine
from msgspec import structs

from april.core import commands as do
from april.core import events as ev
from april.core.batch import Batch, DeliveredSample
from april.core.settings import CoreSettings
from april.core.tape import SegmentKind
from april.core.types import Attempt, Chain, EngineFinish, FinishReason, SampleId
from april.core.versions import PolicyVersion

Key = tuple[int, int]
P = PROMPT.token_ids.tolist()
"""The prompt of every group."""
FIRST = (0, 0)


def token_after(ids: Sequence[int], version: PolicyVersion, ends: int = 0) -> int:
    """The token that weights of ``version`` write after ``ids``; of ``ends`` in 100 it is EOS."""
    text = np.asarray(ids, np.int32).tobytes() + repr(tuple(version)).encode()
    drawn = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    return EOS if drawn % 100 < ends else 10 + (drawn >> 8) % 900


class Heard(NamedTuple):
    ids: list[int]
    """The conversation that was asked for."""
    tokens: list[int]
    finish: FinishReason
    chain: int

    @property
    def conversation(self) -> list[int]:
        """What was asked for, and the answer."""
        return self.ids + self.tokens


class ChainMachine(CoreMachine):
    """A core whose functions do what the test says; the core validates itself after every event.

    ``ends``: per cent of tokens that end their response by themselves.
    """

    ends = 0

    def __init__(self, core_settings: CoreSettings, length: Any = None, *others: Any, **options: Any) -> None:
        self.alive: set[Key] = set()
        """Samples whose function runs."""
        self.asked: dict[tuple[Key, int], list[int]] = {}
        """The conversations of calls without an answer, by sample and number."""
        self.heard: dict[tuple[Key, int], Heard] = {}
        self.made: Counter[Key] = Counter()
        """Calls of the present run of each function."""
        super().__init__(core_settings, length, *others, **({"auto_call": False} | options))

    def _execute(self, command: do.Command) -> None:
        match command:
            case do.StartSample(sample):
                key = tuple(sample.id)
                assert key not in self.alive, "started twice"
                self.alive.add(key)
                self.forget(key)
                self.commands.append(command)
                self.started(key)
            case do.CallCompleted(call):
                self.commands.append(command)
                key = tuple(call.sample.id)
                assert key in self.alive, "an answer to a function that is dead"
                tape, ids = call.chain.tape, self.asked.pop((key, call.number))
                tokens = tape.tokens[call.start : call.end].tolist()
                room = len(call.chain.prompt) + self.core.context.attempts.room(call.chain)
                assert call.chain.conversation(call.start).tolist() == ids[:room]
                assert call.finish is not None
                self.heard[key, call.number] = Heard(ids, tokens, call.finish, call.chain.number)
            case do.CancelSample(sample):
                self.commands.append(command)
                self.gone(tuple(sample.id))
            case _:
                super()._execute(command)

    def started(self, key: Key) -> None:
        """A function was started."""

    def forget(self, key: Key) -> None:
        """Nothing was asked or heard yet."""
        self.made[key] = 0
        for book in (self.asked, self.heard):
            for of, number in list(book):
                if of == key:
                    del book[of, number]

    def gone(self, key: Key) -> None:
        """A function has ended, or its process died."""
        self.alive.discard(key)
        self.forget(key)

    # ---------------------------------------------------------------- functions

    def call(self, ids: Sequence[int], of: Key = FIRST, **sampling: Any) -> int:
        """The function asks to continue ``ids``; returns the number of the call."""
        self.made[of] += 1
        number = self.made[of]
        self.asked[of, number] = list(ids)
        asked = structs.replace(self.sampling, **sampling)
        self.post(ev.CallMade(SampleId(*of), asked, np.array(ids, np.int32), number, any_chain=True))
        return number

    def say(self, ids: Sequence[int], count: int = 3, of: Key = FIRST) -> list[int]:
        """Ask, and let the answer of so many tokens come; returns the conversation with it."""
        return self.complete(self.call(ids, of), count, of).conversation

    def unheard(self, *numbers: int, of: Key = FIRST) -> None:
        """Nobody hears the answers of these calls."""
        for number in numbers:
            self.asked.pop((of, number), None)
            self.post(ev.CallUnheard(SampleId(*of), number))

    def returns(self, of: Key = FIRST) -> list[do.Command]:
        self.alive.discard(of)
        return self.post(ev.SampleReturned(SampleId(*of)))

    def lose(self, *groups: int) -> list[do.Command]:
        """The processes of the functions of these groups die."""
        commands = []
        for key in sorted(key for key in self.alive if key[0] in groups):
            self.gone(key)
            commands += self.post(ev.FunctionLost(SampleId(*key)))
        return commands

    # ---------------------------------------------------------------- engines

    def of_call(self, number: int, of: Key = FIRST) -> Attempt:
        (found,) = [
            a
            for a in self.in_flight.values()
            if tuple(a.sample.id) == of and a.call.number == number and a.drop_reason is None
        ]
        return found

    def tokens(self, attempt_id: str, count: int) -> bool:
        """Let an attempt gain up to ``count`` tokens; True when no other may follow."""
        attempt = self.in_flight[attempt_id]
        ids = [*attempt.request.token_ids.tolist(), *attempt.tape.packed()[0].tolist()]
        for _ in range(min(count, attempt.request.sampling.max_tokens - attempt.tape.parsed)):
            token = token_after(ids, self.core.clock.current, self.ends)
            self._came(attempt, token)
            ids.append(token)
            if token == EOS:
                break
        return attempt.tape.count == attempt.request.sampling.max_tokens or (attempt.tape.count > 0 and ids[-1] == EOS)

    def _came(self, attempt: Attempt, token: int) -> None:
        attempt.tape.append(np.array([token], np.int32), np.full(1, -token / 8, np.float32), self.core.clock.current)
        self.generated += 1

    def grow(self, number: int, count: int, of: Key = FIRST) -> None:
        """Let the request of a call gain so many tokens."""
        self.tokens(self.of_call(number, of).id, count)

    def complete(self, number: int, count: int = 3, of: Key = FIRST) -> Heard:
        """Let a call's request gain so many more tokens, the last of which is EOS."""
        if (of, number) not in self.heard:  # else it was answered from the tape
            attempt = self.of_call(number, of)
            self.tokens(attempt.id, count - 1)
            self.stops(attempt, EOS)
        return self.heard[of, number]

    def stops(self, attempt: Attempt, *tokens: int) -> list[do.Command]:
        """An attempt stops by itself, after these tokens."""
        for token in tokens:
            self._came(attempt, token)
        del self.in_flight[attempt.id]
        self.abort_asked.discard(attempt.id)
        return self.post(ev.AttemptEnded.of(attempt, EngineFinish.STOP))

    # ---------------------------------------------------------------- what there is

    def chains(self, of: Key = FIRST) -> tuple[Chain, ...]:
        """The conversations of a sample."""
        return self.sample(*of).chains

    def conversations(self, of: Key = FIRST) -> list[list[int]]:
        """Prompt and response of each of them."""
        return [chain.conversation(len(chain.tape)).tolist() for chain in self.chains(of)]

    def rows(self, of: Key = FIRST, batch: int = -1) -> list[DeliveredSample]:
        return [row for row in self.batches[batch].samples if tuple(row.id) == of]


def check_rows(batch: Batch, ends: int = 0) -> None:
    """Each token of a row is what the weights of its version write there, the oldest first; an end may be any time."""
    assert sum(batch.group_sizes) == len(batch)
    for row in batch.samples:
        ids = row.prompt.token_ids.tolist()
        versions = [PolicyVersion(*pair) for pair in row.versions.tolist()]
        newest = None
        for i, (token, version) in enumerate(zip(row.tokens.tolist(), versions, strict=True)):
            if row.loss_mask[i] or row.logprobs[i]:
                assert token in (EOS, token_after(ids, version, ends))
                assert row.logprobs[i] == -token / 8
                assert newest is None or newest <= version
                newest = version
            ids.append(token)
        kinds = np.repeat([s.kind is SegmentKind.GENERATED for s in row.segments], [s.count for s in row.segments])
        assert (row.logprobs != 0).tolist() == kinds.astype(bool).tolist()
