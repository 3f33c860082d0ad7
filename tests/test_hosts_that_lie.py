"""A host that is broken, or lies, never breaks the core: it is heard, not heard, or cut off by a sentence."""

from __future__ import annotations

import asyncio
import os
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from core_machine import EOS
from host_sides import SAMPLING, HostSides, answered, function_at_work, requests
from test_random_host_protocol import NOISE, HostsLife, lived
from virtual_rollouts import on_virtual_time

import april
from april.core import commands as do
from april.core import events as ev
from april.processes import messages as wire
from april.processes.link import Link, MemoryLink
from april.processes.messages import ProtocolError
from april.processes.plain_values import of_plain_bytes

pytestmark = on_virtual_time

LIVES = int(os.environ.get("APRIL_RANDOM_LIVES", "30"))
JOINED = 40
"""Tag of the first frame of a host."""
WORDS = ["", "stop", "length", "abort", "broke_off", "corrupt", "refused", "busy", "done", "h/e0", "e0", "\x1b[2J"]
NUMBERS = [-(2**31), -1, 0, 1, 2, 3, 7, 1000, 2**31, 2**40, 2**63 - 1]


class Liar:
    """Changes what a host says: any field of any message, or which messages there are."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.said: list[Any] = []

    def frame(self, frame: bytes) -> bytes:
        """Another one that can still be read, mostly."""
        rng = self.rng
        if rng.random() < 0.01:
            at = rng.randrange(len(frame))
            return frame[:at] + bytes([rng.randrange(256)]) + frame[at + 1 :]
        messages = msgspec.msgpack.decode(frame)
        i = rng.randrange(len(messages))
        match rng.randrange(5):
            case 0:
                messages.insert(i, rng.choice(self.said))
            case 1:
                messages.append(messages.pop(i))
            case _:
                fields = range(1, len(messages[i]))
                for field in rng.sample(fields, min(len(fields), rng.choice([1, 1, 2]))):
                    messages[i][field] = self.changed(messages[i][field])
        return msgspec.msgpack.encode(messages)

    def changed(self, value: Any) -> Any:
        """Something of its kind, or of another one."""
        rng = self.rng
        match value:
            case bool():
                return not value
            case int():
                return rng.choice([*NUMBERS, value + 1, value - 1])
            case float():
                return rng.choice([float("nan"), float("inf"), -1.0, 0.0, 1e308, value + 0.5])
            case str():
                return rng.choice([*WORDS, value[:-1], value * 2, rng.choice(str(self.said))])
            case bytes():
                more = struct.pack("<i", rng.choice([-1, 0, EOS, 5, 2**31 - 1]))
                return rng.choice([value[:-1], value[:-4], value + more, more, value[4:] + more, b""])
            case list() if value:
                value, i = list(value), rng.randrange(len(value))
                match rng.randrange(9):
                    case 0:
                        del value[i]
                    case 1:
                        value.append(value[i])
                    case _:
                        value[i] = self.changed(value[i])
                return value
            case dict() if value:
                field = rng.choice(list(value))
                return value | {field: self.changed(value[field])}
        return rng.choice([None, 0, "x", b"1234", []])


class LyingLife(HostsLife):
    """Its hosts tell a lie now and then, of whatever kind; who is believed, is believed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.liar = Liar(self.luck)

    def link(self, link: MemoryLink) -> Link:
        link.send = partial(self.says, link.send)  # type: ignore[method-assign]
        return link

    def says(self, send: Callable[[bytes], None], frame: bytes) -> None:
        """Or something else, once it has joined."""
        told = [] if frame == NOISE else msgspec.msgpack.decode(frame)
        if told and told[0][0] != JOINED:
            self.liar.said += told
            if self.luck.random() < 0.06:
                self.seen["told a lie"] += 1
                frame = self.liar.frame(frame)
        send(frame)

    async def update(self) -> None:
        """Made again where a host has said that it failed."""
        try:
            await super().update()
        except april.EngineError:
            await self.update()

    def check_end(self) -> None:
        """The core is whole, and every token that was believed is somewhere."""
        self.scheduler.validate()
        for book in self.scheduler.ledger().values():
            assert book.observed == book.held + book.delivered + sum(book.dropped.values())


async def test_whatever_a_host_says_the_core_stays_whole() -> None:
    """Random lies in random lives: nothing raises but the host is cut off, all books are right after every event."""
    wrong: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: wrong.append(context))
    lies = 0
    for seed in range(LIVES):
        life = LyingLife(seed)
        lies += (await lived(life)).seen["told a lie"]
        assert not wrong, f"life {seed}"
    assert lies > 10 * LIVES


