"""The sampler and the callback for verl's driver, which hand over april's batches and save april's state."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from april.adapters.verl.advantages import leave, name_of
from april.adapters.verl.settings import SERVERS, settings_of
from april.core.settings import EngineLimits
from april.errors import ConfigError
from april.processes.coordinator.coordinator import Coordinator
from april.processes.coordinator.messages import Delivery
from april.processes.coordinator.run import Run

log = logging.getLogger("april")

WAITERS = 1_000_000
"""Agent loops that may wait at the coordinator at the same time; each is one pending call."""


class Sampler(ReplayBufferAsync):  # type: ignore[misc]
    """Asks the coordinator for a batch instead of looking at the queue again and again."""

    present: Sampler | None = None
    """That of this process; verl has one trainer per process."""

    def __init__(self, **kwargs: Any) -> None:
        trainer = getattr(kwargs.get("refill_fn"), "__self__", None)
        if trainer is None:
            raise ConfigError("april.adapters.verl.Sampler is for verl's trainer: trainer.v1.sampler.custom_sampler")
        self.trainer = trainer
        self.settings = settings_of(trainer.config)
        super().__init__(**kwargs)
        self.coordinator: Any = None
        self.dispatch: Any = None
        self.run = Run(self, self.settings.config.rollout_batch_size)
        Sampler.present = self

    def open(self, dispatch: Any) -> Any:
        """Start the coordinator; its actor. ``dispatch`` takes rows to agent-loop workers."""
        settings, tokenizer = self.settings, self.trainer.tokenizer
        ends = {getattr(tokenizer, "eos_token_id", None), *_generation_ends(self.trainer.config)} - {None}
        eos = tuple(sorted(map(int, ends)))
        limits = EngineLimits(SERVERS, settings.context, settings.places, eos, "temperature")
        actor = ray.remote(num_cpus=0, max_concurrency=WAITERS)(Coordinator)
        name = f"algorithm.filter_groups.metric={settings.filter_metric}"
        self.coordinator = actor.remote(settings.core, limits, name, check=settings.check)
        self.dispatch = dispatch
        return self.coordinator

    # ---------------------------------------------------------------- what verl calls

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """The next batch: its keys in verl's queue, and metrics. Weights are called by the step they were made in."""
        if self.coordinator is None:
            raise ConfigError(
                "actor_rollout_ref.rollout.agent.agent_loop_manager_class is not april's; leave it to +april=verl"
            )
        if partition_id != "train":
            uids = set(self.ask("validation", batch_size))
            return self._batch_of(partition_id, lambda key: key.split("_")[0] in uids, uids), {}
        before = time.monotonic()
        delivery = self.run.next_batch(global_steps - 1, batch_size)
        names = {name_of(*rollout) for rollout in delivery.rollouts}
        batch = self._batch_of(partition_id, lambda key: _rollout_of(key) in names, delivery.settled)
        self._mask(batch, delivery)
        if self.settings.scaled is not None:
            leave(delivery, scaled=self.settings.scaled)
            rows = list_of_dict_to_tensordict([{"uid": _rollout_of(key)} for key in batch.keys])
            tq.kv_batch_put(keys=batch.keys, partition_id=partition_id, fields=rows)
        metrics = {f"april/{name}": value for name, value in delivery.metrics.items()}
        metrics |= {f"april/dropped_{reason}": float(count) for reason, count in self.run.dropped.items()}
        metrics["april/sample_s"] = time.monotonic() - before
        return batch, metrics

    def _batch_of(self, partition_id: str, wanted: Callable[[str], bool], settled: Collection[str]) -> Any:
        """Look once at the queue's labels, for keys and tags; then prompts that are ``settled`` leave it."""
        labels = (tq.kv_list(partition_id) or {}).get(partition_id, {})
        rows = {k: t for k, t in labels.items() if not t.get("is_prompt", False) and wanted(k)}
        if settled:
            tq.kv_clear(partition_id=partition_id, keys=list(settled))
        return KVBatchMeta(partition_id=partition_id, keys=list(rows), tags=list(rows.values()))

    def _mask(self, batch: Any, delivery: Delivery) -> None:
        """Take the loss off tokens that are too old."""
        keys, fields = [], []
        for (uid, index), mask in delivery.masked.items():
            for key in (k for k in batch.keys if k.startswith(f"{uid}_{index}_")):
                data = tq.kv_batch_get(keys=[key], partition_id="train", select_fields=["prompts", "response_mask"])
                start, response = len(data["prompts"][0]), data["response_mask"][0]
                kept = torch.zeros_like(response)  # what an agent loop added after its last call carries no loss
                part = torch.as_tensor(mask[start : start + len(response)], dtype=response.dtype)
                kept[: len(part)] = response[: len(part)] * part
                keys.append(key)
                fields.append({"response_mask": kept, "loss_mask": kept})
        if keys:
            tq.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(fields))

    # ---------------------------------------------------------------- for the run

    def ask(self, method: str, *args: Any) -> Any:
        """Call the coordinator; blocks this thread without looking again and again."""
        return ray.get(getattr(self.coordinator, method).remote(*args))

    def fetch(self, count: int) -> None:
        """verl draws from its data loader and submits, which comes back to our manager."""
        self.refill_fn(count)

    def abort(self) -> None:
        """End every request at every server; those on their way there are turned away where verl's server can."""
        self.trainer.checkpoint_manager.abort_replicas(reject_request=True)


def _rollout_of(key: str) -> str:
    """Keys in verl's queue are uid_rollout_output."""
    return key.rpartition("_")[0]


def _generation_ends(config: Any) -> set[Any]:
    """Tokens that end a response by the model's own generation configuration, beside the tokenizer's."""
    from transformers import GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(config.actor_rollout_ref.model.path).eos_token_id
    except (OSError, ValueError):
        return set()
    return set(found) if isinstance(found, (list, tuple)) else {found}


class Checkpoints(CheckpointCallback):  # type: ignore[misc]
    """Saves april's state into verl's checkpoint. A callback of yours: subclass this one, and call its method."""

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs: Any
    ) -> None:
        """Called by verl when its own files are written, before the weights change."""
        if Sampler.present is not None and Sampler.present.coordinator is not None:
            Sampler.present.run.save(Path(checkpoint_dir))
