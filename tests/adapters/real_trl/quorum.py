"""With a group quorum the unmodified GRPOTrainer trains by the advantages of a slow reference, and nothing is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import short_runs
from checkpoints import MODES, StopAfter

from april.adapters.trl import rollout
from april.adapters.trl.checkpoint import KIND, STATE_FILE
from april.serialization.state_file import unpack

N = short_runs.SAMPLES
SETTINGS = short_runs.SETTINGS | {"group_quorum": 0.75}
REWARD_OF_LENGTH = 0.5


def length(completion_ids: Any, **others: Any) -> list[float]:
    """A second reward."""
    return [len(ids) / short_runs.LONGEST for ids in completion_ids]


def reward_of(tokens: Iterable[int]) -> float:
    """What both functions of the tests say of one response."""
    ids = list(tokens)
    return sum(1 for token in ids if token % 2 == 0) / len(ids) + REWARD_OF_LENGTH * len(ids) / short_runs.LONGEST


def trainer(folder: Path, settings: dict[str, Any] | None = None, **changes: Any) -> Any:
    rollouts = rollout(SETTINGS | (settings or {}), filter=changes.pop("filter", None))
    values = {"reward_funcs": [short_runs.reward, length], "reward_weights": [1.0, REWARD_OF_LENGTH]}
    return short_runs.trainer(folder, rollouts, **(values | changes))


def reference(batches: list[Any], scale: str = "group") -> list[tuple[tuple[int, ...], float]]:
    """(tokens, advantage) of every response, from the tokens and the order in which a group's first k finished."""
    samples = {(s.id.group, s.id.index): s for batch in batches for s in batch.samples}
    assert len(samples) == sum(map(len, batches)), "a response was delivered twice"
    rows = []
    for batch in batches:
        of_batch = np.std([reward_of(s.tokens) for s in batch.samples], ddof=1)
        for s in batch.samples:
            others: list[float] = []
            for index, said in s.cohort:
                sibling = samples.get((s.id.group, index))
                if sibling is not None:  # else it is in no batch yet
                    assert said == pytest.approx(reward_of(sibling.tokens))
                if index != s.id.index and len(others) < len(s.cohort) - 1:
                    others.append(said)
            compared = [reward_of(s.tokens), *others]
            advantage = compared[0] - np.mean(compared)
            divisor = {"group": np.std(compared, ddof=1) + 1e-4, "batch": of_batch + 1e-4, "none": 1.0}[scale]
            rows.append((tuple(s.tokens.tolist()), float(advantage / divisor)))
    return rows


def assert_trained(given: Iterable[tuple[int, tuple[int, ...], float]], expected: list[Any], times: int = 1) -> None:
    """The same responses, each so many times, with the same advantages."""
    trained = sorted(row[1:] for row in given)
    rows = sorted(expected * times)
    assert [tokens for tokens, _ in trained] == [tokens for tokens, _ in rows]
    np.testing.assert_allclose([a for _, a in trained], [a for _, a in rows], rtol=1e-4, atol=2e-5)


def stragglers(batches: list[Any]) -> int:
    return sum(s.id.index not in dict(s.cohort) for batch in batches for s in batch.samples)


LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo", "scale_rewards": "group"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "gspo, scaled by the batch": {
        "loss_type": "grpo", "importance_sampling_level": "sequence", "scale_rewards": "batch",
    },
}  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
def test_responses_are_trained_with_the_advantages_of_a_slow_reference(loss: str, tmp_path: Path) -> None:
    """n = 8, quorum 0.5, two weighted rewards: advantages, log-probabilities, ledgers, logs."""
    made = trainer(tmp_path, {"group_quorum": 0.5}, temperature=0.8, num_generations=8, **LOSSES[loss])
    made.train()

    scale = LOSSES[loss]["scale_rewards"]
    expected = reference(made.batches, scale)
    assert_trained(made.given, expected)
    assert made.state.global_step == len(made.batches) == 12
    assert {len(batch) for batch in made.batches} == {16}
    rows = Counter(s.prompt.data["row"] for batch in made.batches for s in batch.samples)
    assert rows == dict.fromkeys(range(short_runs.ROWS), 8)
    ledger = made.rollout_func.ledger
    assert (ledger["prompts"].delivered, ledger["prompts"].held) == (short_runs.ROWS, 0)
    assert ledger["tokens"].delivered == ledger["tokens"].observed == made.tokens
    split = sum(len(batch.group_sizes) for batch in made.batches) - short_runs.ROWS
    assert stragglers(made.batches) > 0
    assert split > 0
    assert made.resumed > 0
    assert max(made.logprob_errors) <= 1e-3
    table = list(made._logs["advantages"])
    assert table == pytest.approx([advantage for _, advantage in expected[-16:]], rel=1e-4, abs=2e-5)
    logged = [row for row in made.state.log_history if "april/off_policy_share" in row]
    means = [float(batch.rewards.mean()) for batch in made.batches]
    assert [float(row["reward"]) for row in logged] == pytest.approx(means, rel=1e-4)
    assert [float(row["frac_reward_zero_std"]) for row in logged] == [0.0] * 12
    print(
        f"\n{loss}: {stragglers(made.batches)} of {len(expected)} responses after their group's quorum, {split} parts "
        f"of groups in later batches, {made.resumed} resumed; {made.stale_tokens / made.tokens:.0%} of the tokens from "
        f"older weights; log-probabilities differ by at most {max(made.logprob_errors):.1e}"
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_training_that_is_killed_between_a_group_s_parts_goes_on_exactly(mode: str, tmp_path: Path) -> None:
    """Past its checkpoint, from which another goes on: each response once, stragglers by the first k's rewards."""
    saved_at, per_batch = 3, 1 if mode == "aligned" else 4
    saving = {"save_strategy": "steps", "save_steps": 1, **MODES[mode]}
    before = trainer(tmp_path, **saving)
    before.add_callback(StopAfter(saved_at + 2))
    before.train()
    checkpoint = tmp_path / f"checkpoint-{saved_at}"
    state = unpack(KIND, (checkpoint / STATE_FILE).read_bytes(), "the checkpoint")
    core = state["rollouts"]["core"]
    held = {group["id"] for group in (*core["ready"], *core["waiting"])}
    kept = before.batches[: -(-saved_at // per_batch)]
    begun = held & {s.id.group for batch in kept for s in batch.samples}
    assert begun, "no straggler crosses the restart"

    after = trainer(tmp_path, **saving)
    after.train(resume_from_checkpoint=str(checkpoint))

    batches = kept + after.batches
    late = [s for batch in after.batches for s in batch.samples if s.id.group in begun]
    assert any(s.id.index not in dict(s.cohort) for s in late)
    given = [row for row in before.given if row[0] < saved_at] + after.given
    assert_trained(given, reference(batches), times=2 if "middle" in mode else 1)
    rows = Counter(s.prompt.data["row"] for batch in batches for s in batch.samples)
    assert rows == dict.fromkeys(range(short_runs.ROWS), N)
    assert after.rollout_func.ledger["prompts"].delivered == short_runs.ROWS
    assert max(after.logprob_errors) <= 1e-3
    print(f"\n{mode}: {len(begun)} groups of which a part was trained and {len(late)} responses came after the restart")
