"""The TRL adapter before a stand-in of TRL's trainer: which rows it hands over, when weights change, what it refuses.

The real package is held against it by ``make test-adapters``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fake_servers.vllm import FakeVllmServer
from server_fixtures import KNOWN, ServerThread
from tiny_models import tiny_model

import april
from april.adapters import trl as adapter
from april.adapters.trl.checkpoint import STATE_FILE
from april.adapters.trl.data import ROW, DatasetPasses
from april.adapters.trl.trainer import METRICS
from april.weights.sender import WeightSender
from april.weights.source import Weights

from . import stand_in_trl as trl

Trainer = adapter.april_trainer(trl.GRPOTrainer)
PARTIALS = trl.PARTIALS | {"over_sampling_batch_size": 4}


def trainer(count: int = 12, settings: dict[str, Any] | None = None, **args: Any) -> Any:
    rollouts = adapter.rollout(PARTIALS if settings is None else settings)
    return Trainer(tiny_model(), rollouts, trl.prompts(count), **args)


@pytest.mark.parametrize("asked", [{}, {"metrics": ["bubble", "buble"]}, {"metrics": "all"}], ids=str)
def test_six_metrics_are_logged_unless_others_are_asked_for(
    asked: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """TRL prints a line with all that it logs: six of april's, those that are named, or every one but its own."""
    made = Trainer(tiny_model(), adapter.rollout(PARTIALS, **asked), trl.prompts(12))
    made.train(steps=2)
    logged = {name.removeprefix("april/") for name in made._metrics["train"] if name.startswith("april/")}
    if asked.get("metrics") == "all":
        assert len(logged) > 40
        assert "reward_mean" not in logged
        assert logged > set(METRICS)
    else:
        assert logged == set(asked.get("metrics", METRICS)) - {"buble"}
        assert len(METRICS) == 6
    said = [message for message in caplog.messages if message.startswith("metrics:")]
    assert said == ["metrics: the first batch has no buble; docs/metrics.md has the names"] * ("buble" in str(asked))


def delivered(made: Any) -> Counter[int]:
    return Counter(row["answer"] for rows in made.scored for row in rows[::2])


def test_each_pass_has_its_own_order_and_follows_the_seed() -> None:
    """The same seed gives the same passes; without shuffling, the data set's order."""
    made = trainer()
    passes = DatasetPasses(made)
    orders = []
    for epoch in (0, 1, 0):
        passes.set_epoch(epoch)
        orders.append([prompt[ROW] for prompt in passes])
    made.shuffle_dataset = False

    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == [prompt[ROW] for prompt in passes] == list(range(12))


def test_several_passes_settle_each_prompt_once_per_pass() -> None:
    """As many passes as the trainer says; wrap begins them again for ever."""
    made = trainer()
    made.state.num_train_epochs = 2
    made.train(steps=12)
    endless = trainer(count=3, settings=PARTIALS | {"on_data_end": "wrap"})
    endless.train(steps=4)

    assert delivered(made) == dict.fromkeys(range(12), 2)
    assert sum(delivered(endless).values()) == 8


def test_weights_get_a_new_version_when_the_optimizer_has_stepped() -> None:
    """Two generation batches between two optimizer steps have one version; the engine sees the weights in place."""
    made = trainer(settings={})
    versions: list[int] = []

    def step(output: Any) -> None:
        versions.append(made.rollout_func.scheduler.version.n)
        made.state.global_step -= made._step % 2 == 0  # no optimizer step after every other generation batch

    made.optimizer_step = step
    made.train(steps=3)

    assert versions == [0, 0, 1, 1, 2, 2]


def test_a_trainer_that_was_stopped_in_a_batch_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """The same object: what is left of the batch in which it ended belongs to no checkpoint, and is not trained."""
    made = trainer()
    made.folder = tmp_path
    made.train(steps=2)
    made._step, made._buffered_inputs = 1, ["the rest of a batch"]
    seen: list[Any] = []
    made.optimizer_step = lambda output: seen.append((made._step, made._buffered_inputs))
    made.train(3, str(tmp_path / "checkpoint-2"))

    assert seen == [(0, None)]


