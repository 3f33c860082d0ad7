"""A group quorum in the unmodified verl: full batches of single samples, april's estimator, restarts."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import combinations, permutations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from tiny_verl import train
from training import WITNESS, assert_tokens_balance, rows_of

QUORUM = (
    "actor_rollout_ref.rollout.n=4", "algorithm.adv_estimator=april_grpo", "april.group_quorum=0.75",
    "april.on_failed_sample=replace", "data.max_response_length=120",
)  # fmt: skip


def name_of(row: dict[str, Any]) -> str:
    """Of its rollout."""
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
    first = train(tmp_path, "trainer.total_training_steps=6", *QUORUM, *WITNESS)
    assert first.status == 0, first.log[-4000:]
    assert_tokens_balance(first)
    assert all(m["actor/grad_norm"] > 0 for m in first.metrics)
    assert [len(step["rows"]) for step in first.trained] == [16] * 6
    kept = [row for row in rows_of(first) if row["step"] <= 3]
    parts = Counter((row["step"], row["row"]) for row in rows_of(first))
    assert min(parts.values()) < 4

    second = train(
        tmp_path, "trainer.total_training_steps=8", *QUORUM, *WITNESS, "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={tmp_path}/checkpoints/global_step_3",
    )  # fmt: skip
    assert second.status == 0, second.log[-4000:]
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
    name = "reward.custom_reward_function.name=fails_at_first"
    done = train(tmp_path, "trainer.total_training_steps=5", *QUORUM, *WITNESS, name)
    assert done.status == 0, done.log[-4000:]
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
    from april.corrections.advantages import first_others_of
    from april.processes.coordinator.messages import Delivery

    rewards = torch.rand(12, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(12, 5)
    mask[3, 2:] = 0
    scores = torch.zeros(12, 5)
    scores[:, 1] = rewards
    rollouts = [(f"u{i // 4}", i % 4) for i in range(12)]
    cohorts = [tuple((j, float(rewards[4 * (i // 4) + j])) for j in range(4)) for i in range(12)]
    delivery = Delivery(
        batch=0, rollouts=tuple(rollouts), settled=(), metrics={}, masked={}, rewards=rewards.numpy(),
        baseline_rewards=first_others_of([i for _, i in rollouts], cohorts),
    )  # fmt: skip
    keys = [f"{uid}_{i}_0" for uid, i in rollouts]
    for scaled in (True, False):
        found = []
        for estimator, uids in (("grpo", [u for u, _ in rollouts]), ("april_grpo", [k[:-2] for k in keys])):
            advantages.leave(delivery, scaled=scaled)
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
