"""The demo: its task, and end to end in small: four modes, real training, every check."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib.colors
import numpy as np
import pytest
import torch

from april.core.batch import Batch
from april.core.partial_buffer import Idle
from april.demo import figure, task
from april.demo import run as demo_run
from april.demo.arm import MODES, Arm, ArmResult, DemoSettings, logprob_error, why_empty
from april.demo.run import run_demo, table, verdict
from april.demo.summary import against_sync
from april.demo.warmup import build_model

SMALL = DemoSettings(
    groups=2, samples=4, steps=3, seeds=2, held_out=6, held_out_between=4, evaluate_every=2, group_quorum=0.75
)
REQUIRED = {
    "steps", "decode_steps", "rollout_cpu_s", "rollout_wall_s", "train_cpu_s", "trained_tokens", "generated_tokens",
    "reprefill_tokens", "bubble", "off_policy_share", "staleness_mean", "staleness_max", "held_out_reward_start",
    "held_out_reward_end", "max_abs_logprob_error", "ledger", "spread",
}  # fmt: skip


Seen = list[tuple[str, int]]
"""What progress was told: (phase, steps done)."""


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, Seen]:
    """One small demo, warmed up for a few steps only: its rewards mean nothing, its books must balance."""
    out = tmp_path_factory.mktemp("demo")
    seen: Seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_run, "warm_up", lambda seed, progress, for_servers: build_model(seed))
        return run_demo(SMALL, out, lambda what, total: lambda done, figures: seen.append((what, done))), out, seen


def test_summary_has_every_figure_of_every_mode(summary: tuple[dict[str, Any], Path, Seen]) -> None:
    """summary.json is what the run returned, with all figures under modes."""
    found, out, _ = summary
    written = json.loads((out / "summary.json").read_text("utf-8"))

    assert written == json.loads(json.dumps(found))
    assert set(written["modes"]) == set(MODES)
    for figures in written["modes"].values():
        assert set(figures) >= REQUIRED
        assert set(figures["ledger"]) == {"observed", "delivered", "held", "dropped"}
        assert figures["steps"] == SMALL.steps
    assert (out / "demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_every_check_holds(summary: tuple[dict[str, Any], Path, Seen]) -> None:
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


def test_progress_and_words_for_people(summary: tuple[dict[str, Any], Path, Seen]) -> None:
    """Every step of every arm is reported; the table has a column per mode; a broken check is shouted."""
    found, _, seen = summary
    assert [done for what, done in seen if what == "seed 1: refill"] == [1, 2, 3]
    assert [c.header for c in table(found).columns] == ["", *MODES]
    assert not any("BROKEN" in line for line in verdict(found))
    assert any("over 2 seeds" in line and "per training step; per trained token" in line for line in verdict(found))
    alone = json.loads(json.dumps(found))
    alone["against_sync"]["april"]["held_out_reward_difference_standard_error"] = None
    assert any("(one seed, so no standard error)" in line for line in verdict(alone))
    broken = json.loads(json.dumps(found))
    broken["checks"]["april"]["tokens_balance"]["holds"] = False
    assert any("BROKEN: april: tokens_balance" in line for line in verdict(broken))


def test_cpu_time_is_a_gain_only_if_every_seed_has_one(summary: tuple[dict[str, Any], Path, Seen]) -> None:
    """On a loaded machine one lucky seed is none; the price is named in the same sentence."""
    found = json.loads(json.dumps(summary[0]))
    for by_seed, gain in (([0.7, 0.8], True), ([0.7, 1.01], False), ([0.97, 0.99], False)):
        found["against_sync"]["refill"]["rollout_cpu_s_per_trained_token_by_seed"] = by_seed
        (line,) = (line for line in verdict(found) if line.startswith("refill against sync"))
        assert ("no gain" in line) is not gain
        assert f"{found['modes']['refill']['off_policy_share']:.0%} of the trained tokens are of older weights" in line
    ratios = summary[0]["against_sync"]["refill"]["rollout_cpu_s_per_trained_token_by_seed"]
    assert len(ratios) == SMALL.seeds


def test_the_error_of_a_difference_is_that_over_seeds() -> None:
    """Prompts of one seed share its training, so more of them make nothing surer; with one seed nothing is known."""
    differences, prompts = [0.02, -0.01, 0.05], 1000
    arms, sync = (
        [ArmResult(mode=mode, seed=seed, slots=4, held_out=np.full(prompts, size)) for seed, size in enumerate(sizes)]
        for mode, sizes in (("april", differences), ("sync", [0.0] * 3))
    )
    for arm in (*arms, *sync):
        arm.trained_tokens, arm.rollout_cpu_s = 10, 1.0
    figures = {"decode_steps_per_trained_token": 1.0, "rollout_cpu_s_per_trained_token": 1.0, "rollout_wall_s": 1.0}
    figures |= {"decode_steps_per_step": 1.0}
    versus = against_sync(figures, figures, arms, sync)
    assert versus["held_out_reward_difference"] == pytest.approx(0.02)
    assert versus["held_out_reward_difference_standard_error"] == pytest.approx(0.03 / np.sqrt(3))
    assert versus["held_out_reward_difference_by_seed"] == pytest.approx(differences)
    assert against_sync(figures, figures, arms[:1], sync[:1])["held_out_reward_difference_standard_error"] is None


def test_the_picture_hides_nothing_and_says_why_slots_were_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """No text lies on the bars; every empty slot has the colour of its cause, and every cause stands in the legend."""
    settings = DemoSettings(groups=2, samples=2, steps=2, seeds=1)
    arms = {}
    for mode in MODES:
        arm = ArmResult(mode=mode, seed=0, slots=4, steps=2, decode_steps=9, trained_tokens=30)
        arm.rollout_cpu_s = 1.0
        arm.lengths, arm.staleness = [[3, 4, 4, 4], [5, 5, 5, 0]], [0, 1]
        arm.occupancy, arm.step_ends = [4, 4, 3, 2, 1, 4, 4, 4, 1], [5, 9]
        arm.idle, arm.curve = ["over_sampling", "bound"], [(0, 0.0, 0.1), (2, 1.0, 0.3)]
        arms[mode] = [arm]
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda of, path, **options: drawn.append(of))
    figure.draw(settings, arms, {}, Path("none.png"))
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


def test_why_slots_were_empty() -> None:
    """What kept the most of them empty while the batch was generated; what the trainer did does not count."""
    idle = {f"idle_{cause}": 0.0 for cause in Idle}
    assert why_empty(idle) == ""
    assert why_empty(idle | {"idle_trainer": 0.9, "idle_bound": 0.1, "idle_functions": 0.05}) == "bound"


@pytest.mark.parametrize("mode", ["april", "quorum"])
def test_a_wrong_version_stamp_shows_at_once(mode: str) -> None:
    """Recomputed under another version's weights, log-probabilities differ by far more than the bound."""
    arm = Arm(DemoSettings(groups=2, samples=4, steps=2, held_out=4, group_quorum=0.75), mode, 0, build_model(3))
    result = arm.run(np.zeros(4), lambda step, figures: None)
    moved = {name: tensor + 0.01 for name, tensor in arm.weights[1].items()}

    assert result.max_abs_logprob_error < 1e-4
    assert logprob_error(arm.model, arm.delivered, {**arm.weights, 1: moved})[0] > 1e-2


