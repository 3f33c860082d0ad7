"""Subclasses of verl's sampler, checkpoint callback and agent-loop manager, which run in verl's driver process."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
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

from april.adapters.common.refusals import refuse
from april.adapters.verl.advantages import name_of, store_advantages
from april.adapters.verl.client import AprilServerClient, ask_servers, worker_class
from april.adapters.verl.rollouts import STATE_FILE, DeliveredRows, VerlRollouts
from april.adapters.verl.settings import settings_of
from april.concurrency.worker_threads import run_in_thread
from april.errors import ConfigError
from april.scheduler import RolloutScheduler

log = logging.getLogger("april")

MAX_WORKER_CALLS = 1_000_000
"""Maximum number of concurrent calls to a worker: one for each validation and a few for training."""


class Sampler(ReplayBufferAsync):  # type: ignore[misc]
    """verl's sampler, except that training batches come from april's scheduler instead of polling verl's queue."""

    present: Sampler | None = None
    """The sampler of this process; there is only one, since verl has one trainer per process."""
    rollouts: VerlRollouts
    scheduler: RolloutScheduler | None = None

    def __init__(self, **kwargs: Any) -> None:
        self.trainer = kwargs["refill_fn"].__self__
        self.settings = settings_of(self.trainer.config)
        super().__init__(**kwargs)
        self.validations: list[tuple[list[str], list[Any]]] = []
        """For each running validation, the uids of its prompts and the pending calls to the workers."""
        Sampler.present = self

    def open(self, llm_client: Any, workers: Sequence[Any]) -> None:
        """Create april's scheduler on verl's servers and agent-loop workers."""
        settings, tokenizer = self.settings, self.trainer.tokenizer
        ends = {getattr(tokenizer, "eos_token_id", None), *_generation_ends(self.trainer.config)} - {None}
        send = partial(ask_servers, llm_client)
        calls = [
            SimpleNamespace(begin=w.april_begin.remote, messages=w.april_messages.remote, answer=w.april_answer.remote)
            for w in workers
        ]
        self.rollouts = VerlRollouts(
            settings, send, self._end_all, sorted(map(int, ends)), self.refill_fn, calls
        )
        self.scheduler = RolloutScheduler(settings.config, **self.rollouts.parts)

    async def _end_all(self) -> None:
        """End all requests at verl's servers, and reject requests in transit if a server can."""
        await run_in_thread(self.trainer.checkpoint_manager.abort_replicas, reject_request=True)

    # ---------------------------------------------------------------- called by verl

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Return the keys of the next batch in verl's queue, and metrics."""
        if self.scheduler is None:
            raise ConfigError(
                "actor_rollout_ref.rollout.agent.agent_loop_manager_class is not april's; leave it to +april=verl"
            )
        if partition_id != "train":
            uids, answers = self.validations.pop(0)
            ray.get(answers)
            return self._batch_of(partition_id, lambda key: key.split("_")[0] in uids, uids), {}
        before = time.monotonic()
        self.rollouts.deliveries.report_weights(self.scheduler, global_steps - 1)
        delivery = self.rollouts.delivered(self.scheduler.next_batch(), self.scheduler)
        names = {name_of(*rollout) for rollout in delivery.rollouts}
        batch = self._batch_of(partition_id, lambda key: _name_of(key) in names, delivery.settled, delivery.held)
        self._mask(batch, delivery)
        if self.settings.scaled is not None:
            store_advantages(delivery, scaled=self.settings.scaled)
            rows = tu.list_of_dict_to_tensordict([{"uid": _name_of(key)} for key in batch.keys])
            tq.kv_batch_put(keys=batch.keys, partition_id=partition_id, fields=rows)
        metrics = {f"april/{name}": value for name, value in delivery.metrics.items()}
        metrics["april/sample_s"] = time.monotonic() - before
        return batch, metrics

    def _batch_of(
        self, partition_id: str, wanted: Callable[[str], bool], settled: Collection[str],
        held: Collection[str] | None = None,
    ) -> Any:  # fmt: skip
        """Return the ``wanted`` trajectories of verl's queue, and remove ``settled`` prompts from the queue.

        If ``held`` is given, all other trajectories of prompts that are not ``held`` are removed too.
        """
        labels = (tq.kv_list(partition_id) or {}).get(partition_id, {})
        rows = {k: t for k, t in labels.items() if not t.get("is_prompt", False) and wanted(k)}
        gone = [*settled, *([] if held is None else [key for key in _keys_of_others(held, labels) if key not in rows])]
        if gone:
            tq.kv_clear(partition_id=partition_id, keys=gone)
        return KVBatchMeta(partition_id=partition_id, keys=list(rows), tags=list(rows.values()))

    def _mask(self, batch: Any, delivery: DeliveredRows) -> None:
        keys, fields = [], []
        for (uid, index), mask in delivery.masked.items():
            for key in (k for k in batch.keys if k.startswith(f"{uid}_{index}_")):
                data = tq.kv_batch_get(keys=[key], partition_id="train", select_fields=["response_mask"])
                response = data["response_mask"][0]
                kept = torch.zeros_like(response)  # 0 for tokens that the agent loop added after its last call
                part = torch.as_tensor(mask[: len(response)], dtype=response.dtype)
                kept[: len(part)] = response[: len(part)] * part
                keys.append(key)
                fields.append({"response_mask": kept, "loss_mask": kept})
        if keys:
            tq.kv_batch_put(keys=keys, partition_id="train", fields=tu.list_of_dict_to_tensordict(fields))


