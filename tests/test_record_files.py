"""Files of records over restarts: what was recorded is kept, whoever records under the same name."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from virtual_rollouts import Rollouts, on_virtual_time, table

from april.cli import app
from april.errors import ConfigError
from april.record.file import RecordFile, RunRecord
from april.record.replay import replay


@on_virtual_time
async def test_starts_that_fail_remove_no_record(tmp_path: Path) -> None:
    """However many there are; each run that has ended a response is kept, the oldest first, and nothing else is."""
    path = tmp_path / "run.jsonl"

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
    done = CliRunner().invoke(app, ["report", str(path), "--out", str(tmp_path / "page.html")])
    assert "nothing to show; the record before it is" in " ".join(done.output.split())
    assert done.output.split()[-1].endswith("run.jsonl.2")


def held_by(path: Path, name: str) -> bytes:
    """What a file is when it is to be put aside."""
    head = RecordFile(path, 1 << 20)
    head.add(b'[0.0,"Record",{}')
    head.close()
    start = path.read_bytes()
    return {
        "an evaluation alone": start + b'[1.0,"AttemptEnded",{},"00"]\n',
        "a function without requests": start + b'[1.0,"SampleReturned",{},"00"]\n',
        "a batch of a state": start + b'[1.0,"Batch",{},"00"]\n',
        "cut in its last line": start + b'[1.0,"AttemptEnded",{"att',
        "of somebody else": b"notes of mine\n",
        "of another april": start.replace(b"{}", b'{"format":1}') + b'[1.0,"AttemptEnded",{}]\n',
    }[name]


@pytest.mark.parametrize(
    "name",
    ["an evaluation alone", "a function without requests", "a batch of a state", "cut in its last line",
     "of somebody else", "of another april"],
)  # fmt: skip
def test_a_file_with_anything_in_it_is_put_aside(tmp_path: Path, name: str) -> None:
    """Byte by byte, beside what was put aside before; a number that is taken by something else is left alone."""
    path = tmp_path / "run.jsonl"
    content = held_by(path, name)
    path.write_bytes(content)
    (tmp_path / "run.jsonl.1").write_text("mine")
    (tmp_path / "run.jsonl.2").mkdir()
    RecordFile(path, 1 << 20).close()
    assert (tmp_path / "run.jsonl.1").read_text() == "mine"
    assert (tmp_path / "run.jsonl.3").read_bytes() == content
    assert path.read_bytes() == b""


def test_two_that_write_the_same_path_lose_nothing(tmp_path: Path) -> None:
    """The first has ended no response yet, and goes on in the file that was put aside; nothing of either is gone."""
    path = tmp_path / "run.jsonl"
    files = [RecordFile(path, 1 << 20) for _ in range(3)]
    for number, file in enumerate(files):
        file.add(b'[0.0,"Record",{"n":%d}' % number)
        file.close()
    names = ("run.jsonl.1", "run.jsonl.2", "run.jsonl")
    assert [json.loads((tmp_path / name).read_text())[2]["n"] for name in names] == [0, 1, 2]


def test_a_record_that_cannot_be_put_aside_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that is read-only, or a disk that is full: refused before anything starts, by name."""
    path = tmp_path / "run.jsonl"
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


@pytest.mark.parametrize("command", [["report", "RECORD"], ["profile", "http://127.0.0.1:9", "--kind", "vllm"]])
def test_no_command_writes_over_a_record(tmp_path: Path, command: list[str]) -> None:
    """Given as the file to write, it is refused by name."""
    path = tmp_path / "run.jsonl"
    file = RecordFile(path, 1 << 20)
    file.add(b'[0.0,"Record",{}')
    file.close()
    before = path.read_bytes()
    arguments = [str(path) if part == "RECORD" else part for part in command]
    done = CliRunner().invoke(app, [*arguments, "--out", str(path)])
    assert done.exit_code == 2
    assert "is the record of a run" in " ".join(done.output.replace("│", " ").split())
    assert path.read_bytes() == before
