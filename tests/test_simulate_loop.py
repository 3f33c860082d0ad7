"""``april simulate --train-time``: generation and training as one loop, and what continuous generation gains there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from april.core.types import OnStale, Refill
from april.engines.simulated.clockwork import SimulatedDecoder
from april.engines.simulated.decode_cost import DecodeCost
from april.simulate import workload
from april.simulate.figure import draw_loop
from april.simulate.run import measure, simulate
from april.simulate.show import verdict
from april.simulate.workload import BOUNDS, Placement, Schedule, Workload

SMALL = Workload(
    engines=2, groups=4, samples=4, max_response_len=900, median_len=60.0, sigma_between=0.5, sigma_within=0.7,
    prompt_len=20, steps=40, ramp=10, seed=3, train_time="0.5x",
)  # fmt: skip
ANOTHER_MODEL = {
    "0.25x": {1: 0.55, 2: 0.71, 4: 0.89},
    "1x": {1: 0.47, 2: 0.62, 4: 0.84},
    "4x": {1: 1.0, 2: 1.0, 4: 1.0},
}
"""Share of the smaller limit by train time and max_staleness, from a model that shares nothing with april's."""


@pytest.fixture(autouse=True)
def few_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller sample of the distribution, to be quick."""
    monkeypatch.setattr(workload, "LENGTH_SAMPLES", 8000)


def silent(what: str, total: int) -> Callable[..., None]:
    """Progress for nobody."""
    return lambda done: None


def continuous(w: Workload, bound: int) -> Schedule:
    """Continuous generation with that max_staleness."""
    return w.modes[f"continuous {bound}"]


def test_modes_with_a_trainer_on_gpus_of_its_own() -> None:
    """Continuous generation at each bound, or at max_staleness only; colocated there is none."""
    assert list(SMALL.modes) == ["sync", "april", "refill", *(f"continuous {b}" for b in BOUNDS)]
    assert SMALL.modes["continuous 2"] == Schedule(4, Refill.SAMPLE, 16, 2)
    assert list(replace(SMALL, bounds=False, max_staleness=3).modes)[3:] == ["continuous 3"]
    assert list(replace(SMALL, placement=Placement.COLOCATED).modes) == ["sync", "april", "refill"]
    assert list(replace(SMALL, train_time=None).modes) == ["sync", "april", "refill"]


def test_train_time_in_seconds_and_in_batch_times() -> None:
    """A batch time is that of N x n responses at the engines' limit."""
    limit = SMALL.long_run_limit(16)

    assert SMALL.batch_s == pytest.approx(16 * SMALL.length_sample.mean() / limit)
    assert SMALL.train_s == pytest.approx(0.5 * SMALL.batch_s)
    assert [replace(SMALL, train_time=t).train_s for t in ("40", " 40s", ".5")] == [40.0, 40.0, 0.5]
    assert replace(SMALL, train_time=None).train_s == 0.0


@pytest.mark.parametrize("train_time", ["0.25x", "1x", "4x"])
@pytest.mark.parametrize("bound", BOUNDS)
def test_continuous_generation_loses_nothing_and_keeps_the_bound(train_time: str, bound: int) -> None:
    """Kept tokens are counted twice: by the engines, and from the responses delivered, held and running."""
    w = replace(SMALL, train_time=train_time)

    m = measure(w, continuous(w, bound)).figures

    assert m["kept_tokens"] == m["generated_tokens"]
    assert m["dropped_tokens"] == m["masked_tokens"] == 0
    assert m["staleness_max"] <= bound
    assert m["fraction_of_limit"] <= 1.0 + 1e-9


def test_dropped_tokens_are_kept_apart_in_continuous_generation_too() -> None:
    """With on_stale: drop something is dropped, and the two accounts agree to the token."""
    w = replace(SMALL, on_stale=OnStale.DROP, train_time="1x")

    m = measure(w, continuous(w, 1)).figures

    assert m["kept_tokens"] == m["generated_tokens"] - m["dropped_tokens"]
    assert m["dropped_tokens"] > 0


@pytest.mark.parametrize(("train_time", "shares"), ANOTHER_MODEL.items())
def test_continuous_generation_on_the_reference_workload(train_time: str, shares: dict[int, float]) -> None:
    """At least 0.97 of what another model gives for 32 x 8 on four engines, 256 in flight; the bound holds."""
    w = Workload(steps=40, ramp=10, train_time=train_time)

    for bound, share in shares.items():
        m = measure(w, continuous(w, bound)).figures
        assert m["fraction_of_limit"] >= 0.97 * share, bound
        assert m["staleness_max"] <= bound
        assert m["dropped_tokens"] == m["masked_tokens"] == 0


def test_where_the_trainer_is_the_slower_it_never_waits() -> None:
    """When a batch is trained the next one is ready: the whole of the trainer's limit."""
    w = replace(SMALL, train_time="8x")

    m = measure(w, continuous(w, 2)).figures

    assert m["fraction_of_limit"] == pytest.approx(1.0)
    assert m["trainer_idle_share"] == pytest.approx(0.0, abs=1e-9)
    assert m["rollout_s"] == pytest.approx(30 * w.train_s)


