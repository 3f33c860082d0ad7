"""The unmodified AsyncGRPOTrainer with two real vLLM servers: 2 steps, a restart from the checkpoint, 6 more steps.

One server is killed in the middle. The trainer's attention kernel is for GPUs, so a function of torch takes its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig

from april.adapters.trl import AprilAsyncGRPOTrainer, rollout_worker
from tests.real_engines.commands import vllm_server
from tests.real_engines.models import make_models
from tests.real_engines.servers import Server, ready

GROUPS, SAMPLES, ROWS, LONGEST, STEPS, SAVED, KILLED = 4, 4, 200, 300, 8, 2, 4
TEMPERATURE = 1.0  # the servers return log-probabilities at this temperature, unless they are started otherwise


def attention_on_cpu(
    query: Any, key: Any, value: Any, starts_q: Any, starts_k: Any, most_q: int, most_k: int, **options: Any
) -> Any:
    """What flash-attn 3 computes for each segment: causal attention whose last query sees all keys."""
    parts, heads = [], query.shape[1] // key.shape[1]
    for a, b, c, d in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        q, k, v = query[a:b], key[c:d].repeat_interleave(heads, 1), value[c:d].repeat_interleave(heads, 1)
        seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        scores = torch.einsum("qhd,khd->hqk", q, k) * options["softmax_scale"]
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
    return torch.cat(parts)


@pytest.fixture(autouse=True)
def kernel_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SimpleNamespace(flash_attn_varlen_func=attention_on_cpu)
    monkeypatch.setattr("trl.experimental.async_grpo.packing._flash_attn", lambda: kernel)
    # this asks CUDA for the name of the device
    monkeypatch.setattr("trl.experimental.async_grpo.async_grpo_trainer.get_peak_flops_per_device", lambda *_: None)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Server], Path]]:
    """Two servers and the directory of their model."""
    folder = tmp_path_factory.mktemp("vllm")
    model = make_models(folder / "models")["first"]
    servers = [vllm_server(f"vllm {i}", model, folder, open_routes=True, context=512) for i in range(2)]
    with ready(*servers):
        yield servers, model


class AfterSteps(TrainerCallback):  # type: ignore[misc]
    """Calls a function after an optimizer step, with the training's control."""

    def __init__(self, step: int, call: Any) -> None:
        self._step, self._call = step, call

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self._step:
            self._call(control)


class Watched(AprilAsyncGRPOTrainer):  # type: ignore[misc,valid-type]
    """Keeps the weights of each version, the batches that were fetched, and the rows that reached the loss."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.weights: dict[tuple[int, int], dict[str, Any]] = {}
        self.batches: list[Any] = []
        self.trained_tokens: list[int] = []
        samples = self.rollout_worker._samples

        def noted(batch: Any) -> Any:
            self.batches.append(batch)
            return samples(batch)

        self.rollout_worker._samples = noted

    def _sync_weight(self) -> None:
        super()._sync_weight()
        version = self.rollout_worker.scheduler.version
        self.weights[tuple(version)] = {n: p.detach().clone() for n, p in self.model.state_dict().items()}

    def compute_loss(self, model: Any, inputs: Any, *others: Any, **more: Any) -> Any:
        self.trained_tokens.append(int((inputs["token_index"] >= 0).sum()))
        return super().compute_loss(model, inputs, *others, **more)


def reward(completions: Any, completion_ids: Any, number: Any, **others: Any) -> list[float]:
    assert len(set(number)) == 1
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def trainer(folder: Path, servers: list[Server], model: Path, **settings: Any) -> Any:
    torch.set_num_threads(1)
    prompts = [[{"role": "user", "content": f"count to {n}"}] for n in range(ROWS)]
    return Watched(
        model=str(model), reward_funcs=reward,
        args=AsyncGRPOConfig(
            output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True,
            gradient_checkpointing=False, per_device_train_batch_size=GROUPS * SAMPLES // 2,
            gradient_accumulation_steps=2, num_generations=SAMPLES, max_completion_length=LONGEST, learning_rate=1e-3,
            temperature=TEMPERATURE, max_steps=STEPS, max_staleness=2, save_strategy="steps", save_steps=1,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts, "number": list(range(ROWS))}),
        rollout_worker=rollout_worker(
            # few and long requests take longer than a step, so that updates cut some
            engine={"kind": "vllm", "urls": [server.url for server in servers], "max_in_flight": 2},
            sampling={"stop_token_ids": [300, 301]}, **settings,
        ),
    )  # fmt: skip


def logprob_errors(model: Path, weights: dict[Any, Any], batches: list[Any]) -> dict[str, float]:
    """Largest differences between delivered log-probabilities and those of each token's version, and of another one."""
    plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found = {"own": 0.0, "another": 0.0, "tokens": 0.0}
    for version, values in weights.items():
        plain.load_state_dict(values)
        for sample in (sample for batch in batches for sample in batch.samples):
            of_version = (sample.versions == version).all(1)
            ids = torch.tensor([*sample.prompt.token_ids.tolist(), *sample.tokens.tolist()])
            with torch.no_grad():
                logits = plain(ids[None]).logits[0, -len(sample.tokens) - 1 : -1] / TEMPERATURE
            now = logits.log_softmax(-1).gather(-1, ids[-len(sample.tokens) :, None])[:, 0].numpy()
            apart = np.abs(now - sample.logprobs)
            found["own"] = max(found["own"], float(apart[of_version].max(initial=0)))
            found["another"] = max(found["another"], float(apart[~of_version].max(initial=0)))
            found["tokens"] += int(of_version.sum())
    return found


