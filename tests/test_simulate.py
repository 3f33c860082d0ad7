"""What ``april simulate`` computes: the limit, the accounting, the sweep, the words about what binds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from april.core.types import OnStale
from april.engines.simulated.decode_cost import limit_tokens_per_s
from april.simulate import workload
from april.simulate.measure import measure
from april.simulate.run import RATIOS, length_statistics, simulate
from april.simulate.workload import Workload

SMALL = Workload(
    engines=2, groups=4, samples=4, max_response_len=900, median_len=60.0, sigma_between=0.5, sigma_within=0.7,
    prompt_len=20, steps=18, ramp=5, seed=3,
)  # fmt: skip


@pytest.fixture(autouse=True)
def few_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller sample of the distribution, to be quick."""
    monkeypatch.setattr(workload, "LENGTH_SAMPLES", 8000)


class Silent:
    """Progress for nobody; notes what it was told."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def begin(self, what: str, total: int) -> Callable[[int], None]:
        """A schedule."""
        return lambda done: self.seen.append((what, done))


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
    watcher = Silent()
    report, runs = simulate(SMALL, sweep=True, watcher=watcher)

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
    assert watcher.seen.count(("refill", SMALL.steps)) == 1
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
    report, _ = simulate(replace(SMALL, max_staleness=1, steps=8, ramp=2), sweep=True, watcher=Silent())

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
    report, _ = simulate(w, sweep=False, watcher=Silent())

    assert bool(report["notes"]) is bool(words)
    for part in words:
        assert any(part in note for note in report["notes"])


def test_samples_that_do_not_fit_into_the_kv_cache_are_named() -> None:
    """More in flight than the KV cache holds: the limit is out of reach, and the engine's evictions are counted."""
    w = replace(SMALL, engines=1, tensor_parallel=1, memory_share=0.1025, steps=6, ramp=1)
    report, _ = simulate(w, sweep=False, watcher=Silent())

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
