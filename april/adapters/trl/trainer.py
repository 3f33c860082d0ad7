"""Runs april inside TRL's GRPOTrainer, through its ``rollout_func`` and a subclass that overrides a few methods.

Invariants:

* TRL scores and trains the rows that april delivers, not those of TRL's sampler, which decides only their number;
* rank r gets the r-th of equal parts of the batch, as TRL expects, and all ranks take the same decisions;
* the old log-probabilities in the loss come from the weights that generated the tokens;
* with ``group_quorum`` below 1, the baseline of a response is the mean reward of the first others of its group;
* a checkpoint of the trainer has april's state of the same moment as the trainer's own state.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from april.adapters.common.deliveries import closing_on_error
from april.adapters.common.installed_trainer import require_functions
from april.adapters.common.refusals import refuse
from april.adapters.trl import checkpoint
from april.adapters.trl.checks import REQUIRED_FUNCTIONS, TESTED_VERSION, config_for, given_settings, refusals
from april.adapters.trl.data import (
    DatasetPasses,
    column_of,
    evaluation_prompts,
    group_reward,
    put_advantages,
    sample_reward,
    scorer_of,
    tokenizer_of,
)  # fmt: skip
from april.adapters.trl.ranks import (
    rows_of_all_ranks,
    scheduler_of,
    sends_weights,
    sharding_of,
    takes_adapters,
    write_weights,
)  # fmt: skip
from april.adapters.trl.tools import Note, ToolLoop, check_notes
from april.config.engines import TransformersEngineConfig
from april.config.settings import Config
from april.core.batch import Batch
from april.core.ledger import Ledger
from april.core.types import OnDataEnd
from april.errors import ConfigError, RolloutError

Filter = Callable[[Any, Any], Any]
log = logging.getLogger("april")

METRICS = (
    "off_policy_share", "staleness_mean", "engines_busy", "trainer_wait_s", "resumed_samples", "failed_samples"
)  # fmt: skip


def logged_metrics(batch: Batch, wanted: Sequence[str] | Literal["all"]) -> dict[str, float]:
    """Return the wanted metrics of a batch as ``april/NAME``, without the mean reward, which TRL logs itself."""
    names = batch.metrics.keys() - {"reward_mean"} if wanted == "all" else wanted
    if batch.id == 0 and (missing := [name for name in names if name not in batch.metrics]):
        log.warning("metrics: the first batch has no %s; docs/metrics.md has the names", ", ".join(missing))
    return {f"april/{name}": value for name, value in batch.metrics.items() if name in names}


class Rollout:
    """The ``rollout_func`` of an :data:`AprilGRPOTrainer`: draws prompts, generates, and returns finished responses.

    Args:
        config: an :class:`april.Config`, a mapping of its settings, or the path of a YAML file. A mapping or a file may
            leave out what GRPOConfig already sets (batch size, samples per prompt, length, temperature, seed).
        weights_dir: directory in which the servers of ``config.engine`` read new weights: only the adapter of a PEFT
            model if all servers accept adapters, else the whole model. Not needed for servers that receive weights from
            the trainer's process (setting ``weights``), nor for the embedded engine, which reads the model in place.
        filter: function ``(prompt, responses) -> bool``, as for :class:`april.RolloutScheduler`; dynamic sampling is
            :func:`april.rewards_differ`. With a filter, the trainer's reward functions run for each finished group,
            and once more for trained rows. With ``group_quorum`` below 1 they run for each finished response.
        address: address of rank 0, "host:0", if the trainer's ranks are on several machines; see :class:`april.Ranks`.
        metrics: names of the metrics that TRL logs as ``april/NAME`` (docs/metrics.md), or "all".
        settings: further settings, which override those of ``config``: ``rollout(over_sampling_batch_size=64)``.

    Raises:
        ConfigError: the file cannot be read, or both a Config and ``settings`` are given. The values of settings are
            checked when the trainer is made.
    """

    def __init__(
        self, config: Config | Mapping[str, Any] | str | Path | None = None, *, weights_dir: str | Path | None = None,
        filter: Filter | None = None, address: str | None = None, metrics: Sequence[str] | Literal["all"] = METRICS,
        **settings: Any,
    ) -> None:  # fmt: skip
        self._settings = given_settings(config, settings)
        self._metrics, self._address, self._filter = metrics, address, filter
        self._weights_dir = None if weights_dir is None else Path(weights_dir)
        self._config: Config | None = None
        self._is_main = True
        self._tools: ToolLoop | None = None
        """Runs tools and environments; None if the trainer has none."""
        self.scheduler: Any = None
        """RolloutScheduler, or RankScheduler on several ranks, while the trainer trains or evaluates; else None."""
        self.ledger: dict[str, Ledger] = {}
        """april's counts of prompts and tokens (delivered, dropped, held) after the last training; on rank 0 only."""
        self._written: str | None = None
        self._forget()

    def _forget(self) -> None:
        self._batch: Batch | None = None
        """This rank's part of a delivered batch that TRL has not fetched yet."""
        self._evaluated: dict[str, list[Any]] = {}
        """Columns of an evaluation that TRL fetches next; used with tools only."""
        self._notes: list[Note] = []
        """Messages, counts and rewards of the rows that TRL is working on; empty without tools."""
        self._masks: list[list[int]] = []
        """Loss masks of the same rows: 1 for tokens that the policy generated and that are not too old to train."""
        self._last_batch: Batch | None = None
        self._warned_of_rewards = False
        self._saved: dict[str, Any] | None = None
        self._as_adapter: bool | None = None
        """True if servers get the PEFT adapter alone, False if the merged model; None until it is decided."""
        self._sends: bool | None = None
        """True if this process sends weights to the servers, False if a directory is used; None until it is decided."""
        self._weights_of = 0 if self._config is None or self._embedded else -1
        """Optimizer step whose weights the engines hold; -1 if unknown."""

    @property
    def config(self) -> Config:
        """april's complete settings. Raises ConfigError until a trainer is made with this rollout."""
        if self._config is None:
            raise ConfigError("rollout(...) belongs to no trainer yet: give it to AprilGRPOTrainer(rollout_func=...)")
        return self._config

    @property
    def _embedded(self) -> bool:
        return isinstance(self.config.engine, TransformersEngineConfig)

    def attach(self, trainer: Any) -> None:
        """Attach this rollout to a trainer. Raises ConfigError if april's settings and the trainer's do not fit."""
        config = config_for(self._settings, trainer)
        refuse(refusals(trainer, config, servers=self._weights_dir is not None, filters=self._filter is not None))
        self._config, self._is_main = config, trainer.accelerator.is_main_process
        self._forget()
        self._tools = None
        if trainer.tools or trainer.environment_factories:
            self._tools = ToolLoop(trainer, needs_rewards=config.delivers_parts)

    # ---------------------------------------------------------------- called by TRL

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return ``prompt_ids``, ``completion_ids``, ``logprobs``. Raises ConfigError for a plain GRPOTrainer."""
        if not getattr(trainer, "trains_with_april", False):
            raise ConfigError(
                "this rollout_func needs AprilGRPOTrainer (april.adapters.trl): a plain GRPOTrainer ignores the "
                "log-probabilities of a rollout and would train tokens of older weights uncorrected"
            )
        if not trainer.model.training:
            return self._evaluate(prompts, trainer) if self._tools is None else self._evaluated
        batch, self._batch = self._batch, None
        if batch is None or len(batch) != len(prompts):
            raise RolloutError("TRL asked for rollouts outside of its generation step; nothing was drawn for them")
        columns = _columns([s.prompt.token_ids.tolist() for s in batch.samples], batch.samples)
        self._masks = [s.loss_mask.tolist() for s in batch.samples]
        # with tools of its own, TRL takes the masks from _tool_call_loop; without, it takes them from this column.
        # masked_tokens counts all ranks, so that all of them give TRL the same columns
        if not trainer.tools and (self._tools is not None or batch.metrics["masked_tokens"]):
            columns["env_mask"] = self._masks
        return columns

    def next_rows(self, trainer: Any) -> list[dict[str, Any]]:
        """Return the rows of the next batch, one per response; they replace the rows that TRL's sampler chose."""
        wanted = self.config.rollout_batch_size * self.config.n_samples_per_prompt
        scheduler = self._open(trainer)
        self._give_weights(trainer)
        if self._last_batch is not None:
            scheduler.commit(self._last_batch.id)  # gradients may accumulate over several batches before an update
        batch = scheduler.next_batch()
        if (found := int(batch.metrics["samples"])) != wanted:
            where = "see rank 0"
            if self._is_main:
                where = ", ".join(f"{name}: {dict(ledger.dropped)}" for name, ledger in scheduler.ledger().items())
            raise RolloutError(
                f"the prompts ended with a batch of {found} rows, but TRL needs {wanted}; some were dropped ({where}); "
                "set on_data_end: wrap to start over"
            )
        for name, value in logged_metrics(batch, self._metrics).items():
            trainer._metrics["train"][name].append(value)
        self._batch = self._last_batch = batch
        passes = DatasetPasses(trainer)
        if self._tools is None:
            return [passes.row_of(sample.prompt) for sample in batch.samples]
        self._notes = self._tools.notes_of(sample.id for sample in batch.samples)
        if self._is_main:
            self._tools.keep(scheduler.held_groups() | set(batch.group_ids.tolist()))
        pairs = zip(batch.samples, self._notes, strict=True)
        return [passes.row_of(sample.prompt, note.prompt) for sample, note in pairs]

    def rows_to_evaluate(self, trainer: Any, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows to evaluate. With tools, generates responses first, since environments change prompts."""
        if self._tools is None:
            return inputs
        scheduler = self._open(trainer)
        self._give_weights(trainer)
        responses = scheduler.evaluate(self._tools.evaluation(inputs), seed=trainer.args.seed).responses
        self._notes = self._tools.evaluation_notes()
        first = trainer.accelerator.process_index * len(inputs)
        rows = [response.conversations[0] for (response,) in responses[first : first + len(inputs)]]
        self._masks = [row.loss_mask.tolist() for row in rows]
        self._evaluated = _columns([row.prompt_ids.tolist() for row in rows], rows)
        if not trainer.tools:
            self._evaluated["env_mask"] = self._masks
        return [{**row, "prompt": note.prompt} for row, note in zip(inputs, self._notes, strict=True)]

    @property
    def rewards(self) -> list[list[float]]:
        """Rewards of each row, one per reward function; empty if TRL calls the functions itself."""
        return [note.rewards for note in self._notes if note.rewards]

    def tool_rows(self, completion_ids: list[list[int]], logprobs: list[list[float]]) -> tuple[Any, ...]:
        """Return what TRL's own ``_tool_call_loop`` would return for these rows."""
        return (
            self._masks,
            [note.messages for note in self._notes],
            completion_ids,
            logprobs,
            sum(note.calls for note in self._notes),
            sum(note.failures for note in self._notes),
            [[] for _ in completion_ids],  # images
        )

    def put_advantages(self, trainer: Any, output: dict[str, Any]) -> None:
        """Overwrite TRL's advantages in ``output`` with april's if ``group_quorum`` is below 1."""
        batch = self._last_batch
        if batch is not None and self.config.delivers_parts:
            put_advantages(trainer, batch, output)
            theirs, ours = trainer._metrics["train"]["reward"][-1], batch.metrics["reward_mean"]
            if not self._warned_of_rewards and abs(theirs - ours) > 1e-4 * (1.0 + abs(ours)):
                self._warned_of_rewards = True
                log.warning(
                    "batch %d has a mean reward of %g, but TRL logs %g: with group_quorum below 1 each "
                    "response is scored alone, so reward functions must not compare responses with each other",
                    batch.id, ours, theirs,
                )  # fmt: skip

    def _evaluate(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Generate an evaluation response for each row with the current weights; training rollouts are not affected."""
        scheduler = self._open(trainer)
        self._give_weights(trainer)
        ids, images, _ = trainer._tokenize_prompts(prompts)
        first = trainer.accelerator.process_index * len(ids)
        asked: list[Any] = rows_of_all_ranks(trainer, ids)
        if column_of(trainer.train_dataset) is not None:
            asked = evaluation_prompts(trainer, asked, [[] for _ in ids] if images is None else images)
        rounds = scheduler.evaluate(asked, seed=trainer.args.seed).responses
        rounds = rounds[first : first + len(ids)]
        return _columns([list(row) for row in ids], [responses[0] for responses in rounds])

    # ---------------------------------------------------------------- engines and weights

    def _open(self, trainer: Any) -> Any:
        if self.scheduler is not None:
            return self.scheduler
        config = self.config
        if config.on_data_end is not OnDataEnd.WRAP:
            config = config.model_copy(update={"epochs": max(1, int(trainer.state.num_train_epochs))})
        scheduler = scheduler_of(
            trainer,
            config,
            self._address,
            prompts=DatasetPasses(trainer),
            **self._functions(trainer),
            filter=self._filter,
            model=trainer.model if self._embedded else None,
            tokenizer=tokenizer_of(trainer),
            **({} if column_of(trainer.train_dataset) is None else {"processor": trainer.processing_class}),
        )
        if self._saved is not None:
            with closing_on_error(scheduler.close):
                # no update needs to follow, as the saved version counts the optimizer steps of a half-trained batch
                route = self._route(trainer, scheduler)
                self._written = route.get("path")
                scheduler.load_state_dict(self._saved, **route)
            self._weights_of = trainer.state.global_step
        self.scheduler = scheduler
        return scheduler

    def _functions(self, trainer: Any) -> dict[str, Any]:
        """Return the scheduler's reward function (always 0 if TRL alone scores) and, with tools, rollout function."""
        tools, found = self._tools, {}
        if tools is not None:
            found["rollout"] = tools.rollout
            if trainer.environment_factories:
                return {**found, "reward": tools.reward_of}
        ask = scorer_of(trainer, (lambda response: None) if tools is None else tools.said_of)
        if self.config.delivers_parts:
            return {**found, "reward": sample_reward(ask)}
        if self._filter is not None:
            return {**found, "group_reward": group_reward(ask)}
        return {**found, "reward": _scored_by_trl}

    def _give_weights(self, trainer: Any) -> None:
        """Update the engines if the trainer has new weights; all batches delivered so far then count as trained."""
        step = trainer.state.global_step
        if step == self._weights_of or self.scheduler is None:
            return
        route = self._route(trainer, self.scheduler)
        self.scheduler.weight_update(**route, trained=self._trained)
        path = route.get("path")
        if self._is_main and self._written not in (None, path):
            shutil.rmtree(self._written, ignore_errors=True)
        self._written = path
        self._weights_of = step

    @property
    def _trained(self) -> int | None:
        return None if self._last_batch is None else self._last_batch.id

    def _route(self, trainer: Any, scheduler: Any) -> dict[str, Any]:
        """Return the arguments of ``weight_update`` for the current weights; writes them if servers read files.

        The embedded engine needs no arguments, since it reads the model in place.
        """
        if self._embedded:
            return {}
        directory = self._weights_dir
        if self._sends is None:
            self._sends = sends_weights(trainer, scheduler, self.config, has_weights_dir=directory is not None)
        if self._sends or directory is None:
            return {"weights": trainer.model_wrapped if sharding_of(trainer) else trainer.model}
        if self._as_adapter is None:
            self._as_adapter = takes_adapters(trainer, scheduler)
        path = directory / f"step_{trainer.state.global_step}"
        write_weights(trainer, path, as_adapter=self._as_adapter)
        return {"path": str(path)}

    def close(self) -> None:
        """Close the scheduler and its engines; a later training starts fresh or from a checkpoint."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the scheduler; after an error, end the schedulers of the other ranks too."""
        scheduler, self.scheduler = self.scheduler, None
        self._forget()
        if scheduler is None:
            return
        try:
            if self._is_main:  # other ranks cannot ask, because rank 0 may have closed its scheduler already
                self.ledger = scheduler.ledger()
        finally:
            scheduler.__exit__(kind, error, trace)

    # ---------------------------------------------------------------- checkpoints

    def save(self, trainer: Any, folder: Path) -> None:
        """Write april's state, and the rest of a half-trained generation batch, into the trainer's checkpoint."""
        scheduler, tools = self._open(trainer), self._tools

        def state() -> dict[str, Any]:
            rollouts = scheduler.state_dict(trained_through=self._trained)
            # notes last, so that every finished sample in ``rollouts`` has its note
            return {"rollouts": rollouts, "notes": None if tools is None else tools.state()}

        checkpoint.write(folder, trainer, state)

    def load(self, trainer: Any, folder: Path) -> None:
        """Restore a half-trained batch now and april's state at the next generation. Raises CheckpointError."""
        saved = checkpoint.read(folder, trainer)
        notes = saved.get("notes")
        check_notes(notes, self._tools)
        if self._tools is not None:
            self._tools.load(notes)
        self._saved = saved["rollouts"]


def _columns(prompt_ids: list[list[int]], rows: Sequence[Any]) -> dict[str, list[Any]]:
    """Return the columns that TRL expects from a ``rollout_func``."""
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [row.tokens.tolist() for row in rows],
        "logprobs": [row.logprobs.tolist() for row in rows],
    }


rollout = Rollout
"""Alias of :class:`Rollout`, for ``AprilGRPOTrainer(rollout_func=rollout(...))``."""


async def _scored_by_trl(prompt: Any, response: Any) -> float:
    return 0.0


def april_trainer(base: Any) -> Any:
    """Return a subclass of ``base``, a GRPOTrainer, that trains on april's rollouts.

    Raises ConfigError if the installed TRL does not fit.
    """
    require_functions("trl", TESTED_VERSION, REQUIRED_FUNCTIONS, base)

    class AprilTrainer(base):  # type: ignore[misc]
        """The base trainer, which gets its rows from april through ``rollout_func=april.adapters.trl.rollout(...)``."""

        trains_with_april = True
        environment_factories: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if not isinstance(self.rollout_func, Rollout):
                raise ConfigError("AprilGRPOTrainer needs rollout_func=april.adapters.trl.rollout(...)")
            self.rollout_func.attach(self)

        def train(self, *args: Any, **kwargs: Any) -> Any:
            self.rollout_func.close()  # an earlier evaluation may have opened a scheduler
            # drop the rest of an earlier training's last generation batch; a checkpoint restores its own
            self._step, self._buffered_inputs = 0, None
            with self.rollout_func:
                return super().train(*args, **kwargs)

        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
            training, rollouts = self.model.training, self.rollout_func
            rows = rollouts.next_rows(self) if training else rollouts.rows_to_evaluate(self, inputs)
            factories = self.environment_factories
            try:
                self.environment_factories = None  # TRL would reset environments that april has used
                output = super()._generate_and_score_completions(rows)
            finally:
                self.environment_factories = factories
            if training:
                # otherwise TRL assumes an importance ratio of 1, which is wrong for tokens of older weights
                output["old_per_token_logps"] = output["sampling_per_token_logps"]
                rollouts.put_advantages(self, output)
            return output  # type: ignore[no-any-return]

        def _tool_call_loop(
            self, prompts: Any, prompt_ids: Any, completion_ids: Any, completions: Any, logprobs: Any, images: Any,
            multimodal_fields: Any,
        ) -> Any:  # fmt: skip
            return self.rollout_func.tool_rows(completion_ids, logprobs)

        def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
            rewards = self.rollout_func.rewards
            if not rewards:
                return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            return self.accelerator.gather(self.reward_weights.new_tensor(rewards, device=self.accelerator.device))

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            self.rollout_func.save(self, folder)  # before TRL, so that each complete checkpoint has april's state
            super()._save_checkpoint(model, trial)

        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            super()._load_optimizer_and_scheduler(checkpoint)
            if checkpoint is not None:
                self.rollout_func.load(self, Path(checkpoint))

    AprilTrainer.__name__ = AprilTrainer.__qualname__ = f"April{base.__name__}"
    return AprilTrainer
