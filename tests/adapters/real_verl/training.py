"""Real optimizer steps of the unmodified verl with april switched on as a user does, restarts and quorums too."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import combinations, permutations
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import torch
from tiny_verl import Outcome, train

WITNESS = (
    "trainer.save_freq=1", "trainer.checkpoint_callback_class=verl_on_cpu.witness.Witness",
    "trainer.resume_mode=disable", "april.check=true",
)  # fmt: skip
FP32_LIMIT, BF16_LIMIT = 1e-3, 0.1


def witnessed(directory: Path, steps: int, *words: str) -> Outcome:
    """A run of verl to this step, which has ended well and is witnessed."""
    done = train(directory, f"trainer.total_training_steps={steps}", *WITNESS, *words)
    assert done.status == 0, done.log[-4000:]
    return done


def resumed(directory: Path, steps: int, *words: str) -> Outcome:
    """A run to this step that goes on from the third step's checkpoint."""
    folder = directory / "checkpoints" / "global_step_3"
    words = (*words, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}")
    return witnessed(directory, steps, *words)


def rows_of(outcome: Outcome) -> list[dict[str, Any]]:
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
    done = witnessed(tmp_path, 6, "trainer.test_freq=3")
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
    done = witnessed(tmp_path, 4, "++actor_rollout_ref.actor.fsdp_config.mixed_precision=null")
    assert_whole(done)
    present, _ = report("bf16", done)
    assert present <= BF16_LIMIT


def test_dynamic_sampling(tmp_path: Path) -> None:
    """Groups whose rewards are all equal are not trained, and are replaced; each step has its four groups."""
    done = witnessed(
        tmp_path, 4, "algorithm.filter_groups.enable=True", "april.refill=sample", "april.max_in_flight=10",
        "reward.custom_reward_function.name=same_for_every_third",
    )  # fmt: skip
    assert_whole(done)
    rows = rows_of(done)
    assert len(rows) == 4 * 4 * 2
    assert all(row["row"] % 3 for row in rows)
    assert sum(m.get("april/dropped_filtered", 0) for m in done.metrics) > 0


# ---------------------------------------------------------------- checkpoints


def test_a_restart_from_the_middle(tmp_path: Path) -> None:
    """Five steps, then a process that goes on from the third one's checkpoint: the fourth and fifth never were."""
    first = witnessed(tmp_path, 5)
    before = [row for row in rows_of(first) if row["step"] <= 3]
    held = first.metrics[2]["april/held_tokens"]
    state = tmp_path / "checkpoints" / "global_step_3" / "april_state.msgpack"
    assert state.stat().st_mode & 0o777 == 0o600

    second = resumed(tmp_path, 7)
    assert [m["step"] for m in second.metrics] == [4, 5, 6, 7]
    assert_whole(second)
    after = rows_of(second)
    report("after the restart", second)

    # each prompt once, with both its samples, in the history that the checkpoint kept
    assert set(Counter(row["row"] for row in [*before, *after]).values()) == {2}
    assert len({row["row"] for row in [*before, *after]}) == 7 * 4
    # no prompt was passed over: those between are trained, or held
    seen = {row["row"] for row in [*before, *after]}
    assert len([row for row in range(max(seen)) if row not in seen]) <= 8
    # tokens from before the restart are trained after it, and were not generated again
    old = sum(end - start for row in after for start, end, version in row["spans"] if version.startswith("0."))
    assert old > 0
    generated = sum(len(r["tokens"]) for r in second.requests)
    trained = sum(len(row["response"]) for row in after)
    assert held + generated == trained + second.metrics[-1]["april/held_tokens"]
    # a response that spans the restart goes on with the tokens it had
    spanning = [row for row in after if len({version[0] for *_, version in row["spans"]}) == 2]
    assert spanning
    for row in spanning:
        cut = max(end for _, end, version in row["spans"] if version.startswith("0."))
        asked = [*row["prompt"], *row["response"][:cut]]
        assert any(request["ids"] == asked for request in second.requests)


# ---------------------------------------------------------------- a quorum


QUORUM = (
    "actor_rollout_ref.rollout.n=4", "algorithm.adv_estimator=april_grpo", "april.group_quorum=0.75",
    "april.on_failed_sample=replace", "data.max_response_length=120",
)  # fmt: skip


def name_of(row: dict[str, Any]) -> str:
    return str(row["key"].rpartition("_")[0])


def error_of(rewards: list[float], advantages: list[float], first: tuple[int, ...]) -> float:
    """Largest difference to advantages against the first two others of ``first``, three finishers in their order."""
    worst = 0.0
    for i, (reward, advantage) in enumerate(zip(rewards, advantages, strict=True)):
        others = [rewards[j] for j in first if j != i][:2]
        spread = stdev([reward, *others])
        worst = max(worst, abs(2 / 3 * (reward - fmean(others)) / (spread + 1e-6) - advantage))
    return worst


