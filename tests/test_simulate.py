"""What ``april simulate`` computes, prints, writes and refuses: the limit, what binds, mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from records import command

from april.core.types import OnStale
from april.simulate import workload
from april.simulate.report_tables import verdict
from april.simulate.run import measure, simulate
from april.simulate.workload import BOUNDS, Schedule, Workload

SMALL = Workload(
    engines=2, groups=4, samples=4, max_response_len=900, median_len=60.0, sigma_between=0.5, sigma_within=0.7,
    prompt_len=20, steps=18, ramp=5, seed=3,
)  # fmt: skip


@pytest.fixture(autouse=True)
def few_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller sample of the distribution, to be quick."""
    monkeypatch.setattr(workload, "LENGTH_SAMPLES", 8000)


def silent(what: str, total: int) -> Callable[..., None]:
    """Progress for nobody."""
    return lambda done: None


def test_refill_comes_close_to_the_limit_on_the_reference_workload() -> None:
    """At least 93 % of the limit with as many samples in flight, and nothing beyond max_staleness."""
    w = Workload(steps=11, ramp=5)

    m = measure(w, w.modes["refill"])

    assert 0.93 <= m["fraction_of_limit"] <= 1.0
    assert m["staleness_max"] <= 5
    assert m["dropped_tokens"] == m["masked_tokens"] == 0


@pytest.mark.parametrize("on_stale", [OnStale.FINISH, OnStale.RESTART, OnStale.DROP])
@pytest.mark.parametrize("mode", ["refill", "continuous 1"])
def test_kept_tokens_are_what_the_engines_generated_less_what_was_dropped(mode: str, on_stale: OnStale) -> None:
    """Counted twice: by the engines and the drop ledger, and from the responses delivered and held."""
    w = replace(SMALL if mode == "refill" else replace(LOOP, train_time="1x"), max_staleness=1, on_stale=on_stale)

    m = measure(w, w.modes[mode])

    assert m["kept_tokens"] == m["generated_tokens"] - m["dropped_tokens"]
    assert (m["dropped_tokens"] > 0) is (on_stale is OnStale.DROP)


def test_report_of_all_modes() -> None:
    """Speeds are over sync, refill is closest to its limit, and each step of each mode is one of progress."""
    seen: list[tuple[str, int]] = []
    modes = simulate(SMALL, begin=lambda what, total: lambda done: seen.append((what, done)))["modes"]

    assert modes["sync"]["speed_up"] == 1.0
    assert modes["april"]["speed_up"] > 1.0
    assert modes["sync"]["fraction_of_limit"] < modes["refill"]["fraction_of_limit"] < 1.0
    assert seen == [(name, step + 1) for name in modes for step in range(SMALL.steps)]


@pytest.mark.parametrize(
    ("max_staleness", "on_stale", "limits"),
    [(1, OnStale.FINISH, True), (1, OnStale.DROP, True), (1, OnStale.MASK, True), (50, OnStale.FINISH, False)],
)
def test_what_binds_is_said(max_staleness: int, on_stale: OnStale, limits: bool) -> None:
    """Empty slots under a tight staleness bound are in the sentence on the bottleneck; dropped tokens have a note."""
    report = simulate(replace(SMALL, max_staleness=max_staleness, on_stale=on_stale, steps=14), begin=silent)

    (said,) = [line for line in verdict(report) if line.startswith("refill: ")]
    assert ("max_staleness" in said) is limits
    dropped = "of the generated tokens were dropped because they were too old (on_stale=drop)"
    assert any(dropped in note for note in report["notes"]) is (on_stale is OnStale.DROP)


# ---------------------------------------------------------------- the command

WITHOUT_LENGTHS = [
    "simulate", "--engines", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--prompt-len", "20",
    "--max-response-len", "900", "--steps", "8", "--ramp", "2",
]  # fmt: skip
COMMAND = [*WITHOUT_LENGTHS, "--median-len", "60"]


