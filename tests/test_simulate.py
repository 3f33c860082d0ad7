"""What ``april simulate`` computes, prints, writes and refuses: the limit, the sweep, what binds, mistakes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from april import cli
from april.cli import app
from april.core.types import OnStale
from april.engines.simulated.decode_cost import limit_tokens_per_s
from april.extras import install
from april.simulate import workload
from april.simulate.run import RATIOS, length_statistics, measure, simulate
from april.simulate.workload import Workload

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


def trace(path: Path, *lines: object) -> Path:
    """A JSONL of lengths."""
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n", "utf-8")
    return path


def test_refill_comes_close_to_the_limit_on_the_reference_workload() -> None:
    """At least 93 % of the limit with as many samples in flight, and nothing beyond max_staleness."""
    w = Workload(steps=11, ramp=5)

    m = measure(w, w.modes["refill"]).figures

    assert 0.93 <= m["fraction_of_limit"] <= 1.0
    assert m["staleness_max"] <= 5
    assert m["dropped_tokens"] == m["masked_tokens"] == 0


@pytest.mark.parametrize("on_stale", [OnStale.FINISH, OnStale.RESTART, OnStale.DROP])
def test_kept_tokens_are_what_the_engines_generated_less_what_was_dropped(on_stale: OnStale) -> None:
    """Counted twice: by the engines and the drop ledger, and from the responses delivered and held."""
    w = replace(SMALL, max_staleness=1, on_stale=on_stale)

    m = measure(w, w.modes["refill"]).figures

    assert m["kept_tokens"] == m["generated_tokens"] - m["dropped_tokens"]
    assert (m["dropped_tokens"] > 0) is (on_stale is OnStale.DROP)


def test_what_is_missing_to_the_limit_is_the_second_prefill() -> None:
    """With all slots busy, the fraction of the limit and the time of the second prefills add up to one."""
    w = replace(SMALL, max_staleness=50)

    m = measure(w, w.modes["refill"]).figures

    assert m["bubble"] < 0.005
    assert m["reprefill_time_share"] > 0.01
    assert m["fraction_of_limit"] + m["reprefill_time_share"] == pytest.approx(1.0, abs=0.01)


def test_equal_lengths_leave_sync_at_the_limit(tmp_path: Path) -> None:
    """Where there is no tail there is nothing to gain; the limit is that of the formula, by hand."""
    lengths = trace(tmp_path / "lengths.jsonl", 300)
    w = replace(SMALL, lengths_file=lengths, median_len=None, sigma_between=None, sigma_within=None)

    m = measure(w, w.modes["sync"]).figures

    assert m["fraction_of_limit"] == pytest.approx(1.0, abs=1e-3)
    by_hand = 2 * limit_tokens_per_s(w.cost, [300], 8, 20)
    assert m["limit_tokens_per_s"] == pytest.approx(by_hand)
    assert m["long_run_limit_tokens_per_s"] == pytest.approx(by_hand)
    assert m["bubble"] == pytest.approx(0.0, abs=1e-9)


def test_the_limit_of_a_window_is_that_of_the_distribution_in_the_long_run() -> None:
    """The limit of the tokens kept and that of a large sample of lengths agree: no bias towards short responses."""
    w = replace(SMALL, steps=100, ramp=10)

    m = measure(w, w.modes["april"]).figures

    assert m["limit_tokens_per_s"] == pytest.approx(m["long_run_limit_tokens_per_s"], rel=0.02)


def test_report_of_all_modes_and_the_sweep() -> None:
    """One row per N'/N; the row of 1 is sync, that of 2 is april; shares of token ages add up to one."""
    seen: list[tuple[str, int]] = []
    report, runs = simulate(SMALL, sweep=True, begin=lambda what, total: lambda done: seen.append((what, done)))

    assert [row["ratio"] for row in report["sweep"]] == list(RATIOS)
    modes = report["modes"]
    assert report["sweep"][0] == {"ratio": 1.0} | modes["sync"]
    assert report["sweep"][3] == {"ratio": 2.0} | modes["april"]
    assert modes["sync"]["speed_up"] == 1.0
    assert modes["april"]["speed_up"] > 1.0
    assert modes["sync"]["fraction_of_limit"] < modes["refill"]["fraction_of_limit"] < 1.0
    for m in modes.values():
        ages = m["trained_token_age_shares"]
        assert sum(ages) == pytest.approx(1.0)
        assert 1.0 - ages[0] == pytest.approx(m["off_policy_share"])
    off_policy = [row["off_policy_share"] for row in report["sweep"]]
    assert off_policy == sorted(off_policy)
    assert seen.count(("refill", SMALL.steps)) == 1
    assert set(report["cpu_s"]) == {"sync", "april", "refill", "N'/N = 1.25", "N'/N = 1.5", "N'/N = 3", "total"}
    assert runs["refill"].step_ends[-1] == pytest.approx(modes["refill"]["rollout_s"])


