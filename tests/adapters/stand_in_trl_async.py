"""A trainer of a few lines that calls as TRL's AsyncGRPOTrainer does, with its lookahead of one micro-batch."""

from __future__ import annotations

import queue
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from . import modules
from .stand_in_ranks import Meeting, RankAccelerator
from .stand_in_trl import Words, parse_response

EOS = 2
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_generations": 2, "max_staleness": 4,
    "max_completion_length": 40, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0,
    "seed": 42, "weight_sync_steps": 1, "token_budget": None, "chat_template_kwargs": None,
}  # fmt: skip


@dataclass(slots=True)
class RolloutSample:
    """As TRL's."""

    prompt: Any
    completion: Any
    input_ids: Any
    completion_mask: Any
    old_log_probs: Any
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]
    enqueued_at: float | None = None


def add_response_schema(tokenizer: Any) -> Any:
    raise ValueError("an unknown template")


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of trl from which the adapter imports."""
    found = modules({
        "trl.experimental.async_grpo.async_rollout_worker": {"RolloutSample": RolloutSample},
        "trl.chat_template_utils": {"parse_response": parse_response, "add_response_schema": add_response_schema},
    })  # fmt: skip
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)


def noted(worker: Any) -> list[Any]:
    """The batches that the trainer will fetch through this worker."""
    batches: list[Any] = []
    samples = worker._samples

    def note(batch: Any) -> Any:
        batches.append(batch)
        return samples(batch)

    worker._samples = note
    return batches


class ChatWords(Words):
    """A tokenizer whose chat template is the words of all messages."""

    def apply_chat_template(self, messages: Any, **options: Any) -> list[int]:
        assert options == {"return_dict": False, "add_generation_prompt": True}
        return [int(word) for said in messages for word in said["content"].split()]


class AsyncGRPOTrainer:
    """Trains on rows from its worker's queue; ``trained`` has those of each step."""

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: Any = None, train_dataset: Any = None,
        rollout_worker: Any = None, weight_transfer: Any = None, sees: bool = False,
    ) -> None:  # fmt: skip
        self.args = SimpleNamespace(**(DEFAULTS | (args or {})))
        self.model, self.train_dataset = model, train_dataset
        self.rollout_worker, self.weight_transfer = rollout_worker, weight_transfer
        self.accelerator = RankAccelerator(Meeting(1), 0)
        self.state = SimpleNamespace(global_step=0)
        self.eos_token_ids, self.processing_class, self._is_vlm = [EOS], ChatWords(), sees
        self.model_version = self._groups_before_resume = 0
        self._metrics: Any = {"train": defaultdict(list)}
        self.folder: Path | None = None
        """Where each step is saved; None: nowhere."""
        self.after_step: Callable[[], None] = lambda: None
        self.trained: list[list[RolloutSample]] = []

    def train(self, steps: int, resume_from_checkpoint: str | None = None) -> None:
        if resume_from_checkpoint is not None:
            self.state.global_step = int(resume_from_checkpoint.rpartition("-")[2])
        try:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
            self.weight_transfer.init_weight_transfer()
            self._sync_weight()
            self.rollout_worker.start()
            batches = self._one_ahead(self._micro_batches())
            while self.state.global_step < steps:
                step = [row for _ in range(self.args.gradient_accumulation_steps) for row in next(batches)]
                self.trained.append(step)
                self.state.global_step += 1
                if self.state.global_step % self.args.weight_sync_steps == 0:
                    self._sync_weight()
                while not self.rollout_worker.metrics_queue.empty():
                    for key, value in self.rollout_worker.metrics_queue.get_nowait().items():
                        self._metrics["train"][key].append(value)
                self.after_step()
                if self.folder is not None:
                    self._save_checkpoint(self.model, None)
        finally:
            self.rollout_worker.stop()
            self.weight_transfer.destroy()

    def _rows(self) -> Iterator[RolloutSample]:
        while True:
            try:
                sample = self.rollout_worker.rollout_buffer.get(timeout=5.0)
            except queue.Empty:
                self.rollout_worker.check_health(300.0)
                continue
            if self.model_version - sample.model_version > self.args.max_staleness:
                self._metrics["train"]["sample/dropped_stale_total"].append(1.0)
                continue
            yield sample

    def _micro_batches(self) -> Iterator[list[RolloutSample]]:
        rows = self._rows()
        while True:
            yield [next(rows) for _ in range(self.args.per_device_train_batch_size)]

    def _one_ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        """As accelerate's DataLoaderDispatcher, which looks for the end of the data."""
        following = next(batches)
        while True:
            present, following = following, next(batches)
            yield present

    def _sync_weight(self) -> None:
        self.weight_transfer.pause()
        self.weight_transfer.send_weights(self._streaming_iter())
        self.weight_transfer.resume()
        self.model_version += 1
        self.rollout_worker.update_model_version(self.model_version)

    def _streaming_iter(self) -> Iterator[Any]:
        yield from self.model.named_parameters()

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.folder)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        assert (Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}").is_dir()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        pass
