"""The demo: its task, and end to end in small: every mode, real training, every check."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import matplotlib.colors
import numpy as np
import pytest
import torch

from april.core.partial_buffer import IdleCause
from april.errors import AprilError
from benchmarks.demo import figure
from benchmarks.demo.arm import MODES, Arm, ArmOutcome, DemoSettings, Measured, Point, Stage, logprob_error, why_empty
from benchmarks.demo.run import run_demo, table, trained, verdict
from benchmarks.demo.summary import against_sync, sentence
from benchmarks.study import countdown as task
from benchmarks.study.evaluation import evaluate, evaluate_together
from benchmarks.study.tasks import TASKS
from benchmarks.study.warmup import build_model

SMALL = DemoSettings(
    groups=2, samples=4, steps=3, seeds=2, evaluate_every=3, group_quorum=0.75, warm_up_steps=20, modes=MODES
)
REQUIRED = {
    "steps", "decode_steps", "rollout_cpu_s", "rollout_wall_s", "train_cpu_s", "trained_tokens", "generated_tokens",
    "reprefill_tokens", "bubble", "off_policy_share", "staleness_mean", "staleness_max", "held_out_reward_start",
    "held_out_reward_end", "held_out_reward_end_of_long_prompts", "max_abs_logprob_error", "ledger", "spread",
}  # fmt: skip
EXACT = ("step", "decode_steps", "trained_tokens", "reward", "long")
"""Figures of an evaluation that are no seconds."""


Said = tuple[dict[str, Any], Path, list[str]]
"""The summary, where it was written, and the lines that were said meanwhile."""


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """One small demo, hardly warmed up: its rewards mean nothing, its books must balance."""
    out = tmp_path_factory.mktemp("demo")
    said: list[str] = []
    return run_demo(SMALL, out, said.append), out, said


def test_summary_has_every_figure_of_every_mode(summary: Said) -> None:
    """summary.json is what the run returned, with all figures under modes."""
    found, out, _ = summary
    written = json.loads((out / "summary.json").read_text("utf-8"))

    assert written == json.loads(json.dumps(found))
    assert set(written["modes"]) == set(MODES)
    for figures in written["modes"].values():
        assert set(figures) >= REQUIRED
        assert set(figures["ledger"]) == {"observed", "delivered", "held", "dropped"}
        assert figures["steps"] == SMALL.steps
    for picture in ("demo.png", "slots.png"):
        assert (out / picture).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_every_check_holds(summary: Said) -> None:
    """Books balance against counts at the engine and the source, log-probabilities against recomputation."""
    found = summary[0]
    broken = [(m, n, c) for m, group in found["checks"].items() for n, c in group.items() if not c["holds"]]

    assert broken == []
    assert found["all_checks_hold"]
    assert found["modes"]["april"]["ledger"]["held"] > 0
    assert found["modes"]["april"]["off_policy_share"] > 0
    assert found["modes"]["sync"]["off_policy_share"] == 0
    assert found["modes"]["quorum"]["ledger"]["held"] > 0
    assert found["modes"]["quorum"]["off_policy_share"] > 0
    assert found["modes"]["refill"]["bubble"] < found["modes"]["sync"]["bubble"]


def test_progress_and_words_for_people(summary: Said) -> None:
    """The end of every arm is reported; the table has a column per mode; a broken check is shouted."""
    found, _, lines = summary
    assert len([line for line in lines if "refill/1: " in line]) == 1
    assert [c.header for c in table(found).columns] == ["", *MODES]
    said = verdict(found)
    assert not any("BROKEN" in line for line in said)
    assert set(found["sentences"].values()) < set(said)
    assert len([line for line in said if "of the trained tokens from older weights" in line]) == len(MODES) - 1
    broken = json.loads(json.dumps(found))
    broken["checks"]["april"]["tokens_balance"]["holds"] = False
    assert any("BROKEN: april: tokens_balance" in line for line in verdict(broken))


def outcome(mode: str, seed: int, steps: int, points: list[Point], measured: Measured) -> ArmOutcome:
    return ArmOutcome(
        settings=DemoSettings(groups=2, samples=2, steps=steps).training(mode, seed), evaluations=points,
        measured=measured, kl_k3=[], ess_token=[], quarters={}, old_share=0.0, staleness_max=0, places=0.0,
    )  # fmt: skip


def result(mode: str, seed: int, rewards: list[float], spent: int) -> ArmOutcome:
    """A training of 40 steps, evaluated every fifth, with so many decode steps for each of those."""
    measured = Measured(
        decode_steps=8 * spent, trained_tokens=100, rollout_cpu_s=8.0, occupancy=[4], lengths=[[1]], staleness=[0],
        group_spread=[0.0],
    )  # fmt: skip
    points = [
        Point(
            step=5 * i, decode_steps=spent * i, trained_tokens=0, rollout_cpu_s=float(i), reward=reward, long=reward / 2
        )
        for i, reward in enumerate(rewards)
    ]
    return outcome(mode, seed, 40, points, measured)


RISING = [0.5, 0.5, 0.6, 0.7, 0.8, 0.8, 0.8, 0.8, 0.9]


def test_what_sync_reward_costs_by_hand() -> None:
    """Ratios of the same seed's trainings, their geometric mean, and Student's interval over the seeds."""
    settings = DemoSettings(steps=40, seeds=2, evaluate_every=5)
    sync = [result("sync", seed, RISING, 100) for seed in (0, 1)]
    arms = [result("april", 0, RISING, 50), result("april", 1, [r + 0.02 for r in RISING], 20)]
    assert settings.target_step == 20
    # seed 0: the same curve for half; seed 1: 0.7667 is reached between 0.72 (15) and 0.7867 (20)
    second = 0.2 * (15 + 5 * (0.7666667 - 0.72) / 0.0666667) / 20
    versus = against_sync(settings, arms, sync)
    found = versus["decode_steps_to_target"]
    assert found["by_seed"] == pytest.approx([0.5, second], rel=1e-4)
    logs = np.log(found["by_seed"])
    assert found["ratio"] == pytest.approx(np.exp(logs.mean()))
    assert found["high"] == pytest.approx(np.exp(logs.mean() + 12.706 * logs.std(ddof=1) / np.sqrt(2)), rel=1e-3)
    assert (found["n"], found["never"]) == (2, 0)
    end = versus["held_out_reward_difference"]
    assert end["by_seed"] == pytest.approx([0.0, 0.02])
    assert end["high"] == pytest.approx(0.01 + 12.706 * 0.01, rel=1e-3)
    assert versus["held_out_reward_of_long_prompts_difference"]["difference"] == pytest.approx(0.005)
    assert len(versus["held_out_reward_difference_by_quarter"]) == 4
    assert versus["decode_steps_per_step"]["by_seed"] == pytest.approx([0.5, 0.2])
    said = sentence("april", versus, 20)
    assert said.startswith(f"april: sync's held-out reward of step 20 for {found['ratio']:.2f}x (95% ")
    assert "2 seeds) of the rollout (decode steps), in 0.9" in said


def test_what_is_never_reached_or_was_there_at_once_is_said() -> None:
    """A seed that never gets there is in the ratio, as the largest; no figure is infinite; one seed has no interval."""
    settings = DemoSettings(steps=40, seeds=3, evaluate_every=5)
    sync = [result("sync", seed, RISING, 100) for seed in range(3)]
    flat = [0.5] * 9
    some = against_sync(settings, [result("april", s, flat if s == 0 else RISING, 50) for s in range(3)], sync)
    found = some["decode_steps_to_target"]
    assert found["by_seed"] == [None, pytest.approx(0.5), pytest.approx(0.5)]
    assert (found["ratio"], found["never"], found["high"]) == (pytest.approx(0.5), 1, None)
    assert "1 of the seeds never reached it, so this is the median" in sentence("april", some, 20)
    none = against_sync(settings, [result("april", s, flat, 50) for s in range(3)], sync)
    json.dumps([some, none], allow_nan=False)
    assert sentence("april", none, 20) == "april: 3 of 3 seeds never reached sync's held-out reward of step 20"
    alone = against_sync(settings, [result("april", 0, RISING, 50)], sync[:1])
    assert "0.50x (one seed, so no interval)" in sentence("april", alone, 20)
    falling = [result("sync", 0, flat, 100)]
    assert "nothing can be compared" in sentence("april", against_sync(settings, falling, falling), 20)


def test_processes_change_no_result(summary: Said) -> None:
    """Two processes train what one does, to the last digit."""
    settings = replace(SMALL, modes=("sync", "april"))
    lines: list[str] = []
    for mode, arms in trained(settings, lines.append, processes=2).items():
        before = [[itemgetter(*EXACT)(point) for point in curve] for curve in summary[0]["curves"][mode]]
        assert [[attrgetter(*EXACT)(point) for point in arm.evaluations] for arm in arms] == before
        assert [arm.settings.seed for arm in arms] == [0, 1]


def test_a_training_that_fails_is_said_in_a_sentence() -> None:
    """Which one, and why."""

    def broken(settings: Any, model: Any) -> Stage:
        raise AprilError("the server is gone")

    with pytest.raises(AprilError, match=r"sync/0: AprilError: the server is gone"):
        trained(replace(SMALL, seeds=1, modes=("sync",)), lambda line: None, broken)


def test_a_stage_of_ones_own_stays_in_this_process(tmp_path: Path) -> None:
    """So a server is driven: its model has the shape that servers take, its weights are published at every step."""
    published: list[int] = []

    class Served(Stage):
        def publish(self) -> None:
            published.append(self.engine._model.config.head_dim)  # type: ignore[attr-defined]

    settings = replace(SMALL, served="vllm", steps=2, seeds=1, evaluate_every=2, modes=("sync", "april"))
    found = run_demo(settings, tmp_path, lambda line: None, Served, processes=2)
    assert published == [32] * 4
    assert found["all_checks_hold"]
    assert "server" in found["notes"]["engine_count"]


def test_held_out_questions_together_or_apart_are_the_same_questions() -> None:
    """A batch of short and long ones gives what two batches do, but for the draws of drafts: here there is no draft."""
    model, asked = build_model(0), task.questions(task.TAIL)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    together, apart = evaluate_together(model, asked), evaluate(model, asked)
    assert together.keys() == apart.keys() == {"short", "long", "reward"}
    assert together["reward"] == pytest.approx(0.75 * together["short"] + 0.25 * together["long"])
    assert len(asked.short) + len(asked.long) == len({q.prompt.tobytes() for q in (*asked.short, *asked.long)})


def test_the_picture_hides_nothing_and_says_why_slots_were_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """No text lies on the bars; every empty slot has the colour of its cause, and every cause stands in the legend."""
    settings = DemoSettings(groups=2, samples=2, steps=2, seeds=1, evaluate_every=1, modes=MODES)
    arms = {}
    for mode in MODES:
        measured = Measured(
            decode_steps=9, trained_tokens=30, rollout_cpu_s=1.0, lengths=[[3, 4, 4, 4], [5, 5, 5, 0]],
            staleness=[0, 1], occupancy=[4, 4, 3, 2, 1, 4, 4, 4, 1], step_ends=[5, 9], idle=["over_sampling", "bound"],
            group_spread=[0.0],
        )  # fmt: skip
        points = [
            Point(step=i, decode_steps=4 * i, trained_tokens=0, rollout_cpu_s=i / 2, reward=reward, long=0.0)
            for i, reward in ((0, 0.1), (1, 0.2), (2, 0.3))
        ]
        arms[mode] = [outcome(mode, 0, 2, points, measured)]
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda of, path, **options: drawn.append(of))
    figure.draw(settings, arms, {"target_step": 1, "target_reward": 0.2}, Path("none.png"))
    panels = drawn[0].axes
    busy = panels[: len(MODES)]
    for axes in busy:
        assert list(axes.texts) == []
        filled = {matplotlib.colors.to_hex(c.get_facecolor()[0]) for c in axes.collections}
        assert len(filled) == 3
        assert "of the slots empty" in axes.get_title(loc="left")
    (legend,) = (axes.get_legend() for axes in panels if not axes.axison)
    words = [text.get_text() for text in legend.get_texts()]
    assert len(words) == 2
    assert "max_staleness" in words[1] + words[0]
    titles = [axes.get_title() for axes in panels]
    assert len([t for t in titles if "price" in t]) == 1
    beside = {a.get_xlabel(): [[*line.get_xdata()] for line in a.lines[:4]] for a in panels if a.lines}
    assert beside["training steps"] == [[0.0, 1.0, 2.0]] * 4
    assert beside["decode steps (the rollout)"] == [[0.0, 4.0, 8.0]] * 4


def test_why_slots_were_empty() -> None:
    """What kept the most of them empty while the batch was generated; what the trainer did does not count."""
    idle = {f"idle_{cause}": 0.0 for cause in IdleCause}
    assert why_empty(idle) == ""
    assert why_empty(idle | {"idle_trainer": 0.9, "idle_bound": 0.1, "idle_functions": 0.05}) == "bound"


TASK = TASKS["tail"]()


def arm_of(mode: str, seed: int, steps: int, model: Any) -> Arm:
    settings = DemoSettings(groups=2, samples=4, steps=steps, group_quorum=0.75).training(mode, seed)
    arm = Arm(settings, TASK, model)
    # a few held-out questions: a model that was not warmed up writes drafts without end
    arm.task = replace(TASK, short=TASK.short[:2], long=TASK.long[:2], response_cap=60)
    asyncio.run(arm.run())
    return arm


@pytest.mark.parametrize("mode", ["april", "quorum"])
def test_a_wrong_version_stamp_shows_at_once(mode: str) -> None:
    """Recomputed under another version's weights, log-probabilities differ by far more than the bound."""
    arm = arm_of(mode, 0, 2, build_model(3))
    moved = {name: tensor + 0.01 for name, tensor in arm.weights[1].items()}

    assert arm.measured.max_abs_logprob_error < 1e-4
    assert logprob_error(arm.model, arm.delivered, {**arm.weights, 1: moved})[0] > 1e-2


