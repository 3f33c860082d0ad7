"""Defines RolloutScheduler, the class through which a trainer uses april, with blocking and async methods."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from enum import Enum
from functools import partial
from typing import Any, Self

from msgspec.structs import replace

from april.agents.chat import COMMIT_S, KEEPALIVE_S
from april.agents.gateway import Gateway
from april.config.settings import Config
from april.config.values import LARGEST_INT, shown_value, without_contents
from april.core.batch import Batch
from april.core.ledger import Ledger
from april.core.types import Prompt, SampleId
from april.core.versions import PolicyVersion
from april.core.whole_numbers import whole_number
from april.driver.detokenizer import Detokenizer
from april.driver.engine_roster import Discover, EngineRoster, open_found
from april.driver.llm import BlockingRolloutFunction, RolloutFunction, exact_types, single_turn, wrong_sampling
from april.driver.loop_thread import LoopThread, Reply
from april.driver.prompt_reader import PromptReader, iterate
from april.driver.prompt_source import PromptSource
from april.driver.rewards import EvaluationResult, rewards_differ
from april.driver.rollout_driver import RolloutDriver
from april.driver.sample_functions import RolloutSettings, UserFunctions
from april.driver.tracebacks import shorten
from april.driver.user_calls import WorkerThreads
from april.driver.user_code import PARAMETERS, check_function, refuse_inside_user_code
from april.driver.weight_update import TrainerUpdate
from april.engines.fit import check_engines, warnings_of
from april.engines.kinds.factory import create_engines
from april.engines.protocol import Engine
from april.errors import AprilError, ConfigError, DataExhausted, RolloutError, SchedulerClosed
from april.export import Exporter
from april.images.image_placer import ImagePlacer
from april.record.file import RunRecord
from april.view.observers import Observers
from april.weights.adapter_updates import AdapterUpdates
from april.weights.sender import WeightSender
from april.weights.source import weight_source

log = logging.getLogger("april")


class Unset(Enum):
    """Default of an argument for which None has a meaning of its own."""

    REWARD = "no reward"


_WAITER_LOCK = threading.RLock()
"""Lock held while a call registers as the one that waits for a batch; reentrant, as signal handlers may call april."""


class BatchIterator:
    """Makes a scheduler iterable and closes it: ``for batch in rollouts`` calls ``next_batch``, ``async for`` calls
    ``anext_batch``, and the end of a ``with`` or ``async with`` block closes the scheduler.

    The loop ends when the prompts have ended. The trainer updates the weights inside the loop.
    """

    def next_batch(self) -> Batch:
        """Return the next batch."""
        raise NotImplementedError

    async def anext_batch(self) -> Batch:
        """Return the next batch."""
        raise NotImplementedError

    def _close(self, error: BaseException | None) -> None:
        """Close the scheduler at the end of a ``with`` block; ``error`` is the exception that ended it, if any."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._close(error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await asyncio.to_thread(self._close, error)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        try:
            return self.next_batch()
        except DataExhausted:
            raise StopIteration from None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        try:
            return await self.anext_batch()
        except DataExhausted:
            raise StopAsyncIteration from None


