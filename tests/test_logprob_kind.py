"""Which distribution the log-probabilities are of: declared by engines, carried by batches, never wrong unasked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from real_schedulers import config, engine, scheduler

import april
from april.core.sampling import LogprobKind
from april.core.settings import EngineLimits
from april.driver.command_executor import limits_of
from april.driver.llm import LLM
from april.engines.simulated.engine import SimulatedEngine


def engine_of(kind: LogprobKind, name: str) -> SimulatedEngine:
    made = engine(name)
    made._capabilities = replace(made.capabilities, logprob_kind=kind)
    return made


@pytest.mark.parametrize("kind", list(LogprobKind))
def test_a_batch_says_which_kind_its_log_probabilities_are(kind: LogprobKind) -> None:
    """Every kind is accepted under neutral sampling, and every batch carries the engines' word."""
    with scheduler(engines=[engine_of(kind, "e0"), engine_of(kind, "e1")]) as rollouts:
        for _ in range(2):
            assert rollouts.next_batch().logprob_kind == kind
            rollouts.weight_update()


def test_kinds_that_agree_may_be_mixed() -> None:
    """At temperature 1 all kinds are one distribution, elsewhere those that follow it; the batch says mixed."""
    for temperature, kinds in ((1.0, list(LogprobKind)), (0.7, [LogprobKind.TEMPERATURE, LogprobKind.PROCESSED])):
        engines = [engine_of(kind, kind.value) for kind in kinds]
        with scheduler(engines=engines, config=config(sampling={"temperature": temperature})) as rollouts:
            assert rollouts.next_batch().logprob_kind == "mixed"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (LogprobKind.RAW, r"engine b returns .* temperature 1 \(raw\).*=0.7.*--logprobs-mode processed_logprobs"),
        (LogprobKind.UNKNOWN, r"engine b does not say .*=0.7; set engine.logprobs if you know it .*temperature: 1"),
    ],
)
def test_kinds_that_are_wrong_at_a_temperature_are_refused(kind: LogprobKind, words: str) -> None:
    """One sentence with the engine, the setting and the server's flag; allow_mismatch takes them and says mixed."""
    engines = [engine_of(LogprobKind.TEMPERATURE, "a"), engine_of(kind, "b")]

    with pytest.raises(april.ConfigError, match=words + ".*allow_mismatch: true"):
        scheduler(engines=engines, config=config(sampling={"temperature": 0.7}))
    allowed = config(sampling={"temperature": 0.7}, allow_mismatch=True)
    with scheduler(engines=engines, config=allowed) as rollouts:
        assert rollouts.next_batch().logprob_kind == "mixed"


@pytest.mark.parametrize("kind", list(LogprobKind))
def test_a_call_may_not_choose_a_temperature_that_the_engines_cannot_report(kind: LogprobKind) -> None:
    """What the configuration refuses, a call may not smuggle in: with raw or unknown kinds T stays 1."""

    async def rollout(prompt: april.Prompt, llm: LLM) -> None:
        await llm.generate(temperature=0.7)

    engines = [engine_of(LogprobKind.TEMPERATURE, "a"), engine_of(kind, "b")]
    with scheduler(engines=engines, rollout=rollout) as rollouts:
        if kind in (LogprobKind.TEMPERATURE, LogprobKind.PROCESSED):
            assert len(rollouts.next_batch()) == 6
        else:
            with pytest.raises(april.RolloutError, match=r"=0.7 needs .* follow the temperature.*leave it at 1"):
                rollouts.next_batch()


def test_the_core_hears_of_it_as_a_plain_word() -> None:
    """EngineLimits carries the word, so that the core needs no engine types."""
    limits = limits_of(engine_of(LogprobKind.PROCESSED, "e0"))
    assert type(limits.logprob_kind) is str
    assert limits.logprob_kind == "processed"
    assert EngineLimits("e0", 10).logprob_kind == "temperature"
