"""The sentence of a step: which side waited, how long, why, and what to change. docs/metrics.md shows april's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import april
from april.config.engine_fit import fits
from april.core.partial_buffer import Idle
from april.core.run_times import PARTS, SECONDS, SHARES, UPDATE_PARTS, bottleneck
from april.core.sampling import LogprobKind
from april.core.settings import CoreSettings
from april.core.types import GenerationMode, Refill, Work
from april.engines.protocol import Capabilities

PAGE = " ".join((Path(__file__).parent.parent / "docs" / "metrics.md").read_text("utf-8").split())
CONTINUOUS: dict[str, Any] = {"generation": GenerationMode.CONTINUOUS, "refill": Refill.SAMPLE}


def sentence(
    settings: dict[str, Any] | None = None, refused: tuple[str, ...] = (), blocking: str = "", **times: float
) -> str:
    """Of a step with these times, all others 0; what is left of the places is busy. ``refused``: settings."""
    core = CoreSettings(
        rollout_batch_size=8, n_samples_per_prompt=8, over_sampling_batch_size=16, max_response_len=400,
        **({"max_in_flight": 128, "max_staleness": 1} | (settings or {})),
    )  # fmt: skip
    idle = sum(share for name, share in times.items() if name.startswith("idle_"))
    times = dict.fromkeys((*SECONDS, *SHARES), 0.0) | {"engines_busy": 1.0 - idle} | times
    return bottleneck(times, core, lambda **change: change.keys().isdisjoint(refused), blocking)


SENTENCES = {
    "generation is the bottleneck: the trainer waited 12.3 of 14.0 s for rollouts; engines were busy 97% of the time; "
    "only more or faster ones would help": sentence(
        CONTINUOUS, step_s=14, trainer_wait_s=12.3, train_s=1.7, idle_bound=0.03
    ),
    "generation is the bottleneck: the trainer waited 5.1 of 14.0 s for rollouts; engines stood idle 41% of the time "
    "because max_staleness 1 admits no more; raise it or train faster": sentence(
        CONTINUOUS, step_s=14, trainer_wait_s=5.1, train_s=8.9, idle_bound=0.40, idle_update=0.01
    ),
    "training is the bottleneck: it took 13.8 of 14.0 s; the trainer waited 0.2 s for rollouts; engines stood idle 41% "
    "of the time because max_staleness 1 admits no more; fewer engines would do": sentence(
        CONTINUOUS, step_s=14, trainer_wait_s=0.2, train_s=13.8, idle_bound=0.41
    ),
    "trainer and engines take turns: the trainer waited 9.0 of 14.0 s for rollouts; engines stood idle 52% of the "
    "time, 36% because no batch was asked for; with GPUs of their own they could go on (generation: "
    "continuous)": sentence(
        step_s=14, trainer_wait_s=9, train_s=5, idle_trainer=0.36, idle_over_sampling=0.16
    ),
    "generation is the bottleneck: the trainer waited 12.3 of 14.0 s for rollouts; engines stood idle 62% of the time, "
    "50% because only 16 groups were in progress (refill: none); raise over_sampling_batch_size or set refill: "
    "sample": sentence(step_s=14, trainer_wait_s=12.3, train_s=1.7, idle_trainer=0.12, idle_over_sampling=0.5),
    "the weight update is the bottleneck: it took 8.0 of 14.0 s, 6.5 s of it for the transfer; the trainer waited "
    "0.1 s for rollouts; engines stood idle 57% of the time because weights were updated": sentence(
        CONTINUOUS, step_s=14, trainer_wait_s=0.1, update_s=8, train_s=5.9, update_transfer_s=6.5,
        update_load_s=1.5, idle_update=0.57,
    ),
}  # fmt: skip


@pytest.mark.parametrize("said", SENTENCES)
def test_the_sentences_of_the_page(said: str) -> None:
    """Each is what april says, and on docs/metrics.md."""
    assert SENTENCES[said] == said
    assert said in PAGE


def test_a_trainer_that_asks_ahead_is_not_said_to_wait() -> None:
    """Whether it trained or waited nobody knows; but where batches wait for it, training is too slow."""
    assert sentence(step_s=14, asked_ahead_s=13.9, train_s=0.1).startswith(
        "generation is the bottleneck: a batch was asked for ahead of training for 13.9 of 14.0 s, and none was there"
    )
    assert sentence(step_s=14, asked_ahead_s=9, train_s=5).startswith("training is the bottleneck: it took 5.0 of")


def test_engines_are_not_blamed_for_what_updates_and_evaluations_took() -> None:
    """Also where the trainer waited for rollouts as well, or had asked ahead."""
    slow = sentence(CONTINUOUS, step_s=14, trainer_wait_s=1.4, update_s=11, train_s=1.6, update_load_s=11)
    assert slow.startswith("the weight update is the bottleneck: it took 11.0 of 14.0 s, 11.0 s of it to load")
    ahead = sentence(CONTINUOUS, step_s=14, asked_ahead_s=1, evaluation_s=13)
    assert ahead.startswith("evaluation is the bottleneck: it took 13.0 of 14.0 s")


def test_what_the_trainer_does_otherwise_is_named() -> None:
    """Evaluations, and time of which april sees nothing."""
    assert sentence(step_s=200, evaluation_s=150, trainer_wait_s=10).startswith(
        "evaluation is the bottleneck: it took 150 of 200 s; the trainer waited 10 s"
    )
    assert sentence(step_s=2, other_s=1.5, trainer_wait_s=0.5).startswith(
        "the trainer is the bottleneck: it had nothing to train and asked for nothing for 1.50 of 2.00 s"
    )


@pytest.mark.parametrize("cause", Idle)
def test_every_cause_has_words(cause: Idle) -> None:
    """Also where the trainer waits for it."""
    said = sentence(step_s=14, trainer_wait_s=14, **{f"idle_{cause}": 0.5})
    assert "engines stood idle 50% of the time because " in said


def test_every_part_of_an_update_has_words() -> None:
    """The parts are those that are measured."""
    assert set(PARTS) == set(UPDATE_PARTS.values())


def test_no_time_no_words() -> None:
    """A batch that was there already."""
    assert sentence(step_s=0) == ""


def test_a_function_that_blocks_the_loop_is_the_bottleneck() -> None:
    """Its time is not generation's; below a quarter of the step others are named."""
    blocked = sentence(step_s=15.7, trainer_wait_s=15.7, loop_blocked_s=12.0, blocking="reward (line 9 of a.py)")
    assert blocked == (
        "reward (line 9 of a.py) is the bottleneck: it blocked april's event loop for 12.0 of 15.7 s; make it a plain "
        "def, which april runs in a thread, or await what it waits for"
    )
    assert blocked in PAGE
    assert sentence(step_s=15.7, trainer_wait_s=15.7, loop_blocked_s=3.0).startswith("generation is the bottleneck")
    assert sentence(step_s=15.7, loop_blocked_s=12.0).startswith("a function (its name is in the log) is the")


