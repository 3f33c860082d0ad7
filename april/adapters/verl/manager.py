"""verl's agent-loop manager with the coordinator behind it; and how a run goes on from verl's checkpoint."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.utils import tensordict_utils as tu
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

from april.adapters.verl.client import Client, worker_class
from april.adapters.verl.sampler import Checkpoints, Sampler
from april.errors import CheckpointError, ConfigError
from april.processes.coordinator.run import STATE_FILE

log = logging.getLogger("april")

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
