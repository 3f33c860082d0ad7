"""Runs april inside TRL's AsyncGRPOTrainer, as its rollout worker and its weight transfer.

Invariants:

* an optimizer step trains exactly the rows of one batch of april, in the order in which the trainer fetches them;
* a row's ``model_version`` is the version of its oldest trained token, so TRL's staleness limit holds for each token;
* april's state in a checkpoint of the trainer includes the rows that were fetched but not yet trained.
"""

from __future__ import annotations

import importlib
import queue
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from april.adapters.common.installed_trainer import require_functions
from april.adapters.common.refusals import refuse
from april.adapters.trl import checkpoint
from april.adapters.trl.checks import (
    ASYNC_FUNCTIONS,
    TESTED_VERSION,
    async_refusals,
    config_for,
    given_settings,
    require_trl,
)  # fmt: skip
from april.adapters.trl.data import DatasetPasses, message_of, sample_reward, scored, scorer_of
from april.adapters.trl.ranks import may_send, sharding_of, why_not_sent, why_not_taken
from april.adapters.trl.trainer import METRICS, Filter, logged_metrics
from april.config.settings import Config
from april.core.batch import Batch
from april.core.ledger import Ledger
from april.core.types import GenerationMode, OnDataEnd, OnFailedSample
from april.errors import ConfigError, RolloutError
from april.scheduler import RolloutScheduler
from april.serialization.state_file import write_state

EPSILON = 1e-8
"""Constant that AsyncGRPOTrainer's own worker adds to the standard deviation of a group's rewards."""


class RowQueue(queue.Queue[Any]):
    """A queue that, if it is empty when the trainer asks for a row, calls ``fetch`` for the rows of the next batch."""

    def __init__(self, fetch: Callable[[], Sequence[Any]]) -> None:
        super().__init__()
        self._fetch = fetch

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next row. ``timeout`` is ignored: april's next batch may take long, and failures are raised."""
        if self.empty():
            for row in self._fetch():
                self.put_nowait(row)
        return super().get(block=False)


