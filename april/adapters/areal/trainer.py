"""AReaL's PPOTrainer with april's executor in its inference engine; importing this module imports AReaL."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from areal.trainer.rl_trainer import PPOTrainer as ArealPPOTrainer
from areal.utils.environ import is_single_controller
from areal.utils.recover import RecoverHandler

from april.adapters.areal.executor import AprilExecutor
from april.adapters.areal.settings import config_of, objections
from april.carrying_loader import KEY, CarryingLoader
from april.errors import CheckpointError, ConfigError

log = logging.getLogger("april")


class PPOTrainer(ArealPPOTrainer):  # type: ignore[misc]
    """AReaL's trainer, in SPMD mode, with april's rollouts.

    Args:
        config, train_dataset, valid_dataset: as AReaL's.
        april: april's own settings, by name.

    Raises:
        ConfigError: what speaks against this configuration, in one sentence, before anything is started.
    """

    def __init__(
        self, config: Any, train_dataset: Any = None, valid_dataset: Any = None, *,
        april: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if is_single_controller():
            raise ConfigError(
                "AReaL's single-controller mode runs workflows in processes of its own, which april's core does not "
                "reach; start the run in SPMD mode: AREAL_SPMD_MODE=1, python3 -m areal.infra.launcher.local train.py"
            )
        self._april_settings = dict(april or {})
        for sentence in objections(config, self._april_settings):
            raise ConfigError(sentence)
        self._april: AprilExecutor | None = None
        self._april_files: list[Path] = []
        super().__init__(config, train_dataset=train_dataset, valid_dataset=valid_dataset)

    def _create_dataloader(self, dataset: Any, dataset_config: Any, rank: int, world_size: int) -> Any:
        loader = super()._create_dataloader(dataset, dataset_config, rank, world_size)
        if dataset_config is self.config.train_dataset:
            return CarryingLoader(loader, self._with_april, self._load_april)
        return loader

    def _init_rollout(self, rollout_config: Any, is_eval: bool = False, lora_path: str | None = None) -> Any:
        engine = super()._init_rollout(rollout_config, is_eval=is_eval, lora_path=lora_path)
        if is_eval:
            return engine
        inner, ranks = engine._engine, self.actor_alloc.parallel.dp_size
        april = config_of(self.config, self._april_settings, groups=self.train_dataloader.batch_size, ranks=ranks)
        executor = AprilExecutor(
            inner.config, inner, april, self._ends(), check=bool(self._april_settings.get("check", False))
        )
        inner.workflow_executor.destroy()
        executor.initialize(logger=inner.logger, train_data_parallel_size=ranks)
        inner.workflow_executor = self._april = executor
        log.info("april: generation %s, N=%d, %s", april.generation, april.rollout_batch_size, april.refill)
        return engine

    def _ends(self) -> list[int]:
        """Token ids that end a response, as AReaL's workflows have them."""
        sampling, tokenizer = self.config.gconfig, self.tokenizer
        if sampling.ignore_eos:
            return list(sampling.stop_token_ids)
        own = (tokenizer.eos_token_id, tokenizer.pad_token_id)
        return [*sampling.stop_token_ids, *(token for token in own if token is not None)]

    # ---------------------------------------------------------------- AReaL's recover checkpoint

    def _folder(self) -> Path:
        recover = self.config.recover
        return Path(RecoverHandler.recover_info_path(recover.experiment_name, recover.trial_name, recover.fileroot))

    def _with_april(self, loader_state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """april's state beside AReaL's, in a file of its own name; the one before is kept until AReaL's is written."""
        if self._april is None or self._april.rollouts is None:
            return {**loader_state(), KEY: ""}
        folder = self._folder()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{_prefix()}{uuid.uuid4().hex}.msgpack"
        self._april.rollouts.save(path)
        self._april_files.append(path)
        while len(self._april_files) > 2:
            self._april_files.pop(0).unlink(missing_ok=True)
        return {**loader_state(), KEY: path.name}

    def _load_april(self, name: str | None) -> None:
        if name is None:
            log.warning(
                "AReaL's recover checkpoint was saved without april: what was unfinished then is lost, and its prompts "
                "are not asked again in this epoch"
            )
        if not name:
            return
        path = self._folder() / name
        if path.parent != self._folder() or not path.is_file():
            raise CheckpointError(f"AReaL's recover checkpoint needs april's state {path}, and it is not there")
        assert self._april is not None
        self._april.saved = path
        for old in self._folder().glob(f"{_prefix()}*"):
            if old != path:
                old.unlink()
        self._april_files.append(path)


def _prefix() -> str:
    """Return the prefix of this rank's files."""
    return f"april_{os.getenv('RANK', '0')}_"
