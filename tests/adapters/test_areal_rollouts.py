"""april in AReaL's trainer, on a stand-in: batches, exact versions, conservation, filters, failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters import stand_in_areal as areal
from april.errors import ConfigError, RolloutError

Make = Callable[..., Any]


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Make]:
    """A trainer of the adapter and its server; every third row's first request goes on until it is ended."""
    made = []

    def make(
        april: dict[str, Any] | None = None, *,
        held: Callable[[int, int], bool] = lambda row, so_far: row % 3 == so_far == 0, rows: int = areal.ROWS,
        **changes: Any,
    ) -> Any:  # fmt: skip
        while made:  # there is one trainer at a time
            made.pop().close()
        stats = areal.install(monkeypatch)
        from april.adapters.areal import PPOTrainer

        areal.SERVER[:] = [areal.Server(lambda row: 4 + row % 5, held)]
        config = areal.config(tmp_path, **changes)
        one = PPOTrainer(config, areal.rows(rows), april={"check": True, **(april or {})})
        one.stats, one.workflow, one.server = stats, areal.Workflow(config), areal.SERVER[-1]
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


def trained_rows(trainer: Any) -> list[int]:
    """Of all batches, in order."""
    return [int(group["input_ids"][0][1]) for batch in trainer.trained for group in batch]


def mislabelled(trainer: Any) -> tuple[int, int]:
    """Trained tokens whose version is not that of the weights named by their log-probability; and all of them."""
    wrong = tokens = 0
    for batch in trainer.trained:
        for group in batch:
            mask = group["loss_mask"].bool()
            wrote = ((-group["logprobs"][mask] - 1.0) * 1000).round().int()
            wrong += int((wrote != group["versions"][mask]).sum())
            tokens += int(mask.sum())
    return wrong, tokens


@pytest.mark.parametrize("generation", ["continuous", "stepwise"])
def test_batches_are_whole_and_every_token_has_its_version(trainer: Make, generation: str) -> None:
    """Each group once, with all its samples, whole; resumed responses name several weights, each token its own."""
    run = trainer({"generation": generation})
    run.train(run.workflow, 6)
    seen = trained_rows(run)
    assert len(seen) == len(set(seen)) == 6 * areal.GROUPS
    for group in (g for batch in run.trained for g in batch):
        row = int(group["input_ids"][0][1])
        assert group["loss_mask"].sum(1).tolist() == [4 + row % 5] * areal.SAMPLES
        assert group["rewards"].tolist() == [float(row)] * areal.SAMPLES
        assert group["versions"][:, :2].unique().tolist() == [-1]
    wrong, tokens = mislabelled(run)
    assert not wrong
    assert tokens
    assert any(len(g["versions"][g["loss_mask"].bool()].unique()) > 1 for batch in run.trained for g in batch)
    run.rollout.pause()
    ledgers = run._april.rollouts.ask("ledgers")
    assert ledgers["tokens"]["delivered"] == tokens
    assert ledgers["tokens"]["observed"] == run.server.made == tokens + ledgers["tokens"]["held"]
    assert not ledgers["tokens"]["dropped"]
    assert run.stats["april/off_policy_share"][-1] >= 0


def test_continuous_generation_goes_on_while_the_trainer_trains(trainer: Make) -> None:
    """A batch ends nothing, places are filled without anybody asking, and only the weight update ends what runs."""
    run = trainer(held=lambda row, so_far: row >= areal.GROUPS, rollout__max_concurrent_rollouts=6)
    seen: list[int] = []

    def while_training() -> None:
        run.server.until_live(6 * areal.SAMPLES)
        seen.extend((run.server.ended, run._april.rollouts.ask("ledgers")["prompts"]["observed"]))

    run.train(run.workflow, 1, while_training=while_training)
    assert seen == [0, areal.GROUPS + 6]
    assert run.server.ended >= 6 * areal.SAMPLES
    assert torch.equal(run.trained[0][0]["versions"].unique(), torch.tensor([-1, 0]))


def test_an_episode_that_fails_is_tried_again_and_then_dropped_by_name(trainer: Make) -> None:
    """One failure costs nothing but its tokens; a prompt that always fails is replaced, and everybody hears why."""
    run = trainer()
    run.workflow.fails = {1: [ValueError("once")], 4: [ValueError("always")] * 99}
    run.train(run.workflow, 4)
    seen = trained_rows(run)
    assert 1 in seen
    assert 4 not in seen
    assert len(seen) == len(set(seen)) == 4 * areal.GROUPS
    assert run.stats["april/dropped_failed"] == [1.0]


def test_an_episode_that_fails_for_good_may_cost_itself_alone(trainer: Make) -> None:
    """on_failed_sample: replace. Its group is trained whole, with a fresh episode in its place."""
    run = trainer({"on_failed_sample": "replace"})
    run.workflow.fails = {4: [ValueError("not readable")] * 5}  # of two samples; three tries give one up
    run.train(run.workflow, 4)
    rollouts = run._april.rollouts
    assert rollouts._coordinator.core.counters["replaced_samples"] == 1
    assert rollouts.ask("ledgers")["prompts"]["dropped"] == {}
    seen = trained_rows(run)
    assert 4 in seen
    assert len(seen) == len(set(seen)) == 4 * areal.GROUPS
    assert {len(group["input_ids"]) for batch in run.trained for group in batch} == {areal.SAMPLES}


