"""Records of runs: every run is decided again from its events alone, and what was changed in between is found."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
from memory_doors import MemoryDoors, door_of
from records import command, raw_lines, written
from saved_rollouts import in_a_step, new
from saved_rollouts import plain as saved
from virtual_rollouts import EOS, RecordingEngine, Rollouts, on_virtual_time, table, virtual

import april
from april.core import events as ev
from april.core.rollout_core import RolloutCore
from april.core.types import Prompt, SampleId
from april.driver.llm import LLM
from april.engines.protocol import Chunk, Request
from april.errors import ConfigError, InvariantError, RecordError, RolloutError
from april.record import file as record_file
from april.record.event_values import NAME_FIELDS, exception_name, from_plain, to_plain
from april.record.file import RecordFile, RunRecord
from april.record.replay import replay
from april.scheduler import RolloutScheduler
from april.testing import FakeEngine, rollouts

pytestmark = on_virtual_time

@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a record that is not there yet."""
    return tmp_path / "run.jsonl"


SECRET = "sk-the prompt of a customer"  # noqa: S105


async def reward(prompt: Prompt, response: Any) -> float:
    """Some fail; what they raise quotes the prompt."""
    if response.tokens[0] % 23 == 0:
        raise ValueError(f"no verdict about {prompt.data['text']}")
    return float(response.tokens[0] % 2)


async def two_turns(prompt: Prompt, llm: LLM) -> None:
    """A call, a tool's answer, a call."""
    done = await llm.generate(max_tokens=12)
    await asyncio.sleep(1.5)
    await llm.generate([*done.conversation.tolist(), 950, 951], max_tokens=30)


async def keep(prompt: Prompt, responses: Sequence[Any]) -> bool:
    return len({r.reward for r in responses}) > 1


def prompts() -> list[Prompt]:
    """With data that is nobody's business."""
    return [Prompt(np.array([i % 900 + 1, 7, 7], np.int32), {"text": f"{SECRET} {i}"}) for i in range(400)]


def faulty(seed: int) -> type[RecordingEngine]:
    """An engine that breaks off, and that ignores some aborts for ever."""
    rng = np.random.default_rng(seed)

    class Faulty(RecordingEngine):
        def alter_chunk(self, request: Request, chunk: Chunk) -> Chunk:
            if rng.random() < 0.03:
                raise ConnectionError(f"reset by {SECRET}")
            return chunk

        async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
            if rng.random() < 0.4:
                await super().abort(attempt_ids)

    return Faulty


async def eventful(path: Path, seed: int = 0, steps: int = 4, **changes: Any) -> Rollouts:
    """Faults, filter, functions, evaluation and weight updates, closed at the end."""
    lengths = table({(g, i): (g * 7 + i * 13) % 40 + 1 for g in range(400) for i in range(2)})
    engines = [faulty(seed + i)(lengths, f"e{i}", stream_interval_s=2.5, max_running=6) for i in range(2)]
    options: dict[str, Any] = {"samples": 2, "over": 4, "filter": keep, "max_response_len": 50, "reward": reward}
    options |= {"rollout": two_turns, "engines": engines, "prompts": prompts(), "abort_deadline_s": 1.5}
    rollouts = Rollouts(lengths, n=2, record=RunRecord(path), **(options | changes))
    for step in range(steps):
        await rollouts.driver.next_batch()
        await rollouts.driver.update_weights()
        if step == 1:
            with suppress(RolloutError):
                await rollouts.driver.evaluate(prompts()[:2], 1, rollouts.driver.sampling, 0)
    await rollouts.close()
    return rollouts


def record(path: Path, **options: Any) -> Rollouts:
    """A recorded run."""
    kept = []

    async def program() -> None:
        kept.append(await eventful(path, **options))

    virtual(program)
    return kept[0]


# ---------------------------------------------------------------- the same decisions


