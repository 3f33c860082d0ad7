"""april in AReaL's trainer, on a stand-in: batches, filters, one call of a workflow, the recover checkpoint."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adapters import stand_in_areal as areal
from april.adapters.areal.rollouts import CURRENT_LLM
from april.adapters.common.placed_media import digest_of
from april.core.types import DropReason, FinishReason, SampleId
from april.driver.llm import Completion
from april.errors import CheckpointError, ConfigError, RolloutError
from april.testing import run_virtual

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


def ledgers(trainer: Any) -> dict[str, dict[str, Any]]:
    return {name: book.as_dict() for name, book in trainer._april.rollouts.scheduler.ledger().items()}


def test_a_trajectory_is_what_areals_workflow_returns(trainer: Make) -> None:
    """Rows and rewards of a group, joined; what its prompt has is no version; statistics are AReaL's own."""
    run = trainer({"generation": "stepwise"})
    run.train(run.workflow, 6)
    for group in (g for batch in run.trained for g in batch):
        row = int(group["input_ids"][0][1])
        assert group["rewards"].tolist() == [float(row)] * areal.SAMPLES
        assert group["versions"][:, :2].unique().tolist() == [-1]
    run.rollout.pause()
    assert ledgers(run)["tokens"]["observed"] == run.server.made
    assert run.stats["april/off_policy_share"][-1] >= 0


@pytest.mark.parametrize("generation", ["continuous", "stepwise"])
def test_experts_are_those_of_the_step_that_read_each_token(trainer: Make, generation: str) -> None:
    """As AReaL's servers give them for a response that was not cut: one row for each token but the last, as it was
    made; AReaL's own client repeats the prompt's rows at every cut.
    """
    run = trainer({"generation": generation}, rollout__return_routed_experts=True)
    run.train(run.workflow, 6)
    cut = 0
    for made in run.workflow.answers:
        whole = made.input_tokens + made.output_tokens
        read, places, weights = made.routed_experts.T.tolist()
        assert read == whole[:-1]
        assert places == list(range(len(whole) - 1))
        assert weights[len(made.input_tokens) - 1 :] == made.output_versions
        assert made.routed_experts.dtype == np.int32
        cut += len(set(made.output_versions)) > 1
    assert cut
    assert trainer().workflow.answers == []


def test_continuous_generation_goes_on_while_the_trainer_trains(trainer: Make) -> None:
    """A batch ends nothing, places are filled without anybody asking, and only the weight update ends what runs."""

    def look(run: Any) -> list[int]:
        return [run.server.ended, ledgers(run)["prompts"]["observed"]]

    run, seen = while_training(trainer, look)
    assert seen == [0, areal.GROUPS + 6]
    assert run.server.ended >= 6 * areal.SAMPLES
    assert torch.equal(run.trained[0][0]["versions"].unique(), torch.tensor([-1, 0]))


def test_a_pause_ends_what_is_at_the_servers(trainer: Make) -> None:
    """Before it returns, so that weights may change; nothing begins before the end of the pause."""

    def look(run: Any) -> list[int]:
        run.rollout.pause()
        seen = [len(run.server.live), run._april.rollouts._servers.busy]
        run.rollout.resume()
        run.server.until_live(6 * areal.SAMPLES)
        return seen

    assert while_training(trainer, look)[1] == [0, 0]


def while_training(trainer: Make, look: Callable[[Any], list[int]]) -> tuple[Any, list[int]]:
    """A trainer after one step, and what ``look`` has seen during it, with all places taken by requests that go on."""
    run = trainer(held=lambda row, so_far: row >= areal.GROUPS, rollout__max_concurrent_rollouts=6)
    seen: list[int] = []

    def full() -> None:
        run.server.until_live(6 * areal.SAMPLES)
        seen.extend(look(run))

    run.train(run.workflow, 1, while_training=full)
    return run, seen


def asks(run: Any) -> Any:
    return run.rollout.prepare_batch(run.train_dataloader, run.workflow, None, areal.SAMPLES)