def test_busy_slots_of_the_picture_integrate_to_the_bubble() -> None:
    """What is drawn is what was measured: the area under the busy slots is 1 - bubble."""
    w = replace(SMALL, steps=40)
    run = measure(w, w.modes["april"])
    at, busy = np.array([t for t, _ in run.busy]), np.array([b for _, b in run.busy])

    area = float((np.diff(at) * busy[:-1]).sum()) / (run.figures["in_flight"] * run.figures["rollout_s"])

    assert area == pytest.approx(1.0 - run.figures["bubble"], abs=0.02)


def test_ratios_that_the_staleness_bound_forbids_are_left_out_and_named() -> None:
    """3 N groups cannot all be delivered within one update: the sweep says so and goes on."""
    report, _ = simulate(replace(SMALL, max_staleness=1, steps=8, ramp=2), sweep=True, begin=silent)

    assert [row["ratio"] for row in report["sweep"]] == [1.0, 1.25, 1.5, 2.0]
    assert any(note.startswith("N'/N = 3 is left out: over_sampling_batch_size=12") for note in report["notes"])


@pytest.mark.parametrize(
    ("max_staleness", "on_stale", "words"),
    [
        (1, OnStale.FINISH, ["refill: max_staleness=1 binds: no more than 8 groups"]),
        (1, OnStale.DROP, ["of the generated tokens were dropped because they got too old (on_stale=drop)"]),
        (1, OnStale.MASK, ["refill: max_staleness=1 binds: no more than 8 groups"]),
        (50, OnStale.FINISH, []),
    ],
)
def test_what_binds_is_said(max_staleness: int, on_stale: OnStale, words: list[str]) -> None:
    """Empty slots under a tight staleness bound and dropped tokens have a note; otherwise there is none."""
    w = replace(SMALL, max_staleness=max_staleness, on_stale=on_stale, steps=14)
    report, _ = simulate(w, sweep=False, begin=silent)

    assert bool(report["notes"]) is bool(words)
    for part in words:
        assert any(part in note for note in report["notes"])


def test_samples_that_do_not_fit_into_the_kv_cache_are_named() -> None:
    """More in flight than the KV cache holds: the limit is out of reach, and the engine's evictions are counted."""
    w = replace(SMALL, engines=1, tensor_parallel=1, memory_share=0.1025, steps=6, ramp=1)
    report, _ = simulate(w, sweep=False, begin=silent)

    assert w.fits < 16
    assert any(note.startswith("sync: the KV cache holds about") for note in report["notes"])
    assert any("had to leave it and wait" in note for note in report["notes"])


def test_length_statistics_by_hand(tmp_path: Path) -> None:
    """Two kinds of prompts, constant within a prompt: median, share at the cap, all variance between prompts."""
    lengths = trace(tmp_path / "lengths.jsonl", {"lengths": [10, 10]}, {"lengths": [10, 10]}, {"lengths": [5000, 5000]})
    w = replace(SMALL, lengths_file=lengths, median_len=None, sigma_between=None, sigma_within=None)

    found = length_statistics(w)

    assert found["median"] == 10
    assert found["longest"] == 900  # cut at max_response_len
    assert found["share_at_the_cap"] == pytest.approx(1 / 3, abs=0.02)
    assert found["share_of_log_variance_between_prompts"] == pytest.approx(1.0)
    assert sum(found["histogram"]["counts"]) == found["samples"] >= 8000
    assert found["longest_of_a_step_over_median"] == pytest.approx(90 * (1 - (2 / 3) ** 4) + (2 / 3) ** 4, rel=0.02)


# ---------------------------------------------------------------- the command