@pytest.mark.parametrize("seed", [0, 3, 7])
def test_an_eventful_run_is_decided_again_from_its_events(path: Path, seed: int) -> None:
    """Same commands, ledgers, counters and stories, with breaks, fences, filters, tools, an evaluation and updates."""
    rollouts = record(path, seed=seed)
    times: list[float] = []
    run = replay(path, watch=lambda at, event, commands: times.append(at))

    assert run.end == "the run was closed"
    assert run.core.tokens == rollouts.core.tokens
    assert run.core.prompts == rollouts.core.prompts
    assert run.core.counters == rollouts.core.counters
    assert run.core.clock.current == (0, 4)
    assert run.core.story(SampleId(1, 0)).splitlines()[:2] == rollouts.core.story(SampleId(1, 0)).splitlines()[:2]
    assert times == sorted(times)
    assert 0 < times[-1] <= run.seconds
    assert run.core.counters["failed_attempts"] > 0 < run.core.counters["fenced_attempts"]
    assert run.events["AttemptEnded"] > 20 < run.events["CallMade"]


async def over_a_restart(path: Path, at: float, steps: int = 1, before: int = 0, **options: Any) -> RolloutCore:
    """The core of a recorded run that goes on from the state of another one, in the middle of a step; it is decided
    again with the same tokens."""
    old = new(**options)
    for _ in range(before):
        await old.driver.next_batch()
        await old.driver.update_weights()
    async with in_a_step(old, at):
        state = saved(old.driver.state_dict(None))
    again = new(**options | {"engines": None}, record=RunRecord(path))
    await again.driver.load_state_dict(state)
    for _ in range(steps):
        await again.driver.next_batch()
        await again.driver.update_weights()
    await again.close()
    core = replay(path).core
    assert core.tokens == again.core.tokens
    assert core.clock.current == again.core.clock.current == (1, before + steps)
    return core


def calls_of(path: Path) -> list[dict[str, Any]]:
    return [line[2] for line in raw_lines(path) if line[1] == "CallMade"]


@pytest.mark.parametrize("at", [0.0, 9.5, 20.0])
@pytest.mark.parametrize("stops", [(), (11,)])
async def test_a_run_that_goes_on_from_a_state_is_decided_again(path: Path, at: float, stops: Any) -> None:
    """The record has the state without its texts; calls are answered from it, and one may stand at its last token."""

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        done = await llm.generate(max_tokens=9, stop_token_ids=stops)
        await llm.generate([*done.conversation.tolist(), 950], stop_token_ids=stops)

    await over_a_restart(path, at, steps=3, before=1, rollout=rollout, prompts=prompts())
    (state,) = (line[2] for line in raw_lines(path) if line[1] == "State")
    assert not any("data" in group for group in (*state["ready"], *state["waiting"]))
    assert SECRET not in str(raw_lines(path))


async def test_a_partial_at_its_end_in_a_state_is_complete_in_the_replay(path: Path) -> None:
    """Saved between its last token and the end of its attempt: the record says that it ends, not with which token."""

    class Holds(RecordingEngine):
        """Its last chunk comes long before its end."""

        async def generate(self, request: Request) -> Any:
            async for chunk in super().generate(request):
                yield Chunk(chunk.tokens, chunk.logprobs, chunk.version)
                last = chunk
            await asyncio.sleep(50)
            yield Chunk(last.tokens[:0], last.logprobs[:0], last.version, last.finish)

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        await llm.generate(stop_token_ids=(EOS,))

    lengths = table({}, 7)
    options: dict[str, Any] = {"lengths": lengths, "rollout": rollout, "n": 1, "samples": 1, "over": 1}
    core = await over_a_restart(path, 20, engines=[Holds(lengths)], **options)
    assert core.context.batches == 1
    assert [call["ends"] for call in calls_of(path)] == [True]


async def test_a_state_of_between_two_calls_goes_on_in_the_replay(path: Path) -> None:
    """The first call has ended in EOS, whose number a record does not have; the second quotes it."""

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        done = await llm.generate(stop_token_ids=(EOS,))
        await asyncio.sleep(20)
        done = await llm.generate([*done.conversation.tolist(), 950], stop_token_ids=(EOS,))
        await llm.generate([*done.conversation.tolist(), 950], max_tokens=1)

    await over_a_restart(path, 10.0, rollout=rollout, lengths=table({}, 5))
    assert any("token_ids" in call for call in calls_of(path))