def test_a_trainer_that_never_updates_is_told(trainer: Make) -> None:
    """Whatever came then would be too old when it is trained; a pause alone commits nothing."""
    run = trainer(rollout__max_head_offpolicyness=1)
    for _ in range(2):
        asks(run)
        run.rollout.pause()
        run.rollout.resume()
    with pytest.raises(RolloutError, match="2 batches are delivered but not trained"):
        asks(run)


def test_weights_that_changed_without_a_pause_are_refused(trainer: Make) -> None:
    """Requests were at the servers: nobody could say which weights wrote what. Stepwise none are there."""
    run = trainer()
    asks(run)
    run.rollout.set_version(1)
    with pytest.raises(RolloutError, match="the weights changed from 0 to 1 while requests were at the servers"):
        asks(run)
    run = trainer({"generation": "stepwise"})
    asks(run)
    run.server.weights = 1
    run.rollout.set_version(1)
    assert 1 in torch.cat([group["versions"].flatten() for group in asks(run)])


def test_a_prompt_that_is_dropped_is_in_areals_statistics(trainer: Make) -> None:
    """By its reason: everybody hears why it was replaced."""
    run = trainer()
    run.workflow.fails = {4: [ValueError("always")] * 99}
    run.train(run.workflow, 4)
    assert run.stats["april/dropped_failed"] == [1.0]


def test_samples_that_a_workflow_rejects_are_left_out(trainer: Make) -> None:
    """As in AReaL: None shrinks a group, and a group of nothing else is rejected and replaced."""
    run = trainer()
    run.workflow.fails = {1: [None], 2: [None] * 99}
    run.train(run.workflow, 3)
    assert 2 not in trained_rows(run)
    sizes = {int(g["input_ids"][0][1]): len(g["input_ids"]) for batch in run.trained for g in batch}
    assert sizes.pop(1) == areal.SAMPLES - 1
    assert set(sizes.values()) == {areal.SAMPLES}
    assert ledgers(run)["prompts"]["dropped"]["filtered"] >= 1


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
    assert not ledgers(run)["tokens"]["dropped"]


def test_a_data_set_smaller_than_a_batch_is_told(trainer: Make) -> None:
    """Instead of a search for prompts that never ends; found beside the trainer, and told to it."""
    run = trainer(rows=0)
    with pytest.raises(RolloutError, match="returns no batch"):
        run.train(run.workflow, 1)
    with pytest.raises(RolloutError, match="returns no batch"):
        run.train(run.workflow, 1)


def test_evaluations_and_dynamic_batches_are_not_aprils(trainer: Make) -> None:
    """The evaluation's engine keeps AReaL's executor; a batch of varying size is refused."""
    run = trainer()
    assert type(run.eval_rollout._engine.workflow_executor) is areal.WorkflowExecutor
    assert not run.eval_rollout._engine.workflow_executor.destroyed
    with pytest.raises(ConfigError, match="dynamic_bs: april's batches always have the configured size"):
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


def test_a_workflow_may_hold_several_conversations(trainer: Make) -> None:
    """One after the other, whatever each begins with, as agents do that shorten what was said; over restarts too."""

    def twice(run: Any) -> Any:
        stock = run.workflow.arun_episode

        async def episode(engine: Any, data: Any) -> Any:
            await engine.agenerate(areal.request([51, data["row"]], run.config.gconfig.new()))
            return await stock(engine, data)

        run.workflow.arun_episode = episode
        run.train(run.workflow, 3)
        return trained_rows(run)

    first, second = twice(trainer()), twice(trainer())
    assert len({*first, *second}) == len([*first, *second]) == 6 * areal.GROUPS


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


# ---------------------------------------------------------------- one call of a workflow