def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """One of other prompts, one whose prompts have changed, one without april's state."""
    before = trainer()
    before.folder = tmp_path
    before.train(steps=1)
    checkpoint = str(tmp_path / "checkpoint-1")

    rows = r"saved with prompts .*'rows': 12.*, but now they are .*'rows': 11"
    with pytest.raises(april.CheckpointError, match=rows):
        trainer(count=11).train(2, checkpoint)
    with pytest.raises(april.CheckpointError, match=r"'seed': 42.*, but now they are .*'seed': 43"):
        trainer(seed=43).train(2, checkpoint)
    changed = trainer()
    changed.train_dataset = trl.Rows(row | {"prompt": "5 6"} for row in trl.prompts(12))
    with pytest.raises(april.CheckpointError, match="the first 4 prompts of epoch 0 differ from those drawn before"):
        changed.train(6, checkpoint)
    (tmp_path / "checkpoint-1" / STATE_FILE).unlink()
    with pytest.raises(april.CheckpointError, match="it was saved without april"):
        trainer().train(2, checkpoint)


def test_an_evaluation_answers_what_was_asked_and_leaves_training_alone() -> None:
    """The rows asked, in their order, under the present weights, before and between steps."""
    made = trainer()
    rows = [dict(row) for row in trl.prompts(4)]
    outputs = [made.evaluate(rows)]
    made.optimizer_step = lambda output: outputs.append(made.evaluate(rows))
    made.train(steps=6)

    for output in outputs:
        assert output["prompt_ids"] == made._tokenize_prompts([row["prompt"] for row in rows])[0]
        assert "old_per_token_logps" not in output
    trained = [scored for scored in made.scored if scored is not rows]
    assert Counter(row["answer"] for scored in trained for row in scored[::2]) == dict.fromkeys(range(12), 1)


def on_server(server: Any, **settings: Any) -> Any:
    """A trainer before this server, which is in a thread."""
    engine = {"kind": "vllm", "urls": [server.url], **KNOWN}
    rollouts = adapter.rollout(engine=engine, over_sampling_batch_size=3, **settings)
    return Trainer(tiny_model(), rollouts, trl.prompts(12))


