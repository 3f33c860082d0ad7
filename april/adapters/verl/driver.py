"""What runs in verl's driver: sampler and callback, which hand over april's batches and save its state, and manager."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.utils import tensordict_utils as tu
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

from april.adapters.verl.advantages import leave, name_of
from april.adapters.verl.client import Client, worker_class
from april.adapters.verl.settings import SERVERS, settings_of
from april.core.settings import EngineLimits
from april.errors import CheckpointError, ConfigError
from april.processes.coordinator.coordinator import Coordinator
from april.processes.coordinator.messages import Delivery
from april.processes.coordinator.run import STATE_FILE, Run

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
        extras = settings.core.extras
        limits = EngineLimits(SERVERS, settings.context, settings.places, eos, "temperature", extras=extras)
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
        batch = self._batch_of(partition_id, lambda key: _name_of(key) in names, delivery.settled)
        self._mask(batch, delivery)
        if self.settings.scaled is not None:
            leave(delivery, scaled=self.settings.scaled)
            rows = tu.list_of_dict_to_tensordict([{"uid": _name_of(key)} for key in batch.keys])
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
            tq.kv_batch_put(keys=keys, partition_id="train", fields=tu.list_of_dict_to_tensordict(fields))

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


HELD = "held_by_april"
"""Status of a prompt that april goes on with by itself: verl starts only pending and running ones anew."""
UNKNOWN = ("__rollout_n__", "__do_sample__")
"""Columns by which a prompt asks for samples of its own kind."""


class AgentLoopManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """Keeps training prompts until the coordinator wants them; validation is verl's own."""

    def __init__(
        self, config: Any, llm_client: Any, teacher_client: Any = None, reward_loop_worker_handles: Any = None
    ) -> None:
        sampler = Sampler.present
        if sampler is None:
            raise ConfigError(
                "trainer.v1.sampler.custom_sampler is not april's, so nobody would ask for batches; leave it to "
                "+april=verl"
            )
        if not isinstance(sampler.trainer.checkpoint_callback, Checkpoints):
            theirs: CheckpointCallback = sampler.trainer.checkpoint_callback
            raise ConfigError(
                f"trainer.checkpoint_callback_class is {type(theirs).__name__}, so checkpoints would lose what is "
                "unfinished; let it be a subclass of april.adapters.verl.Checkpoints"
            )
        self._sampler = sampler
        coordinator = sampler.open(self.dispatch)
        settings = sampler.settings
        client = Client.around(llm_client, coordinator, settings.max_tokens, overruns=settings.overruns)
        super().__init__(config, client, teacher_client, reward_loop_worker_handles)
        self.agent_loop_workers_class = ray.remote(worker_class())
        self._turn = itertools.count()

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> Any:
        """As verl's; then what a checkpoint holds goes on."""
        manager = super().create(*args, **kwargs)
        manager.go_on()
        return manager

    def generate_sequences(self, prompts: Any) -> None:
        """Take prompts from verl; training prompts wait until the coordinator draws them."""
        if tu.get_non_tensor_data(prompts, "validate", False):
            super().generate_sequences(prompts)
            return
        for column in UNKNOWN:
            if column in prompts:
                raise ConfigError(
                    f"the data have a column {column}: with april every prompt has rollout.n samples of one kind; "
                    "leave the column out"
                )
        self._sampler.run.offer(zip(prompts["uid"], prompts.chunk(len(prompts)), strict=True))

    def dispatch(self, rows: Sequence[Any]) -> None:
        """Send each prompt to one worker, in turn."""
        workers = self.agent_loop_workers
        ray.get([workers[next(self._turn) % len(workers)].generate_sequences.remote(row) for row in rows])

    # ---------------------------------------------------------------- after a restart

    def go_on(self) -> None:
        """Continue what a checkpoint holds. verl has loaded its queue by now, and not started anything anew."""
        trainer = self._sampler.trainer
        folder = _checkpoint(trainer)
        labels = (tq.kv_list("train") or {}).get("train", {})
        prompts = [key for key, tag in labels.items() if tag.get("is_prompt", False)]
        stored: dict[str, list[int]] = {uid: [] for uid in prompts}
        orphans = []
        for key, tag in labels.items():
            if not tag.get("is_prompt", False):
                uid, index, _ = key.split("_")
                if uid in stored:
                    stored[uid].append(int(index))
                else:
                    orphans.append(key)
        if orphans:
            # of the batch that the saved weights were trained on
            tq.kv_clear(keys=orphans, partition_id="train")
        if folder is None:
            return
        if not (folder / STATE_FILE).is_file():
            self._adopt(folder, prompts, labels)
            return
        held, dropped = self._sampler.run.restore(folder, stored, self._rows)
        if held:
            _label(sorted(held), HELD, trainer.global_steps)
        # with a quorum, of samples that the saved weights were trained on, too
        trained = {(uid, i) for uid, there in stored.items() for i in there if i not in held.get(uid, (i,))}
        if gone := [key for key in labels if key.split("_")[0] in dropped or _rollout_of(key) in trained]:
            tq.kv_clear(keys=gone, partition_id="train")
        waiting = [uid for uid in prompts if uid not in held and uid not in dropped]
        self._sampler.run.offer(zip(waiting, self._rows(waiting), strict=True))
        if waiting:
            _label(waiting, HELD, trainer.global_steps)

    def _adopt(self, folder: Path, prompts: list[str], labels: dict[str, Any]) -> None:
        """A checkpoint that was saved without april: its prompts are begun anew, finished ones too."""
        if not prompts:
            return
        log.warning(
            "%s was saved without april: responses to its %d prompts that are not trained yet are generated anew",
            folder, len(prompts),
        )  # fmt: skip
        _label(prompts, "pending", self._sampler.trainer.global_steps)

    def _rows(self, uids: list[str]) -> Sequence[Any]:
        """Prompts of verl's queue as they came from its data loader."""
        if not uids:
            return []
        batch = tq.kv_batch_get(keys=uids, partition_id="train")
        tu.assign_non_tensor_data(batch, "global_steps", self._sampler.trainer.global_steps + 1)
        return list(batch.chunk(len(uids)))


def _name_of(key: str) -> str:
    """Keys in verl's queue are uid_rollout_output."""
    return key.rpartition("_")[0]


def _rollout_of(key: str) -> tuple[str, int] | None:
    """(uid, rollout) of a trajectory's key; None: of a prompt."""
    uid, *rest = key.split("_")
    return (uid, int(rest[0])) if rest else None


def _label(uids: list[str], status: str, step: int) -> None:
    tags = [{"is_prompt": True, "status": status, "global_steps": step} for _ in uids]
    tq.kv_batch_put(keys=uids, partition_id="train", tags=tags)


def _checkpoint(trainer: Any) -> Path | None:
    """Return where verl has loaded its checkpoint from, by the rules that it goes by; None: it begins anew."""
    settings = trainer.config.trainer
    if settings.resume_mode == "disable" or not trainer.global_steps:
        return None
    path = settings.default_local_dir if settings.resume_mode == "auto" else settings.resume_from_path
    where = os.path.abspath(path)
    found = find_latest_ckpt_path(where) if settings.resume_mode == "auto" else where
    if found is None:
        raise CheckpointError(f"verl has loaded step {trainer.global_steps}, and there is no checkpoint in {where}")
    return Path(found)