def whole(tmp_path: Path, *arguments: str, says: tuple[str, ...]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """What a call with these words prints, the report that it writes, and its modes."""
    out = tmp_path / "plan"
    code, text = command(*COMMAND, *arguments, "--out", out)
    assert code == 0
    for words in says:
        assert words in text
    report = json.loads((out / "simulate.json").read_text("utf-8"))
    return text, report, report["modes"]


def test_group_quorum(tmp_path: Path) -> None:
    """april and refill beside themselves with a quorum, in table and sentence."""
    says = ("scheduled five ways", "sync april refill april q=0.75 refill q=0.75")
    text, _, modes = whole(tmp_path, "--group-quorum", "0.75", says=says)
    assert [m["group_quorum"] for m in modes.values()] == [1.0, 1.0, 1.0, 0.75, 0.75]
    assert len({m["digest"] for m in modes.values()}) == 5  # the core was told
    share = [f"{modes[name]['off_policy_share']:.0%}" for name in ("april", "april q=0.75")]
    assert f"takes april from {modes['april']['speed_up']:.2f}x" in text
    assert f"from {share[0]} to {share[1]} off-policy" in text


def test_tail_batching_and_speculative_decoding(tmp_path: Path) -> None:
    """Tail batching is a mode at staleness 0; what speculative decoding brings is said of every mode."""
    says = ("scheduled four ways", "sync april refill tail", "speculative decoding brings: sync ", "in a later round")
    _, _, modes = whole(tmp_path, "--tail-batching", "5", "--speculative", "2:2,16:1", says=says)
    tail = modes["tail"]
    assert (tail["staleness_max"], tail["off_policy_share"], tail["held_tokens_mean"]) == (0, 0.0, 0.0)
    assert tail["dropped_tokens"] > 0


@pytest.mark.parametrize("quorum", [1.0, 0.75])
def test_the_whole_loop(quorum: float, tmp_path: Path) -> None:
    """With a train time one table of the loop, and a sentence that says what to take.

    With a quorum the continuous modes are run with it.
    """
    says = ("Generation and training, separate", "continuous 8", "trainer slots", "the slower of the two")
    says += ("a group quorum of 0.75 takes refill from",) if quorum < 1 else ()
    text, report, modes = whole(tmp_path, "--train-time", "1x", "--group-quorum", str(quorum), says=says)
    assert report["loop"]["train_time_in_batch_times"] == 1.0
    assert f"{modes['continuous 4']['trainer_idle_share']:.1%}" in text
    assert modes["refill"]["group_quorum"] == 1.0
    assert modes["continuous 4"]["group_quorum"] == quorum
    if quorum < 1:
        assert modes["refill q=0.75"]["group_quorum"] == quorum


def test_own_lengths(tmp_path: Path) -> None:
    """A JSONL replaces the distribution."""
    lengths = tmp_path / "mine.jsonl"
    lengths.write_text('{"lengths": [10, 400, 20, 30]}\n55\n', "utf-8")
    code, said = command(*WITHOUT_LENGTHS, "--lengths", lengths, "--out", tmp_path)

    assert code == 0, said
    report = json.loads((tmp_path / "simulate.json").read_text("utf-8"))
    assert report["lengths"]["longest"] == 400
    assert report["workload"]["lengths_file"] == str(lengths)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "gpt-9"], "unknown model 'gpt-9'; choose one of qwen3-4b, qwen3-8b, r1-distill-1.5b"),
        (["--gpu", "abacus"], "unknown GPU 'abacus'; choose one of"),
        (["--over-sampling-batch-size", "0"], "'--over-sampling-batch-size'"),
        (["--n-samples-per-prompt", "0"], "'--n-samples-per-prompt'"),
        (["--over-sampling-batch-size", "400"], "over_sampling_batch_size=400 is too large: with max_staleness=5"),
        (["--over-sampling-batch-size", "9999999", "--on-stale", "drop"], "39,999,996 samples in flight are more than"),
        (["--group-quorum", "0.5"], "group_quorum=0.5 delivers groups of n_samples_per_prompt=4 from 2 finished"),
        (["--group-quorum", "1.5"], "group_quorum"),
        (["--max-staleness", "-1"], "'--max-staleness'"),
        (["--on-stale", "pray"], "'restart', 'mask'"),
        (["--train-time", "soon"], "train_time='soon' is no time: give seconds (40), or batch times"),
        (["--train-time", "9" * 400], "is more than the 315,360,000 s of ten years"),
        (["--train-time=-1"], "train_time='-1' is no time"),
        (["--train-time", "1", "--placement", "colocated", "--fetch-ahead", "1"], "engines stand still meanwhile"),
        (["--fetch-ahead", "1"], "have no meaning where training takes no time"),
        (["--placement", "separate"], "have no meaning where training takes no time; give train_time"),
        (["--train-time", "1", "--placement", "elsewhere"], "'colocated', 'separate'"),
        (["--train-time", "1", "--fetch-ahead", "-1"], "'--fetch-ahead'"),
        (["--speculative", "fast"], "speculative='fast' is no list of SEQUENCES:FACTOR points"),
        (["--tail-batching", "4"], "tail_batching=4 is N', which must be more than groups=4"),
        (["--ramp", "8"], "ramp=8 leaves nothing to measure of steps=8; give more steps"),
        (["--max-response-len", "9000000"], "does not fit into the"),
        (["--engines", "17"], "16 samples in flight leave some of 17 engines empty"),
        (["--sigma-within", "9"], "'--sigma-within'"),
        (["--median-len", "inf"], "median_len=inf must be a finite number"),
        (["--lengths", "LENGTHS"], "median_len, sigma_between and sigma_within have no meaning"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_in_one_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    """Exit code 2, no traceback, and nothing is run or written."""
    out = tmp_path / "plan"
    code, text = command(*COMMAND, "--out", out, *arguments)

    assert code == 2
    assert sentence in text
    assert "Traceback" not in text
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"12\n{\n", "line 2: neither JSON of lengths nor the first line of a record"),
        (b"12\n\n0\n", "line 3: expected an integer >= 1"),
        (b"ten\n", "line 1: neither JSON of lengths nor the first line of a record"),
        (b"1.5\n", "line 1: expected an integer >= 1"),
        (b"5\ntrue\n", "line 2: expected an integer >= 1"),
        (b'{"lengths": [3, "4"]}\n', "line 1: expected an integer >= 1"),
        (b'5\n{"lengths": [1, -2]}\n', "line 2: expected an integer >= 1"),
        (b'5\n{"lengths": []}\n', "line 2"),
        (b'5\n{"length": [1]}\n', "line 2"),
        (b"[" * 100_000 + b"\n", "line 1: neither JSON of lengths nor the first line of a record"),
        (b"3\n" + b"1" * 5000 + b"\n", "line 2: neither JSON of lengths nor the first line of a record"),
        (b"\n", "the trace is empty"),
        (b"\xff\xfe", "is no UTF-8 text"),
        (None, "cannot read"),
    ],
)
def test_bad_length_files_are_refused_with_the_line(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    """The file and the line are named, exit code 2."""
    path = tmp_path / "lengths.jsonl"
    if content is not None:
        path.write_bytes(content)
    code, text = command(*WITHOUT_LENGTHS, "--lengths", path, "--out", tmp_path / "plan")

    assert code == 2
    assert sentence in text
    assert "lengths.jsonl" in text
    assert not (tmp_path / "plan").exists()


# ----------------------------------------------------------------
# With a train time: generation and training as one loop, and what continuous generation gains there.

LOOP = replace(SMALL, steps=40, ramp=10, train_time="0.5x")
ANOTHER_MODEL = {
    "0.25x": {1: 0.55, 2: 0.71, 4: 0.89},
    "1x": {1: 0.47, 2: 0.62, 4: 0.84},
    "4x": {1: 1.0, 2: 1.0, 4: 1.0},
}
"""Share of the smaller limit by train time and max_staleness, from a model that shares nothing with april's."""


def continuous(w: Workload, bound: int) -> Schedule:
    """Continuous generation with that max_staleness."""
    return w.modes[f"continuous {bound}"]


@pytest.mark.parametrize("train_time", ["0.25x", "1x", "4x"])
@pytest.mark.parametrize("bound", BOUNDS)
def test_continuous_generation_loses_nothing_and_keeps_the_bound(train_time: str, bound: int) -> None:
    """Kept tokens are counted twice: by the engines, and from the responses delivered, held and running."""
    w = replace(LOOP, train_time=train_time)

    m = measure(w, continuous(w, bound))

    assert m["kept_tokens"] == m["generated_tokens"]
    assert m["dropped_tokens"] == m["masked_tokens"] == 0
    assert m["staleness_max"] <= bound
    assert m["fraction_of_limit"] <= 1.0 + 1e-9


@pytest.mark.parametrize(("train_time", "shares"), ANOTHER_MODEL.items())
def test_continuous_generation_on_the_reference_workload(train_time: str, shares: dict[int, float]) -> None:
    """At least 0.97 of what another model gives for 32 x 8 on four engines, 256 in flight; the bound holds."""
    w = Workload(steps=24, ramp=8, train_time=train_time)

    for bound, share in shares.items():
        m = measure(w, continuous(w, bound))
        assert m["fraction_of_limit"] >= 0.97 * share, bound
        assert m["staleness_max"] <= bound
        assert m["dropped_tokens"] == m["masked_tokens"] == 0


def test_an_output_that_lacks_a_character_gets_another_one() -> None:
    """A terminal of another encoding shows the help, which has frames."""
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "40"}
    done = subprocess.run(
        [sys.executable, "-m", "april", "simulate", "--help"], env=environment, capture_output=True, check=True
    )  # fmt: skip
    assert b"--train-time" in done.stdout