NONE = {"reward": False, "group_reward": False, "filter": False, "tokenizer": False}
LIES = {
    "tokens from the middle": lambda i: wire.Came(i, 3, bytes(4), bytes(4), (((0, 0), 1),)),
    "tokens outside of the vocabulary": lambda i: wire.Came(i, 0, b"\xff\xff\xff\xff", bytes(4), (((0, 0), 1),)),
    "spans that are not the tokens": lambda i: wire.Came(i, 0, bytes(8), bytes(8), (((0, 0), 1),)),
    "half a token": lambda i: wire.Came(i, 0, bytes(3), bytes(3), (((0, 0), 1),)),
    "more than the budget": lambda i: wire.Came(i, 0, bytes(4004), bytes(4004), (((0, 0), 1001),)),
    "an end that is none": lambda i: wire.Ended(i, "tired"),
    "a second welcome": lambda i: wire.Joined(protocol=2, name="h", life="1", engines=(), functions=True, **NONE),
    "a call that nobody can make": lambda i: wire.Failed(i, "", "broke_off", -1, 0.0),
} | {
    f"weights that never were: {version}": lambda i, version=version: wire.Came(
        i, 0, bytes(4), bytes(4), ((version, 1),)
    )
    for version in [(-(2**31), 0), (1, 0), (0, -1), (0, 1)]
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_what_cannot_be_true_cuts_the_host_off(lie: Any) -> None:
    """A broken host never reaches the core, which counts how old tokens are: nothing of it is believed."""
    sides, (attempt,) = requests()
    with pytest.raises(ProtocolError):
        sides.hear(sides.desk.receive(wire.encode([lie(attempt.id)])))
    assert sides.core.attempts[attempt.id].tape.count == 0
    sides.hear(sides.desk.lost("it lied"))
    assert sides.core.tokens.observed == 0
    assert not sides.core.attempts


def test_what_a_function_cannot_say_cuts_its_host_off() -> None:
    """A conversation outside of the vocabulary, for which a model has no row; rewards of others than were asked for."""
    sides, sample = function_at_work()
    prompt = sample.group.prompt.token_ids
    sides.mirror.post(ev.CallMade(sample.id, SAMPLING, np.concatenate((prompt, np.array([-7], np.int32)))))
    with pytest.raises(ProtocolError, match="token id -7"):
        sides.up()
    sides, sample = function_at_work()
    answered(sides, sample, 2)
    sides.down()
    sides.mirror.post(ev.SampleReturned(sample.id))
    sides.up()
    assert [type(command) for command in sides.down()] == [do.ScoreSample]
    with pytest.raises(ProtocolError, match="asked for those of"):
        sides.hear(sides.desk.receive(wire.encode([wire.Rewards(0, 0, 2, ())])))
    assert not sides.batches


@pytest.mark.parametrize("noise", [b"", b"\xc1", b"GET / HTTP/1.1\r\n", b"\x91\x93\x05\x01\x02", b"\x91" * 5000])
def test_what_cannot_be_read_is_refused(noise: bytes) -> None:
    """Noise is a ProtocolError on both sides, and so is an output that is none."""
    sides = HostSides()
    for read in (sides.desk.receive, sides.mirror.receive, lambda noise: [of_plain_bytes(noise + b"\x01")]):
        with pytest.raises(ProtocolError):
            list(read(noise or b"\x01"))


@pytest.mark.parametrize("shares", [False, True], ids=["server", "model"])
def test_a_report_of_written_weights_ends_a_wait_if_it_can_be_true(shares: bool) -> None:
    """Alone, without a request that it broke: whoever waits is told which host said it, and what to do. A host whose
    engines have weights of their own cannot know it, and is cut off.
    """
    sides, _ = requests()
    sides.desk.engines = {name: replace(limits, remote=not shares) for name, limits in sides.desk.engines.items()}
    sides.mirror.post(ev.WeightsWritten("somebody wrote"))
    if shares:
        sides.up()
        (submit,) = (c for c in sides.down() if isinstance(c, do.Abort))
        assert submit.engine == "h/e0"
        assert do.Fail("host h: somebody wrote; call weight_update before the next batch", True) in sides.others
    else:
        with pytest.raises(ProtocolError, match="host h says that weights were written which none of its engines"):
            sides.up()
