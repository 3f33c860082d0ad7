"""TRL: april inside the unmodified GRPOTrainer, by its ``rollout_func`` and a subclass of a few methods.

Invariants:

* what TRL scores and trains are the rows that april delivered: TRL's sampler says how many, april says which;
* on several ranks, rank r has rows [r * asked, (r + 1) * asked) of the batch, as TRL takes them to be, and what one
  rank does all do: it is decided by numbers that they have in common;
* the old log-probabilities of the loss are those of the weights that generated the tokens;
* with a quorum, each response is compared with the first others of its group, whatever batch they are in;
* a checkpoint of the trainer holds april's state of the same moment, whatever the moment.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from april.adapters.trl import checkpoint
from april.adapters.trl.checks import SEAMS, TESTED_VERSION, config_for, hint_at_one_process, refuse_unsupported
from april.adapters.trl.data import (
    DatasetPasses,
    asking,
    group_reward,
    put_advantages,
    sample_reward,
    warn_of_other_rewards,
)
from april.adapters.trl.images import column_of, evaluated, tokenizer_of
from april.adapters.trl.ranks import (
    rows_of_all_ranks,
    scheduler_of,
    sends_weights,
    takes_adapters,
    tensors_of,
    write_weights,
)
from april.adapters.trl.tools import Note, ToolLoop, check_notes
from april.config.engines import TransformersEngineConfig
from april.config.settings import Config, read_yaml
from april.core.batch import Batch
from april.core.ledger import Ledger
from april.core.types import OnDataEnd
from april.errors import ConfigError, RolloutError
from april.one_row import refuse_several_rows
from april.seams import require_seams

Filter = Callable[[Any, Any], Any]


def rollout(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    weights_dir: str | Path | None = None,
    filter: Filter | None = None,
    address: str | None = None,
    **settings: Any,
) -> Rollout:
    """The ``rollout_func`` of an :data:`AprilGRPOTrainer`.

    Args:
        config: an :class:`april.Config`, a mapping of its settings, or a YAML file. In the latter two, what GRPOConfig
            says already (batch size, samples per prompt, length, temperature, seed) may be left out.
        weights_dir: directory that servers of ``config.engine`` can read; new weights go through it: of a PEFT model
            the adapter alone, where all servers take adapters, else the whole model. Servers that take weights from the
            trainer's process (``weights`` of the settings) need none, and the embedded engine reads the model in place.
        filter: ``(prompt, responses) -> bool``, as for :class:`april.RolloutScheduler`: dynamic sampling with
            :func:`april.rewards_differ`. The trainer's reward functions then run for each finished group (with
            ``group_quorum`` below 1, filter or not, for each finished response), and once more for what is trained.
        address: of rank 0, "host:0", if the trainer's ranks are on several machines; see :class:`april.Ranks`.
        settings: more settings, above those of ``config``: ``rollout(over_sampling_batch_size=64)``.

    Raises:
        ConfigError: the file cannot be read, or a Config comes with settings. Everything else is checked when the
            trainer is made.
    """
    if isinstance(config, Config):
        if settings:
            raise ConfigError(f"rollout: {sorted(settings)} beside an april.Config; put them into the Config")
        return Rollout(config, weights_dir, filter, address)
    values = read_yaml(config) if isinstance(config, (str, Path)) else {} if config is None else config
    if not isinstance(values, Mapping):
        raise ConfigError(f"rollout: expected a mapping of settings, got {type(values).__name__}")
    return Rollout({**values, **settings}, weights_dir, filter, address)


class Rollout:
    """The rollouts of a trainer: draws its own prompts, and hands over what TRL asks for."""

    def __init__(
        self,
        settings: Config | Mapping[str, Any],
        weights_dir: str | Path | None,
        filter: Filter | None,
        address: str | None,
    ) -> None:
        self._settings = settings
        self._address = address
        self._filter = filter
        self._weights_dir = None if weights_dir is None else Path(weights_dir)
        self._config: Config | None = None
        self._is_main = True
        self._tools: ToolLoop | None = None
        """None without tools and environments."""
        self.scheduler: Any = None
        """A RolloutScheduler, or a RankScheduler on several ranks, while the trainer trains or evaluates."""
        self.ledger: dict[str, Ledger] = {}
        """april's ledgers at the end of the last training, on rank 0."""
        self._written: str | None = None
        self._forget()

    def _forget(self) -> None:
        self._batch: Batch | None = None
        """Drawn, until TRL has its rows; of several ranks, this one's part."""
        self._evaluated: dict[str, list[Any]] = {}
        """With tools: what the rows of an evaluation have become, until TRL has it."""
        self._notes: list[Note] = []
        """With tools: those of the rows that TRL works on."""
        self._masks: list[list[int]] = []
        """1 where the policy wrote the token and it is not too old, of those rows."""
        self._last_batch: Batch | None = None
        self._warned = False
        """True once reward functions gave other values when they were asked again."""
        self._saved: dict[str, Any] | None = None
        self._as_adapter: bool | None = None
        """Whether servers get a trained adapter as such; None: not known yet, or nothing is for servers."""
        self._sends: bool | None = None
        """Whether weights go to servers from this process; None: not known yet, or nothing is for servers."""
        self._weights_of = 0 if self._config is None or self._embedded else -1
        """Optimizer steps of the weights that the engines have; -1: not known."""

    @property
    def config(self) -> Config:
        """Settings as april goes by them; known once a trainer was made with this rollout."""
        if self._config is None:
            raise ConfigError("rollout(...) belongs to no trainer yet: give it to AprilGRPOTrainer(rollout_func=...)")
        return self._config

    @property
    def _embedded(self) -> bool:
        return isinstance(self.config.engine, TransformersEngineConfig)

    def attach(self, trainer: Any) -> None:
        """Check everything against the trainer, before anything starts; raises ConfigError."""
        config = config_for(self._settings, trainer)
        refuse_unsupported(trainer, config, servers=self._weights_dir is not None, filters=self._filter is not None)
        self._config, self._is_main = config, trainer.accelerator.is_main_process
        self._forget()
        self._tools = None
        if trainer.tools or trainer.environment_factories:
            self._tools = ToolLoop(trainer, needs_rewards=config.delivers_parts)
        hint_at_one_process(trainer)

    # ---------------------------------------------------------------- what TRL calls

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """TRL's rollout function: lists per row, ``prompt_ids``, ``completion_ids``, ``logprobs``.

        Raises ConfigError for a plain GRPOTrainer.
        """
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
        columns: dict[str, list[Any]] = {
            "prompt_ids": [s.prompt.token_ids.tolist() for s in batch.samples],
            "completion_ids": [s.tokens.tolist() for s in batch.samples],
            "logprobs": [s.logprobs.tolist() for s in batch.samples],
        }
        self._masks = [s.loss_mask.tolist() for s in batch.samples]
        # with tools it comes out of their loop; else TRL takes it from here
        if not trainer.tools and (self._tools is not None or batch.metrics["masked_tokens"]):  # of all ranks
            columns["env_mask"] = self._masks
        return columns

    def next_rows(self, trainer: Any, asked: int) -> list[dict[str, Any]]:
        """The dataset's rows of the next batch, one per response, in place of those that TRL's sampler chose.

        ``asked``: of this rank.
        """
        wanted = self.config.rollout_batch_size * self.config.n_samples_per_prompt
        if (rows := asked * trainer.accelerator.num_processes) != wanted:
            raise RolloutError(f"TRL asked for {rows} rows at once and not for a generation batch of {wanted}")
        scheduler = self._open(trainer)
        self._give_weights(trainer)
        if self._last_batch is not None:
            scheduler.commit(self._last_batch.id)  # its gradients may wait for the next one, and bring no update of it
        batch = scheduler.next_batch()
        refuse_several_rows(batch, "TRL", "rewards.view(-1, num_generations) in _generate_and_score_completions")
        if (found := int(batch.metrics["samples"])) != wanted:
            where = "see rank 0"
            if self._is_main:
                where = ", ".join(f"{name}: {dict(ledger.dropped)}" for name, ledger in scheduler.ledger().items())
            raise RolloutError(
                f"the prompts ended with a batch of {found} rows where TRL needs {wanted}, as some were dropped "
                f"({where}); set on_data_end: wrap to begin them again"
            )
        for name, value in batch.metrics.items():
            if name != "reward_mean":  # TRL logs the rewards
                trainer._metrics["train"][f"april/{name}"].append(value)
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
        """The rows that TRL evaluates. With tools their rollouts are made here, as environments change prompts."""
        if self._tools is None:
            return inputs
        scheduler = self._open(trainer)
        self._give_weights(trainer)
        responses = scheduler.evaluate(self._tools.evaluation(inputs), seed=trainer.args.seed).responses
        self._notes = self._tools.evaluated()
        first = trainer.accelerator.process_index * len(inputs)
        rows = [response.conversations[0] for (response,) in responses[first : first + len(inputs)]]
        self._masks = [row.loss_mask.tolist() for row in rows]
        self._evaluated = {
            "prompt_ids": [row.prompt_ids.tolist() for row in rows],
            "completion_ids": [row.tokens.tolist() for row in rows],
            "logprobs": [row.logprobs.tolist() for row in rows],
        }
        if not trainer.tools:
            self._evaluated["env_mask"] = self._masks
        return [{**row, "prompt": note.prompt} for row, note in zip(inputs, self._notes, strict=True)]

    @property
    def rewards(self) -> list[list[float]]:
        """By row that TRL works on, then by reward function; empty where TRL asks the functions itself."""
        return [note.rewards for note in self._notes if note.rewards]

    def tool_rows(self, completion_ids: list[list[int]], logprobs: list[list[float]]) -> tuple[Any, ...]:
        """What TRL's own loop over tools would return, had it generated these rows."""
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
        """With a quorum, those of the batch that TRL has just scored, into what its loss gets."""
        batch = self._last_batch
        if batch is not None and self.config.delivers_parts:
            put_advantages(trainer, batch, output)
            self._warned = self._warned or warn_of_other_rewards(trainer, batch)

    def _evaluate(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Rollouts of the present weights for the rows that were asked, in their order; training loses nothing."""
        scheduler = self._open(trainer)
        self._give_weights(trainer)
        ids, shown, _ = trainer._tokenize_prompts(prompts)
        first = trainer.accelerator.process_index * len(ids)
        asked: list[Any] = rows_of_all_ranks(trainer, ids)
        if column_of(trainer.train_dataset) is not None:
            asked = evaluated(trainer, asked, [[] for _ in ids] if shown is None else shown)
        rounds = scheduler.evaluate(asked, seed=trainer.args.seed).responses
        rounds = rounds[first : first + len(ids)]
        return {
            "prompt_ids": [list(row) for row in ids],
            "completion_ids": [responses[0].tokens.tolist() for responses in rounds],
            "logprobs": [responses[0].logprobs.tolist() for responses in rounds],
        }

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
            try:
                # the saved version is that of these weights, those of a batch that was half trained then included
                route = self._route(trainer, scheduler)
                self._written = route.get("path")
                scheduler.load_state_dict(self._saved, **route)
            except BaseException:
                scheduler.close()
                raise
            self._weights_of = trainer.state.global_step
        self.scheduler = scheduler
        return scheduler

    def _functions(self, trainer: Any) -> dict[str, Any]:
        """The rollout function, if there are tools, and rewards: for baselines of single responses, or for a filter."""
        tools, found = self._tools, {}
        if tools is not None:
            found["rollout"] = tools.rollout
            if trainer.environment_factories:
                return {**found, "reward": tools.reward_of}
        ask = asking(trainer, (lambda response: None) if tools is None else tools.said_of)
        if self.config.delivers_parts:
            return {**found, "reward": sample_reward(ask)}
        if self._filter is not None:
            return {**found, "group_reward": group_reward(ask)}
        return {**found, "reward": _scored_by_trl}

    def _give_weights(self, trainer: Any) -> None:
        """The engines have the trainer's present weights; the batches delivered before are trained on."""
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
        """The way in which servers get the trainer's present weights; empty: the model is read in place."""
        if self._embedded:
            return {}
        directory = self._weights_dir
        if self._sends is None:
            self._sends = sends_weights(trainer, scheduler, self.config, has_weights_dir=directory is not None)
        if self._sends or directory is None:
            return {"weights": tensors_of(trainer)}
        if self._as_adapter is None:
            self._as_adapter = takes_adapters(trainer, scheduler)
        path = directory / f"step_{trainer.state.global_step}"
        write_weights(trainer, path, as_adapter=self._as_adapter)
        return {"path": str(path)}

    def close(self) -> None:
        """End the engines; the next training begins anew, or from a checkpoint."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """:meth:`close`; after an error, on the other ranks, too."""
        scheduler, self.scheduler = self.scheduler, None
        self._forget()
        if scheduler is None:
            return
        try:
            if self._is_main:  # which has the scheduler, and may have closed it before another rank asks
                self.ledger = scheduler.ledger()
        finally:
            scheduler.__exit__(kind, error, trace)

    # ---------------------------------------------------------------- checkpoints

    def save(self, trainer: Any, folder: Path) -> None:
        """april's state into the trainer's checkpoint; with it the rest of a generation batch that is half trained."""
        scheduler, tools = self._open(trainer), self._tools

        def state() -> dict[str, Any]:
            rollouts = scheduler.state_dict(trained_through=self._trained)
            # behind it: what is finished in it has its note by now
            return {"rollouts": rollouts, "notes": None if tools is None else tools.state()}

        checkpoint.write(folder, trainer, state)

    def load(self, trainer: Any, folder: Path) -> None:
        """Go on from a checkpoint: now the batch that was half trained, at the next generation everything else.

        Raises CheckpointError as :func:`.checkpoint.read`.
        """
        saved = checkpoint.read(folder, trainer)
        notes = saved.get("notes")
        check_notes(notes, self._tools)
        if self._tools is not None:
            self._tools.load(notes)
        self._saved = saved["rollouts"]


async def _scored_by_trl(prompt: Any, response: Any) -> float:
    return 0.0


def april_trainer(base: Any) -> Any:
    """A subclass of ``base``, a GRPOTrainer or a subclass of yours, that trains on april's rollouts; or ConfigError."""
    require_seams("trl", TESTED_VERSION, SEAMS, base)

    class AprilTrainer(base):  # type: ignore[misc]
        """Takes ``rollout_func=april.adapters.trl.rollout(...)``; everything else is as in its base."""

        trains_with_april = True
        environment_factories: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if not isinstance(self.rollout_func, Rollout):
                raise ConfigError("AprilGRPOTrainer needs rollout_func=april.adapters.trl.rollout(...)")
            self.rollout_func.attach(self)

        def train(self, *args: Any, **kwargs: Any) -> Any:
            self.rollout_func.close()  # an evaluation may have opened it
            # the rest of a generation batch in which an earlier training ended; a checkpoint brings its own
            self._step, self._buffered_inputs = 0, None
            with self.rollout_func:
                return super().train(*args, **kwargs)

        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
            training, rollouts = self.model.training, self.rollout_func
            rows = rollouts.next_rows(self, len(inputs)) if training else rollouts.rows_to_evaluate(self, inputs)
            factories = self.environment_factories
            try:
                self.environment_factories = None  # they have played their part, and TRL would reset them
                output = super()._generate_and_score_completions(rows)
            finally:
                self.environment_factories = factories
            if training:
                # without these TRL sets the importance ratio to 1, which is wrong for tokens of older weights
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
            self.rollout_func.save(self, folder)  # first: a checkpoint that is complete for TRL has april's state
            super()._save_checkpoint(model, trial)

        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            super()._load_optimizer_and_scheduler(checkpoint)
            if checkpoint is not None:
                self.rollout_func.load(self, Path(checkpoint))

    AprilTrainer.__name__ = AprilTrainer.__qualname__ = f"April{base.__name__}"
    return AprilTrainer
