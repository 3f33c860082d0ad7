"""The sentence of a step: which side waited, how long, why, and what to change. docs/metrics.md shows april's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from april.core.bottleneck import PARTS, bottleneck
from april.core.idle import Idle
from april.core.run_times import SECONDS, SHARES, UPDATE_PARTS
from april.core.settings import CoreSettings
from april.core.types import GenerationMode, Refill

PAGE = " ".join((Path(__file__).parent.parent / "docs" / "metrics.md").read_text("utf-8").split())
CONTINUOUS: dict[str, Any] = {"generation": GenerationMode.CONTINUOUS, "refill": Refill.SAMPLE}


def sentence(settings: dict[str, Any] | None = None, **times: float) -> str:
    """Of a step with these times, all others 0; what is left of the places is busy."""
    core = CoreSettings(
        rollout_batch_size=8, n_samples_per_prompt=8, over_sampling_batch_size=16, max_response_len=400,
        **({"max_in_flight": 128, "max_staleness": 1} | (settings or {})),
    )  # fmt: skip
    idle = sum(share for name, share in times.items() if name.startswith("idle_"))
    return bottleneck(dict.fromkeys((*SECONDS, *SHARES), 0.0) | {"engines_busy": 1.0 - idle} | times, core)


SENTENCES = {
    "generation is the bottleneck: the trainer waited 12.3 of 14.0 s for rollouts; engines were busy 97% of the time; "
    "add engines": sentence(CONTINUOUS, step_s=14, trainer_wait_s=12.3, train_s=1.7, idle_bound=0.03),
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
    "50% because 16 groups are in work and refill: none adds none; raise over_sampling_batch_size or set refill: "
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
