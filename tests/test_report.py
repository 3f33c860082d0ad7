"""The report of a run: a page from its record alone, without scripts, requests to anywhere or text that is obeyed."""

from __future__ import annotations

import html
import html.parser
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from records import SMALL, command, recorded, rewritten

from april.core.partial_buffer import IdleCause
from april.engines.simulated.fitted_cost import fit
from april.record.file import lines_of
from april.record.replay import replay
from april.simulate.simulation import Simulation
from april.view.report import page
from april.view.report_figures import _over_steps
from april.view.run_data import EngineHistory, RecordedEngine, distance, limit_distance_of, mean_busy, read_run

SCRIPT = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Simulation]:
    """One record for the tests that only read it."""
    path = tmp_path_factory.mktemp("record") / "run.jsonl"
    return path, recorded(path)


class Seen(html.parser.HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


def test_what_is_read_is_what_happened(run: tuple[Path, Simulation]) -> None:
    """Batches, tokens, lengths and busy places of the record against the simulation's own account."""
    path, simulation = run
    data, steps = read_run(path), simulation.result.steps
    assert data.end == "the run was closed"
    assert [b.metrics["trained_tokens"] for b in data.batches] == [s.trained_tokens for s in steps]
    assert [b.lengths for b in data.batches] == [s.lengths for s in steps]
    assert [b.ages for b in data.batches] == [s.token_ages for s in steps]
    assert [b.time_s for b in data.batches] == pytest.approx([s.end_s for s in steps], abs=1e-5)
    done = (data.ended_s <= steps[-1].end_s + 1e-5) & (data.generated > 0)
    assert data.generated[done].sum() == sum(s.generated_tokens for s in steps)
    edges = np.array([0.0, *(s.end_s for s in steps)])
    busy = mean_busy(data.began_s, data.ended_s, edges) * np.diff(edges)
    assert busy == pytest.approx([s.busy_slot_s for s in steps], rel=1e-3)
    assert set(data.costs) == {"engine0", "engine1"}
    assert replay(path).decisions.digest  # the same record is replayed as ever


def test_the_age_of_a_request_is_that_of_its_sample(run: tuple[Path, Simulation]) -> None:
    """Weight updates since the first token of its response, when it was sent."""
    first: dict[tuple[int, int], float] = {}
    ages, updates_s = [], [line.time_s for line in lines_of(run[0], ["UpdateRequested"])][1:]
    lines = lines_of(run[0], ["AttemptEnded"])
    assert next(lines).kind == "Record"
    for line in lines:
        _, group, index, _, age, began, _, generated = line.fields["ran"]
        if (group, index) in first:
            ages.append(age)
            assert age == sum(first[group, index] < at <= began for at in updates_s)
        elif generated:
            first[group, index] = began
            assert age == 0
    assert {1, 2} <= set(ages)


def test_places_by_hand() -> None:
    """Two for 10 s, five for 10 s, three for 20 s; then one at most, whoever comes; then nobody is there."""
    there = EngineHistory([RecordedEngine("a", 2)], 9)
    there.joined(10.0, [RecordedEngine("b", 3)])
    there.left(20.0, ["a"])
    there.limit_changed(40.0, 1)
    there.joined(50.0, [RecordedEngine("a", 2), RecordedEngine("c")])
    there.left(60.0, ["b", "a", "c"])
    assert there.place_s(0.0, 40.0) == 2 * 10 + 5 * 10 + 3 * 20
    assert there.place_s(5.0, 15.0) == 2 * 5 + 5 * 5
    assert there.place_s(40.0, 99.0) == 20
    assert there.engine_s(0.0, 40.0) == 10 + 2 * 10 + 20
    assert there.engine_s(50.0, 99.0) == 3 * 10
    assert there.place_s(7.0, 7.0) == there.engine_s(30.0, 20.0) == 0.0
    assert max(there.places) == 5
    assert list(there.names) == ["a", "b", "c"]
    more = EngineHistory([RecordedEngine("a"), RecordedEngine("b", 3)], 9)
    assert more.places == [9]
    more.joined(10.0, [RecordedEngine("c"), RecordedEngine("d")])
    assert (more.at(9.0), more.at(21.0)) == ((2, 9), (4, 9))


def test_the_distance_from_the_limit_adds_up(run: tuple[Path, Simulation]) -> None:
    """Its parts are all of the time, and the simulation's own fraction of the limit is met."""
    path, simulation = run
    data = read_run(path)
    found = distance(data, data.batches[0].time_s, data.batches[-1].time_s)
    assert found is not None
    whole = found.at_limit + found.reprefill + sum(found.causes.values()) + found.unexplained
    assert whole == pytest.approx(1.0)
    assert {IdleCause.OVER_SAMPLING, IdleCause.TRAINER} <= found.causes.keys()
    tokens = sum(s.generated_tokens for s in simulation.result.steps[1:])
    lengths = [length for s in simulation.result.steps for length in s.lengths]
    seconds = data.batches[-1].time_s - data.batches[0].time_s
    least = SMALL.limit_s(lengths, data.places) * tokens / sum(lengths)
    assert found.at_limit == pytest.approx(least / seconds, rel=0.06)
    data.costs.clear()
    assert distance(data, 0.0, 1.0) is None


def test_a_limit_is_stated_only_where_the_fit_carries_it(run: tuple[Path, Simulation]) -> None:
    """A fit that misses, places that were never full, engines that became slower: said, and no figure stands alone."""
    sure = read_run(run[0])
    found = limit_distance_of(sure)
    assert found is not None
    assert found.doubt == ""
    text = page([sure])
    assert "<b>" in text
    assert "Settings over the run" not in text  # nothing changed
    missed, empty, slower = (read_run(run[0]) for _ in range(3))
    missed.costs = {name: replace(cost, error=0.2) for name, cost in missed.costs.items()}
    empty.engine_history = EngineHistory([RecordedEngine("engine0"), RecordedEngine("engine1")], 50 * sure.places)
    middle = float(np.median(slower.began_s))
    for times in (slower.began_s, slower.ended_s):
        times[times > middle] = middle + 3.0 * (times[times > middle] - middle)
    for batch in slower.batches:
        batch_s = batch.time_s
        batch.time_s = max(batch_s, middle + 3.0 * (batch_s - middle))
    slower.costs = {name: fit(slower.requests_of(number, 4096)) for number, name in enumerate(slower.engines)}
    for data, words in ((missed, "by 20% on average"), (empty, "of the places were busy"), (slower, "half")):
        text = page([data])
        assert "does not show how far the run was from the limit of its engines: " in text, words
        assert words in text or data is slower
        assert "<b>" not in text
        assert "of the engines&#x27; limit" not in text
        assert "% of the limit" not in text


def test_the_page_is_whole_and_asks_for_nothing(run: tuple[Path, Simulation]) -> None:
    """No script, no address; ids are used once."""
    text = page([read_run(run[0])])
    seen = Seen(text)
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(seen.tags)
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert all(value.startswith("#") for name, value in seen.attributes if name in ("href", "xlink:href", "src"))
    assert "url(http" not in text
    assert "default-src 'none'" in text
    ids = [value for name, value in seen.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for words in ("Busy places", "at the limit", "prefilled again", "over_sampling: N", "Off-policy", "engine1"):
        assert words.lower() in text.lower(), words


def test_text_of_others_is_only_text(run: tuple[Path, Simulation], tmp_path: Path) -> None:
    """An engine, a failure and a sentence that are HTML."""

    def hostile(line: list[Any]) -> list[Any]:
        time_s, what, parts, digest = line
        if "ran" in parts:
            parts["ran"][0] = SCRIPT
        if what == "Batch":
            parts["bottleneck"] = SCRIPT
        if what == "Record":
            parts["began"] = parts["april"] = SCRIPT
        return [time_s, "AttemptFailed" if what == "AttemptEnded" else what, parts | {"kind": SCRIPT}, digest]

    path = rewritten(run[0], tmp_path / "<script>.jsonl", hostile)
    text = page([read_run(path)])
    seen = Seen(text)
    assert not {"script", "img"} & set(seen.tags)
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert "&lt;script&gt;" in text


def test_a_record_that_was_cut_is_shown_to_there(run: tuple[Path, Simulation], tmp_path: Path) -> None:
    """A killed process leaves half a line."""
    data = run[0].read_bytes()
    path = tmp_path / "cut.jsonl"
    path.write_bytes(data[: len(data) * 2 // 3])
    seen = read_run(path)
    assert seen.end.startswith("in the middle")
    assert 0 < len(seen.batches) < len(read_run(run[0]).batches)
    assert "in the middle" in page([seen])
    lines = data.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]))
    code, said = command("report", path, "--out", tmp_path / "no.html")
    assert (code, "nothing to show" in said) == (1, True)
    first = next(i for i, line in enumerate(lines) if b'"Batch"' in line)
    path.write_bytes(b"".join(lines[:first]))
    assert "Busy places" in page([read_run(path)])  # killed before its first batch


def test_the_command(run: tuple[Path, Simulation], tmp_path: Path) -> None:
    """Two runs side by side; a file of mode 0600; a sentence for one that cannot be written."""
    other, out = tmp_path / "other.jsonl", tmp_path / "deep" / "report.html"
    recorded(other, "refill", steps=4)
    assert command("report", run[0], other, "--out", out)[0] == 0
    text = out.read_text()
    assert "2 runs" in text
    assert "other.jsonl" in text
    assert len(text) < 5_000_000
    assert out.stat().st_mode & 0o777 == 0o600
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text("{}\n")
    assert command("report", run[0], "--out", wrong / "report.html")[0] == 2


def test_steps_have_the_numbers_of_their_batches(run: tuple[Path, Simulation], tmp_path: Path) -> None:
    """As everywhere else, also in the record of a run that goes on from a state: there the first is not 0."""

    def later(line: list[Any]) -> list[Any]:
        if line[1] == "Batch":
            line[2]["id"] += 1040
        if line[1] == "Record":
            line[2]["settings"]["auto"] = ["over_sampling_batch_size"]
        return line

    data = read_run(rewritten(run[0], tmp_path / "later.jsonl", later))
    numbers = [1040 + number for number in range(len(data.batches))]
    assert [batch.id for batch in data.batches] == numbers
    steps, _ = _over_steps(data.batches, "engines_busy", 99)
    assert steps.tolist() == numbers
    steps, _ = _over_steps(data.batches, "engines_busy", 2)
    assert steps.mean() == pytest.approx(np.mean(numbers))
    assert "<td>1,040</td><td>N&#x27; = " in page([data])


# ----------------------------------------------------------------
# Records that somebody else made: whatever stands in one, each command says a sentence and no terminal obeys it.


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


FOREIGN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "another file": (lambda data: b'{"lengths": [1, 2]}\n', "is not a record of april"),
    "a picture": (lambda data: b"\x89PNG\r\n\x1a\n" * 9, "is not a record of april"),
    "deep": (lambda data: b"[" * 100_000 + b"\n", "is not a record of april"),
    "its checksum": (lambda data: b'[0.0,"StepRequested",{},"","00000000"]\n', "is not a record of april"),
    "a changed line": (lambda data: data.replace(b'"step":1', b'"step":7', 1), "or was changed"),
    "damage": (lambda data: data.replace(b"\n", b"\nx\n", 1), "line 2 of {path} is damaged, or was changed"),
}


@pytest.mark.parametrize("who", ["replay", "report", "watch"])
@pytest.mark.parametrize("what", [*FOREIGN, "a newer april", "a directory", "nothing"])
def test_what_is_no_record(record: Path, tmp_path: Path, what: str, who: str) -> None:
    """A sentence, once, and exit code 1: for the line it is about, and not packed into one about another line."""
    path = tmp_path / "run.jsonl"
    sentence = {"a directory": "cannot be read: Is a directory", "nothing": "cannot be read: No such file or directory"}
    if what in FOREIGN:
        change, sentence[what] = FOREIGN[what]
        path.write_bytes(change(record.read_bytes()))
    elif what == "a newer april":
        sentence[what] = "{path} cannot be read: april 9.0 has written it in format 9, this april reads format 6"
        rewritten(record, path, lambda line: [*line[:2], line[2] | {"format": 9, "april": "9.0"}, line[3]])
    elif what == "a directory":
        path.mkdir()
    elif who == "watch":
        sentence[what] = "does not exist yet"
    code, said = command(who, path, *(["--once"] if who == "watch" else []))
    assert code == 1
    assert said.count(sentence[what].format(path=path)) == 1
    assert said.count("is not valid") == 0