async def test_an_agent_that_outlives_the_process_goes_on_in_the_replay(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first request of the new process has the last answer in it, which has ended in EOS."""
    monkeypatch.setattr(RolloutScheduler, "_gateway_type", MemoryDoors)
    said: dict[SampleId, list[int]] = {}

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        door = door_of(llm)
        if llm.sample_id not in said:
            done = await door.ask(prompt.token_ids, stop_token_ids=(EOS,))
            said[llm.sample_id] = done.conversation.tolist()
            await asyncio.sleep(20)
        await door.ask([*said[llm.sample_id], 950], stop_token_ids=(EOS,))

    core = await over_a_restart(path, 10.0, rollout=rollout, lengths=table({}, 5))
    assert core.tokens.dropped == {}
    assert any(call.get("ends") for call in calls_of(path))


async def test_a_function_that_asks_otherwise_after_a_restart_does_so_in_the_replay(path: Path) -> None:
    """The record has where its conversation differs, not how; its sample begins again in both."""
    begun = 0

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        nonlocal begun
        begun += llm.sample_id == (1, 0)
        other = begun == 2 and llm.sample_id == (1, 0)
        done = await llm.generate(max_tokens=6)
        await llm.generate([*done.conversation.tolist(), 951 if other else 950])

    core = await over_a_restart(path, 20.0, rollout=rollout, lengths=table({}, 30))
    assert core.tokens.dropped[april.DropReason.REPLAY_DIVERGED] > 0
    differing = [ids for call in calls_of(path) if "differs_at" in (ids := call.get("token_ids") or {})]
    assert differing == [{"length": 10, "differs_at": 9}]


async def test_requests_that_go_on_over_updates_do_so_in_the_replay(path: Path) -> None:
    """Also one that had no token when its engine was paused."""
    config = april.Config(
        rollout_batch_size=1, n_samples_per_prompt=2, max_response_len=40, generation="continuous",
        on_weight_update="keep", max_staleness=2,
    )  # fmt: skip
    engine = FakeEngine("e", lengths=lambda request: 5 + 10 * (request.sample_key[0] % 3), chunk_tokens=4)
    async with rollouts(config, engines=[engine], prompts=prompts(), reward=lambda p, r: 1.0, record=path) as run:
        for _ in range(4):
            await run.next_batch()
            await run.weight_update()
    assert any("silent" in event for _, what, event, *_ in raw_lines(path) if what == "EngineCallEnded")
    assert replay(path).end == "the run was closed"


async def test_a_run_with_stop_strings_is_decided_again(path: Path) -> None:
    """Requests with stop strings are streamed; a record says that there were some, and not which."""

    async def stops(prompt: Prompt, llm: LLM) -> None:
        await llm.generate(stop=[SECRET])

    config = april.Config(rollout_batch_size=1, n_samples_per_prompt=2, max_response_len=40)
    async with rollouts(
        config, engines=[FakeEngine("e", lengths=9)], prompts=prompts(), reward=lambda p, r: 1.0, record=path,
        rollout=stops, tokenizer=types.SimpleNamespace(decode=lambda ids, **options: "x" * len(ids)),
    ) as run:  # fmt: skip
        await run.next_batch()
    assert SECRET not in str(raw_lines(path))
    assert replay(path).end == "the run was closed"


async def test_two_bugs_of_a_function_are_two_in_the_replay(path: Path) -> None:
    """Failures of one kind are a bug after a few samples; a record has a hash of the kind, and not its text."""

    def faulty_reward(prompt: Prompt, response: Any) -> float:
        if prompt.data["odd"]:
            return 1 / 0
        return float(prompt.data["missing"])

    config = april.Config(rollout_batch_size=4, n_samples_per_prompt=2, max_response_len=40)
    engine = FakeEngine("e", lengths=lambda request: 5 + 3 * request.sample_key[0], chunk_tokens=4)
    given = [{"token_ids": [1, i + 1], "odd": i % 2} for i in range(30)]
    async with rollouts(config, engines=[engine], prompts=given, reward=faulty_reward, record=path) as run:
        with pytest.raises(RolloutError, match="KeyError"):
            await run.next_batch()
    assert len({event["kind"] for _, what, event, *_ in raw_lines(path) if what == "SampleFailed"}) == 2
    assert "test_record.py" not in str(raw_lines(path))
    assert replay(path).end == "the run was closed"


async def test_what_breaks_the_core_is_in_the_record(path: Path) -> None:
    """The event that cannot be is the last line, and breaks the replay in the same way."""
    rollouts = Rollouts(table({}, 5), n=1, record=RunRecord(path))
    await rollouts.driver.next_batch()
    rollouts.driver.post(ev.BatchCommitted(7))
    await rollouts.driver.close()
    run = replay(path)
    assert run.end.startswith("the run broke in line")
    assert "batch 7 was committed twice, or never delivered" in run.end
    with pytest.raises(InvariantError):
        run.core.handle(ev.BatchCommitted(7))


# ---------------------------------------------------------------- files that are not what was written


def test_a_torn_last_line_is_no_error(path: Path) -> None:
    """A process that is killed while it writes leaves half a line; all before it counts."""
    record(path)
    data = path.read_bytes()
    for cut in (1, 40, len(data) // 2, len(data) - data.index(b"\n") - 1):
        path.write_bytes(data[:-cut])
        assert replay(path).end.startswith("in the middle: ")


def test_a_change_is_found_in_its_line(path: Path) -> None:
    """One that was made to the text, one to a decision with checks that fit, and a line that cannot be."""
    record(path)
    data, lines = path.read_bytes(), raw_lines(path)
    number = next(i for i, line in enumerate(lines, 1) if line[1] == "CallMade")
    text = data.splitlines(keepends=True)
    path.write_bytes(b"".join([*text[: number - 1], text[number - 1].replace(b"]", b" ]", 1), *text[number:]]))
    with pytest.raises(RecordError, match=f"line {number} of .* is damaged, or was changed"):
        replay(path)
    path.write_bytes(b"".join([*text[: number - 1], *text[number:]]))
    with pytest.raises(RecordError, match=f"line {number} of .* is damaged, or was changed"):
        replay(path)
    at = next(i for i, line in enumerate(lines, 1) if line[1] == "StepRequested")
    with pytest.raises(RecordError, match=rf"line {at} of .*StepRequested, at .* differently .*{april.__version__}"):
        replay(written(path, [*lines[: at - 1], [*lines[at - 1][:3], "0" * 16], *lines[at:]]))
    lines[number - 1][2]["sampling"]["max_tokens"] -= 1
    sentence = rf"line {number} of .*\(CallMade, at 0 s\): the core decides differently than"
    with pytest.raises(RecordError, match=sentence):
        replay(written(path, lines))
    lines[number - 1][0] = "soon"
    with pytest.raises(RecordError, match=f"line {number} of .* is damaged, or was changed"):
        replay(written(path, lines))
    lines[number - 1][:2] = 0.0, "AttemptForgotten"
    with pytest.raises(RecordError, match=f"line {number} of .* is not valid: KeyError"):
        replay(written(path, lines))


def test_a_record_without_its_settings_is_refused(path: Path) -> None:
    """With the first that is missing; so is an empty file. ``test_report.py`` has the rest."""
    record(path, steps=1)
    lines = raw_lines(path)
    lines[0][2] |= {"settings": {}}
    with pytest.raises(RecordError, match=r"line 1 of .*: Object missing required field `rollout_batch_size`"):
        replay(written(path, lines))
    path.write_bytes(b"")
    with pytest.raises(RecordError, match="is not a record of april"):
        replay(path)


# ---------------------------------------------------------------- the file


def test_nothing_that_is_secret_is_in_the_file(tmp_path: Path, path: Path) -> None:
    """Neither prompts nor tokens nor what errors quote; readable by its owner only; an older record is kept."""
    path.write_text("an older one")
    rollouts = record(path)
    data = path.read_text()
    assert SECRET not in data
    assert "verdict" not in data
    assert data.count('"ValueError"') == rollouts.core.counters["failed_samples"] > 0
    assert '"ConnectionError"' in data
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "run.jsonl.1").read_text() == "an older one"
    assert "eos_token_ids" not in data
    assert not {part for line in raw_lines(path) for part in line[2]} & {"tokens", "logprobs", "data"}


async def test_messages_of_errors_are_recorded_where_that_is_wanted(path: Path) -> None:
    """They may quote prompts, so it is said explicitly; decisions do not depend on it."""
    rollouts = Rollouts(table({}, 5), n=1, record=RunRecord(path, messages=True))
    await rollouts.driver.next_batch()
    rollouts.driver.post(ev.TokensUnused(0, april.DropReason.LATE))
    rollouts.driver.post(ev.AttemptFailed(attempt_id="unknown", error=f"what {SECRET} said"))
    await rollouts.close()
    assert SECRET in str(raw_lines(path))
    assert replay(path).events["AttemptFailed"] == 1


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("limit", "it has reached its limit of 0 MiB"),
        ("full", "No space left on device"),
        ("slow", "the disk does not keep up"),
    ],
)
def test_a_record_that_cannot_go_on_ends_and_the_run_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str, why: str
) -> None:
    """At its limit, on a disk that is full or slow: it says so once, and what was written before can be replayed. At
    the limit the file says so too, and is no larger."""
    real, limit = os.write, 20_000

    def write(file: int, data: bytes) -> int:
        if os.fstat(file).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data[:5000])

    if how == "limit":
        monkeypatch.setattr("april.record.recorder.RecordFile", lambda path, _: RecordFile(path, limit))
    elif how == "full":
        monkeypatch.setattr(record_file.os, "write", write)
    else:
        monkeypatch.setattr(record_file, "MAX_WAITING_BYTES", 5000)
        monkeypatch.setattr(record_file, "WRITE_EVERY_S", 60.0)
    with caplog.at_level(logging.WARNING, "april"):
        rollouts = record(path, steps=6)
    assert rollouts.core.context.batches == 6
    assert [r.message for r in caplog.records if r.message.startswith("the record")] == [
        f"the record {path} ends here, but the run continues: {why}"
    ]
    run = replay(path)
    assert sum(run.events.values()) > 10
    if how == "limit":
        assert limit - 1000 < path.stat().st_size <= limit
        assert run.end == f"the run continued, but its record stopped: {why}"


@pytest.mark.parametrize(("number", "error"), [(1j, "TypeError"), (float("nan"), "ValueError")])
async def test_what_cannot_be_written_down_ends_the_record_and_not_the_run(
    path: Path, caplog: pytest.LogCaptureFixture, number: Any, error: str
) -> None:
    """A number that JSON does not have, out of a user's hands: it would hide all that comes after it."""
    rollouts = Rollouts(table({}, 5), n=1, record=RunRecord(path))
    await rollouts.driver.next_batch()
    rollouts.driver.post(ev.Scored(99, [(0, number)]))
    await rollouts.step()
    await rollouts.close()
    assert f"Scored could not be recorded ({error})" in caplog.text
    assert replay(path).end.endswith(f"Scored could not be recorded ({error})")


def test_a_file_that_cannot_be_made_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """So is a limit that is none. Directories that are missing are made, for their owner only."""
    config = april.Config(rollout_batch_size=1, max_response_len=5)
    (tmp_path / "file").touch()
    for wrong, sentence in [
        (tmp_path / "file" / "run.jsonl", "cannot be written: Not a directory"),
        (tmp_path, f"record: {tmp_path} is a directory; name a file in it, such as run.jsonl"),
        (f"{tmp_path}/runs/", "runs/ is a directory; name a file in it"),
        (7, "record must be the name of a file or an april.RunRecord, got 7"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            april.RolloutScheduler(
                config, prompts=[[5]], reward=None, engines=[RecordingEngine(table({}))], record=wrong  # type: ignore[arg-type]
            )
    with pytest.raises(ConfigError, match="limit_mib must be a whole number of at least 1, got 0"):
        RunRecord("run.jsonl", 0)


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
sys.path.insert(0, "tests")
from april.record import file
file.WRITE_EVERY_S = 0.001
from test_record import eventful, prompts
from virtual_rollouts import virtual
async def program():
    path = Path(sys.argv[1])
    await eventful(path, steps=2)
    again = asyncio.create_task(eventful(path, steps=4000, prompts=prompts() * 25))
    await asyncio.sleep(1)
    while path.stat().st_size < 60_000:
        await asyncio.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
virtual(program)
"""


def test_a_process_that_is_killed_leaves_a_record_up_to_there(tmp_path: Path, path: Path) -> None:
    """And the record of the process before it."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    run = replay(path)
    assert run.end.startswith("in the middle: ")
    assert run.core.context.batches > 2
    assert replay(tmp_path / "run.jsonl.1").end == "the run was closed"


# ---------------------------------------------------------------- events of every kind


def example(kind: Any, name: str = "") -> Any:
    """A value of this type, with text that must not get into a record."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is str:
        return "e0" if name in NAME_FIELDS else f"ValueError: {SECRET}"
    if kind in (int, float, bool):
        return {int: 7, float: 0.5, bool: True}[kind]
    if origin in (Union, types.UnionType):
        return example(inner[0], name)
    if origin is np.ndarray:
        return np.array([4, 5, 6], np.int32)
    if origin is tuple:
        return tuple(example(part, name) for part in inner if part is not Ellipsis)
    if origin is not None and issubclass(origin, Mapping):
        return {example(inner[0], name): example(inner[1], name)}
    if origin is not None:
        return [example(inner[0], name)]
    if issubclass(kind, Enum):
        return next(iter(kind))
    if issubclass(kind, tuple):
        return kind(*(example(part, field) for field, part in get_type_hints(kind).items()))
    hints = get_type_hints(kind)
    return kind(**{name: example(hints[name], name) for name in names_of(kind) if name not in ("data", "note")})


def names_of(kind: type[Any]) -> set[str]:
    """The fields of a message or a dataclass."""
    return set(kind.__struct_fields__) if issubclass(kind, msgspec.Struct) else {f.name for f in fields(kind)}


@pytest.mark.parametrize("kind", ev.Event.__subclasses__(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("text", [exception_name, lambda text: text])
def test_every_event_goes_into_a_record_and_back(kind: type[Any], text: Callable[[str], str]) -> None:
    """All its numbers, states and names, no text and no token; a new kind of event needs nothing for that."""
    event = example(kind)
    parts = json.loads(json.dumps(to_plain(event, text)))
    again = from_plain(parts, kind)
    assert type(again) is kind
    assert to_plain(again, text) == parts
    assert set(parts) <= names_of(kind)
    assert json.dumps(parts).count('"e0"') == repr(event).count("'e0'")  # names are kept
    if text is exception_name:
        assert SECRET not in json.dumps(parts)


def test_what_a_message_of_an_error_leaves_behind() -> None:
    """The name of the exception, if it has one."""
    assert exception_name("engine http://10.0.0.1:8000: TimeoutError: no answer") == "TimeoutError"
    assert exception_name("ValueError: a secret") == "ValueError"
    assert exception_name("the reward is nan") == exception_name(f"{SECRET}Error") == "(left out)"
    assert exception_name("") == ""


# ---------------------------------------------------------------- numbers

NUMBERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 1}, {}), ({"temperature": np.float32(0.7), "max_tokens": np.int64(9)}, {}), ({"top_p": 1}, {}),
    ({"stop_token_ids": np.array([7])}, {}),
    *(({}, {"temperature": temperature, "top_p": 1}) for temperature in (0, 1, np.float32(0.5))),
]  # fmt: skip
"""Arguments of ``llm.generate`` and of ``evaluate``."""



@pytest.mark.parametrize(("call", "evaluation"), NUMBERS, ids=str)
def test_numbers_are_replayed(call: dict[str, Any], evaluation: dict[str, Any], tmp_path: Path) -> None:
    """An int for a float, as in ``llm.generate(temperature=1)``: the replay decides as the run did."""
    config = april.Config(
        rollout_batch_size=2, n_samples_per_prompt=4, max_response_len=60,
        engine={"kind": "simulated", "median_len": 20},
    )  # fmt: skip

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        await llm.generate(**call)

    with april.RolloutScheduler(
        config, prompts=[[1, 2 + i] for i in range(20)], reward=lambda prompt, response: 1, rollout=rollout,
        record=str(tmp_path / "record.jsonl"), progress=False,
    ) as rollouts:  # fmt: skip
        rollouts.next_batch()
        rollouts.weight_update()
        rollouts.evaluate([[1, 5], [1, 6]], **evaluation)
        rollouts.next_batch()
    replay(tmp_path / "record.jsonl")


# ---------------------------------------------------------------- the command


def test_the_command_prints_the_run_and_a_sample(path: Path) -> None:
    """Steps, versions, ledgers, digest; with --story what happened to one sample, which must be one."""
    rollouts = record(path)
    code, said = command("replay", path, "--story", "g1.s0")
    assert code == 0
    for part in ("4 requested, 4 batches delivered", "0.4", f"observed {rollouts.core.tokens.observed}", "digest"):
        assert part in said
    assert "story of g1.s0: event " in said
    assert "rollout function started" in said
    assert "the run was closed" in said
    code, said = command("replay", path, "--story", "three")
    assert code == 2
    assert "no sample is named 'three'; a name looks like g3.s1: group 3, sample 1" in said


# ----------------------------------------------------------------
# Files of records over restarts: what was recorded is kept, whoever records under the same name.


@on_virtual_time
async def test_starts_that_fail_remove_no_record(tmp_path: Path, path: Path) -> None:
    """However many there are; each run that has ended a response is kept, the oldest first, and nothing else is."""

    async def start(steps: int) -> None:
        run = Rollouts(table({}, 5), n=1, record=RunRecord(path))
        for _ in range(steps):
            await run.driver.next_batch()
            await run.driver.update_weights()
        await run.close()

    for steps in (2, 0, 0, 3, 0, 0, 0):
        await start(steps)
    assert replay(tmp_path / "run.jsonl.1").core.context.batches == 2
    assert replay(tmp_path / "run.jsonl.2").core.context.batches == 3
    assert sorted(os.listdir(tmp_path)) == ["run.jsonl", "run.jsonl.1", "run.jsonl.2"]
    _, said = command("report", path, "--out", tmp_path / "page.html")
    assert "nothing to show; the previous record is" in said
    assert said.split()[-1].endswith("run.jsonl.2")


def begun(path: Path) -> RecordFile:
    """A record with its first line."""
    file = RecordFile(path, 1 << 20)
    file.add(b'[0.0,"Record",{}')
    return file


HELD: dict[str, Callable[[bytes], bytes]] = {
    "an evaluation alone": lambda start: start + b'[1.0,"AttemptEnded",{},"00"]\n',
    "a function without requests": lambda start: start + b'[1.0,"SampleReturned",{},"00"]\n',
    "a batch of a state": lambda start: start + b'[1.0,"Batch",{},"00"]\n',
    "cut in its last line": lambda start: start + b'[1.0,"AttemptEnded",{"att',
    "of somebody else": lambda start: b"notes of mine\n",
    "of another april": lambda start: start.replace(b"{}", b'{"format":1}') + b'[1.0,"AttemptEnded",{}]\n',
}
"""Files that are to be put aside, made of the first line of a record."""


@pytest.mark.parametrize("name", HELD)
def test_a_file_with_anything_in_it_is_put_aside(tmp_path: Path, path: Path, name: str) -> None:
    """Byte by byte, beside what was put aside before; a number that is taken by something else is left alone."""
    begun(path).close()
    content = HELD[name](path.read_bytes())
    path.write_bytes(content)
    (tmp_path / "run.jsonl.1").write_text("mine")
    (tmp_path / "run.jsonl.2").mkdir()
    RecordFile(path, 1 << 20).close()
    assert (tmp_path / "run.jsonl.1").read_text() == "mine"
    assert (tmp_path / "run.jsonl.3").read_bytes() == content
    assert path.read_bytes() == b""


def test_two_that_write_the_same_path_lose_nothing(tmp_path: Path, path: Path) -> None:
    """The first has ended no response yet, and goes on in the file that was put aside; nothing of either is gone."""
    files = [RecordFile(path, 1 << 20) for _ in range(3)]
    for number, file in enumerate(files):
        file.add(b'[0.0,"Record",{"n":%d}' % number)
        file.close()
    names = ("run.jsonl.1", "run.jsonl.2", "run.jsonl")
    assert [json.loads((tmp_path / name).read_text())[2]["n"] for name in names] == [0, 1, 2]


def test_a_record_that_cannot_be_put_aside_is_as_it_was(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that is read-only, or a disk that is full: refused before anything starts, by name."""
    path.write_text("notes")
    real = os.open

    def refuses(name: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(name, flags, mode)

    with monkeypatch.context() as context:
        context.setattr(os, "open", refuses)
        with pytest.raises(ConfigError, match=r"run.jsonl cannot be written: Read-only file system"):
            RecordFile(path, 1 << 20)
    with monkeypatch.context() as context:
        context.setattr(Path, "replace", lambda *_: refuses("", os.O_CREAT))
        with pytest.raises(ConfigError, match=r"run.jsonl cannot be written: Read-only file system"):
            RecordFile(path, 1 << 20)
    assert os.listdir(tmp_path) == ["run.jsonl"]
    assert path.read_text() == "notes"


@pytest.mark.parametrize("arguments", [["report", "RECORD"], ["profile", "http://127.0.0.1:9", "--kind", "vllm"]])
def test_no_command_writes_over_a_record(path: Path, arguments: list[str]) -> None:
    """Given as the file to write, it is refused by name."""
    begun(path).close()
    before = path.read_bytes()
    code, said = command(*(path if part == "RECORD" else part for part in arguments), "--out", path)
    assert (code, "is the record of a run" in said) == (2, True)
    assert path.read_bytes() == before