COMMAND = [
    "simulate", "--engines", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--prompt-len", "20",
    "--max-response-len", "900", "--median-len", "60", "--steps", "8", "--ramp", "2",
]  # fmt: skip


def call(*arguments: str) -> tuple[int, str]:
    """Exit code and output, boxes and line ends taken off."""
    result = CliRunner().invoke(app, [*COMMAND, *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, re.sub(r"[│\s]+", " ", result.output)


def whole(tmp_path: Path, *arguments: str, says: tuple[str, ...]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """What a call with these words prints, the report that it writes, and its modes; it draws a picture as well."""
    out = tmp_path / "plan"
    code, text = call(*arguments, "--out", str(out))
    assert code == 0
    for words in says:
        assert words in text
    assert (out / "simulate.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    report = json.loads((out / "simulate.json").read_text("utf-8"))
    return text, report, report["modes"]


def test_table_json_and_picture(tmp_path: Path) -> None:
    """One call prints both tables and writes the figures and the picture."""
    says = ("sync april refill", "fraction of that limit", "How much to over-sample", "refill reaches")
    text, _, modes = whole(tmp_path, says=says)
    assert list(modes) == ["sync", "april", "refill"]
    assert f"{modes['refill']['fraction_of_limit']:.1%}" in text


def test_group_quorum(tmp_path: Path) -> None:
    """april and refill beside themselves with a quorum, in table, sentence and picture; the sweep is with it."""
    says = ("scheduled five ways", "sync april refill april q=0.75 refill q=0.75", "once per step, group quorum 0.75")
    text, _, modes = whole(tmp_path, "--group-quorum", "0.75", says=says)
    assert [m["group_quorum"] for m in modes.values()] == [1.0, 1.0, 1.0, 0.75, 0.75]
    assert len({m["digest"] for m in modes.values()}) == 5  # the core was told
    share = [f"{modes[name]['off_policy_share']:.0%}" for name in ("april", "april q=0.75")]
    assert f"takes april from {modes['april']['speed_up']:.2f}x" in text
    assert f"from {share[0]} to {share[1]} off-policy" in text
    assert re.search(r"N' = [56789] with it instead of N' = 8 whole groups goes from", text)


@pytest.mark.parametrize("quorum", [1.0, 0.75])
def test_the_whole_loop(quorum: float, tmp_path: Path) -> None:
    """With a train time one table of the loop, a sentence that says what to take, and a picture of its own.

    With a quorum the continuous modes are run with it.
    """
    says = ("Generation and training, separate", "continuous 8", "trainer slots", "the slower of the two")
    says += ("a group quorum of 0.75 takes refill from",) if quorum < 1 else ()
    text, report, modes = whole(tmp_path, "--train-time", "1x", "--group-quorum", str(quorum), says=says)
    assert "How much to over-sample" not in text
    assert report["loop"]["train_time_in_batch_times"] == 1.0
    assert f"{modes['continuous 4']['trainer_idle_share']:.1%}" in text
    assert modes["refill"]["group_quorum"] == 1.0
    assert modes["continuous 4"]["group_quorum"] == quorum
    if quorum < 1:
        assert modes["refill q=0.75"]["group_quorum"] == quorum


def test_the_same_arguments_give_the_same_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit, CPU seconds apart; another seed gives other figures."""
    monkeypatch.setattr(cli, "find_spec", lambda name: None)  # drawing takes most of the time

    def figures(name: str, *arguments: str) -> dict[str, Any]:
        assert call("--no-sweep", "--out", str(tmp_path / name), *arguments)[0] == 0
        report = json.loads((tmp_path / name / "simulate.json").read_text("utf-8"))
        assert report.pop("cpu_s")["total"] > 0
        return dict(report)

    first = figures("a")
    assert figures("b") == first
    assert figures("c", "--seed", "1")["modes"] != first["modes"]
    assert first["sweep"] == []


def test_own_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A JSONL replaces the distribution; without matplotlib the figures come without the picture."""
    lengths = tmp_path / "mine.jsonl"
    lengths.write_text('{"lengths": [10, 400, 20, 30]}\n55\n', "utf-8")
    arguments = [a for a in COMMAND if a not in ("--median-len", "60")]
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, [*arguments, "--lengths", str(lengths), "--no-sweep", "--out", str(tmp_path)])

    assert result.exit_code == 0, result.output
    assert install("plot") in result.output
    report = json.loads((tmp_path / "simulate.json").read_text("utf-8"))
    assert report["lengths"]["longest"] == 400
    assert report["workload"]["lengths_file"] == str(lengths)
    assert not (tmp_path / "simulate.png").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "gpt-9"], "unknown model 'gpt-9'; known are qwen3-4b, qwen3-8b, r1-distill-1.5b"),
        (["--gpu", "abacus"], "unknown GPU 'abacus'; known are"),
        (["--over-sampling-batch-size", "0"], "'--over-sampling-batch-size'"),
        (["--n-samples-per-prompt", "0"], "'--n-samples-per-prompt'"),
        (["--over-sampling-batch-size", "400"], "over_sampling_batch_size=400 holds more groups than max_staleness=5"),
        (["--over-sampling-batch-size", "9999999", "--on-stale", "drop"], "39,999,996 samples in flight are more than"),
        (["--group-quorum", "0.5"], "group_quorum=0.5 makes groups of n_samples_per_prompt=4 count with 2 finished"),
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
        (["--ramp", "8"], "ramp=8 leaves nothing to measure of steps=8; give more steps"),
        (["--memory-share", "1.5"], "memory_share=1.5 is a share of the GPU's memory"),
        (["--memory-share", "0.05"], "leave no KV cache"),
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
    code, text = call("--out", str(out), *arguments)

    assert code == 2
    assert sentence in text
    assert "Traceback" not in text
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"12\n{\n", "line 2: not JSON"),
        (b"12\n\n0\n", "line 3: expected an integer >= 1"),
        (b"ten\n", "line 1: not JSON"),
        (b"1.5\n", "line 1: expected an integer >= 1"),
        (b"5\ntrue\n", "line 2: expected an integer >= 1"),
        (b'{"lengths": [3, "4"]}\n', "line 1: expected an integer >= 1"),
        (b'5\n{"lengths": [1, -2]}\n', "line 2: expected an integer >= 1"),
        (b'5\n{"lengths": []}\n', "line 2"),
        (b'5\n{"length": [1]}\n', "line 2"),
        (b"[" * 100_000 + b"\n", "line 1: not JSON"),
        (b"3\n" + b"1" * 5000 + b"\n", "line 2: not JSON"),
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
    arguments = [a for a in COMMAND if a not in ("--median-len", "60")]
    result = CliRunner().invoke(
        app, [*arguments, "--lengths", str(path), "--out", str(tmp_path / "plan")], env={"COLUMNS": "400"}
    )

    text = re.sub(r"[│\s]+", " ", result.output)
    assert result.exit_code == 2
    assert sentence in text
    assert "lengths.jsonl" in text
    assert not (tmp_path / "plan").exists()


