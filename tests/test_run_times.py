"""Where the time of a run went: the trainer's seconds and the shares of the places add up, and each has its cause.

One decode step takes one virtual second, so everything is exact.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from virtual_rollouts import RecordingEngine, Rollouts, on_virtual_time, table

from april.core.batch import Batch
from april.core.run_times import (
    SECONDS,
    SHARES,
    UPDATE_PARTS,
    TrainerTime,
    bottleneck,
    bottleneck_of,
    pace,
)
from april.core.settings import CoreSettings
from april.core.types import GenerationMode, Refill, Work
from april.record.file import RunRecord
from april.record.replay import replay

pytestmark = on_virtual_time

CONTINUOUS: dict[str, Any] = {"generation": GenerationMode.CONTINUOUS, "refill": Refill.SAMPLE}


def check(m: Mapping[str, float]) -> None:
    """The identities, of the metrics of every batch."""
    assert sum(m[name] for name in TrainerTime) == pytest.approx(m["step_s"])
    assert sum(m[name] for name in dict.fromkeys(UPDATE_PARTS.values())) == pytest.approx(m["update_s"])
    assert sum(m[name] for name in SHARES) == pytest.approx(1.0 if m["step_s"] else 0.0)
    assert all(-1e-9 <= m[name] <= 1.0 + 1e-9 for name in (*SHARES, "bubble"))
    assert all(m[name] >= 0.0 for name in SECONDS)
    assert m["idle_bound"] * m["step_s"] <= m["bound_wait_s"] + 1e-9 <= m["step_s"] + 2e-9
    assert m["rollout_wall_s"] <= m["step_s"] + 1e-9


def times(batch: Batch) -> dict[str, float]:
    """What is not 0, without the two that follow from the rest."""
    left_out = ("bubble", "rollout_wall_s")
    found = {name: batch.metrics[name] for name in (*SECONDS, *SHARES) if name not in left_out}
    return {name: value for name, value in found.items() if abs(value) > 1e-9}


async def test_a_trainer_that_waits_for_each_batch() -> None:
    """Two groups of 4 and 8 s on two places, 3 s of training, an update with a part of each kind, 2 s of something."""

    def lengths(group: int, index: int) -> int:
        return 4 if group % 2 == 0 else 8

    engine = RecordingEngine(lengths, slow={"pause": 1.0, "load": 2.0, "resume": 0.5})
    run = Rollouts(lengths, n=2, engines=[engine])
    batch = await run.driver.next_batch()
    check(batch.metrics)
    assert times(batch) == pytest.approx(
        {"step_s": 8, "trainer_wait_s": 8, "engines_busy": 12 / 16, "idle_over_sampling": 4 / 16}
    )
    assert batch.metrics["bubble"] == pytest.approx(4 / 16)
    await asyncio.sleep(3)
    await run.driver.update_weights("new", lambda: asyncio.sleep(4))
    await asyncio.sleep(2)
    batch = await run.driver.next_batch()
    check(batch.metrics)
    step = 3 + 7.5 + 2 + 8
    assert times(batch) == pytest.approx(
        {
            "step_s": step, "train_s": 3, "update_s": 7.5, "other_s": 2, "trainer_wait_s": 8,
            "update_pause_s": 1, "update_transfer_s": 4, "update_load_s": 2, "update_resume_s": 0.5,
            "engines_busy": 6 / step, "idle_over_sampling": 2 / step, "idle_update": 7.5 / step,
            "idle_trainer": 5 / step,
        }
    )  # fmt: skip
    assert batch.metrics["rollout_wall_s"] == pytest.approx(8)
    assert batch.metrics["bubble"] == pytest.approx(4 / 16)


async def test_the_bound_is_what_keeps_places_empty() -> None:
    """Continuous, bound 1: two batches' worth of groups is done after 10 s, and the trainer trains for 100 s."""
    run = Rollouts(lambda g, i: 5, n=2, max_staleness=1, **CONTINUOUS)
    batch = await run.driver.next_batch()
    assert times(batch) == pytest.approx({"step_s": 5, "trainer_wait_s": 5, "engines_busy": 1})
    assert batch.bottleneck == (
        "start-up: the trainer waited 5.00 of 5.00 s for the first batch; later batches show what the bottleneck is; "
        "engines were busy 100% of the time"
    )
    await asyncio.sleep(100)
    await run.driver.update_weights()
    batch = await run.driver.next_batch()
    check(batch.metrics)
    # one batch is out: the plan takes one more of 2 groups, and a second one from the update on
    assert times(batch) == pytest.approx(
        {"step_s": 100, "train_s": 100, "engines_busy": 0.05, "idle_bound": 0.95, "bound_wait_s": 95}
    )
    assert batch.bottleneck == (
        "training is the bottleneck: it took 100 of 100 s; the trainer waited 0 s for rollouts; engines stood idle 95% "
        "of the time because max_staleness 1 allows no more work; fewer engines would do"
    )