class RolloutScheduler(BatchIterator):
    """Schedules rollouts for one trainer, on a background event loop that runs until :meth:`close`.

    ``for batch in rollouts`` calls :meth:`next_batch` until the prompts have ended; update the weights in the loop.

    Args:
        config: Configuration, an :class:`april.Config`.
        prompts: Iterable of :class:`april.Prompt`, of mappings with ``token_ids`` or ``input_ids`` (as a tokenizer or
            ``apply_chat_template`` returns for one prompt) or with ``messages`` (a chat), or of lists of token ids.
        reward: Function ``(prompt, response) -> float``, sync or async; sync functions run in threads. Without a reward
            function all rewards are 0, and a warning is logged; ``reward=None`` suppresses the warning.
        group_reward: Function ``(prompt, responses) -> [float] * n``, called once per group in place of ``reward``.
        filter: Function ``(prompt, responses) -> bool``, sync or async, called for each scored group (dynamic
            sampling). Only accepted groups are delivered; all others are dropped, counted as rejected and replaced.
            See :func:`april.rewards_differ`.
        rollout: Function ``(prompt, llm)``, async, or plain (in a thread of its own, where ``llm.generate`` blocks).
            The default generates one response.
        model: Model object for an embedded engine.
        engines: Engine objects, in place of those that ``config.engine`` describes.
        discover: Function, plain or async, that returns the addresses of the servers that exist now. They are of the
            kind of ``config.engine``; if that kind has no servers, they are april's own (``april.serve``). The function
            is called at once and then every ``discover_every_s`` seconds, and engines are added and removed
            accordingly.
        tokenizer: Object with ``decode(ids, skip_special_tokens=False) -> str``, such as one of Hugging Face. Stop
            strings, ``response.text()`` and ``llm.base_url`` need it.
        processor: Processor of a model that reads images, as an object or a path; it includes the tokenizer, and
            allows prompts to have ``images``. See docs/images.md.
        renderer: A ``renderers.RendererConfig``, which says how ``llm.base_url`` converts messages to tokens. None
            means the renderer of the tokenizer's model. See docs/agents.md.
        commit_s: Seconds for which ``llm.base_url`` delays the start of an answer, so that an error in this time can be
            reported by an HTTP status.
        alive_s: Seconds between the bytes that keep the client's connection alive once the answer has started.
        check: True to cross-check all of april's state after every event (slow; for tests and bug hunts).
        record: File that records the run's events, without prompts and tokens, for ``april replay``: its name, or an
            :class:`april.RunRecord` with a size limit. See docs/report.md.
        progress: Where ``next_batch`` shows a line about the step: None means on a terminal or in a notebook, and
            elsewhere on stderr in long waits; False means nowhere; or a rich ``Console``. See docs/report.md.
        exporters: Exporters for the metrics of each batch, such as :class:`april.export.TensorBoard`; :meth:`close`
            closes them.
        sample_texts: Number of responses per batch that exporters get as text, decoded by ``tokenizer``.

    Raises:
        ConfigError: the arguments contradict each other or the engines; nothing has started.
        EngineError: a server does not answer.
    """

    _loop_type: type[LoopThread] = LoopThread
    _gateway_type: Callable[..., Gateway] = Gateway
    _gathers = False
    """True in subclasses whose calls all ranks make together, as engines with ``gathers_weights`` need."""
    _refuse_prompt: Callable[[Prompt], None] | None = None
    """Function of a subclass that raises an error for a prompt it cannot use; see :class:`PromptSource`."""

    def __init__(
        self,
        config: Config,
        *,
        prompts: Iterable[Any],
        reward: Callable[..., Any] | Unset | None = Unset.REWARD,
        group_reward: Callable[..., Any] | None = None,
        filter: Callable[..., Any] | None = None,
        rollout: RolloutFunction | BlockingRolloutFunction = single_turn,
        model: Any = None,
        engines: Sequence[Engine] | None = None,
        discover: Discover | None = None,
        discover_every_s: float = 10.0,
        tokenizer: Any = None,
        processor: Any = None,
        renderer: Any = None,
        commit_s: float = COMMIT_S,
        alive_s: float = KEEPALIVE_S,
        check: bool = False,
        record: str | os.PathLike[str] | RunRecord | None = None,
        progress: Any = None,
        exporters: Sequence[Exporter] = (),
        sample_texts: int = 0,
    ) -> None:
        if not isinstance(config, Config):
            raise ConfigError(
                f"config must be an april.Config, got {type(config).__name__}; Config.from_mapping and "
                "Config.from_yaml make one"
            )
        if isinstance(reward, Unset):
            reward = None
            if group_reward is None:
                log.warning(
                    "no reward function is given, so the rewards of all batches are 0; give reward= or group_reward=, "
                    "or reward=None if that is intended"
                )
        check_functions(config, rollout, reward, group_reward, filter)
        if engines is not None and (isinstance(engines, str) or not isinstance(engines, Sequence)):
            raise ConfigError(f"engines must be a list of engine objects, got {type(engines).__name__}")
        self.config = config
        for doubt in warnings_of(config):
            log.warning("%s", doubt)
        images = None if processor is None else ImagePlacer(processor, config.images)
        tokenizer = images.tokenizer if images is not None and tokenizer is None else tokenizer
        detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        if config.sampling.stop and detokenizer is None:
            raise ConfigError("sampling.stop: stop strings are matched on text; give the scheduler tokenizer=...")
        settings = config.core_settings(
            has_reward=reward is not None or group_reward is not None,
            group_reward=group_reward is not None,
            has_filter=filter is not None,
            run_id=int.from_bytes(os.urandom(8), "big"),
            attachments=getattr(prompts, "attachments", ()) if images is None else (images.kind,),
        )
        self._sampling = config.sampling_params(() if images is None else images.banned_ids)
        self._gateway = self._gateway_type(
            tokenizer, renderer, commit_s, alive_s, images, config.agents, config.sampling_of_clients,
            config.constraints,
        )  # fmt: skip
        if rollout is not single_turn:
            self._gateway.load()
        functions = UserFunctions(rollout, reward, group_reward, filter, detokenizer, self._gateway, images)
        self._waiter: object | None = None  # token of the call that waits for a batch
        self._update: TrainerUpdate | None = None  # the last weight update, until a call has returned its result
        self._adapters = AdapterUpdates(config)
        self._adapted: str | None = None  # the directory of an adapter that april has written for that update
        self._thread = self._loop_type(relax_gc=config.relax_gc)
        made: Sequence[Engine] = ()
        found: dict[str, Engine] = {}

        try:
            self._observers = Observers(progress, exporters, sample_texts, detokenizer, self._thread)
            if discover is not None:
                if engines is not None or model is not None or not callable(discover):
                    raise ConfigError("discover= must be a function, in place of engines= and model=")
                if not isinstance(discover_every_s, (int, float)) or not discover_every_s > 0:
                    raise ConfigError(f"discover_every_s must be a number of seconds, got {discover_every_s!r}")
                found = self._thread.run(lambda: open_found(config, discover))
                engines = made = list(found.values())
            if engines is None:
                seen_by = None if images is None else images.processor
                engines = made = create_engines(config.engine, model, config.seed, self._thread.run, seen_by)
            self._engines = list(engines)
            kinds = settings.attachments
            check_engines(config, self._engines, gathers=self._gathers, attachments=kinds)
            self._vocab_size: int = min(engine.capabilities.vocab_size for engine in self._engines)
            writes_its_own = rollout is not single_turn
            self._reader = PromptReader(self._vocab_size, tokenizer, images, data_alone=writes_its_own)
            source = PromptSource(prompts, self._reader, config.passes, self._refuse_prompt)
            rollouts = RolloutSettings(
                sampling=self._sampling, allow_mismatch=config.allow_mismatch,
                function_timeout_s=config.function_timeout_s, stall_timeout_s=config.stall_timeout_s,
                warn_after_s=config.warned_after_s, reward_weights=config.weights_of_parts,
            )  # fmt: skip
            self._driver = self._thread.call(
                lambda: RolloutDriver(
                    settings, rollouts, self._engines, source, functions,
                    check=check, draw_in_thread=self._thread.threads_wake_it, config=config.to_mapping(),
                    record=record if record is None or isinstance(record, RunRecord) else RunRecord(record),
                    delivered=self._observers.delivered, blocked=self._thread.blocked,
                )
            )  # fmt: skip
        except BaseException as error:
            self._thread.request_stop(lambda: close_abandoned(made))
            self._thread.stop()
            if isinstance(error, AprilError):
                shorten(error)
            raise
        self._roster = EngineRoster(config, self._driver, self._engines, settings.attachments)
        if discover is not None:
            names = {url: engine.name for url, engine in found.items()}
            follow = partial(self._roster.follow, discover, discover_every_s, names)
            self._thread.call(lambda: self._driver.executor.spawn(follow()))
        self._observers.driver = self._driver
        recorder = self._driver.recorder
        ends = [*(() if recorder is None else (recorder.end,)), *self._observers.close_functions]
        self._close_abandoned = partial(close_abandoned, self._engines, self._driver.executor.worker_threads, ends)
        dropped = partial(self._close_abandoned, dropped=True)
        self._dropped = weakref.finalize(self, self._thread.request_stop, dropped)
        self._dropped.atexit = False

    # ---------------------------------------------------------------- one step

    def next_batch(self) -> Batch:
        """Return the next batch of ``rollout_batch_size`` groups (fewer only at the end of the data).

        Blocks until the batch is complete. An interrupted call loses nothing: the next call returns the batch.

        Raises:
            DataExhausted: the prompts have ended and all of them are delivered or dropped.
            RolloutError: rollouts or rewards fail repeatedly, a prompt is unusable, or another call is waiting. Also if
                more than ``max_staleness`` delivered batches are not trained yet: newly generated tokens would be too
                stale when they are trained, so train first.
            EngineError: a weight update failed and some engines may hold partial weights; update again first.
            InvariantError: april's state is inconsistent, which is a bug in april.
            SchedulerClosed: after :meth:`close`.
        """
        me = object()
        try:
            self._begin_wait(me)
            with self._observers.waiting():
                batch = self._thread.run(partial(self._driver.wait_batch, blocks=True))
            # signal handlers run at calls and in loops, so from here on they cannot keep the batch from the caller
            self._driver.handed_out = batch.id
            return batch
        except AprilError as error:
            shorten(error)
            raise
        finally:
            if self._waiter is me:
                self._waiter = None

    async def anext_batch(self) -> Batch:
        """Do the same as :meth:`next_batch`, for a trainer with its own event loop. Cancelling the call loses nothing.

        It may be called while the trainer trains on earlier batches. april expects one weight update for each of these
        batches and plans the new batch for the weights after them, so that ``max_staleness`` holds when it is trained.
        While more than ``max_staleness`` delivered batches are not trained, the call waits for a weight update.
        """
        await asyncio.sleep(0)  # lets a call that was just cancelled end first
        me = object()
        try:
            self._begin_wait(me)
            with self._observers.waiting():
                batch = await self._thread.run_async(self._driver.wait_batch)
            self._driver.handed_out = batch.id
            return batch
        except AprilError as error:
            shorten(error)
            raise
        finally:
            if self._waiter is me:
                self._waiter = None

    def _begin_wait(self, me: object) -> None:
        """Register a call as the one that waits for a batch; raises RolloutError if another call already waits."""
        with _WAITER_LOCK:
            if self._waiter is None:
                self._waiter = me
                return
        refuse_inside_user_code()  # its message is more specific
        raise RolloutError(
            "next_batch was called while another call waits for the same batch; ask for one batch at a time"
        )

    def weight_update(
        self, path: str | None = None, transfer: Callable[[], Any] | None = None, trained: int | None = None,
        weights: Any = None, label: int | None = None,
    ) -> PolicyVersion:  # fmt: skip
        """Give the engines the trainer's new weights, commit the trained batches and raise the policy version.

        Give one of ``path``, ``transfer`` and ``weights``. If none is given, the engines must read the model in place,
        as embedded engines do; servers cannot, so this raises ConfigError if there are servers.

        Args:
            path: Directory from which the engines load the new weights; servers get it as an absolute path.
            transfer: Function that gives the engines the weights; called in this thread while the engines are paused.
            weights: Module, mapping, or re-iterable of (Hugging Face name, tensor), which april sends from this process
                to the engines in buckets, without a directory. An engine that fails meanwhile is left out if there are
                other engines. For a module with an adapter (PEFT LoRA), april writes only the adapter, to a directory
                of its own, if all engines load adapters. See docs/weights.md.
            trained: Number (``batch.id``) of the last batch that these weights were trained on; it is committed
                together with all earlier batches. None means the oldest delivered batch that is not committed yet, as
                april assumes one update per batch, in delivery order. Give the number if one update trains several
                batches, or if one batch leads to several updates while other batches are not trained.
            label: Number of the new version, if the trainer counts versions itself; must be greater than the number of
                the version before. Staleness is counted in these numbers. None means one more than before.

        Returns:
            The new version. If ``transfer`` or a load raises, the version is unchanged and generation goes on, with one
            exception: if only some engines have loaded the weights, or servers may hold a part of the transferred
            weights, calls that wait for a batch or an evaluation raise EngineError until an update has reached all
            engines. An engine that was found dead before the update is left out until a later update reaches it.

        Raises:
            ConfigError: an argument has a wrong type, there are servers and no weights for them, there is no such
                batch, or the label is not greater; nothing has happened.
            EngineError: an engine could not be paused or could not load.
            SchedulerClosed: after :meth:`close`.

        If a signal (Ctrl-C) interrupts the call, the update has either not begun or goes on to its end; inside
        ``transfer`` the exception of the signal is an error like any other. If you repeat the call with the same
        arguments (before the next batch, if ``trained`` is None), it waits for the end of this update and does not
        update twice; :attr:`version` is the version in force. See docs/restarts.md.
        """
        run = partial(self._driver.update_weights, trained=trained, label=label)
        named = None if trained is label is None else (trained, label)
        return self._with_weights("weight_update", run, path, transfer, named, weights)

    async def aweight_update(
        self, path: str | None = None, transfer: Callable[[], Any] | None = None, trained: int | None = None,
        weights: Any = None, label: int | None = None,
    ) -> PolicyVersion:  # fmt: skip
        """Do the same as :meth:`weight_update`, in a thread, for a trainer with its own event loop."""
        return await asyncio.to_thread(self.weight_update, path, transfer, trained, weights, label)

    def pause(self) -> None:
        """Keep training's requests off the engines until :meth:`resume`, for trainers that load weights themselves.

        During the pause, such a trainer calls :meth:`weight_update` with a transfer that does nothing. Requests in
        flight are interrupted and continue after the pause. A second call does nothing. The call waits for a weight
        update or an evaluation that is under way.
        """
        self._thread.run(self._driver.pause)

    def resume(self) -> None:
        """End a :meth:`pause`, if there is one."""
        self._thread.run(self._driver.resume)

    async def apause(self) -> None:
        """Do the same as :meth:`pause`, for a trainer with its own event loop."""
        await self._thread.run_async(self._driver.pause)

    async def aresume(self) -> None:
        """Do the same as :meth:`resume`, for a trainer with its own event loop."""
        await self._thread.run_async(self._driver.resume)

    def commit(self, batch_id: int) -> None:
        """Commit this batch and all earlier batches without a weight update; does not wait for anything.

        A committed batch no longer counts as untrained, and saved states do not contain it. Use this if you only
        generate, or accumulate gradients over batches.

        Raises:
            ConfigError: there is no such batch.
        """
        self._thread.call(lambda: self._driver.commit(batch_id))

    def lower_staleness(self, to: int | None = None) -> int:
        """Lower the staleness bound for prompts drawn from now on to ``to``, or by one if it is None; return the bound.

        Prompts drawn earlier keep the old bound and are not dropped; once they are delivered, all trained tokens are
        within the new bound. The bound is kept across restarts, until ``max_staleness`` is configured to another value.

        Raises:
            ConfigError: ``to`` is not between 0 and the current bound.
        """
        return self._thread.call(lambda: self._driver.lower_staleness(to))

    def record_report(self, batch_id: int, report: Mapping[str, float]) -> None:
        """Add the result of :func:`april.off_policy_report` for a batch to the record, for ``april report``.

        Each rank may add the report of its share. Does nothing without a record, and does not wait for anything.

        Raises:
            ConfigError: ``report`` is not a mapping of names to finite numbers.
        """
        if (number := whole_number(batch_id)) is None:
            raise ConfigError(f"record_report: batch_id must be batch.id, got {type(batch_id).__name__}")
        try:
            figures = {str(name): float(value) for name, value in report.items()}
        except (AttributeError, TypeError, ValueError):
            figures = {"": math.nan}
        if not all(map(math.isfinite, figures.values())):
            raise ConfigError(
                "record_report: the report must be the result of april.off_policy_report, with finite numbers"
            )
        self._thread.call_later(lambda: self._driver.record_report(number, figures))

    def evaluate(
        self, prompts: Iterable[Any], *, n_samples: int = 1, temperature: float | None = None,
        top_p: float | None = None, max_tokens: int | None = None, seed: int = 0,
    ) -> EvaluationResult:  # fmt: skip
        """Generate and score responses to ``prompts`` with the current weights; training loses no tokens.

        In stepwise generation the requests of training are interrupted, and training waits. With ``generation:
        continuous`` training goes on, and only weight updates wait.

        The default sampling is that of training. With the same weights and seed the result is the same on engines that
        honour seeds.

        Raises:
            ConfigError: an argument is out of range, or a prompt is unusable.
            RolloutError: there is no reward function, or a rollout or reward function failed; names the prompt.
            EngineError: no engine is left, or a request failed repeatedly (it starts from its prompt each time).
        """
        return self._thread.run(self._evaluation(prompts, n_samples, temperature, top_p, max_tokens, seed))

    async def aevaluate(
        self, prompts: Iterable[Any], *, n_samples: int = 1, temperature: float | None = None,
        top_p: float | None = None, max_tokens: int | None = None, seed: int = 0,
    ) -> EvaluationResult:  # fmt: skip
        """Do the same as :meth:`evaluate`, for a trainer with its own event loop."""
        arguments = prompts, n_samples, temperature, top_p, max_tokens, seed
        run = await asyncio.to_thread(self._evaluation, *arguments) if self._reader.is_slow else None
        return await self._thread.run_async(self._evaluation(*arguments) if run is None else run)

    def _evaluation(
        self, prompts: Iterable[Any], n_samples: int, temperature: float | None, top_p: float | None,
        max_tokens: int | None, seed: int,
    ) -> Callable[[], Coroutine[Any, Any, EvaluationResult]]:  # fmt: skip
        """Check the arguments and read the prompts in the caller's thread; returns the coroutine function to run."""
        limit, numbers = 1 if max_tokens is None else max_tokens, {}
        for name, value, least in (("n_samples", n_samples, 1), ("max_tokens", limit, 1), ("seed", seed, 0)):
            if (number := whole_number(value)) is None or number < least:
                raise ConfigError(f"evaluate: {name} must be a whole number and at least {least}, got {value!r}")
            if number > LARGEST_INT and name != "seed":
                raise ConfigError(f"evaluate: {name} must be at most {LARGEST_INT:,}, got {without_contents(number)}")
            numbers[name] = number
        base = self._sampling
        sampling = replace(
            base,
            temperature=base.temperature if temperature is None else temperature,
            top_p=base.top_p if top_p is None else top_p,
            max_tokens=base.max_tokens if max_tokens is None else max_tokens,
        )
        wrong = wrong_sampling(sampling, self._vocab_size)
        if wrong is not None:
            raise ConfigError(f"evaluate: {wrong}")
        checked = [self._reader.read(p, i) for i, p in enumerate(iterate(prompts, "evaluate: "))]
        if not checked:
            raise ConfigError("evaluate: there are no prompts")
        return partial(self._driver.evaluate, checked, numbers["n_samples"], exact_types(sampling), numbers["seed"])

    # ---------------------------------------------------------------- data and restarts

    def extend(self, prompts: Iterable[Any]) -> None:
        """Append prompts, also after the present prompts have ended.

        Raises:
            ConfigError: ``prompts`` is no iterable, or the last epoch has not begun (all epochs must have the same
                prompts).
        """
        self._thread.call(lambda: self._driver.extend(prompts))

    def state_dict(self, trained_through: int | None = None) -> dict[str, Any]:
        """Return everything that must survive a restart, for the trainer's checkpoint; may be called at any time.

        The state consists of plain numbers, strings, bytes, lists and dicts, and the ``data`` of held prompts as it was
        given, and has a checksum. It includes the tokens generated so far, also those of running requests. april puts
        no empty bytes into it, because ``torch.load(weights_only=True)`` cannot read them; the ``data`` of your prompts
        and the notes of your rewards may contain some. The tokens of a sample in flight may be a list of bytes. april's
        loop goes on meanwhile, and the state is that of one moment within the call.

        Args:
            trained_through: Number (``batch.id``) of the last batch that the weights in the checkpoint were trained on;
                later batches are delivered again after a restart. None means the last committed batch.

        Raises:
            CheckpointError: there is no such batch, or a later batch is committed already.
        """
        driver = self._driver
        return self._thread.run_or_call(
            lambda: driver.save(trained_through), lambda: driver.state_dict(trained_through)
        )

    def load_state_dict(
        self, state: dict[str, Any], path: str | None = None, transfer: Callable[[], Any] | None = None,
        weights: Any = None,
    ) -> PolicyVersion:  # fmt: skip
        """Continue from a saved state; must be called before the first batch.

        The prompts must be the same as before the restart, in the same order; those drawn already are compared and
        skipped. Unfinished single-turn responses continue exactly where they were. For several turns the rollout
        functions start again, and their calls are answered from the state as long as they repeat the earlier requests.
        The restart begins a new incarnation: the first number of the policy version grows by one.

        Args:
            path: Directory with the checkpoint's weights, as in :meth:`weight_update`.
            transfer: Function that gives the engines these weights, as in :meth:`weight_update`.
            weights: The weights themselves, as in :meth:`weight_update`. If none of the three is given, engines read
                the model in place, which must already have the weights. This is refused if there are servers: they hold
                the weights with which they were started, or those of a run that went on after the checkpoint.

        Returns:
            The policy version of the checkpoint's weights, in the new incarnation. Tokens that these weights generated
            before the restart are not stale under this version.

        Raises:
            CheckpointError: the state was changed, or it does not fit the prompts, settings or engines
                (docs/restarts.md has the list); nothing has changed.
            ConfigError: an argument has a wrong type, or there are servers and none of the three is given;
                nothing has changed.
            EngineError: an engine could not be paused or could not load; the same state may be loaded again.
        """
        load = partial(self._driver.load_state_dict, state)
        return self._with_weights("load_state_dict", load, path, transfer, id(state), weights)

    async def aload_state_dict(
        self, state: dict[str, Any], path: str | None = None, transfer: Callable[[], Any] | None = None,
        weights: Any = None,
    ) -> PolicyVersion:  # fmt: skip
        """Do the same as :meth:`load_state_dict`, in a thread, for a trainer with its own event loop."""
        return await asyncio.to_thread(self.load_state_dict, state, path, transfer, weights)

    def _with_weights(
        self, what: str, run: Callable[..., Coroutine[Any, Any, PolicyVersion]], path: Any, transfer: Any,
        named: object, weights: Any = None,
    ) -> PolicyVersion:  # fmt: skip
        """Run the driver's ``run(path, update=...)``, with ``transfer`` in the caller's thread; returns the version.

        A repeated call continues the update that an interrupted call has begun. A call counts as repeated if ``what``
        (the method), the path, the kind of transfer and ``named`` are the same. ``named`` has the method's other
        arguments; if it is None, the call only counts as repeated until the next batch is handed out.
        """
        if path is not None and not isinstance(path, (str, os.PathLike)):
            raise ConfigError(
                f"{what}: path must be the name of a directory, got {type(path).__name__}; pass a function that hands "
                "over the weights as transfer=, and do not pass a model that the engine reads in place"
            )
        path = None if path is None else os.fspath(path)
        if transfer is not None and not callable(transfer):
            raise ConfigError(f"{what}: transfer must be a function, got {type(transfer).__name__}")
        sender = None
        hand_over: Callable[[Sequence[str]], Any] | None = None if transfer is None else lambda engines: transfer()
        if weights is not None and (path is not None or transfer is not None):
            raise ConfigError(f"{what}: april itself sends weights=; leave out path= and transfer=")
        self._thread.refuse_waiting()
        handed_out = self._driver.handed_out if named is None else None
        # weights= has time limits of its own, and time on a virtual clock would not stop for the transfer's thread
        limited = weights is None and self._thread.threads_wake_it
        limit_s = 2 * self.config.outage_deadline_s if limited else None
        asked = (what, path, transfer is not None, weights is not None, named, handed_out)
        call = self._update
        if call is None or not call.repeats(asked):
            self._adapted = None
            if weights is not None:
                self._adapted, weights = self._adapters.prepare(what, weights, self._engines)
            if weights is not None:
                sender = self._sender()
                sender.refuse_engines(what)
                hand_over = partial(sender.send, weight_source(weights))
            call = TrainerUpdate(self._thread, hand_over, asked, sender, limit_s)
            self._update = call
        path = path or self._adapted
        try:
            version = call.carry_out(lambda update: run(path, update=update))
        except AprilError as error:
            shorten(error)
            raise
        if self._update is call:
            self._update = None
            if self._adapted is not None:
                self._adapters.remove_unused(self._engines, self._thread.call)
            self._adapted = None
        return version

    def _sender(self) -> WeightSender:
        def ask(calls: Sequence[Coroutine[Any, Any, Any]]) -> Sequence[Reply[Any]]:
            return self._thread.call(lambda: [self._thread.follow(call) for call in calls])

        engines = {e.name: e for e in self._engines}
        return WeightSender(engines, ask, self.config.outage_deadline_s)

    # ---------------------------------------------------------------- engines that come and go

    def add_engine(self, engine: Engine | str, *, api_key: str | None = None) -> str:
        """Add an engine during the run, given as an object or as the address of a server; returns its name.

        A server is of the kind of ``config.engine``; if that kind has no servers, it is april's own (``april.serve``).
        The engine gets the current weights from the directory of the last weight update; if there is none, with the
        next update.

        Args:
            api_key: API key of the server, if it differs from the key in the configuration.

        Raises:
            ConfigError: the engine does not fit the configuration or the other engines, or its name is taken.
            EngineError: the server could not be reached.
        """
        return self._thread.run(lambda: self._roster.add(engine, api_key))

    async def aadd_engine(self, engine: Engine | str, *, api_key: str | None = None) -> str:
        """Do the same as :meth:`add_engine`, for a trainer with its own event loop."""
        return await self._thread.run_async(lambda: self._roster.add(engine, api_key))

    def remove_engine(self, name: str, *, cut: bool = False) -> None:
        """Remove an engine during the run and close it; it gets no new requests, and its running requests end first.

        Args:
            cut: True to abort its requests now; they continue on other engines with their tokens.

        Raises:
            ConfigError: there is no such engine.
        """
        self._thread.run(lambda: self._roster.remove(name, cut=cut))

    async def aremove_engine(self, name: str, *, cut: bool = False) -> None:
        """Do the same as :meth:`remove_engine`, for a trainer with its own event loop."""
        await self._thread.run_async(lambda: self._roster.remove(name, cut=cut))

    # ---------------------------------------------------------------- looking inside

    @property
    def version(self) -> PolicyVersion:
        """The current policy version."""
        return self._driver.core.clock.current

    @property
    def engines(self) -> list[Engine]:
        """The engine objects."""
        return list(self._engines)

    def ledger(self) -> dict[str, Ledger]:
        """Return copies of the token and prompt ledgers; observed == delivered + held + sum(dropped) always holds."""

        def copy() -> dict[str, Ledger]:
            core = self._driver.core
            return {
                name: Ledger(b.observed, b.delivered, b.held, b.dropped.copy())
                for name, b in (("tokens", core.tokens), ("prompts", core.prompts))
            }

        return self._thread.call(copy)

    def held_groups(self) -> frozenset[int]:
        """Return the numbers of the groups that were drawn and are neither delivered whole nor dropped."""
        return self._thread.call(lambda: frozenset(self._driver.core.buffer.groups))

    def validate(self) -> None:
        """Cross-check april's whole state now; raises InvariantError."""
        self._thread.call(self._driver.core.validate)

    def story(self, group: int, index: int) -> str:
        """Return the history of one sample, one line per transition."""
        return self._thread.call(lambda: self._driver.core.story(SampleId(group, index)))

    def __repr__(self) -> str:
        try:
            return f"<RolloutScheduler {self._thread.call(self._status_text)}>"
        except SchedulerClosed:
            return "<RolloutScheduler closed>"
        except RolloutError:
            return "<RolloutScheduler of another process>"

    def _status_text(self) -> str:
        core = self._driver.core
        tokens, waits = core.tokens, self._driver.long_waits.current_wait
        return (
            f"version={core.clock.current}, {'between steps' if core.step is None else 'in a step'}: "
            f"{len(core.buffer)} groups held, {core.monitor.ready} of them finished; "
            f"{len(core.attempts)} requests in flight; tokens: {tokens.observed} generated, "
            f"{tokens.delivered} delivered, {tokens.held} held, {sum(tokens.dropped.values())} dropped"
            f"{f'; {waits}' if waits else ''}"
        )

    def close(self) -> None:
        """End all requests and functions, and close the engines; idempotent. Does nothing in a forked process.

        Functions get CLOSE_PATIENCE_S (10) seconds to end; those that take longer, also in threads, are left running.
        """
        if not self._thread.in_own_process:
            return
        self._dropped.detach()
        try:
            closing = self._thread.submit(self._driver.close)
        except SchedulerClosed:
            self._thread.stop()
            self._observers.close()  # an earlier close may have been interrupted before this
            return
        ended = None
        try:
            ended = self._thread.wait_while_responsive(closing)
        finally:
            if not ended:
                self._thread.request_stop(self._close_abandoned)
            self._thread.stop(answers=ended is not False)
            self._gateway.close()
            self._observers.close()
            self._adapters.close()
        error = closing.error()
        if error is not None and not isinstance(error, CancelledError):
            raise error

    def _close(self, error: BaseException | None) -> None:
        self.close()