def test_a_restart_and_a_server_that_dies(served: tuple[list[Server], Path], tmp_path: Path) -> None:
    """Each group is trained once over the restart, each token has the version and the log-probability of the weights
    that wrote it, none is older than two updates, and the server that lives goes on alone.
    """
    servers, model = served
    before = trainer(tmp_path, servers, model)  # the weights are sent
    before.add_callback(AfterSteps(SAVED, lambda control: setattr(control, "should_training_stop", True)))
    before.train()
    assert before.state.global_step == SAVED

    after = trainer(tmp_path, servers, model, weights_dir=tmp_path / "weights", weights="disk")
    after.add_callback(AfterSteps(KILLED, lambda control: servers[0].kill()))
    after.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{SAVED}"))
    assert after.state.global_step == STEPS

    trained = [*before.batches[:SAVED], *after.batches[: STEPS - SAVED]]
    again = {s.id: s.tokens.tolist() for batch in before.batches[SAVED:] for s in batch.samples}
    samples = [s for batch in trained for s in batch.samples]
    assert set(Counter(s.id for s in samples).values()) == {1}
    assert len(samples) == STEPS * GROUPS * SAMPLES
    assert set(Counter(s.id.group for s in samples).values()) == {SAMPLES}
    kept = [s for s in samples if s.id in again]
    assert kept  # fetched before the restart and not trained: the same tokens come again
    assert all(s.tokens.tolist() == again[s.id] for s in kept)
    for made, batches in ((before, before.batches[:SAVED]), (after, after.batches[: STEPS - SAVED])):
        assert sum(made.trained_tokens) == sum(int(s.loss_mask.sum()) for batch in batches for s in batch.samples)
        logged = [row for row in made.state.log_history if "sample/staleness_max" in row]
        assert max(row["sample/staleness_max"] for row in logged) <= 2
        assert not any("sample/dropped_stale_total" in row for row in made.state.log_history)
    assert max(s.staleness for s in samples) <= 2
    assert sum(s.resumes > 0 for s in samples)
    engines = Counter(segment.engine for s in samples for segment in s.segments)
    assert before.state.log_history[0]["ratio"] == pytest.approx(1.0, abs=1e-4)  # TRL's own, of its first step

    found = logprob_errors(model, before.weights | after.weights, trained)
    assert found["tokens"] == sum(len(s.tokens) for s in samples)
    assert found["own"] <= 1e-4
    assert found["another"] > 100 * found["own"]
    assert after.rollout_worker.ledger["tokens"].balanced
    print(f"\n{found}, by engine {dict(engines)}, {sum(s.resumes > 0 for s in samples)} of {len(samples)} resumed, "
          f"{len(kept)} fetched before the restart")  # fmt: skip
