"""Which distribution the log-probabilities are of: declared by engines, carried by batches, never mixed unasked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from real_schedulers import config, engine, scheduler

import april
from april.core.settings import EngineLimits
from april.driver.rollout_driver import limits_of
from april.engines.protocol import LogprobKind
from april.engines.simulated import SimulatedEngine


def engine_of(kind: LogprobKind, name: str) -> SimulatedEngine:
    """A simulated engine that declares ``kind``."""
    made = engine(name)
    made._capabilities = replace(made.capabilities, logprob_kind=kind)
    return made


@pytest.mark.parametrize("kind", list(LogprobKind))
def test_a_batch_says_which_kind_its_log_probabilities_are(kind: LogprobKind) -> None:
    """Both kinds are accepted under neutral sampling, and every batch carries the engines' word."""
    with scheduler(engines=[engine_of(kind, "e0"), engine_of(kind, "e1")]) as rollouts:
        for _ in range(2):
            assert rollouts.next_batch().logprob_kind == kind
            rollouts.weight_update()


def test_two_kinds_in_one_scheduler_are_refused() -> None:
    """One sentence that names both kinds and an engine of each; allow_mismatch accepts them and says mixed."""
    engines = [engine_of(LogprobKind.TEMPERATURE, "a"), engine_of(LogprobKind.PROCESSED, "b")]

    with pytest.raises(april.ConfigError, match=r"of different kinds, processed .b. and temperature .a.; use engines"):
        scheduler(engines=engines)
    with scheduler(engines=engines, config=config(allow_mismatch=True)) as rollouts:
        assert rollouts.next_batch().logprob_kind == "mixed"


def test_the_core_hears_of_it_as_a_plain_word() -> None:
    """EngineLimits carries the word, so that the core needs no engine types."""
    limits = limits_of(engine_of(LogprobKind.PROCESSED, "e0"))
    assert type(limits.logprob_kind) is str
    assert limits.logprob_kind == "processed"
    assert EngineLimits("e0", 10).logprob_kind == "temperature"