async def test_a_trainer_that_asks_ahead() -> None:
    """It asks as soon as it has a batch: where it is slower, a batch waits for it, and that is training's time."""
    for training, ready in ((4.0, 0.0), (25.0, 15.0)):
        run = Rollouts(lambda g, i: 10, n=2)
        batch = await run.driver.next_batch()
        for _ in range(3):
            ahead = asyncio.create_task(run.driver.next_batch())
            await asyncio.sleep(training)
            batch = await ahead
            check(batch.metrics)
            await run.driver.update_weights()
        assert batch.metrics["asked_ahead_s"] == pytest.approx(10)
        assert batch.metrics["train_s"] == pytest.approx(ready)
        side = "training" if ready else "generation"
        assert batch.bottleneck.startswith(f"{side} is the bottleneck"), batch.bottleneck
        # where it is slower its time is known; where it waits for the batch, that is not taken for training
        assert pace([batch.metrics] * 3) == (pytest.approx(training if ready else 0.0), 1)
        await run.close()


async def test_a_replay_finds_the_same_times(tmp_path: Path) -> None:
    """The events of a record say where the time of its run went."""
    lengths = table({(g, i): 3 + 7 * (g % 3) for g in range(60) for i in range(2)})
    batches: list[Batch] = []

    slow = {"pause": 0.5, "load": 2.0}
    engines = [RecordingEngine(lengths, f"e{i}", max_running=3, slow=slow) for i in range(2)]
    run = Rollouts(lengths, n=2, samples=2, over=3, engines=engines, record=RunRecord(tmp_path / "run.jsonl"))
    for _ in range(4):
        batches.append(await run.driver.next_batch())
        await asyncio.sleep(6)
        await run.driver.update_weights("new")
    await run.close()
    again = replay(tmp_path / "run.jsonl")
    for batch, found in zip(batches, again.steps, strict=True):
        assert {name: batch.metrics[name] for name in found} == pytest.approx(found, abs=1e-5)
    assert again.rows()["time"].startswith("trainer and engines take turns: the trainer waited ")


# ----------------------------------------------------------------
# The sentence of a step: which side waited, how long, why, and what to change. docs/metrics.md shows april's own.


PAGE = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text("utf-8")


def sentence(
    settings: dict[str, Any] | None = None, blocking: str = "", first: bool = False, **times: float
) -> str:
    """Of a step with these times, all others 0; what is left of the places is busy."""
    core = CoreSettings(
        rollout_batch_size=8, n_samples_per_prompt=8, over_sampling_batch_size=16, max_response_len=400,
        **({"max_in_flight": 128, "max_staleness": 1} | (settings or {})),
    )  # fmt: skip
    idle = sum(share for name, share in times.items() if name.startswith("idle_"))
    times = dict.fromkeys((*SECONDS, *SHARES), 0.0) | {"engines_busy": 1.0 - idle} | times
    return bottleneck(times, core, blocking, first=first)