def test_training_and_a_restart_with_a_quorum(tmp_path: Path) -> None:
    """Each step 16 samples; none twice, over a restart too; advantages are those of some first three of each group."""
    first = witnessed(tmp_path, 6, *QUORUM)
    assert_tokens_balance(first)
    assert all(m["actor/grad_norm"] > 0 for m in first.metrics)
    assert [len(step["rows"]) for step in first.trained] == [16] * 6
    kept = [row for row in rows_of(first) if row["step"] <= 3]
    parts = Counter((row["step"], row["row"]) for row in rows_of(first))
    assert min(parts.values()) < 4

    second = resumed(tmp_path, 8, *QUORUM)
    assert [len(step["rows"]) for step in second.trained] == [16] * 5
    history = [*kept, *rows_of(second)]
    assert max(Counter(map(name_of, history)).values()) == 1

    groups: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in history:
        groups[row["row"]].append(row)
        assert len(set(row["advantages"])) == 1
    whole = [rows for rows in groups.values() if len(rows) == 4]
    assert len(whole) >= 8
    late = 0
    for rows in whole:
        rewards, advantages = [r["reward"] for r in rows], [r["advantages"][0] for r in rows]
        if len(set(rewards)) < 4:
            continue
        orders = [order for three in combinations(range(4), 3) for order in permutations(three)]
        assert min(error_of(rewards, advantages, order) for order in orders) < 1e-3
        late += len({row["step"] for row in rows}) > 1
    assert late
    print(f"\nquorum: {len(history)} samples, {len(whole)} whole groups, {late} of them over several steps")


def test_samples_that_fail_for_good_are_replaced(tmp_path: Path) -> None:
    """Full batches, no prompt dropped, no sample twice; only tokens of samples that failed are not trained or held."""
    done = witnessed(tmp_path, 5, *QUORUM, "reward.custom_reward_function.name=fails_at_first")
    assert [len(step["rows"]) for step in done.trained] == [16] * 5
    assert max(Counter(map(name_of, rows_of(done))).values()) == 1
    assert sum(m["april/replaced_samples"] for m in done.metrics) > 0
    assert sum(m["april/groups_dropped_failed"] for m in done.metrics) == 0
    generated = sum(len(r["tokens"]) for r in done.requests if r["temperature"] > 0)
    trained = sum(len(row["response"]) for row in rows_of(done))
    dropped = generated - trained - done.metrics[-1]["april/held_tokens"]
    failed = sum(m["april/failed_samples"] for m in done.metrics)
    replaced = sum(m["april/replaced_samples"] for m in done.metrics)
    assert 0 < dropped <= failed * 120
    assert 3 * replaced <= failed
    print(f"\n{failed:.0f} failures, {replaced:.0f} samples replaced, {dropped:.0f} of {generated} tokens dropped")


def test_without_a_quorum_the_estimator_is_verls_grpo() -> None:
    """On whole groups, by verl's own functions: scaled and centred only."""
    import numpy as np
    from verl import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    from april.adapters.verl import advantages
    from april.corrections.advantages import first_others_of, group_advantages

    rewards = torch.rand(12, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(12, 5)
    mask[3, 2:] = 0
    scores = torch.zeros(12, 5)
    scores[:, 1] = rewards
    rollouts = [(f"u{i // 4}", i % 4) for i in range(12)]
    cohorts = [tuple((j, float(rewards[4 * (i // 4) + j])) for j in range(4)) for i in range(12)]
    baseline_rewards = first_others_of([i for _, i in rollouts], cohorts)

    def advantages_of_batch(method: Any, ddof: int) -> Any:
        return group_advantages(rewards.numpy(), baseline_rewards, method, ddof=ddof)

    delivery: Any = SimpleNamespace(rollouts=rollouts, batch=SimpleNamespace(advantages=advantages_of_batch))
    keys = [f"{uid}_{i}_0" for uid, i in rollouts]
    for scaled in (True, False):
        found = []
        for estimator, uids in (("grpo", [u for u, _ in rollouts]), ("april_grpo", [k[:-2] for k in keys])):
            advantages.store_advantages(delivery, scaled=scaled)
            data = DataProto.from_dict(
                {"token_level_rewards": scores.clone(), "response_mask": mask},
                non_tensors={"uid": np.array(uids, dtype=object)},
            )
            made = compute_advantage_for_multi_trajectories(
                data, keys, adv_estimator=estimator, norm_adv_by_std_in_grpo=scaled, config={}
            )
            found.append(made.batch["advantages"])
        assert found[0].abs().max() > 0.1
        torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-4)