def test_a_length_of_any_size_is_cut_at_the_most(tmp_path: Path) -> None:
    """Also one that is beyond what a float holds."""
    path = tmp_path / "lengths.jsonl"
    path.write_text(f"{10**400}\n" + '{"lengths": [3]}\n')
    assert workload.read_lengths(path, 0).group(0, 4).max() in (3, 2**31 - 1)
    path.write_text(f'{{"lengths": [{10**400}, 3]}}\n')
    assert sorted(workload.read_lengths(path, 0).group(0, 2)) == [3, 2**31 - 1]


@pytest.mark.parametrize("name", ["simulate.json", "simulate.png"])
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    """The tables are there by then."""
    (tmp_path / name).mkdir()
    code, text = call("--out", str(tmp_path), "--no-sweep")
    assert code == 2
    assert f"{name}: Is a directory; choose another --out" in text
    assert "seconds per step" in text


def test_steps_that_take_no_time_are_too_few(tmp_path: Path) -> None:
    """What counts had all been generated in the ramp: one sentence, not a speed without end."""
    few = ["--median-len", "2500", "--max-response-len", "300", "--n-samples-per-prompt", "8", "--steps", "3"]
    code, output = call(*few, "--ramp", "1", "--out", str(tmp_path))
    assert code == 1
    assert "took no time" in output
    assert "simulate more steps" in output


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """A file in the way of --out is said before anything runs."""
    (tmp_path / "taken").write_text("", "utf-8")
    code, text = call("--out", str(tmp_path / "taken" / "plan"))

    assert code == 2
    assert "cannot make the directory" in text
