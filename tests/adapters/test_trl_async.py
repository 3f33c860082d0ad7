"""The adapter of AsyncGRPOTrainer before a stand-in of it, with a fake vLLM on a socket.

The real package is held against it by ``make test-adapters``.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_servers.vllm import FakeVllmServer
from server_fixtures import KNOWN, ServerThread
from tiny_models import tiny_model

import april
from april.adapters import trl as adapter
from april.errors import ConfigError

from . import stand_in_trl_async as trl
from .stand_in_trl import conversations

Trainer = adapter.april_async_trainer(trl.AsyncGRPOTrainer)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    trl.install(monkeypatch)


def even(prompts: Any, completions: Any, completion_ids: Any, answer: Any, **others: Any) -> list[float]:
    """The share of even tokens; the arguments must belong together."""
    assert [said[0]["content"] for said in prompts] == [f"{10 + n % 80} {10 + n // 80}" for n in answer]
    assert [[int(word) for word in said[0]["content"].split()] for said in completions] == completion_ids
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def trainer(folder: Path, *servers: Any, reward: Any = even, rows: int = 240, **changes: Any) -> Any:
    """A trainer, and the batches that its rows were made of as its attribute ``batches``."""
    settings = {"engine": {"kind": "vllm", "urls": [server.url for server in servers], **KNOWN}}
    worker = adapter.rollout_worker({**settings, **changes.pop("settings", {})}, weights_dir=folder / "weights")
    made = Trainer(tiny_model(), reward, changes, train_dataset=conversations(rows), rollout_worker=worker)
    made.batches, samples = [], worker._samples

    def noted(batch: Any) -> Any:
        made.batches.append(batch)
        return samples(batch)

    worker._samples = noted
    return made


def test_rows(tmp_path: Path) -> None:
    server = FakeVllmServer(max_running=4, turns=5)
    with ServerThread(server):
        made = trainer(tmp_path, server)
        made.train(6)
    print(made._metrics, [b.samples[0].versions for b in made.batches])