SENTENCES = {
    "generation is the bottleneck: the trainer waited 12.3 of 14.0 s for rollouts; engines were busy 97% of the time; "
    "only more or faster engines would help": sentence(
        CONTINUOUS, step_s=14, trainer_wait_s=12.3, train_s=1.7, idle_bound=0.03
    ),
    "generation is the bottleneck: the trainer waited 5.1 of 14.0 s for rollouts; engines stood idle 41% of the time "
    "because max_staleness 1 allows no more work; raise it or train faster": sentence(
        CONTINUOUS, step_s=14, trainer_wait_s=5.1, train_s=8.9, idle_bound=0.40, idle_update=0.01
    ),
    "training is the bottleneck: it took 13.8 of 14.0 s; the trainer waited 0.2 s for rollouts; engines stood idle 41% "
    "of the time because max_staleness 1 allows no more work; fewer engines would do": sentence(
        CONTINUOUS, step_s=14, trainer_wait_s=0.2, train_s=13.8, idle_bound=0.41
    ),
    "trainer and engines take turns: the trainer waited 9.0 of 14.0 s for rollouts; engines stood idle 52% of the "
    "time, 36% because no batch was asked for; engines with GPUs of their own could continue (generation: "
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


def test_the_sentences_of_the_page() -> None:
    """The examples on docs/metrics.md are among them; the reward that blocks has a test of its own."""
    examples = re.findall(r"^\* ([^*]* is the bottleneck: [^*|]*?)$(?=\n\*|\n\n)", PAGE, re.M)
    texts = [" ".join(example.split()) for example in examples]
    assert len(texts) == 2
    assert {text for text in texts if not text.startswith("reward")} <= SENTENCES.keys()


def test_engines_are_not_blamed_for_what_updates_and_evaluations_took() -> None:
    """Also where the trainer waited for rollouts as well, or had asked ahead."""
    slow = sentence(CONTINUOUS, step_s=14, trainer_wait_s=1.4, update_s=11, train_s=1.6, update_load_s=11)
    assert slow.startswith("the weight update is the bottleneck: it took 11.0 of 14.0 s, 11.0 s of it to load")
    ahead = sentence(CONTINUOUS, step_s=14, asked_ahead_s=1, evaluation_s=13)
    assert ahead.startswith("evaluation is the bottleneck: it took 13.0 of 14.0 s")


def test_the_first_batch_blames_nobody() -> None:
    """Everything waits for it, so a slow start is no verdict on generation; what blocked the loop is named.

    Of several steps it counts only where it is alone.
    """
    said = sentence(step_s=60, trainer_wait_s=60, idle_over_sampling=0.3, first=True)
    assert said.startswith(
        "start-up: the trainer waited 60.0 of 60.0 s for the first batch; later batches show what the bottleneck is; "
        "engines stood idle 30% of the time"
    )
    blocked = sentence(step_s=60, trainer_wait_s=60, loop_blocked_s=30.0, blocking="f", first=True)
    assert blocked.startswith("f is the bottleneck")
    core = CoreSettings(
        rollout_batch_size=8, n_samples_per_prompt=8, over_sampling_batch_size=16, max_response_len=400,
        max_in_flight=128,
    )  # fmt: skip
    none = dict.fromkeys((*SECONDS, *SHARES), 0.0) | {"engines_busy": 1.0}
    start = none | {"step_s": 60.0, "trainer_wait_s": 60.0}
    steps = [start, *[none | {"step_s": 10.0, "train_s": 9.0, "trainer_wait_s": 1.0}] * 2]
    assert bottleneck_of(steps, core).startswith("training is the bottleneck: it took 18.0 of 20.0 s")
    assert bottleneck_of(steps[:1], core).startswith("start-up: ")


def test_a_function_that_blocks_the_loop_is_the_bottleneck() -> None:
    """Its time is not generation's; below a quarter of the step others are named."""
    blocked = sentence(step_s=15.7, trainer_wait_s=15.7, loop_blocked_s=12.0, blocking="reward (line 9 of a.py)")
    assert blocked == (
        "reward (line 9 of a.py) is the bottleneck: it blocked april's event loop for 12.0 of 15.7 s; make it a plain "
        "def, which april runs in a thread, or await whatever it waits for"
    )
    assert blocked in " ".join(PAGE.split())
    assert sentence(step_s=15.7, trainer_wait_s=15.7, loop_blocked_s=3.0).startswith("generation is the bottleneck")
    assert sentence(step_s=15.7, loop_blocked_s=12.0).startswith("a function (its name is in the log) is the")


def test_nothing_is_advised_that_april_chooses_itself() -> None:
    """Settings that are auto are not named; limits only where they can have been reached."""
    for auto, advice in (
        ((), "raise over_sampling_batch_size or set refill: sample"), (("refill",), "raise over_sampling_batch_size"),
        (("over_sampling_batch_size",), "set refill: sample"),
    ):  # fmt: skip
        said = sentence({"auto": tuple(map(Work, auto))}, step_s=14, trainer_wait_s=14, idle_over_sampling=0.5)
        assert said.rpartition("; ")[2] == advice
    for settings, advice in (
        ({"max_held_tokens": 1000}, "raise max_held_tokens"), ({"extras": ("experts",)}, "raise max_extras_bytes"),
    ):  # fmt: skip
        assert sentence(settings, step_s=14, trainer_wait_s=14, idle_held=0.5).rpartition("; ")[2] == advice