class NotedSender(WeightSender):
    """Goes through the weights, and notes their names."""

    sent: ClassVar[list[list[str]]] = []

    def send(self, source: Weights, names: Sequence[str]) -> None:
        self.sent.append([spec.name for bucket in source.buckets() for spec in bucket.specs])


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of each update that was sent."""
    monkeypatch.setattr("april.scheduler.WeightSender", NotedSender)
    monkeypatch.setattr(NotedSender, "sent", [])
    return NotedSender.sent


@pytest.mark.parametrize(("takes", "route", "by_directory"), [
    (None, {"weights_dir": True}, True),
    ("april_gloo", {}, False),
    ("april_gloo", {"weights": "collective"}, False),
    ("april_gloo", {"weights_dir": True}, False),
    ("april_gloo", {"weights": "disk", "weights_dir": True}, True),
], ids=str)  # fmt: skip
def test_servers_get_each_new_weights(
    takes: str | None, route: dict[str, Any], by_directory: bool, sent: list[list[str]], tmp_path: Path
) -> None:
    """Before the first rollout and after each step: from the trainer's process where they take them, under their names
    in a checkpoint, or through a directory, of which only the last one is left; other files stay.
    """
    (tmp_path / "step_of_mine").mkdir()
    server = FakeVllmServer(max_running=4, turns=5, transfers=takes)
    with ServerThread(server):
        made = on_server(server, **route | ({"weights_dir": tmp_path} if "weights_dir" in route else {}))
        made.train(steps=4)

    assert not server.violations
    assert len(sent) == (0 if by_directory else 4)
    assert all(names == list(made.model.state_dict()) for names in sent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_3"] * by_directory + ["step_of_mine"]
    assert not by_directory or server.weights == "step_3"
    assert sum(delivered(made).values()) == 8
    assert set(delivered(made).values()) == {1}


def test_servers_that_take_weights_by_a_directory_alone_need_one(tmp_path: Path) -> None:
    """Known when they were asked; where the other way is asked for by name, a directory does not do."""
    server = FakeVllmServer(max_running=4, turns=5)
    with ServerThread(server):
        with pytest.raises(april.ConfigError, match=r"accepts none from there, .* give rollout\(weights_dir=\.\.\.\)"):
            on_server(server).train(steps=1)
        with pytest.raises(april.ConfigError, match=r"weights: collective: engine .* accepts none from there"):
            on_server(server, weights="collective", weights_dir=tmp_path).train(steps=1)


def test_servers_get_the_weights_of_a_checkpoint_under_its_version(tmp_path: Path) -> None:
    """They hold others when a trainer resumes; what the checkpoint's weights had generated is not stale under them."""
    server = FakeVllmServer(max_running=4, turns=5)
    versions: list[tuple[int, int]] = []

    def resumable() -> Any:
        made = on_server(server, weights_dir=tmp_path / "weights", metrics=["staleness_max"])
        made.optimizer_step = lambda output: versions.append(made.rollout_func.scheduler.version)
        return made

    with ServerThread(server):
        before = resumable()
        before.folder = tmp_path
        before.train(steps=3)
        server.weights = "of another run"
        after = resumable()
        after.train(steps=4, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert (server.weights, server.violations) == ("step_3", [])

    # the first weight update of a run is that of its first step, with the weights that it begins with
    assert versions == [(0, 1), (0, 2), (0, 3), (1, 3), (1, 4)]
    assert after._metrics["train"]["april/staleness_max"][0] <= 2


def test_dynamic_sampling_asks_the_trainers_reward_functions() -> None:
    """Groups whose rewards do not differ are replaced; plain and async functions see the columns of their own row."""
    asked: list[list[int]] = []

    def even(prompts: Any, completions: Any, completion_ids: Any, answer: Any, **others: Any) -> list[float | None]:
        assert prompts == [trl.prompts(12)[n]["prompt"] for n in answer]
        assert [len(text.split()) for text in completions] == [len(ids) for ids in completion_ids]
        others["log_metric"]("asked", 1.0)
        others["log_extra"]("answer", answer)
        asked.append(answer)
        return [None if n % 2 else float(i) for i, n in enumerate(answer)]

    async def never(completion_ids: Any, **others: Any) -> list[float]:
        return [1.0] * len(completion_ids)

    rollouts = adapter.rollout(PARTIALS, on_data_end="wrap", filter=april.rewards_differ)
    made = Trainer(tiny_model(), rollouts, trl.prompts(12), reward_funcs=[even, never])
    rows = [dict(row) for row in trl.prompts(4)]
    made.optimizer_step = lambda output: made.evaluate(rows)
    made.train(steps=4)
    made.scored = [scored for scored in made.scored if scored is not rows]

    assert all(row["answer"] % 2 == 0 for rows in made.scored for row in rows)
    assert any(answer[0] % 2 for answer in asked)
    assert made.rollout_func.ledger["prompts"].dropped


def test_other_calls_and_ends_of_the_data_are_refused() -> None:
    """Rollouts that TRL asks for in a way nobody foresaw, and prompts that are not enough."""
    made = trainer()
    with pytest.raises(april.RolloutError, match="outside of its generation step"):
        made.rollout_func(["10 11"] * 4, made)
    few = trainer(count=3)
    with pytest.raises(april.RolloutError, match="a batch of 2 rows, but TRL needs 4"):
        few.train(steps=2)