REFUSABLE = {
    Idle.TRAINER: ("generation",),
    Idle.BOUND: ("max_staleness",),
    Idle.HELD: ("max_held_tokens",),
    Idle.OVER_SAMPLING: ("over_sampling_batch_size", "refill"),
}
"""Settings that are advised, by what keeps places empty."""


@pytest.mark.parametrize("cause", Idle)
def test_nothing_is_advised_that_would_be_refused(cause: Idle) -> None:
    """Of each piece of advice: it is there where it would be taken, and not where it would not."""
    settings, idle = {"max_held_tokens": 1000}, {f"idle_{cause}": 0.5}
    names = REFUSABLE.get(cause, ())
    allowed = sentence(settings, step_s=14, trainer_wait_s=14, **idle)
    assert all(f"{name}" in allowed or name == "max_staleness" for name in names)
    for name in names:
        words = "raise it" if name == "max_staleness" else "refill: sample" if name == "refill" else f"{name}"
        advice = sentence(settings, (name,), step_s=14, trainer_wait_s=14, **idle).rpartition("; ")[2]
        assert words in allowed.rpartition("; ")[2]
        assert words not in advice


def test_what_april_chooses_itself_is_not_advised() -> None:
    """``over_sampling_batch_size: auto`` is nobody's to raise, and its refill nobody's to set."""
    for auto in (Work.OVER_SAMPLING, Work.REFILL):
        said = sentence({"auto": (auto,)}, step_s=14, trainer_wait_s=14, idle_over_sampling=0.5)
        assert str(auto) not in said.rpartition("(refill: ")[2].partition(")")[2]


def test_advice_is_checked_as_the_configuration_is() -> None:
    """By the configuration itself and what the engines can do; the embedded engine cannot go on beside the trainer."""
    config = april.Config(rollout_batch_size=2, max_response_len=8)
    able = Capabilities(max_context=64, logprob_kind=LogprobKind.TEMPERATURE, vocab_size=10, returns_partials=True)
    shared = replace(able, shares_weights=True)
    lossy = replace(able, returns_partials=False)
    for change, here in {
        "continuous": ({"generation": "continuous"}, (True, False, False)),
        "more": ({"over_sampling_batch_size": 4}, (True, True, False)),
        "sample": ({"refill": "sample"}, (True, True, False)),
        "nonsense": ({"refill": "much"}, (False, False, False)),
    }.values():
        assert tuple(fits(config, {"e": engine}, **change) for engine in (able, shared, lossy)) == here


def test_the_embedded_engine_is_never_told_to_go_on() -> None:
    """Where nothing is known of the engines, neither."""
    core = CoreSettings(
        rollout_batch_size=2, n_samples_per_prompt=2, over_sampling_batch_size=2, max_response_len=8, max_in_flight=4
    )
    times = dict.fromkeys((*SECONDS, *SHARES), 0.0) | {"step_s": 10.0, "train_s": 8.0, "idle_trainer": 0.8}
    assert "continuous" not in bottleneck(times, core)