def test_a_quorum_trains_parts_of_groups() -> None:
    """Batches are of N x n responses, groups over several of them; all responses of a group name the same cohort."""
    arm = arm_of("quorum", 0, 3, build_model(3))
    batches = [arm.delivered[first : first + 8] for first in range(0, 24, 8)]
    parts = Counter(group for batch in batches for group in {sample.id.group for sample in batch})
    cohorts = {(sample.id.group, sample.cohort) for sample in arm.delivered}

    assert [len(lengths) for lengths in arm.measured.lengths] == [8, 8, 8]
    assert max(parts.values()) > 1
    assert len(cohorts) == len(parts)
    assert {len(cohort) for _, cohort in cohorts} == {3}


def test_arms_repeat_exactly() -> None:
    """The same seed gives the same batches, decode steps and weights, to the last bit."""

    def fingerprint() -> tuple[Any, ...]:
        torch.set_num_threads(1)
        arm = arm_of("refill", 1, 2, build_model(4))
        m, weights = arm.measured, [tensor.double().sum().item() for tensor in arm.weights[2].values()]
        return m.decode_steps, m.lengths, m.occupancy, [p.reward for p in arm.evaluations], weights

    assert fingerprint() == fingerprint()


# ---------------------------------------------------------------- the task


def response(*parts: list[int]) -> np.ndarray:
    return np.array([token for part in parts for token in part], np.int32)


