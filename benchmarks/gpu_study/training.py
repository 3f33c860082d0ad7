"""One training on GPUs, from the pretrained model to its last evaluation; it goes on from its checkpoint if it has one.

Every rank runs it. What is measured is what a user waits for: rollouts, training and the hand-over of weights. Seconds
of evaluations and checkpoints are in no figure.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

import april
from april.serialization.state_file import write_atomic
from benchmarks.gpu_study.design import GpuSizes
from benchmarks.gpu_study.questions import reward, split, stream
from benchmarks.gpu_study.trainer import RankTrainer, computing_in, load_model
from benchmarks.study.runner import outcome_path
from benchmarks.study.training import DIGITS, Evaluation, Outcome, Settings, config_of, over_steps

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
Say = Callable[[str], None]


class GpuEvaluation(Evaluation, frozen=True, kw_only=True, array_like=True):
    """An evaluation, and the seconds that had been spent until then.

    ``decode_steps`` are 0 on servers, which do not count them. ``long`` is of the questions whose first response was
    longer than the median.
    """

    wall_s: float
    gpu_s: float
    rollout_s: float
    train_s: float
    update_s: float


class GpuOutcome(Outcome, frozen=True, kw_only=True):
    """What came of a training."""

    evaluations: list[GpuEvaluation]  # type: ignore[assignment]
    device: str
    gpus: int


class Notes(msgspec.Struct, kw_only=True):
    """What is known on the way; a checkpoint has it."""

    step: int = 0
    rows: list[dict[str, float]] = []
    evaluations: list[GpuEvaluation] = []
    long: list[int] = []
    """Numbers of the held-out questions with long first responses."""
    seconds: dict[str, float] = msgspec.field(default_factory=lambda: {"rollout": 0.0, "train": 0.0, "update": 0.0})
    decode_steps: int = 0
    busy_slot_steps: int = 0
    trained_tokens: int = 0
    old_tokens: float = 0.0


def checkpoint_path(out: Path, name: str) -> Path:
    """Return where the checkpoint of a training is."""
    return out / "checkpoints" / f"{name.replace('/', '--')}.pt"


def notes_path(out: Path, name: str) -> Path:
    """Return where it says how far it is, for people."""
    return checkpoint_path(out, name).with_suffix(".json")


def train(out: Path, name: str, settings: Settings, sizes: GpuSizes, urls: list[str], say: Say = print) -> None:
    """Train, and write the outcome; ``urls`` are those of the servers."""
    alone = not dist.is_torchelastic_launched()
    device = torch.device(sizes.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" and not alone else "gloo"
    if alone:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    else:
        dist.init_process_group(backend)
    try:
        _Training(out, name, settings, sizes, urls, device, say).run()
    finally:
        dist.destroy_process_group()


class _Training:
    def __init__(
        self, out: Path, name: str, settings: Settings, sizes: GpuSizes, urls: list[str], device: torch.device, say: Say
    ) -> None:
        from transformers import AutoTokenizer

        self._out, self._name, self._settings, self._sizes = out, name, settings, sizes
        self._device, self._say, self._first = device, say, dist.get_rank() == 0
        self._tokenizer: Any = AutoTokenizer.from_pretrained(sizes.model)
        self._model = load_model(sizes, device)
        self._trainer = RankTrainer(self._model, settings, sizes)
        self._notes = Notes()
        train_on, self._held_out = split(sizes, self._tokenizer)
        self._engine, engines, engine = None, None, {}
        if sizes.engine == "transformers":
            slots = settings.groups * settings.samples
            with computing_in(getattr(torch, sizes.dtype), device):
                self._engine = april.TransformersEngine(self._model, slots=slots, max_len=sizes.max_len)
            engines = [self._engine]
        else:
            engine = {"engine": {"kind": sizes.engine, "urls": urls}}
        self._rollouts = april.RankScheduler(
            config_of(settings, sizes, **engine), ranks=april.Ranks.of_torch(rank_timeout_s=7200.0),
            prompts=stream(train_on, settings.seed), reward=reward, engines=engines, tokenizer=self._tokenizer,
        )  # fmt: skip

    def run(self) -> None:
        notes, settings = self._notes, self._settings
        with self._rollouts:
            if checkpoint_path(self._out, self._name).exists():
                self._load()
                notes = self._notes
                self._tell(f"goes on after step {notes.step}")
            else:
                self._evaluate()
            while notes.step < settings.steps:
                self._step()
                if notes.step % settings.evaluate_every == 0 or notes.step == settings.steps:
                    self._evaluate()
                    self._save()
            self._rollouts.validate()
        if self._first:
            path = outcome_path(self._out, self._name)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, msgspec.json.encode(self._outcome()) + b"\n")
            checkpoint_path(self._out, self._name).unlink(missing_ok=True)
            shutil.rmtree(self._weights_dir(), ignore_errors=True)

    # ---------------------------------------------------------------- a step

    def _step(self) -> None:
        notes, began = self._notes, time.perf_counter()
        counted = self._counted()
        batch = self._rollouts.next_batch()
        rolled = time.perf_counter()
        report = self._trainer.update(batch)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        trained = time.perf_counter()
        self._hand_over(batch)
        done = time.perf_counter()
        notes.step += 1
        for what, seconds in (("rollout", rolled - began), ("train", trained - rolled), ("update", done - trained)):
            notes.seconds[what] += seconds
        notes.decode_steps += self._counted()[0] - counted[0]
        notes.busy_slot_steps += self._counted()[1] - counted[1]
        metrics = batch.metrics
        notes.trained_tokens += int(metrics["trained_tokens"])
        notes.old_tokens += metrics["off_policy_share"] * metrics["trained_tokens"]
        row = {"staleness": "staleness_mean", "staleness_max": "staleness_max", "batch_reward": "reward_mean",
               "length": "response_len_mean", "longest": "response_len_max"}  # fmt: skip
        notes.rows.append(report | {name: float(metrics[metric]) for name, metric in row.items()})
        self._tell(
            f"step {notes.step}/{self._settings.steps}: reward {metrics['reward_mean']:.3f}, "
            f"{metrics['response_len_mean']:.0f} tokens (longest {metrics['response_len_max']:.0f}), rollout "
            f"{rolled - began:.1f} s, training {trained - rolled:.1f} s, weights {done - trained:.1f} s, "
            f"{metrics['off_policy_share']:.0%} from older weights"
        )

    def _counted(self) -> tuple[int, int]:
        """Return decode steps, and busy slots over them, of this process's engine."""
        stats = None if self._engine is None else self._engine.stats
        return (0, 0) if stats is None else (stats.decode_steps, stats.busy_slot_steps)

    def _weights_dir(self) -> Path:
        return (self._out / "weights" / self._name.replace("/", "--")).resolve()

    def _written(self, number: int) -> str:
        """Write the weights for the servers; collective."""
        directory = self._weights_dir() / str(number % 2)  # the servers may still read the other one
        weights = get_model_state_dict(self._model, options=WHOLE)
        if self._first:
            write_weights(directory, weights, self._model, self._tokenizer, getattr(torch, self._sizes.dtype))
        if dist.get_world_size() > 1:
            dist.barrier()
        return str(directory)

    def _hand_over(self, batch: april.Batch) -> None:
        if self._engine is not None:
            self._rollouts.weight_update(trained=batch.id)
        else:
            self._rollouts.weight_update(path=self._written(batch.id), trained=batch.id)

    # ---------------------------------------------------------------- evaluations and checkpoints

    def _evaluate(self) -> None:
        notes = self._notes
        found = self._rollouts.evaluate(self._held_out if self._first else [], temperature=0.0)
        rewards = found.rewards.mean(axis=1)
        if not notes.long:
            lengths = np.array([len(responses[0].tokens) for responses in found.responses])
            notes.long = np.argsort(lengths, kind="stable")[len(lengths) // 2 :].tolist()
        seconds = notes.seconds
        wall = sum(seconds.values())
        notes.evaluations.append(
            GpuEvaluation(
                step=notes.step, decode_steps=notes.decode_steps, trained_tokens=notes.trained_tokens,
                reward=round(float(rewards.mean()), DIGITS), long=round(float(rewards[notes.long].mean()), DIGITS),
                wall_s=round(wall, 2), gpu_s=round(wall * self._sizes.gpus, 2),
                rollout_s=round(seconds["rollout"], 2), train_s=round(seconds["train"], 2),
                update_s=round(seconds["update"], 2),
            )
        )  # fmt: skip
        self._tell(f"after step {notes.step}: held-out reward {notes.evaluations[-1].reward:.3f}, {wall:.0f} s spent")

    def _save(self) -> None:
        """Write everything that the training goes on from; whole or not at all."""
        weights, moments = get_state_dict(self._model, self._trainer.optimizer, options=WHOLE)
        if not self._first:
            return
        path = checkpoint_path(self._out, self._name)
        path.parent.mkdir(parents=True, exist_ok=True)
        notes = msgspec.to_builtins(self._notes)
        part = path.with_suffix(".part")
        torch.save(
            {"model": weights, "optimizer": moments, "rollouts": self._rollouts.state_dict(), "notes": notes}, part
        )
        part.replace(path)
        write_atomic(notes_path(self._out, self._name), msgspec.json.encode(notes))

    def _load(self) -> None:
        saved = torch.load(checkpoint_path(self._out, self._name), weights_only=True, map_location="cpu")
        set_state_dict(
            self._model, self._trainer.optimizer, model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"], options=WHOLE,
        )  # fmt: skip
        self._notes = msgspec.convert(saved["notes"], Notes)
        self._trainer.updates = self._notes.step
        if self._engine is None:
            self._rollouts.load_state_dict(saved["rollouts"], path=self._written(self._notes.step))
        else:
            self._rollouts.load_state_dict(saved["rollouts"])

    def _outcome(self) -> GpuOutcome:
        notes, cuda = self._notes, self._device.type == "cuda"
        return GpuOutcome(
            settings=self._settings, evaluations=notes.evaluations, **over_steps(notes.rows),
            old_share=round(notes.old_tokens / max(1, notes.trained_tokens), DIGITS),
            places=round(notes.busy_slot_steps / max(1, notes.decode_steps), 2),
            device=torch.cuda.get_device_name(self._device) if cuda else "CPU", gpus=self._sizes.gpus,
        )  # fmt: skip

    def _tell(self, line: str) -> None:
        if self._first:
            self._say(f"{self._name} {line}")


def write_weights(directory: Path, weights: dict[str, Any], model: Any, tokenizer: Any, dtype: torch.dtype) -> None:
    """Write a directory that a server loads: whole weights as they are computed with, configuration and tokenizer."""
    from safetensors.torch import save_file

    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    if model.config.tie_word_embeddings:
        weights = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    save_file(
        {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}, directory / "model.safetensors",
        metadata={"format": "pt"},
    )  # fmt: skip
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