def _generation_ends(config: Any) -> set[Any]:
    """Return the end-of-sequence tokens in the model's generation configuration; empty if it has none."""
    from transformers import GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(config.actor_rollout_ref.model.path).eos_token_id
    except (OSError, ValueError):
        return set()
    return set(found) if isinstance(found, (list, tuple)) else {found}


class Checkpoints(CheckpointCallback):  # type: ignore[misc]
    """Saves april's state into verl's checkpoint. A custom callback must subclass it and call ``super().on_save``."""

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs: Any
    ) -> None:
        """Save april's state. verl calls this once its own files are written, before the weights change."""
        if (sampler := Sampler.present) is not None and sampler.scheduler is not None:
            sampler.rollouts.save(Path(checkpoint_dir), sampler.scheduler)


HELD = "held_by_april"
"""Status in verl's queue of prompts that april continues; verl would restart pending or running prompts."""
REFUSED_COLUMNS = ("__rollout_n__", "__do_sample__")
"""Columns of verl's data that change the number or kind of samples of a prompt; april refuses both."""


class AgentLoopManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """verl's manager of agent loops, except that training prompts go to april; verl still runs validation prompts."""

    def __init__(
        self, config: Any, llm_client: Any, teacher_client: Any = None, reward_loop_worker_handles: Any = None
    ) -> None:
        sampler = Sampler.present
        callback: CheckpointCallback = None if sampler is None else sampler.trainer.checkpoint_callback
        # fmt: off
        refuse([
            (sampler is None, "trainer.v1.sampler.custom_sampler is not april's", "no component would ask for batches",
             "leave it to +april=verl"),
            (not isinstance(callback, Checkpoints), f"trainer.checkpoint_callback_class is {type(callback).__name__}",
             "checkpoints would lose unfinished responses",
             "let it be a subclass of april.adapters.verl.Checkpoints"),
        ])
        # fmt: on
        assert sampler is not None
        self._sampler = sampler
        client = AprilServerClient.around(llm_client, sampler.settings.max_tokens)
        super().__init__(config, client, teacher_client, reward_loop_worker_handles)
        self.agent_loop_workers_class = ray.remote(max_concurrency=MAX_WORKER_CALLS)(worker_class())

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> Any:
        """Create verl's manager and april's scheduler, and resume from a checkpoint if verl has loaded one."""
        manager = super().create(*args, **kwargs)
        manager._sampler.open(manager.llm_client, manager.agent_loop_workers)
        manager.restore_april()
        return manager

    def generate_sequences(self, prompts: Any) -> None:
        """Receive prompts from verl: start their validation, or offer training prompts to april."""
        if tu.get_non_tensor_data(prompts, "validate", False):
            workers, uids = self.agent_loop_workers, list(prompts["uid"])
            chunks = prompts.chunk(len(workers))
            answers = [w.april_validate.remote(rows) for w, rows in zip(workers, chunks, strict=False)]
            self._sampler.validations.append((uids, answers))
            return
        refuse((column in prompts, f"the data have a column {column}",
                "with april every prompt has rollout.n samples of one kind", "leave the column out")
               for column in REFUSED_COLUMNS)  # fmt: skip
        rows = map(ray.put, prompts.chunk(len(prompts)))  # stored in Ray once for all samples of a prompt
        self._sampler.rollouts.prompts.offer(zip(prompts["uid"], rows, strict=True))

    # ---------------------------------------------------------------- after a restart

    def restore_april(self) -> None:
        """Restore april's state from the loaded checkpoint. verl has loaded its queue but restarted no prompt yet."""
        trainer, scheduler, rollouts = self._sampler.trainer, self._sampler.scheduler, self._sampler.rollouts
        assert scheduler is not None
        folder = _checkpoint(trainer)
        labels = (tq.kv_list("train") or {}).get("train", {})
        prompts = [key for key, tag in labels.items() if tag.get("is_prompt", False)]
        if folder is None or not (folder / STATE_FILE).is_file():
            # these trajectories are left over from the batch on which the saved weights were trained
            if orphans := _keys_of_others(prompts, labels):
                tq.kv_clear(keys=orphans, partition_id="train")
            if folder is not None and prompts:
                log.warning(
                    "%s was saved without april, so april generates responses to its %d untrained prompts again",
                    folder, len(prompts),
                )  # fmt: skip
                _label(prompts, "pending", trainer.global_steps)
            return
        stored: dict[str, dict[int, list[str]]] = {uid: {} for uid in prompts}
        for key in labels:
            uid, *rest = key.split("_")
            if rest and uid in stored:
                stored[uid].setdefault(int(rest[0]), []).append(key)
        state, waiting = rollouts.read(folder, stored)
        scheduler.load_state_dict(state)
        held = rollouts.restored(scheduler, self._rows, waiting)
        here = {*held, *waiting}
        if gone := [*(uid for uid in prompts if uid not in here), *_keys_of_others(held, labels)]:
            tq.kv_clear(keys=gone, partition_id="train")
        if here:
            _label(sorted(here), HELD, trainer.global_steps)

    def _rows(self, uids: list[str]) -> Sequence[Any]:
        """Return the rows of prompts in verl's queue, in the form in which verl's data loader yields them."""
        if not uids:
            return []
        batch = tq.kv_batch_get(keys=uids, partition_id="train")
        tu.assign_non_tensor_data(batch, "global_steps", self._sampler.trainer.global_steps + 1)
        return list(map(ray.put, batch.chunk(len(uids))))


def _name_of(key: str) -> str:
    """Return the rollout's name from a trajectory's key, which is ``name_output``."""
    return key.rpartition("_")[0]


def _keys_of_others(prompts: Collection[str], labels: Mapping[str, Any]) -> list[str]:
    """Return the keys of trajectories in verl's queue (``labels``) that belong to none of these prompts."""
    return [k for k, tag in labels.items() if not tag.get("is_prompt", False) and k.split("_")[0] not in prompts]


def _label(uids: list[str], status: str, step: int) -> None:
    tags = [{"is_prompt": True, "status": status, "global_steps": step} for _ in uids]
    tq.kv_batch_put(keys=uids, partition_id="train", tags=tags)


def _checkpoint(trainer: Any) -> Path | None:
    """Return the folder of the checkpoint that verl has loaded, found by verl's own rules; None if it loaded none."""
    settings = trainer.config.trainer
    if settings.resume_mode == "disable" or not trainer.global_steps:
        return None
    path = settings.default_local_dir if settings.resume_mode == "auto" else settings.resume_from_path
    where = os.path.abspath(path)
    return Path(find_latest_ckpt_path(where) if settings.resume_mode == "auto" else where)
