"""Records that somebody else made: whatever stands in one, each command says a sentence and no terminal obeys it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from records import recorded, rewritten
from typer.testing import CliRunner

from april.cli import app
from april.errors import RecordError
from april.view.run_data import read_run

HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202e[/red]</script>\nmore"


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a short run."""
    path = tmp_path_factory.mktemp("record") / "run.jsonl"
    recorded(path, steps=3)
    return path


GONE = "(left out)"


def put(what: str, *keys: str | int, to: Any) -> Callable[[list[Any]], list[Any]]:
    """In all lines of a kind one part is another, or GONE."""

    def change(line: list[Any]) -> list[Any]:
        if line[1] == what:
            parts = line[2]
            for key in keys[:-1]:
                parts = parts[key] if not isinstance(parts, dict) or key in parts else {}
            if to is GONE:
                del parts[keys[-1]]
            elif isinstance(parts, list) or keys[-1] in parts:
                parts[keys[-1]] = to
        return line

    return change


WRONG = [
    ("AttemptEnded", "ran", 3, "x"), ("AttemptEnded", "ran", 4, None), ("AttemptEnded", "ran", 5, 1e308),
    ("AttemptEnded", "ran", 7, -3), ("AttemptEnded", "ran", 7, 10**30), ("SampleReturned", "sample", []),
    ("SampleReturned", "sample", 0, 10**30), ("SampleReturned", "generated", "many"), ("Batch", "ages", None),
    ("Batch", "ages", ["x"]), ("Batch", "lengths", {}), ("Batch", "lengths", [1e308]), ("Batch", "metrics", None),
    ("Batch", "metrics", {}), ("Batch", "metrics", "update_s", None), ("Batch", "metrics", "reward_mean", 1e300),
    ("Batch", "id", None), ("Batch", "id", -1), ("Batch", "id", GONE),
]  # fmt: skip
WRONG_FIRST = [
    ("engines", None), ("engines", GONE), ("engines", {}), ("engines", []), ("engines", [1]), ("engines", [None]),
    ("engines", 0, "name", ["e"]), ("engines", 0, "name", None), ("engines", 0, "name", GONE),
    ("engines", [{"name": "e", "max_in_flight": "many"}]), ("settings", None), ("settings", GONE), ("settings", []),
    ("settings", "max_in_flight", "many"), ("settings", "rollout_batch_size", GONE),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_a_part_that_cannot_be_is_named_by_its_line(record: Path, tmp_path: Path, wrong: tuple[Any, ...]) -> None:
    """For the report and for a plan, however well the checks of the lines fit."""
    path = rewritten(record, tmp_path / "wrong.jsonl", put(wrong[0], *wrong[1:-1], to=wrong[-1]))
    with pytest.raises(RecordError, match=r"^line \d+ of .*wrong.jsonl is not valid: ValueError: "):
        read_run(path)
    result = CliRunner().invoke(app, ["plan", str(path), "--out", str(tmp_path / "plan")])
    assert (result.exit_code, "is not valid" in " ".join(result.output.split())) == (1, True)


@pytest.mark.parametrize("command", ["replay", "report", "plan", "watch"])
@pytest.mark.parametrize("wrong", WRONG_FIRST, ids=repr)
def test_a_first_line_that_cannot_be_is_named(
    record: Path, tmp_path: Path, wrong: tuple[Any, ...], command: str
) -> None:
    """A sentence, whoever needs what is wrong in it; who only watches does not."""
    path = rewritten(record, tmp_path / "wrong.jsonl", put("Record", *wrong[:-1], to=wrong[-1]))
    out = {"report": ["--out", str(tmp_path / "page")], "plan": ["--out", str(tmp_path / "plan")], "watch": ["--once"]}
    result = CliRunner().invoke(app, [command, str(path), *out.get(command, [])])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == (0 if command == "watch" else 1)
    assert (f"line 1 of {path}" in " ".join(result.output.split())) is (command != "watch")


@pytest.mark.parametrize("name", ["max_staleness", "max_in_flight", "over_sampling_batch_size"])
def test_a_setting_that_no_picture_can_show_is_refused(record: Path, tmp_path: Path, name: str) -> None:
    """Before anything is drawn."""

    def change(line: list[Any]) -> list[Any]:
        if line[1] == "Record":
            line[2]["settings"][name] = 10**400
        return line

    with pytest.raises(RecordError, match=r"^line 1 of .*wrong.jsonl is not valid: ValueError: "):
        read_run(rewritten(record, tmp_path / "wrong.jsonl", change))


FOREIGN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "another file": (lambda data: b'{"lengths": [1, 2]}\n', "is no record of april's"),
    "a picture": (lambda data: b"\x89PNG\r\n\x1a\n" * 9, "is no record of april's"),
    "deep": (lambda data: b"[" * 100_000 + b"\n", "is no record of april's"),
    "its checksum": (lambda data: b'[0.0,"StepRequested",{},"","00000000"]\n', "is no record of april's"),
    "a changed line": (lambda data: data.replace(b'"step":1', b'"step":7', 1), "or was changed"),
    "damage": (lambda data: data.replace(b"\n", b"\nx\n", 1), "line 2 of {path} is damaged, or was changed"),
}