def test_colocated_time_is_rollout_and_training_one_after_the_other(tmp_path: Path) -> None:
    """With equal lengths nothing is lost: sync is at the limit of engines and trainer in turn."""
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text("300\n", "utf-8")
    w = replace(
        SMALL, lengths_file=lengths, median_len=None, sigma_between=None, sigma_within=None,
        placement=Placement.COLOCATED,
    )  # fmt: skip

    m = measure(w, w.modes["sync"]).figures

    assert m["fraction_of_limit"] == pytest.approx(1.0, abs=1e-3)
    assert m["step_s_mean"] == pytest.approx(1.5 * w.batch_s, rel=1e-3)
    assert m["trainer_idle_share"] == pytest.approx(2 / 3, abs=1e-3)
    assert m["bubble"] == pytest.approx(1 / 3, abs=1e-3)


def test_fetching_ahead_overlaps_training_with_the_next_step() -> None:
    """Stepwise, the engines work while the trainer trains, for one update of staleness."""
    waits, ahead = (measure(w, w.modes["sync"]).figures for w in (SMALL, replace(SMALL, fetch_ahead=1)))

    assert ahead["trained_tokens_per_s"] > 1.1 * waits["trained_tokens_per_s"]
    assert (waits["staleness_max"], ahead["staleness_max"]) == (0, 1)


@pytest.mark.parametrize("train_time", ["0.1x", "8x"])
def test_batches_that_wait_for_the_trainer_are_no_throughput(train_time: str) -> None:
    """Fetched ahead, they may be more than were trained in a window; the limit counts what was."""
    w = replace(SMALL, train_time=train_time, fetch_ahead=2, max_staleness=4, steps=16, ramp=1)

    m = measure(w, w.modes["refill"]).figures

    assert m["fraction_of_limit"] <= 1.0 + 1e-9


def test_report_and_picture_of_the_loop(tmp_path: Path) -> None:
    """No sweep of N'/N; what is drawn of the trainer is what was measured; one sentence says which bound is enough."""
    report, runs = simulate(SMALL, sweep=True, begin=silent)
    draw_loop(report, runs, tmp_path / "loop.png")

    assert (tmp_path / "loop.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert report["sweep"] == []
    assert report["loop"] == {
        "placement": "separate", "batch_s": SMALL.batch_s, "train_s": SMALL.train_s,
        "train_time_in_batch_times": pytest.approx(0.5), "slower": "engines",
    }  # fmt: skip
    for name, run in runs.items():
        busy = sum(ended - began for began, ended in run.trainings)
        assert busy == pytest.approx((1.0 - report["modes"][name]["trainer_idle_share"]) * run.step_ends[-1])
    speed = [m["trained_tokens_per_s"] for m in report["modes"].values()]
    assert speed[0] < speed[2] < speed[5]
    assert any("generation: continuous with max_staleness" in line for line in verdict(report))


def test_report_of_a_colocated_loop() -> None:
    """There is no continuous generation, and N'/N is swept as ever."""
    report, _ = simulate(replace(SMALL, placement=Placement.COLOCATED, steps=12, ramp=2), sweep=True, begin=silent)

    assert report["loop"]["placement"] == "colocated"
    assert len(report["sweep"]) == 5
    assert "one after the other" in verdict(report)[0]


def test_requests_that_go_on_over_updates_prefill_nothing_again() -> None:
    """With keep each bound is run a second time so; what updates cut and prefill otherwise is generated instead."""
    w = replace(SMALL, keep=True, bounds=False, max_staleness=3, prompt_len=2000)
    assert list(w.modes)[3:] == ["continuous 3", "continuous 3 keep"]
    cut, kept = (measure(w, w.modes[name]).figures for name in ("continuous 3", "continuous 3 keep"))
    assert (cut["on_weight_update"], kept["on_weight_update"]) == ("resubmit", "keep")
    assert cut["reprefill_tokens"] > 0 == kept["reprefill_tokens"]
    assert kept["trained_tokens_per_s"] > 1.05 * cut["trained_tokens_per_s"]
    assert kept["staleness_max"] <= 3
    assert max(cut["fraction_of_limit"], kept["fraction_of_limit"]) < 1.02
    with pytest.raises(ValueError, match="keep is for continuous generation"):
        replace(w, train_time=None)


def test_siblings_share_the_prefill_of_their_prompt() -> None:
    """With keep an engine prefills a group's prompt once per version; a preempted request does so again."""
    cost = DecodeCost(base_s=1.0, per_sequence_s=0.0, per_kv_token_s=0.0, per_prefill_token_s=1.0)
    decoder = SimulatedDecoder(cost, 4, 0.0)
    decoder.add("a", 100, 5)
    decoder.add("b", 100, 5, cached=100)
    decoder.advance(99.0)
    assert decoder.counters().prefill_tokens == 100
    assert SMALL.limit_s([50] * 8, 8) - replace(SMALL, keep=True).limit_s([50] * 8, 8) == pytest.approx(
        SMALL.cost.prefill_s(SMALL.prompt_len) * 8 * 3 / 4 / SMALL.engines
    )
