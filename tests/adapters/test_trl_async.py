"""The adapter of AsyncGRPOTrainer before a stand-in of it, with a fake vLLM on a socket.

The real package is held against it by ``make test-adapters``; restarts are in ``test_every_adapter.py``.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_servers.vllm import FakeVllmServer
from server_fixtures import KNOWN, ServerThread
from tiny_models import tiny_model

import april
from april.adapters import trl as adapter
from april.adapters.trl.trainer import METRICS
from april.errors import ConfigError, RolloutError

from . import stand_in_trl_async as trl
from .stand_in_trl import conversations, prompts
from .test_trl_adapter import sent  # noqa: F401  # a fixture

Trainer = adapter.april_async_trainer(trl.AsyncGRPOTrainer)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of trl."""
    trl.install(monkeypatch)


def even(prompts: Any, completions: Any, completion_ids: Any, answer: Any, **others: Any) -> list[float]:
    """The share of even tokens; the arguments must belong together."""
    assert [said[0]["content"] for said in prompts] == [f"{10 + n % 80} {10 + n // 80}" for n in answer]
    assert [[int(word) for word in said[0]["content"].split()] for said in completions] == completion_ids
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def trainer(
    folder: Path | None, *urls: str, reward: Any = even, data: Any = None, settings: Any = None, own: Any = None,
    **args: Any,
) -> Any:  # fmt: skip
    """A trainer; ``args`` are TRL's settings, ``settings`` april's, ``own`` the trainer's further arguments."""
    engine = {"kind": "vllm", "urls": urls or ["http://127.0.0.1:9"], **KNOWN}
    worker = adapter.rollout_worker(
        {"engine": engine, **(settings or {})}, weights_dir=None if folder is None else folder / "weights"
    )
    own = {"train_dataset": conversations(240) if data is None else data, "rollout_worker": worker} | (own or {})
    return Trainer(tiny_model(), reward, args, **own)


QUORUM = {"settings": {"group_quorum": 0.75}, "num_generations": 4, "per_device_train_batch_size": 4}


@pytest.mark.parametrize("changes", [{}, {"weight_sync_steps": 2}, QUORUM], ids=["plain", "two steps", "a quorum"])
def test_rows_are_what_was_delivered(changes: dict[str, Any], tmp_path: Path) -> None:
    """Each step trains one batch: tokens, masks, log-probabilities and advantages; no row is too old for TRL.

    One of two servers dies on the way.
    """
    servers = FakeVllmServer(max_running=4, turns=2), FakeVllmServer(max_running=4, turns=2)
    with ServerThread(*servers) as thread:
        made = trainer(tmp_path, *(server.url for server in servers), **changes)
        batches = trl.noted(made.rollout_worker)
        made.after_step = lambda: made.state.global_step == 3 and thread.loop.call_soon_threadsafe(servers[1].die)
        made.train(8)

    n, ages = made.args.num_generations, []
    assert [len(rows) for rows in made.trained] == [2 * n] * 8
    for batch, rows in zip(batches, made.trained, strict=False):
        for s, row in zip(batch.samples, rows, strict=True):
            before = len(s.prompt.token_ids)
            assert row.input_ids.tolist() == [*s.prompt.token_ids, *s.tokens]
            assert row.completion_mask.tolist() == [0] * before + [1] * len(s.tokens)
            assert row.old_log_probs[before:].tolist() == s.logprobs.tolist()
            assert not row.old_log_probs[:before].any()
            assert row.group_id == s.id.group
            rewards = np.array([reward for _, reward in s.cohort])
            if "settings" not in changes:
                assert len(rewards) == n
                expected = (s.reward - rewards.mean()) / (rewards.std() + 1e-8)
                assert row.advantage == pytest.approx(expected, rel=1e-4, abs=1e-5)
            assert row.metrics == {"reward": s.reward, "reward_std": pytest.approx(rewards.std())}
            if "weight_sync_steps" not in changes:  # april's numbers of weights are TRL's
                assert row.model_version == s.versions[:, 1].min()
            ages.append(s.staleness)
    assert len({s.id for batch in batches for s in batch.samples}) == sum(len(batch) for batch in batches)
    assert "sample/dropped_stale_total" not in made._metrics["train"]
    assert 0 < max(ages) <= 4
    assert sum(s.resumes > 0 for batch in batches for s in batch.samples)
    assert {name for name in made._metrics["train"] if "april" in name} == {f"april/{name}" for name in METRICS}
    assert made.rollout_worker.ledger["tokens"].balanced
    assert len([*(tmp_path / "weights").iterdir()]) == 1
    assert len({s.engine for b in batches for r in b.samples for s in r.segments}) == 2


def test_masked_tokens_make_no_row_too_old(tmp_path: Path) -> None:
    """With ``on_stale: mask``, a row is as old as its oldest trained token, so TRL drops none."""
    server = FakeVllmServer(max_running=16, turns=8)
    settings = {"on_stale": "mask", "over_sampling_batch_size": 8, "max_in_flight": 16}
    with ServerThread(server):
        made = trainer(tmp_path, server.url, settings=settings, max_staleness=1, max_completion_length=200)
        batches = trl.noted(made.rollout_worker)
        made.train(12)
    masked = 0
    for batch, rows in zip(batches, made.trained, strict=False):
        for s, row in zip(batch.samples, rows, strict=True):
            trained = s.versions[s.loss_mask != 0, 1]
            assert row.model_version == trained.min(initial=batch.version.n)
            masked += len(s.tokens) - len(trained)
    assert masked
    assert len(made.trained) == 12
    assert "sample/dropped_stale_total" not in made._metrics["train"]