PROMPT = task.encode_prompt(123)
RIGHT = task.answer_ids(123)
DRAFT = [task.DRAFT_ID, *task.answer_ids(45)[1:-1]]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (response(RIGHT), 1.0),
        (response(DRAFT, RIGHT), 1.0),
        (response(DRAFT, DRAFT, [task.DRAFT_ID, task.PAD_ID], RIGHT), 1.0),
        (response(RIGHT[:-1]), 0.0),
        (response(RIGHT, [task.EOS_ID]), 0.0),
        (response([task.EOS_ID], RIGHT), 0.0),
        (response(RIGHT[:-1], RIGHT), 0.0),
        (response(task.answer_ids(124)), 0.0),
        (response(task.answer_ids(123, 100)), 0.0),
        (response(RIGHT[:4], RIGHT[7:]), 0.0),
        (response(DRAFT), 0.0),
        (response([]), 0.0),
    ],
    ids=[
        "right", "draft then right", "drafts are not judged", "no EOS", "two EOS", "EOS too early", "two answers",
        "other number", "other unit", "a number left out", "draft only", "empty",
    ],
)  # fmt: skip
def test_only_the_exact_answer_earns_the_reward(tokens: np.ndarray, expected: float) -> None:
    """The reward is verifiable: the answer's tokens, exactly, and EOS."""
    assert task.reward(PROMPT, tokens) == expected


