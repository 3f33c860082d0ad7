"""slime with a group quorum, and samples that fail for good: full batches of right advantages, every sample once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_schedulers import assert_nothing_is_left, engine

from adapters.slime_stand_in import DataSource, Sample, installed, namespace
from adapters.test_slime_checkpoints import Process
from adapters.test_slime_rollouts import Run
from april.adapters.slime import make_generate_rollout, post_process_rewards
from april.errors import RolloutError

USER = "adapters.slime_functions_of_a_user"
N, SIZE = 3, 6
HOOKED: dict[str, Any] = {
    "n_samples_per_prompt": SIZE, "custom_reward_post_process_path": "april.adapters.slime.post_process_rewards",
}  # fmt: skip
QUORUM: dict[str, Any] = {**HOOKED, "april": {"group_quorum": 0.5}}


@pytest.fixture(autouse=True)
def framework(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("april.config.settings.RETRY_PAUSE_S", 0.0)
    with installed():
        yield
    assert_nothing_is_left()


def watched(run: Any) -> list[Any]:
    """Batches of april, from its second on, as they are delivered."""
    scheduler, batches = run.scheduler, []

    def next_batch() -> Any:
        batches.append(scheduler_next())
        return batches[-1]

    scheduler_next, scheduler.next_batch = scheduler.next_batch, next_batch
    return batches


def by_hand(delivered: Any, *, scaled: bool) -> float:
    """From the first k - 1 other finishers, in plain Python."""
    k = len(delivered.cohort)
    others = [reward for index, reward in delivered.cohort if index != delivered.id.index][: k - 1]
    centred = (k - 1) / k * (delivered.reward - sum(others) / len(others))
    return centred / (float(np.std([delivered.reward, *others], ddof=1)) + 1e-6) if scaled else centred


@pytest.mark.parametrize(("estimator", "std", "scaled"), [
    ("grpo", True, True), ("gspo", False, False), ("reinforce_plus_plus_baseline", True, False),
])  # fmt: skip
def test_batches_are_full_and_their_advantages_are_of_the_first_finishers(
    estimator: str, std: bool, scaled: bool
) -> None:
    """N * n samples in parts of groups; each sample once; its baseline is that of the first k - 1 other finishers."""
    with Run(**QUORUM, advantage_estimator=estimator, grpo_std_normalization=std) as run:
        groups = run(0)
        batches = watched(run)
        seen = Counter(s.index for g in groups for s in g)
        late = parts = 0
        for rollout_id in range(1, 12):
            groups = run(rollout_id)
            samples = [s for g in groups for s in g]
            assert len(samples) == N * SIZE
            assert all(len({s.group_index for s in g}) == 1 for g in groups)
            parts += any(len(g) < SIZE for g in groups)
            seen.update(s.index for s in samples)
            raw, advantages = post_process_rewards(run.args, samples)
            assert raw == [s.response_length for s in samples]
            delivered = {(d.id.group, d.id.index): d for d in batches[-1].samples}
            for s, advantage in zip(samples, advantages, strict=True):
                d = delivered[s.group_index, s.index % SIZE]
                late += s.index % SIZE not in [index for index, _ in d.cohort]
                assert advantage == pytest.approx(by_hand(d, scaled=scaled), rel=1e-4, abs=1e-4)
        assert set(seen.values()) == {1}
        books = run.scheduler.ledger()
        run.scheduler.validate()
        assert len(run.data.drawn) == books["prompts"].observed == books["prompts"].delivered + books["prompts"].held
        assert late
        assert parts


@pytest.mark.parametrize("flags", [
    {}, {"grpo_std_normalization": False}, {"advantage_estimator": "reinforce_plus_plus_baseline"},
    {"rewards_normalization": False}, {"advantage_estimator": "ppo"},
], ids=str)  # fmt: skip
def test_without_a_quorum_the_hook_gives_what_slime_makes_of_rewards(flags: dict[str, Any]) -> None:
    """slime's own normalisation over n neighbours, written down a second time."""
    with Run(**HOOKED, **flags) as run:
        samples = [s for g in run(0) for s in g]
    raw, advantages = post_process_rewards(run.args, samples)
    expected = np.array(raw)
    if not {"rewards_normalization", "advantage_estimator"} & set(flags) or "reinforce" in str(flags):
        rows = expected.reshape(-1, SIZE)
        rows = rows - rows.mean(1, keepdims=True)
        expected = (rows if flags else rows / (rows.std(1, ddof=1, keepdims=True) + 1e-6)).ravel()
    assert np.ptp(advantages)
    np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=1e-4)