class Policy:
    """The policy as a workflow's sample sees it: one request, whose answer comes back under these ``versions``."""

    sample_id = SampleId(0, 0)

    def __init__(self, engine: Any, versions: list[tuple[int, int]]) -> None:
        self.engine, self.versions = engine, versions

    async def forward(self, token_ids: list[int], sampling: dict[str, Any], attached: Any) -> Completion:
        self.asked, self.sampling, self.attached = token_ids, sampling, attached
        ids, servers = np.array(token_ids, np.int32), self.engine.servers
        self.result = await servers._send_to_server(servers.requests[self.sample_id], ids, sampling["max_tokens"])
        tokens = np.arange(len(self.versions), dtype=np.int32)
        return Completion(
            tokens=tokens, logprobs=tokens * np.float32(-0.5), versions=np.array(self.versions, np.int32),
            finish=FinishReason.STOP, conversation=np.concatenate((ids, tokens)),
        )  # fmt: skip


class Call:
    """Calls of AReaL's engine as a workflow has it, for a prompt of two tokens; responses have four."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        areal.install(monkeypatch)
        self.server = areal.Server(lambda row: 4, lambda row, so_far: False)
        areal.SERVER[:], self.pauses = [self.server], 0
        self.more: dict[str, Any] = {}
        inner = areal.RemoteInfEngine(SimpleNamespace(request_timeout=1.0))
        trainer = importlib.import_module("april.adapters.areal.trainer")
        self.engine = trainer.WorkflowEngine(inner, lambda: self.pauses, lambda: None, (areal.EOS,))
        self.policy = Policy(self.engine, [(0, 6)] * 3 + [(0, 7)])

    def __call__(self, **more: Any) -> Any:
        sampling = {"n_samples": 1, "max_tokens": 10, "max_new_tokens": 20, "temperature": 0.7, **more}
        gconfig = SimpleNamespace(**sampling, new=lambda **new: SimpleNamespace(**{**sampling, **new}))

        async def program() -> Any:
            CURRENT_LLM.set(self.policy)  # type: ignore[arg-type]
            request = areal.request([50, 3], gconfig)
            vars(request).update(self.more)
            return await self.engine.agenerate(request)

        return run_virtual(program())


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    return Call(monkeypatch)


def test_versions_are_those_that_april_says(call: Call) -> None:
    """The response of two requests under two weights; the room is that of the smaller limit."""
    made = call(stop_token_ids=[9])
    policy = call.policy
    assert policy.asked == [50, 3]
    assert policy.sampling == {"max_tokens": 8, "temperature": 0.7, "stop_token_ids": (9,), "banned_ids": ()}
    assert made.output_versions == [6, 6, 6, 7]
    assert made.output_logprobs == [0.0, -0.5, -1.0, -1.5]
    assert made.stop_reason == "stop"
    assert (policy.result.label, policy.result.own_end) == (0, False)


def test_tokens_that_came_after_a_pause_have_no_known_weights(call: Call) -> None:
    """The weights may have changed before they were written: they are counted and not kept, under no version."""
    answer = call.server.answer

    async def late(payload: Any) -> Any:
        call.pauses += 1
        return await answer(payload)

    call.server.answer = late  # type: ignore[method-assign]
    call()
    result = call.policy.result
    assert (len(result.tokens), len(result.logprobs), result.aborted) == (0, 0, True)
    assert result.unused == (4, DropReason.UNKNOWN_WEIGHTS)


def test_images_are_known_by_their_content(call: Call) -> None:
    """april is told their hashes at their places, and the id that is never to be generated; the server gets them as the
    workflow gave them. What cannot be placed goes along all the same.
    """
    call.more = {"input_ids": [50, 7, 7, 3], "image_data": ["a cat"], "processor": SimpleNamespace(image_token_id=7)}
    made = call()
    (placed,) = call.policy.attached
    assert (placed.at, placed.count, placed.attachment.kind) == (1, 2, "image")
    assert placed.attachment.digest == digest_of("a cat")
    assert call.policy.sampling["banned_ids"] == (7,)
    assert made.input_images == ["a cat"]
    call.more["image_data"] = ["a cat", "a dog"]
    call()
    assert (call.policy.attached, call.policy.sampling["banned_ids"]) == ((), ())


@pytest.mark.parametrize(("more", "message"), [
    ({"n_samples": 2}, "a request for 2 samples: a workflow must ask once per sample"),
    ({"max_tokens": 2}, "a prompt of 2 tokens leaves no room for a response: max_tokens=2"),
])  # fmt: skip
def test_requests_that_cannot_be(call: Call, more: dict[str, Any], message: str) -> None:
    """They fail their sample with a sentence."""
    with pytest.raises(RolloutError, match=message):
        call(**more)


def test_what_is_not_aprils_is_areals(call: Call) -> None:
    """Outside of a training rollout, and for everything but agenerate."""
    assert call.engine.choose_server() == "here:1"
    with pytest.raises(AssertionError, match="AReaL's own"):
        run_virtual(call.engine.agenerate(areal.request([1], None)))


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("generation", ["continuous", "stepwise"])
def test_a_run_that_goes_on_asks_each_prompt_once(trainer: Make, generation: str) -> None:
    """Over three lives and two epochs, in the loader's own order of each."""
    lives = []
    for _ in range(3):
        lives.append(trainer({"generation": generation}, rows=12))
        # what is drawn for a rejected prompt is one of three that the loader gives
        lives[-1].workflow.fails = {5: [None] * 99}
        lives[-1].train(lives[-1].workflow, 3)
    drawn = [row for life in lives for row in trained_rows(life)] + [group["row"] for group in held(lives[-1])]
    rejected = ledgers(lives[-1])["prompts"]["dropped"]["filtered"]
    assert rejected
    in_order = [*range(12), *reversed(range(12)), *range(12), *reversed(range(12))]
    assert sorted([*drawn, *[5] * rejected]) == sorted(in_order[: len(drawn) + rejected])


