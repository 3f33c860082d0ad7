"""The unmodified GRPOTrainer trains an adapter of PEFT, whose versions a real vLLM has under names of their own."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from april.adapters.trl import rollout
from tests.real_engines.adapters import adapters_on
from tests.real_engines.models import make_models
from tests.real_engines.servers import Server, ready

sys.path.insert(0, str(Path(__file__).parent.parent / "real_trl"))

import short_runs

UPDATES = 6


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server that takes adapters, and the directory of its model."""
    folder = tmp_path_factory.mktemp("vllm")
    model = make_models(folder / "models")["first"]
    server = adapters_on("vllm", model, folder)
    with ready(server):
        yield server, model


def trained(folder: Path, server: Server, model: Path, **lora: Any) -> Any:
    """A trainer after so many updates, and what it has seen."""
    made = short_runs.trainer(
        folder,
        rollout(
            engine={"kind": "vllm", "urls": [server.url]}, over_sampling_batch_size=2 * short_runs.GROUPS,
            sampling={"stop_token_ids": list(range(300, 320))}, weights_dir=folder / "weights",
        ),
        lambda completion_ids, **columns: [sum(t % 2 for t in ids) / len(ids) for ids in completion_ids],
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        peft_config=LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear", **lora),
        processing_class=AutoTokenizer.from_pretrained(model), max_steps=UPDATES, learning_rate=3e-2,
    )  # fmt: skip
    made.train()
    return made


def loads(server: Server) -> int:
    """Adapters that the server has loaded so far, by its log."""
    return server.log.read_text("utf-8", errors="replace").count("Loaded new LoRA adapter")


@pytest.mark.parametrize("scales", [False, True], ids=["LoRA", "rsLoRA"])
def test_each_version_is_an_adapter(scales: bool, served: tuple[Server, Path], tmp_path: Path) -> None:
    """The trainer recomputes the log-probabilities of each version's tokens; nothing is merged, and nothing is left."""
    server, model = served
    before = loads(server)
    made = trained(tmp_path, server, model, use_rslora=scales)
    assert made.state.global_step == UPDATES
    versions = {int(n) for batch in made.batches for s in batch.samples for _, n in s.versions}
    assert loads(server) - before >= UPDATES
    assert made.stale_tokens
    assert max(made.logprob_errors) <= 1e-4
    assert max(made.stale_differences) > 10 * max(made.logprob_errors)
    with urllib.request.urlopen(f"{server.url}/v1/models") as reply:  # noqa: S310 - our own server
        assert [m["id"] for m in json.load(reply)["data"]] == ["tiny"]
    figures = {
        "versions": len(versions), "resumed": made.resumed, "tokens": made.tokens, "stale": made.stale_tokens,
        "largest error": max(made.logprob_errors), "largest of stale ones": max(made.stale_differences),
    }  # fmt: skip
    print(f"\nvLLM, adapters of {'rsLoRA' if scales else 'LoRA'}: {figures}")


def test_what_vllm_does_not_compute_is_merged(served: tuple[Server, Path], tmp_path: Path) -> None:
    """DoRA: the server gets the whole model, below no adapter."""
    server, model = served
    before = loads(server)
    made = trained(tmp_path, server, model, use_dora=True)
    assert loads(server) == before
    assert made.state.global_step == UPDATES
    assert max(made.logprob_errors) <= 1e-4
    print(f"\nvLLM, merged: largest error {max(made.logprob_errors)}")
