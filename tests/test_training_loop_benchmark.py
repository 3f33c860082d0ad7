"""The model of ``benchmarks.training_loop`` and the core: two accounts of one loop that share no code."""

from __future__ import annotations

from typing import Any

import pytest

from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.response_lengths import ConstantLengths
from april.simulate import workload
from benchmarks.training_loop import TICK_S, Model, compare


@pytest.fixture(autouse=True)
def few_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller sample of the distribution, to be quick."""
    monkeypatch.setattr(workload, "LENGTH_SAMPLES", 8000)


@pytest.mark.parametrize(("train_time", "bound"), [("0.25x", 1), ("1x", 2), ("1x", 4)])
def test_the_core_is_where_the_model_says(train_time: str, bound: int) -> None:
    """Within 3 % of the model's throughput on the reference workload, at the same ages, with nothing lost."""
    row: dict[str, Any] = compare(train_time, bound, 20, ())

    assert row["core"] == pytest.approx(row["model"], rel=0.03)
    assert row["core_staleness"].split("/")[1] == row["model_staleness"].split("/")[1] == str(bound)
    assert row["core_dropped_or_masked"] == 0


@pytest.mark.parametrize("train_s", [0.5, 4.0])
def test_the_model_by_hand(train_s: float) -> None:
    """Responses of equal length that all fit: the slower of training and generation is the whole time of a batch."""
    model = Model(
        DecodeCost(base_s=0.01, per_sequence_s=0.0, per_kv_token_s=0.0, per_prefill_token_s=1e-9),
        ConstantLengths(200), bound=2, train_s=train_s, groups=2, n=4, slots=8, engines=2,
    )  # fmt: skip
    model.run(12)

    share, _, most = model.figures(4, limit=8 / 0.01)
    assert share == pytest.approx(1.0, rel=2 * TICK_S)
    assert most <= 2