def test_samples_that_a_workflow_rejects_are_left_out(trainer: Make) -> None:
    """As in AReaL: None shrinks a group, and a group of nothing else is rejected and replaced."""
    run = trainer()
    run.workflow.fails = {1: [None], 2: [None] * 99}
    run.train(run.workflow, 3)
    assert 2 not in trained_rows(run)
    sizes = {int(g["input_ids"][0][1]): len(g["input_ids"]) for batch in run.trained for g in batch}
    assert sizes.pop(1) == areal.SAMPLES - 1
    assert set(sizes.values()) == {areal.SAMPLES}
    assert run._april.rollouts.ask("ledgers")["prompts"]["dropped"]["filtered"] >= 1


def test_the_filter_of_train_is_asked_for_whole_groups(trainer: Make) -> None:
    """It gets joined trajectories, its verdicts are counted as AReaL counts them, and batches stay whole."""
    run = trainer()
    asked = []

    def accept(trajectory: dict[str, Any]) -> bool:
        asked.append(len(trajectory["rewards"]))
        return bool(trajectory["rewards"][0] % 4 != 3)

    run.train(run.workflow, 4, accept)
    seen = trained_rows(run)
    assert len(seen) == 4 * areal.GROUPS
    assert not any(row % 4 == 3 for row in seen)
    assert set(asked) == {areal.SAMPLES}
    assert len(run.stats["accepted"]) + len(run.stats["rejected"]) == len(asked)


def test_a_server_that_breaks_off_costs_nothing(trainer: Make) -> None:
    """The request is sent again; what it said is short, without the prompt that AReaL's error repeats."""
    run = trainer()
    run.server.fails = [OSError("gone")]
    run.train(run.workflow, 2)
    assert len(trained_rows(run)) == 2 * areal.GROUPS
    assert not run._april.rollouts.ask("ledgers")["tokens"]["dropped"]


def test_prompts_that_never_work_end_the_run_with_their_own_words(trainer: Make) -> None:
    """After eight in a row."""
    run = trainer()
    run.workflow.fails = {row: [ValueError("no such column")] * 99 for row in range(areal.ROWS)}
    with pytest.raises(RolloutError, match="ValueError: no such column"):
        run.train(run.workflow, 1)


def test_a_data_set_smaller_than_a_batch_is_told(trainer: Make) -> None:
    """Instead of a search for prompts that never ends; found beside the trainer, and told to it."""
    run = trainer(rows=0)
    with pytest.raises(RolloutError, match="gives no batch"):
        run.train(run.workflow, 1)
    with pytest.raises(RolloutError, match="gives no batch"):
        run.train(run.workflow, 1)


def test_evaluations_and_dynamic_batches_are_not_aprils(trainer: Make) -> None:
    """The evaluation's engine keeps AReaL's executor; a batch of varying size is refused."""
    run = trainer()
    assert type(run.eval_rollout._engine.workflow_executor) is areal.WorkflowExecutor
    assert not run.eval_rollout._engine.workflow_executor.destroyed
    with pytest.raises(ConfigError, match="dynamic_bs: april's batches are whole"):
        run._april.prepare_batch(run.train_dataloader, run.workflow, None, True)


def test_a_trainer_that_updates_too_often_loses_only_what_is_too_old(trainer: Make) -> None:
    """Two updates per batch: no plan can hold the bound, so tokens beyond it carry no loss; others are untouched."""
    run = trainer(rollout__max_head_offpolicyness=1)

    def update_once_more() -> None:
        run.rollout.pause()
        run.server.weights = run.step = run.step + 1
        run.rollout.set_version(run.step)
        run.rollout.resume()

    run.train(run.workflow, 5, while_training=update_once_more)
    masked = 0
    for step, batch in enumerate(run.trained):
        for group in batch:
            written = group["versions"] >= 0
            written &= group["attention_mask"].bool()
            too_old = written & (group["versions"] < 2 * step - 1)
            assert torch.equal(group["loss_mask"].bool(), written & ~too_old)
            masked += int(too_old.sum())
    assert masked


def test_interactions_of_areals_client_are_joined(trainer: Make) -> None:
    """A workflow may return one part per call; what is no trajectory at all fails its sample, by name."""
    run = trainer()
    stock = run.workflow.arun_episode

    async def in_parts(engine: Any, data: Any) -> Any:
        made = await stock(engine, data)
        if data["row"] == 2:
            return "text"
        return {"a": SimpleNamespace(to_tensor_dict=lambda: made), "b": SimpleNamespace(to_tensor_dict=lambda: made)}

    run.workflow.arun_episode = in_parts
    run.train(run.workflow, 2)
    assert {len(group["rewards"]) for batch in run.trained for group in batch} == {2 * areal.SAMPLES}
    assert 2 not in trained_rows(run)


def test_trajectories_are_dumped_where_areal_dumps_them(trainer: Make) -> None:
    """rollout.dump_to_file, by AReaL's own method, and its check of their format."""
    run = trainer(rollout__dump_to_file=True, rollout__check_trajectory_format=True)
    dumped = []

    async def dump(trajectory: Any, task_id: int, is_eval: bool) -> tuple[bool, str]:
        dumped.append((int(trajectory["input_ids"][0][1]), is_eval))
        return True, ""

    run._april._dump_trajectory = dump
    run.train(run.workflow, 2)
    assert dumped == [(row, False) for row in trained_rows(run)]
    assert "input_ids" in run._april._expected_trajectory_keys