def test_servers_that_take_weights_from_the_trainer_need_no_directory(
    sent: list[list[str]], tmp_path: Path  # noqa: F811
) -> None:
    """Those before the first step and after each one; other servers need a directory, and the trainer says so."""
    server, other = FakeVllmServer(max_running=4, transfers="april_gloo"), FakeVllmServer(max_running=4)
    with ServerThread(server, other):
        made = trainer(None, server.url)
        made.train(3)
        assert sent == [list(made.model.state_dict())] * 4
        with pytest.raises(ConfigError, match=r"accepts none from there, .* give rollout\(weights_dir=\.\.\.\)"):
            trainer(None, other.url).train(1)


def test_a_restart_counts_groups_and_versions_on(tmp_path: Path) -> None:
    """For TRL's end of an epoch; what was fetched and not trained comes again, and another trainer's state does not."""
    server = FakeVllmServer(max_running=4, turns=2)
    with ServerThread(server):
        before = trainer(tmp_path, server.url)
        before.folder, batches = tmp_path, trl.noted(before.rollout_worker)
        before.train(3)
        after = trainer(tmp_path, server.url)
        again = trl.noted(after.rollout_worker)
        after.train(5, str(tmp_path / "checkpoint-3"))
        (tmp_path / "checkpoint-3" / "april_state.msgpack").unlink()
        with pytest.raises(april.CheckpointError, match="it was saved without april"):
            trainer(tmp_path, server.url).train(5, str(tmp_path / "checkpoint-3"))

    assert after._groups_before_resume == 3 * 2
    assert after.model_version == 4 + 3  # the weights of the checkpoint are published once more
    lost = {s.id: s.tokens.tolist() for s in batches[3].samples}
    found = {s.id: s.tokens.tolist() for batch in again for s in batch.samples}
    assert lost.items() <= found.items()
    trained = [s.id for s in chain.from_iterable(batch.samples for batch in batches[:3])]
    assert not set(trained) & set(found)


def test_rows_of_a_training_that_was_stopped_are_not_trained_in_the_next(tmp_path: Path) -> None:
    """What the trainer had fetched ahead belongs to batches of a scheduler that is closed. The state has these rows."""
    server = FakeVllmServer(max_running=4, turns=2)

    def stop() -> None:
        if made.state.global_step == 3:
            made.after_step = lambda: None
            raise KeyboardInterrupt

    with ServerThread(server):
        made = trainer(tmp_path, server.url)
        made.folder, made.after_step, batches = tmp_path, stop, trl.noted(made.rollout_worker)
        with pytest.raises(KeyboardInterrupt):
            made.train(6)
        with pytest.raises(RolloutError, match=r"has trained already, .*; make a new trainer"):
            made.rollout_worker.rollout_buffer.get(timeout=5.0)
        trained, fetched = len(made.trained), len(batches)
        made.train(4, str(tmp_path / "checkpoint-2"))

    for batch, rows in zip(batches[fetched:], made.trained[trained:], strict=False):
        assert [row.input_ids.tolist() for row in rows] == [
            [*s.prompt.token_ids.tolist(), *s.tokens.tolist()] for s in batch.samples
        ]


def test_a_response_without_a_reward_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its siblings are compared with it; its group is replaced, and at last the run ends with the reason."""
    monkeypatch.setattr("april.config.settings.RETRY_PAUSE_S", 0.0)  # a reward that fails is asked again at once
    server = FakeVllmServer(max_running=4)

    def unscored(answer: Any, completion_ids: Any, **others: Any) -> list[float | None]:
        return [None if n % 2 else 1.0 for n in answer]

    with ServerThread(server):
        made = trainer(tmp_path, server.url, reward=unscored)
        batches = trl.noted(made.rollout_worker)
        made.train(2)
        assert all(s.prompt.data["row"] % 2 == 0 for batch in batches for s in batch.samples)
        with pytest.raises(RolloutError, match="every reward function returned None or NaN for a response to row"):
            trainer(tmp_path, server.url, reward=lambda answer, **others: [None for _ in answer]).train(1)


@pytest.mark.parametrize(("changes", "said"), [
    ({"settings": {"engine": {"kind": "transformers"}, "generation": "stepwise"}}, "the embedded engine: "),
    ({"settings": {"generation": "stepwise"}}, "generation: stepwise: "),
    ({"settings": {"on_data_end": "short"}}, "on_data_end=short: "),
    ({"settings": {"max_staleness": 2}}, "max_staleness=2 of april contradicts max_staleness=4"),
    ({"settings": {"rollout_batch_size": 3}}, "rollout_batch_size=3 of april contradicts rows per optimizer step"),
    ({"max_staleness": 0}, "max_staleness=0: "),
    ({"token_budget": 4096}, "token_budget=4096: "),
    ({"num_generations": 3}, "4 rows per optimizer step: num_generations=3 "),
    ({"top_p": 0.9}, "GRPOConfig.top_p=0.9: "),
    ({"own": {"tools": [print]}}, "tools: "),
    ({"own": {"environment_factory": print}}, "environment_factory: "),
    ({"own": {"weight_transfer": object()}}, "weight_transfer: "),
    ({"own": {"rollout_worker": None}}, "AprilAsyncGRPOTrainer needs rollout_worker="),
    ({"own": {"sees": True}}, "images, or a model that sees: "),
    ({"own": {"train_dataset": iter(prompts(3))}}, "train_dataset is a list_iterator, "),
], ids=lambda value: None if isinstance(value, dict) else value.partition(":")[0])  # fmt: skip
def test_what_does_not_fit_is_refused_when_the_trainer_is_made(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """In one sentence, before anything starts."""
    with pytest.raises(ConfigError) as refused:
        trainer(tmp_path, **changes)
    assert str(refused.value).startswith(said)