class RolloutWorker:
    """The ``rollout_worker`` and ``weight_transfer`` of an :data:`AprilAsyncGRPOTrainer`.

    The arguments are those of :class:`april.adapters.trl.Rollout`. A mapping or file as ``config`` may leave out what
    AsyncGRPOConfig already sets (rows per step, samples per prompt, length, temperature, staleness, seed).

    Raises ConfigError if the settings cannot be read. Their values are checked when the trainer is made.
    """

    def __init__(
        self, config: Config | Mapping[str, Any] | str | Path | None = None, *, weights_dir: str | Path | None = None,
        filter: Filter | None = None, metrics: Sequence[str] | Literal["all"] = METRICS, **settings: Any,
    ) -> None:  # fmt: skip
        self._settings = given_settings(config, settings)
        self._weights_dir = None if weights_dir is None else Path(weights_dir)
        self._filter, self._metrics = filter, metrics
        self._trainer: Any = None
        self._config: Config | None = None
        self._passes: Any = None
        self.rollout_buffer = RowQueue(self._next_rows)
        """Queue from which the trainer takes its rows."""
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        """Queue from which the trainer takes april's metrics for its log."""
        self.scheduler: RolloutScheduler | None = None
        """april's scheduler; None while the trainer does not train."""
        self.ledger: dict[str, Ledger] = {}
        """april's counts of prompts and tokens (delivered, dropped, held) at the end of the last training."""
        self._saved: dict[str, Any] | None = None
        """april's state from a checkpoint, which the first weight transfer restores; None without a checkpoint."""
        self._first_step = 0
        self._batches: list[tuple[int, frozenset[int]]] = []
        """Batch id and group numbers for each optimizer step from ``_first_step`` on."""
        self._sends: bool | None = None
        """True if this process sends weights to the servers, False if a directory is used; None until it is decided."""
        self._written: Path | None = None

    def attach(self, trainer: Any, given: Mapping[str, Any]) -> None:
        """Attach this worker to a trainer. Raises ConfigError if its settings, or arguments ``given``, do not fit."""
        args = trainer.args
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * trainer.accelerator.num_processes
        decided = {
            "rollout_batch_size": ("rows per optimizer step / num_generations", max(1, rows // args.num_generations)),
            "max_staleness": ("max_staleness", args.max_staleness),
        }
        defaults = {"generation": GenerationMode.CONTINUOUS, "on_data_end": OnDataEnd.WRAP}
        config = config_for(self._settings, trainer, decided, defaults)
        refuse(async_refusals(trainer, config, servers=self._weights_dir is not None, rows=rows, given=given))
        args.token_budget = 0  # with None, TRL asks a server for a budget, and steps have different numbers of rows
        self._trainer, self._config, self._passes = trainer, config, DatasetPasses(trainer)

    # ---------------------------------------------------------------- what TRL calls in a rollout worker

    def start(self) -> None:
        """Do nothing: generation begins when the trainer asks for its first row."""

    def stop(self) -> None:
        """Close the scheduler and its engines, and discard fetched rows, so that no later training gets them."""
        scheduler, self.scheduler, self._saved = self.scheduler, None, None
        for fetched in (self.rollout_buffer, self.metrics_queue):
            fetched.queue.clear()
        if scheduler is not None:
            try:
                self.ledger = scheduler.ledger()
            finally:
                scheduler.close()

    def update_model_version(self, model_version: int) -> None:
        """Do nothing: the servers have these weights already, and april has counted the update."""

    def check_health(self, stale_after_s: float) -> None:
        """Do nothing: the call that waits for a batch raises april's errors."""

    # ---------------------------------------------------------------- what TRL calls in a weight transfer

    def init_weight_transfer(self) -> None:
        """Connect to the servers."""
        trainer, config = self._trainer, self._config
        assert config is not None
        ask = scorer_of(trainer, lambda response: None)
        reward: dict[str, Any] = {"reward": sample_reward(ask)}
        if not config.delivers_parts and config.on_failed_sample is not OnFailedSample.REPLACE:
            reward = {"group_reward": lambda prompt, responses: [scored(prompt, v) for v in ask(prompt, responses)]}
        self._batches, self._first_step = [], trainer.state.global_step
        self.scheduler = RolloutScheduler(
            config, prompts=self._passes, **reward, filter=self._filter, tokenizer=trainer.processing_class
        )
        why = why_not_sent(trainer, config) or why_not_taken(self.scheduler)
        self._sends = may_send(why, config, has_weights_dir=self._weights_dir is not None)

    def pause(self) -> None:
        """Do nothing: april itself interrupts requests while the servers load weights."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Send the weights to the servers, and report to april the batches on which the weights were trained."""
        scheduler, saved = self.scheduler, self._saved
        assert scheduler is not None
        route = self._route(iterator)
        if saved is None:
            scheduler.weight_update(**route, trained=self._trained)
        else:
            scheduler.load_state_dict(saved, **route)
            self._saved = None
        path = route.get("path")
        if self._written not in (None, path):
            shutil.rmtree(str(self._written), ignore_errors=True)
        self._written = path

    def resume(self) -> None:
        """Do nothing: april has already resumed the requests."""

    def destroy(self) -> None:
        """Close the scheduler if :meth:`stop` has not done so."""
        self.stop()

    # ---------------------------------------------------------------- batches and weights

    @property
    def _steps(self) -> int:
        """Number of batches trained since this training began or was resumed."""
        return int(self._trainer.state.global_step) - self._first_step

    @property
    def _trained(self) -> int | None:
        """Id of the last trained batch; None before the first."""
        return self._batches[self._steps - 1][0] if self._steps else None

    def _next_rows(self) -> list[Any]:
        """Return the rows of april's next batch, after telling april which batches are trained."""
        scheduler = self.scheduler
        if scheduler is None:
            raise RolloutError(
                "this AsyncGRPOTrainer has trained already, and sends its servers no weights at the start of another "
                "training; make a new trainer, and call train(resume_from_checkpoint=...) to go on"
            )
        if self._trained is not None:
            scheduler.commit(self._trained)  # now, since not every step ends with a weight update (weight_sync_steps)
        batch = scheduler.next_batch()
        self._batches.append((batch.id, frozenset(batch.group_ids.tolist())))
        self.metrics_queue.put(logged_metrics(batch, self._metrics))
        return self._samples(batch)

    def _samples(self, batch: Batch) -> list[Any]:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        trainer, made = self._trainer, []
        ahead = batch.trained_at.n - batch.version.n
        ages = np.split(batch.token_ages, np.cumsum(batch.lengths)[:-1])
        advantages = batch.advantages("grpo", epsilon=EPSILON)
        for sample, of_tokens, advantage in zip(batch.samples, ages, advantages, strict=True):
            oldest = int(of_tokens[sample.loss_mask != 0].max(initial=0))
            before, tokens = sample.prompt.token_ids.tolist(), sample.tokens.tolist()
            none = np.zeros(len(before))
            made.append(RolloutSample(
                prompt=self._passes.row_of(sample.prompt)["prompt"],
                completion=[message_of(trainer, tokens, before, ())],
                input_ids=np.array(before + tokens, np.int64),
                completion_mask=np.concatenate([none, sample.loss_mask]).astype(np.int64),
                old_log_probs=np.concatenate([none, sample.logprobs]).astype(np.float32),
                advantage=float(advantage),
                # april counts the age until the row is trained, TRL until the row is fetched
                model_version=trainer.model_version - max(0, oldest - ahead),
                group_id=sample.id.group,
                metrics={"reward": sample.reward, "reward_std": float(np.std([r for _, r in sample.cohort]))},
            ))  # fmt: skip
        return made

    def _route(self, iterator: Iterator[tuple[str, Any]]) -> dict[str, Any]:
        """Return the arguments of ``weight_update`` for the current weights; writes the weights if servers read files.

        Reading ``iterator`` gathers a sharded model from all ranks, so it must be read exactly once, to its end.
        """
        trainer, directory = self._trainer, self._weights_dir
        model = trainer.accelerator.unwrap_model(trainer.model)
        sharded = bool(sharding_of(trainer))
        if self._sends or directory is None:
            return {"weights": iterator if sharded else model}
        path = directory / f"step_{trainer.state.global_step}"
        model.save_pretrained(path, **({"state_dict": dict(iterator)} if sharded else {}))
        return {"path": path}

    # ---------------------------------------------------------------- checkpoints

    def save(self, folder: Path) -> None:
        """Write april's state, with the rows that were fetched but not trained, into the trainer's checkpoint."""
        trainer, scheduler = self._trainer, self.scheduler
        assert scheduler is not None
        groups = frozenset[int]().union(*(of_one for _, of_one in self._batches[: self._steps]))
        state = {
            "order": checkpoint.order_of_prompts(trainer), "micro": 0, "version": trainer.model_version,
            "groups": trainer._groups_before_resume + len(groups),
            "rollouts": scheduler.state_dict(trained_through=self._trained),
        }  # fmt: skip
        write_state(folder / checkpoint.STATE_FILE, checkpoint.ASYNC_KIND, state)

    def load(self, folder: Path) -> None:
        """Read april's state; the first weight transfer restores it. Raises CheckpointError."""
        state = checkpoint.read(folder, self._trainer, checkpoint.ASYNC_KIND)
        self._saved = state["rollouts"]
        self._trainer.model_version, self._trainer._groups_before_resume = state["version"], state["groups"]


rollout_worker = RolloutWorker
"""Alias of :class:`RolloutWorker`, for ``AprilAsyncGRPOTrainer(rollout_worker=rollout_worker(...))``."""


def april_async_trainer(base: Any) -> Any:
    """Return a subclass of ``base``, an AsyncGRPOTrainer, that trains on april's rollouts.

    Raises ConfigError if the installed TRL does not fit.
    """
    require_functions("trl", TESTED_VERSION, ASYNC_FUNCTIONS, base)

    class AprilTrainer(base):  # type: ignore[misc]
        """The base trainer, which gets its rows from april through the argument ``rollout_worker``."""

        # attributes of GRPOTrainer that april reads in code for both trainers
        environment_factories, tools, shuffle_dataset = None, (), False

        def __init__(
            self, model: Any, reward_funcs: Any = None, args: Any = None, *, rollout_worker: Any = None,
            tools: Any = None, environment_factory: Any = None, weight_transfer: Any = None, **others: Any,
        ) -> None:  # fmt: skip
            if not isinstance(rollout_worker, RolloutWorker):
                raise ConfigError("AprilAsyncGRPOTrainer needs rollout_worker=april.adapters.trl.rollout_worker(...)")
            super().__init__(
                model, reward_funcs, args, rollout_worker=rollout_worker, weight_transfer=rollout_worker, **others
            )
            functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
            self.reward_funcs = [function for function in functions if function is not None]
            self.reward_weights = [1.0] * len(self.reward_funcs)
            self._rollouts = rollout_worker
            schemas = ("response_template", "response_schema")
            if all(getattr(self.processing_class, name, None) is None for name in schemas):
                with suppress(ValueError):  # TRL cannot parse this chat template, so messages hold plain text
                    importlib.import_module("trl.chat_template_utils").add_response_schema(self.processing_class)
            given = {
                "tools": tools, "environment_factory": environment_factory, "weight_transfer": weight_transfer,
            }  # fmt: skip
            rollout_worker.attach(self, given)

        def _tokenize_prompts(self, prompts: list[Any]) -> Any:
            """Tokenize like AsyncGRPOTrainer's own worker, but return the tuple that GRPOTrainer's method returns."""
            template = self.args.chat_template_kwargs or {}
            ids = [
                self.processing_class.apply_chat_template(
                    prompt, return_dict=False, add_generation_prompt=True, **template
                )
                for prompt in prompts
            ]
            return ids, None, {}

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            if self.accelerator.is_main_process:  # before TRL, so that each complete checkpoint has april's state
                self._rollouts.save(Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}")
            super()._save_checkpoint(model, trial)

        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            super()._load_optimizer_and_scheduler(checkpoint)
            if checkpoint is not None and self.accelerator.is_main_process:
                self._rollouts.load(Path(checkpoint))

    AprilTrainer.__name__ = AprilTrainer.__qualname__ = f"April{base.__name__}"
    return AprilTrainer


def require_async_trainer() -> Any:
    """Import and return AsyncGRPOTrainer. Raises ConfigError if it cannot be imported."""
    require_trl()
    try:
        return importlib.import_module("trl.experimental.async_grpo").AsyncGRPOTrainer
    except ImportError as error:
        raise ConfigError(
            f"this TRL has no AsyncGRPOTrainer ({error}); pip install trl=={TESTED_VERSION}"
        ) from error
