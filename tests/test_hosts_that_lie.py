"""A host that is broken, or lies, never breaks the core: it is heard, not heard, or cut off by a sentence."""

from __future__ import annotations

import os
import random
import struct
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from core_machine import EOS, settings
from host_sides import SAMPLING, HostSides, answered, function_at_work, requests

from april.core import commands as do
from april.core import events as ev
from april.core.types import EngineFinish
from april.processes import messages as wire
from april.processes.messages import ProtocolError, of_plain_bytes

LIVES = int(os.environ.get("APRIL_RANDOM_LIVES", "150"))
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


class Life:
    """A few steps with one host that does its work at random and tells a lie now and then."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        samples = rng.choice([1, 2, 3])
        self.functions = rng.random() < 0.6
        self.group_reward = rng.random() < 0.3
        self.sides = HostSides(
            settings(
                n=2,
                samples=samples,
                over=3,
                max_response_len=rng.choice([12, 1000]),
                group_reward=self.group_reward,
                has_filter=rng.random() < 0.5,
                max_attempt_failures=9,
                max_failed_groups=99,
                max_filtered_groups=99,
            ),
            functions=self.functions,
        )
        self.liar = Liar(rng)
        self.todo: list[Any] = []
        self.updates = 0

    def run(self) -> str | None:
        """Why the host was cut off in the end, or None."""
        sides, rng = self.sides, self.rng
        sides.pump.post(ev.StepRequested())
        why, idle = None, 0
        for turn in range(200):
            self.todo += [c for c in sides.down() if not isinstance(c, (do.Submit, do.Abort, do.Fence))]
            self.work()
            frame = sides.mirror.take()
            idle = 0 if frame is not None else idle + 1
            if idle > 9:
                break  # what it keeps back, nobody can wait for
            if frame is None:
                continue
            self.liar.said += msgspec.msgpack.decode(frame)
            try:
                sides.hear(sides.desk.receive(self.liar.frame(frame) if rng.random() < 0.12 else frame))
            except ProtocolError as error:
                why = str(error)
                break
            if sides.batches and turn % 3 == 0:
                self.updates += 1
                sides.pump.post(
                    ev.UpdateRequested(update=self.updates, path="weights", trained=sides.batches.pop(0).id)
                )
            if any(isinstance(c, do.UpdateEnded) for c in sides.others):
                sides.others.clear()
                sides.pump.post(ev.StepRequested())
        sides.hear(sides.desk.lost(why or "the end"))
        self.check()
        return why

    def check(self) -> None:
        """Nothing runs, and every token that was believed is somewhere."""
        core = self.sides.core
        core.validate()
        assert not core.attempts
        assert core.tokens.observed == core.tokens.held + core.tokens.delivered + sum(core.tokens.dropped.values())

    def work(self) -> None:
        """Some of what there is to do."""
        sides, rng = self.sides, self.rng
        for attempt in sides.running():
            room = attempt.sampling.max_tokens - attempt.tape.count
            match rng.randrange(6):
                case 0 | 1 if room > 1:
                    sides.brings(attempt, min(room - 1, rng.randint(1, 5)))
                case 2 | 5:
                    sides.ends(attempt, 1)
                case 3 if attempt.tape.count:
                    sides.mirror.post(ev.AttemptEnded.of(attempt, EngineFinish.ABORT))
                case 4 if rng.random() < 0.2:
                    sides.mirror.post(ev.AttemptFailed.of(attempt, "broke"))
        if rng.random() < 0.2:
            sides.mirror.report()
        rng.shuffle(self.todo)
        for command in [self.todo.pop() for _ in range(rng.randint(0, len(self.todo)))]:
            self.answer(command)

    def answer(self, command: Any) -> None:
        post, rng = self.sides.mirror.post, self.rng
        match command:
            case do.StartSample(sample):
                if sample.id in self.sides.mirror._runs:  # or it was cancelled before it began
                    post(ev.CallMade(sample.id, SAMPLING))
            case do.CallCompleted(call):
                sample = call.sample
                if sample.id not in self.sides.mirror._runs:
                    return
                if rng.random() < 0.4 and len(sample.tape) < 20:
                    tool = np.array([70, 71], np.int32)
                    tokens = np.concatenate((sample.group.prompt.token_ids, sample.tape.tokens[: call.end], tool))
                    post(ev.CallMade(sample.id, SAMPLING, tokens))
                elif rng.random() < 0.1:
                    post(ev.SampleFailed(sample.id, "raised"))
                else:
                    post(ev.SampleReturned(sample.id))
            case do.ScoreSample(sample):
                post(ev.Scored(sample.id.group, [(sample.id.index, rng.random())]))
            case do.ScoreGroup(group):
                post(ev.Scored(group.id, [(s.id.index, rng.random()) for s in group.members]))
            case do.JudgeGroup(group):
                post(ev.GroupJudged(group=group.id, judgement=command.judgement, keep=rng.random() < 0.8))
            case do.PauseEngine() | do.LoadEngine() | do.ResumeEngine():
                result = ev.CallResult.DONE if rng.random() < 0.9 else ev.CallResult.UNREACHABLE
                post(ev.EngineCallEnded(command.engine, command.call, result))
            case do.ProbeEngine():
                load = ev.LoadReported(engine=command.engine, running=1, waiting=0, kv_usage=0.5, preemptions=0)
                post(ev.EngineProbed(engine=command.engine, probe=command.probe, answered=True, ok=True, load=load))


def test_whatever_a_host_says_the_core_stays_whole() -> None:
    """Random lies in random lives: no error but ProtocolError, all books of the core right after every event."""
    cut_off: Counter[bool] = Counter()
    for seed in range(LIVES):
        try:
            cut_off[Life(seed).run() is not None] += 1
        except BaseException as error:
            error.add_note(f"life {seed}")
            raise
    assert min(cut_off[True], cut_off[False]) > LIVES / 10


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
