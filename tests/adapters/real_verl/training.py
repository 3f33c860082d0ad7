"""Real optimizer steps of the unmodified verl with april switched on as a user does, and what was trained in them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tiny_verl import Outcome, train

WITNESS = (
    "trainer.save_freq=1", "trainer.checkpoint_callback_class=verl_on_cpu.witness.Witness",
    "trainer.resume_mode=disable", "april.check=true",
)  # fmt: skip
FP32_LIMIT, BF16_LIMIT = 1e-3, 0.1


def rows_of(outcome: Outcome) -> list[dict[str, Any]]:
    """Everything trained."""
    return [row | {"step": step["step"]} for step in outcome.trained for row in step["rows"]]


def differences(row: dict[str, Any]) -> tuple[float, float]:
    """Largest |trainer - rollout| log-probability of the present version's tokens, and of older ones."""
    present = older = 0.0
    for start, end, version in row["spans"]:
        gap = max(abs(a - b) for a, b in zip(row["old"][start:end], row["rollout"][start:end], strict=True))
        if int(version.split(".")[1]) == row["step"] - 1:
            present = max(present, gap)
        else:
            older = max(older, gap)
    return present, older


def assert_whole(outcome: Outcome) -> None:
    """Every trained response: spans without a gap, each prompt once with all its samples, versions never decrease."""
    rows = rows_of(outcome)
    for row in rows:
        ends = [0, *(end for _, end, _ in row["spans"])]
        assert [start for start, _, _ in row["spans"]] == ends[:-1]
        assert ends[-1] == len(row["response"]) == len(row["rollout"]) == len(row["old"]) <= 160
        assert all(row["mask"])
        steps = [int(version.split(".")[1]) for *_, version in row["spans"]]
        assert steps == sorted(steps)
        assert (row["oldest"], row["newest"]) == (steps[0], steps[-1])
        assert row["step"] - 1 - steps[0] <= 5
    assert set(Counter(row["row"] for row in rows).values()) == {2}


def assert_tokens_balance(outcome: Outcome) -> None:
    """What the replica generated for training is what was trained, held at the end, or dropped by name."""
    generated = sum(len(r["tokens"]) for r in outcome.requests if r["temperature"] > 0)
    trained = sum(len(row["response"]) for row in rows_of(outcome))
    assert generated == trained + outcome.metrics[-1]["april/held_tokens"]
    assert trained == sum(m["april/trained_tokens"] for m in outcome.metrics)


def report(what: str, outcome: Outcome) -> tuple[float, float]:
    """Print what a page may cite; the two differences over all rows."""
    rows = rows_of(outcome)
    gaps = [differences(row) for row in rows]
    present, older = max(g[0] for g in gaps), max(g[1] for g in gaps)
    tokens = sum(len(row["response"]) for row in rows)
    off = sum(
        end - start for row in rows for start, end, v in row["spans"] if int(v.split(".")[1]) < row["step"] - 1
    )
    print(
        f"\n{what}: {len(outcome.metrics)} steps, {len(rows)} responses, {tokens} tokens; "
        f"{sum(r['reason'] == 'aborted' and bool(r['tokens']) for r in outcome.requests)} requests aborted, "
        f"{sum(row['resumes'] > 0 for row in rows)} resumed responses trained; {off / tokens:.0%} older tokens; "
        f"largest difference {present:.2g} (present weights), {older:.2g} (older)"
    )
    return present, older


def test_training_with_april(tmp_path: Path) -> None:
    """Six steps in fp32 with validations: resumed responses trained, log-probabilities agree, all balances."""
    done = train(tmp_path, "trainer.total_training_steps=6", "trainer.test_freq=3", *WITNESS)
    assert done.status == 0, done.log[-4000:]
    assert [m["step"] for m in done.metrics] == [1, 2, 3, 4, 5, 6]
    assert all(m["actor/grad_norm"] > 0 for m in done.metrics)
    assert_whole(done)
    assert_tokens_balance(done)
    present, older = report("fp32", done)
    assert present <= FP32_LIMIT
    assert older > 10 * present, "the weights have not changed, so that the test shows nothing"
    rows = rows_of(done)
    assert any(row["resumes"] > 0 for row in rows)
    assert any(len(row["spans"]) > 1 for row in rows)
    assert any(r["reason"] == "aborted" and r["tokens"] for r in done.requests)
    assert any("val-" in name for name in done.metrics[2])
    assert sum(r["temperature"] == 0 for r in done.requests) == 2 * 4
    assert any(m["rollout_corr/rollout_is_max"] > 1.001 for m in done.metrics)


def test_bfloat16(tmp_path: Path) -> None:
    """verl's default precision in the trainer, fp32 in the replica: the difference is that of bfloat16."""
    default = "++actor_rollout_ref.actor.fsdp_config.mixed_precision=null"
    done = train(tmp_path, "trainer.total_training_steps=4", default, *WITNESS)
    assert done.status == 0, done.log[-4000:]
    assert_whole(done)
    present, _ = report("bf16", done)
    assert present <= BF16_LIMIT


def test_dynamic_sampling(tmp_path: Path) -> None:
    """Groups whose rewards are all equal are not trained, and are replaced; each step has its four groups."""
    done = train(
        tmp_path, "trainer.total_training_steps=4", "algorithm.filter_groups.enable=True",
        "reward.custom_reward_function.name=same_for_every_third", "april.refill=sample", "april.max_in_flight=10",
        *WITNESS,
    )  # fmt: skip
    assert done.status == 0, done.log[-4000:]
    assert_whole(done)
    rows = rows_of(done)
    assert len(rows) == 4 * 4 * 2
    assert all(row["row"] % 3 for row in rows)
    assert sum(m.get("april/dropped_filtered", 0) for m in done.metrics) > 0


def test_wrong_use_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    """Before a worker is started; all sentences are in tests/adapters/test_refusals.py."""
    off = "algorithm.rollout_correction.rollout_is=null"
    done = train(tmp_path, "trainer.total_training_steps=1", off)
    assert done.status != 0
    assert f"ConfigError: {off}: verl recomputes old log-probabilities with the present weights" in done.log
    assert not done.metrics