def test_answer_counts_down_to_the_round_number() -> None:
    """123 by ten: 122, 121, 120; by hundred: down to 100."""
    digits = [(t - task.DIGITS) % 10 for t in task.answer_ids(123)[4:-1]]
    assert digits == [1, 2, 2, 1, 2, 1, 1, 2, 0]
    assert len(task.answer_ids(123, 100)) == 1 + 3 + 3 * 23 + 1


@pytest.mark.parametrize("unit", [10, 100])
def test_prompts_can_be_read_back(unit: int) -> None:
    """decode_prompt is the inverse of encode_prompt, and refuses anything else."""
    for number in (1, 99, 123, 999):
        assert task.decode_prompt(task.encode_prompt(number, unit)) == (number, unit)
    with pytest.raises(ValueError, match="not a prompt"):
        task.decode_prompt(np.array([0, 1, 2, 3, 4], np.int32))
    with pytest.raises(ValueError, match="cannot ask"):
        task.encode_prompt(120, unit)


def test_prompts_depend_on_seed_and_index_only_and_held_out_ones_are_never_trained() -> None:
    """The same arguments give the same prompt; the two streams share no number."""
    train = [task.prompt_ids(3, i) for i in range(300)]
    held_out = [task.prompt_ids(3, i, held_out=True) for i in range(300)]

    assert np.array_equal(task.prompt_ids(3, 17), train[17])
    assert {task.decode_prompt(p)[0] for p in train}.isdisjoint({task.decode_prompt(p)[0] for p in held_out})
    assert not np.array_equal(np.stack(train), np.stack([task.prompt_ids(4, i) for i in range(300)]))


@pytest.mark.parametrize("sizes", [task.TAIL, task.WIDE], ids=["the demo's", "trl_demo.py's"])
def test_demonstrations_fit_the_cap_and_are_imperfect(sizes: task.Sizes) -> None:
    """They teach the form and leave something to learn: between half and nine tenths earn the reward."""
    pairs = [task.demonstration(0, i, sizes) for i in range(500)]
    rewards = [task.reward(prompt, tokens) for prompt, tokens in pairs]

    assert max(len(tokens) for _, tokens in pairs) <= task.RESPONSE_CAP
    assert all(0 <= tokens.min() <= tokens.max() < task.VOCAB_SIZE for _, tokens in pairs)
    assert 0.5 < np.mean(rewards) < 0.9


def test_lengths_have_a_long_tail() -> None:
    """Longest over median of 64 demonstrations is at least 8 on average."""
    lengths = np.array([len(task.demonstration(1, i)[1]) for i in range(64 * 20)]).reshape(20, 64)
    assert np.mean(lengths.max(axis=1) / np.median(lengths, axis=1)) >= 8