def test_a_quorum_trains_parts_of_groups() -> None:
    """Batches are of N x n responses, groups over several of them; all responses of a group name the same cohort."""
    batches: list[Batch] = []

    class Noting(Arm):
        def _note(self, batch: Batch) -> None:
            batches.append(batch)
            super()._note(batch)

    settings = DemoSettings(groups=2, samples=4, steps=3, held_out=4, group_quorum=0.75)
    arm = Noting(settings, "quorum", 0, build_model(3))
    arm.run(np.zeros(4), lambda step, figures: None)
    parts = Counter(group for batch in batches for group in set(batch.group_ids.tolist()))
    cohorts = {(sample.id.group, sample.cohort) for sample in arm.delivered}

    assert [len(batch) for batch in batches] == [8, 8, 8]
    assert max(parts.values()) > 1
    assert len(cohorts) == len(parts)
    assert {len(cohort) for _, cohort in cohorts} == {3}


def test_arms_repeat_exactly() -> None:
    """The same seed gives the same batches, decode steps and weights, to the last bit."""

    def fingerprint() -> tuple[Any, ...]:
        torch.set_num_threads(1)
        arm = Arm(DemoSettings(groups=2, samples=4, steps=2, held_out=4), "refill", 1, build_model(4))
        r = arm.run(np.zeros(4), lambda step, figures: None)
        weights = [tensor.double().sum().item() for tensor in arm.weights[2].values()]
        return r.decode_steps, r.lengths, r.occupancy, r.held_out.tolist(), weights

    assert fingerprint() == fingerprint()


# ---------------------------------------------------------------- the task


def response(*parts: list[int]) -> np.ndarray:
    """Parts of a response as one array."""
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


def test_demonstrations_fit_the_cap_and_are_imperfect() -> None:
    """They teach the form and leave something to learn: between half and nine tenths earn the reward."""
    pairs = [task.demonstration(0, i) for i in range(500)]
    rewards = [task.reward(prompt, tokens) for prompt, tokens in pairs]

    assert max(len(tokens) for _, tokens in pairs) <= task.RESPONSE_CAP
    assert all(0 <= tokens.min() <= tokens.max() < task.VOCAB_SIZE for _, tokens in pairs)
    assert 0.5 < np.mean(rewards) < 0.9


def test_lengths_have_a_long_tail() -> None:
    """Longest over median of 64 demonstrations is at least 8 on average."""
    lengths = np.array([len(task.demonstration(1, i)[1]) for i in range(64 * 20)]).reshape(20, 64)
    assert np.mean(lengths.max(axis=1) / np.median(lengths, axis=1)) >= 8