def test_samples_of_somebody_else_are_refused() -> None:
    """The hook without april's rollout function."""
    with pytest.raises(RolloutError, match="goes with --rollout-function-path april"):
        post_process_rewards(namespace(), [Sample(0, 0, "p1", reward=1.0)])


@pytest.mark.parametrize("flags", [{}, {"custom_generate_function_path": f"{USER}.generate"}], ids=["april", "slime"])
@pytest.mark.parametrize("settings", [
    {"on_failed_sample": "replace"},
    {"on_failed_sample": "replace", "group_quorum": 0.5},
    {"on_failed_sample": "shrink", "group_quorum": 0.5},
], ids=str)  # fmt: skip
def test_a_sample_that_fails_for_good_costs_a_sample(settings: dict[str, Any], flags: dict[str, Any]) -> None:
    """Batches stay full, no group is dropped; one that takes another's place has an index of its own."""
    flags = {**HOOKED, **flags, "custom_rm_path": f"{USER}.fails_for_one", "april": settings}
    with Run(**flags) as run:
        seen: Counter[int] = Counter()
        for rollout_id in range(8):
            samples = [s for g in run(rollout_id) for s in g]
            assert len(samples) == N * SIZE
            seen.update(s.index for s in samples)
            assert len(post_process_rewards(run.args, samples)[1]) == N * SIZE
        books = run.scheduler.ledger()["prompts"]
        run.scheduler.validate()
        assert set(seen.values()) == {1}
        assert not sum(books.dropped.values())
        failing = {s for s in range(len(run.data.drawn) * SIZE) if s % SIZE == 1 and s // SIZE % 3 == 0}
        assert not failing & set(seen)
        replaced = {-1 - s for s in seen if s < 0}
        assert bool(replaced) == (settings["on_failed_sample"] == "replace")
        assert all(s // SIZE % 3 == 0 for s in replaced)


def test_nothing_of_a_rejected_group_is_kept() -> None:
    """--dynamic-sampling-filter-path sees the first k; what else was scored of a group goes two batches later."""
    with Run(**QUORUM, dynamic_sampling_filter_path=f"{USER}.keep_short") as run:
        seen: list[set[int]] = []
        for rollout_id in range(8):
            samples = [s for g in run(rollout_id) for s in g]
            assert len(samples) == N * SIZE
            kept = {sample_id.group for sample_id in list(run.hooks.held)}
            seen.append(kept - run.scheduler.held_groups())
        assert any(seen)
        assert not any(first & third for first, third in zip(seen, seen[2:], strict=False))


@pytest.mark.parametrize("settings", [
    {"group_quorum": 0.5}, {"group_quorum": 0.5, "on_failed_sample": "replace"},
], ids=str)  # fmt: skip
def test_a_run_that_goes_on_trains_every_sample_once(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Three processes, each ended two rollouts after its checkpoint: no sample is lost or trained twice."""
    flags = {**HOOKED, "april": settings, "custom_rm_path": f"{USER}.fails_for_one"} if len(settings) > 1 else {
        **HOOKED, "april": settings}  # fmt: skip
    trained: Counter[int] = Counter()
    lost: dict[int, float] = {}
    start = 0
    for _ in range(4):
        process = Process(tmp_path, start, **flags)
        fixed: set[int] = set()
        for rollout_id in range(start, start + 6):
            samples = [s for g in process(rollout_id) for s in g]
            assert len(samples) == N * SIZE
            given = dict(zip([s.index for s in samples], post_process_rewards(process.args, samples)[1], strict=True))
            for index in given.keys() & lost.keys():
                assert given[index] == lost[index]
            if rollout_id < start + 4:
                trained.update(list(given))
                fixed |= {s.group_index for s in samples}
            else:  # comes again, and of these groups with the same first finishers
                lost |= {s.index: given[s.index] for s in samples if s.group_index in fixed}
            if rollout_id == start + 3:
                process.data.save(rollout_id)
        start += 4
        process.end()
    assert set(trained.values()) == {1}
    assert len(trained) == 16 * N * SIZE


def test_a_quorum_needs_no_hook_where_rewards_go_as_they_are() -> None:
    """--disable-rewards-normalization, PPO, REINFORCE++: no group is looked at."""
    args = namespace(n_samples_per_prompt=SIZE, april={"group_quorum": 0.5}, advantage_estimator="reinforce_plus_plus")
    function = make_generate_rollout([engine()], check=True)
    groups = function(args, 0, DataSource(args)).samples
    function.function.close()
    assert "advantage" not in groups[0][0].metadata["april"]
    assert sum(map(len, groups)) == N * SIZE
