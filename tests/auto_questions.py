"""A small run that asks what would be better, and what it may be told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from april.auto.question import TuningAnswer, TuningQuestion, WorkSettings
from april.core.settings import CoreSettings
from april.core.types import OnStale, Refill, Work
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.response_lengths import LognormalLengths, ResponseLengths
from april.simulate.simulation import Simulation

COST = DecodeCost(1e-2, 1e-4, 1e-7, 1e-5)
NOW = WorkSettings(over_sampling_batch_size=4, refill=Refill.NONE, max_in_flight=16, group_quorum=1.0)
BETTER = replace(NOW, over_sampling_batch_size=7, max_in_flight=28, group_quorum=0.75)


def question(**changes: Any) -> TuningQuestion:
    """Of a small run."""
    values: dict[str, Any] = {
        "groups": 4, "samples": 4, "max_response_len": 400, "prompt_len": 8, "max_staleness": 3,
        "on_stale": OnStale.FINISH, "max_off_policy_share": 1.0, "continuous": False, "train_s": 0.0, "fetch_ahead": 0,
        "engines": 2,
        "cost": COST, "lengths": [[10, 20, 40, 160], [20, 20, 30, 300], [8, 9, 10, 40]],
        "places": 64, "free": tuple(Work), "now": NOW,
    }  # fmt: skip
    return TuningQuestion(**(values | changes))


def answer(best: WorkSettings = BETTER, **changes: Any) -> TuningAnswer:
    values = {"tokens_per_s": 100.0, "off_policy_share": 0.5, "speed_up": 1.4, "share_now": 0.0}
    return TuningAnswer(best=best, **(values | changes))


class Watched(Simulation):
    """A simulation whose chooser answers as it is told, and remembers what it was asked."""

    def __init__(
        self, told: Callable[[TuningQuestion], TuningAnswer], lengths: ResponseLengths | None = None, *,
        train_s: float = 2.0, fetch_ahead: int = 0, cost: DecodeCost = COST, **settings: Any,
    ) -> None:  # fmt: skip
        self.asked: list[tuple[int, TuningQuestion]] = []
        values: dict[str, Any] = {
            "rollout_batch_size": 4, "n_samples_per_prompt": 4, "over_sampling_batch_size": 4, "max_in_flight": 16,
            "max_response_len": 4000, "has_reward": False, "auto": tuple(Work),
        }  # fmt: skip

        def asked(question: TuningQuestion) -> TuningAnswer:
            self.asked.append((len(self.result.steps), question))
            return told(question)

        super().__init__(
            CoreSettings(**(values | settings)), cost, lengths or LognormalLengths(100.0, 0.5, 0.5, seed=1), engines=2,
            choose=asked, most_in_flight=64, check=True, train_s=train_s, fetch_ahead=fetch_ahead,
        )  # fmt: skip


def stays(q: TuningQuestion) -> TuningAnswer:
    """Nothing better."""
    return answer(q.now, speed_up=1.0)