@pytest.mark.parametrize("command", ["replay", "report", "watch"])
@pytest.mark.parametrize("what", [*FOREIGN, "a newer april", "a directory", "nothing"])
def test_what_is_no_record(record: Path, tmp_path: Path, what: str, command: str) -> None:
    """A sentence, once, and exit code 1: for the line it is about, and not packed into one about another line."""
    path = tmp_path / "run.jsonl"
    sentence = {"a directory": "cannot be read: Is a directory", "nothing": "cannot be read: No such file or directory"}
    if what in FOREIGN:
        change, sentence[what] = FOREIGN[what]
        path.write_bytes(change(record.read_bytes()))
    elif what == "a newer april":
        sentence[what] = "{path} cannot be read: april 9.0 has written it in format 9, this april reads format 3"
        rewritten(record, path, lambda line: [*line[:2], line[2] | {"format": 9, "april": "9.0"}, line[3]])
    elif what == "a directory":
        path.mkdir()
    elif command == "watch":
        sentence[what] = "is not there yet"
    result = CliRunner().invoke(app, [command, str(path), *(["--once"] if command == "watch" else [])])
    assert result.exit_code == 1, result.output
    said = " ".join(result.output.split())
    assert said.count(sentence[what].format(path=path)) == 1
    assert said.count("is not valid") == 0


@pytest.mark.parametrize("field", ["april", "began", "format"])
@pytest.mark.parametrize("command", ["replay", "report", "plan", "watch"])
def test_text_of_others_moves_no_terminal(record: Path, tmp_path: Path, command: str, field: str) -> None:
    """Escape sequences, what turns the direction, NUL: shown by number, whichever command meets them."""
    path = rewritten(record, tmp_path / "run.jsonl", put("Record", field, to=HOSTILE))
    more = {"report": ["--out", str(tmp_path / "page.html")], "watch": ["--once"]}.get(command, [])
    if command == "plan" and field != "format":
        more = ["--max-response-len", "0"]  # refused, after which nothing is simulated
    output = CliRunner().invoke(app, [command, str(path), *more], env={"NO_COLOR": "1"}).output
    assert not {"\x1b", "\x07", "\u202e"} & set(output)
    if command == "report" and field == "began":
        text = (tmp_path / "page.html").read_text("utf-8")
        assert not {"\x1b", "\x07", "\u202e"} & set(text)
        assert "owned\\x07\\u202e[/red]&lt;/script&gt;" in text


@pytest.mark.parametrize("name", [b"x[/red]y.jsonl", b"\xff\x1b[2J.jsonl"])
def test_any_name_of_a_file_will_do(record: Path, tmp_path: Path, name: bytes) -> None:
    """One that looks like rich's markup, and one that is no UTF-8."""
    path, out = tmp_path / os.fsdecode(name), tmp_path / os.fsdecode(b"\xff.html")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(record.read_bytes())
    result = CliRunner().invoke(app, ["report", str(path), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert out.read_text("utf-8").startswith("<!doctype html>")
    assert "\\udcff.html" in result.output