def check_functions(
    config: Config,
    rollout: Callable[..., Any],
    reward: Callable[..., Any] | None,
    group_reward: Callable[..., Any] | None,
    filter: Callable[..., Any] | None,
) -> None:
    """Raise ConfigError for functions that cannot be called, or that contradict each other or the configuration."""
    if reward is not None and group_reward is not None:
        raise ConfigError("give reward or group_reward, not both")
    if group_reward is not None and config.delivers_parts:
        raise ConfigError(
            f"group_reward scores whole groups, but group_quorum={shown_value(config.group_quorum)} delivers parts of "
            "groups; give reward instead, or set group_quorum: 1"
        )
    given = {"rollout": rollout, "reward": reward, "group_reward": group_reward, "filter": filter}
    for kind, function in given.items():
        if function is not None or kind == "rollout":
            check_function(kind, function, PARAMETERS[kind])
    if filter is rewards_differ and (config.n_samples_per_prompt == 1 or reward is group_reward is None):
        raise ConfigError(
            "filter=rewards_differ would reject every group; it needs a reward and n_samples_per_prompt above 1"
        )


PATIENCE_S = 10.0
"""Seconds that :func:`close_abandoned` waits for engines to close."""


async def close_abandoned(
    engines: Sequence[Engine], threads: WorkerThreads | None = None, ends: Sequence[Callable[[], None]] = (),
    *, dropped: bool = False,
) -> None:  # fmt: skip
    """Close the engines of a scheduler whose constructor failed, that was ``dropped``, or whose close was interrupted.

    This runs last on the loop. The driver and the user's functions are not among the arguments, because they may refer
    to the scheduler, which then would never be dropped. At last the functions ``ends`` are called; they must not raise.
    """
    if dropped:
        log.warning("a RolloutScheduler was dropped without close(); its threads and engines end now")
    if threads is not None:
        threads.close()
    closing = [asyncio.ensure_future(engine.close()) for engine in engines]
    if closing:
        await asyncio.wait(closing, timeout=PATIENCE_S)
    for engine, done in zip(engines, closing, strict=True):
        if not done.done():
            done.cancel()
        elif not done.cancelled() and (error := done.exception()) is not None:
            log.error("engine %s could not be closed", engine.name, exc_info=error)
    for end in ends:
        end()