def held(run: Any) -> list[Any]:
    run.rollout.pause()
    rollouts = run._april.rollouts
    state = rollouts.scheduler.state_dict(rollouts.deliveries.last)
    groups = [*state["core"]["ready"], *state["core"]["waiting"]]
    return [*(group["data"]["row"] for group in groups), *rollouts.prompts.carried.ahead]


def test_the_state_is_the_one_that_areals_checkpoint_names(trainer: Make, tmp_path: Path) -> None:
    """A file of its own per checkpoint, the last two kept; a crash between the two writes goes on from the older."""
    run = trainer()
    run.train(run.workflow, 2)
    info = tmp_path / "e" / "t" / "recover_info" / "info.json"
    before = info.read_text()
    run.train(run.workflow, 1)
    files = {p.name for p in info.parent.glob("april_0_*")}
    assert len(files) == 2
    assert json.loads(info.read_text())["loader"]["april"] in files
    seen = trained_rows(run)[: 2 * areal.GROUPS]
    info.write_text(before)
    after = trainer()
    assert len(list(info.parent.glob("april_0_*"))) == 1
    after.train(after.workflow, 4)
    again = seen + trained_rows(after)
    assert len(again) == len(set(again))
    assert sorted([*again, *(row["row"] for row in held(after))])[: len(again)] == list(range(len(again)))


def test_a_checkpoint_without_april_goes_on_with_a_warning(
    trainer: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    """From where the loader stood."""
    info = tmp_path / "e" / "t" / "recover_info" / "info.json"
    info.parent.mkdir(parents=True)
    info.write_text(json.dumps({"step": 2, "loader": {"at": 6}}))
    run = trainer()
    assert "AReaL's recover checkpoint was saved without april" in caplog.text
    run.train(run.workflow, 1)
    assert min(trained_rows(run)) >= 6


def test_a_state_that_is_gone_is_refused(trainer: Make, tmp_path: Path) -> None:
    """Instead of prompts that are lost in silence."""
    run = trainer()
    run.train(run.workflow, 2)
    info = tmp_path / "e" / "t" / "recover_info" / "info.json"
    (info.parent / json.loads(info.read_text())["loader"]["april"]).unlink()
    with pytest.raises(CheckpointError, match=r"needs april's state .* which does not exist"):
        trainer()
