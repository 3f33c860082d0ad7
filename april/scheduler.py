"""The scheduler: april as a trainer sees it, with a blocking and an async face."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from enum import Enum
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, Protocol, Self, TypeVar, cast

from april.agents.chat import ALIVE_S, COMMIT_S
from april.agents.gateway import Gateway
from april.config.engine_fit import check_engines, doubts_of, fits
from april.config.engines import TransformersEngineConfig as EmbeddedConfig
from april.config.settings import Config
from april.config.values import MOST, shown, without_contents
from april.core.batch import Batch
from april.core.ledger import Ledger
from april.core.types import Prompt, SampleId
from april.core.versions import PolicyVersion
from april.driver.detokenizer import Detokenizer
from april.driver.llm import BlockingRolloutFunction, RolloutFunction, exact_types, single_turn, wrong_sampling
from april.driver.local_host import Hosts, OtherHosts, limits_of
from april.driver.loop_thread import LoopThread, Reply
from april.driver.prompt_reader import PromptReader
from april.driver.prompt_source import PromptSource
from april.driver.rewards import EvaluationResult, rewards_differ
from april.driver.rollout_driver import DriverOptions, RolloutDriver
from april.driver.sample_functions import RolloutSettings, UserFunctions
from april.driver.user_calls import WorkerThreads
from april.driver.user_code import PARAMETERS, check_function, check_signatures, is_async, refuse_inside_user_code
from april.driver.weight_update import TrainerUpdate
from april.engines.kinds.factory import create_engines
from april.engines.protocol import Engine
from april.errors import ConfigError, RolloutError, SchedulerClosed
from april.export import Exporter
from april.images.placing import Images
from april.record.file import RunRecord
from april.view.observers import Observers
from april.weights.adapter_updates import AdapterUpdates
from april.weights.sender import WeightSender
from april.weights.source import weight_source

log = logging.getLogger("april")


class NotGiven(Enum):
    """The default of an argument for which None has a meaning."""

    REWARD = "no reward"


_ASKING = threading.RLock()
"""Makes two assignments one step for other threads; a signal handler may enter it again."""


class RolloutScheduler:
    """Schedules rollouts for one trainer, on a background loop that lives until :meth:`close`.

    Args:
        config: see :class:`april.Config`.
        prompts: iterable of :class:`april.Prompt`, of mappings with ``token_ids`` or ``input_ids`` (what a tokenizer or
            ``apply_chat_template`` returns for one prompt) or with ``messages`` (a chat), or of lists of token ids.
        reward: ``(prompt, response) -> float``, sync or async; sync functions run in threads. Without a reward
            function all rewards of a batch are 0, which the log warns of; ``reward=None`` says that it is meant.
        group_reward: ``(prompt, responses) -> [float] * n``, called once per group; instead of ``reward``.
        filter: ``(prompt, responses) -> bool``, sync or async, called for each scored group (dynamic sampling): only
            groups it accepts count and are delivered, the others are dropped by name and replaced. See
            :func:`april.rewards_differ`.
        rollout: ``(prompt, llm)``, async, or plain (in a thread of its own, where ``llm.generate`` blocks); the default
            generates one response.
        model: the model object for an embedded engine.
        engines: engine objects, instead of those that ``config.engine`` describes.
        hosts: where other processes bring engines and functions of theirs, such as :class:`april.HostListener`; without
            ``model`` and ``engines`` it waits for the first. See docs/processes.md.
        tokenizer: with ``decode(ids, skip_special_tokens=False) -> str``, as those of Hugging Face; stop strings and
            ``response.text()`` need it, and ``llm.base_url``.
        processor: the processor of a model that reads images, an object or the path of one; it has the tokenizer, too.
            Prompts may have ``images`` then. See docs/images.md.
        renderer: how ``llm.base_url`` writes messages as tokens: a ``renderers.RendererConfig``; None means the one for
            the tokenizer's model. See docs/agents.md.
        commit_s: seconds in which a client at ``llm.base_url`` may still be told an error by its status; then the
            answer begins.
        alive_s: seconds between the bytes that keep its connection alive from then on.
        check: cross-check all of april's books after every event (slow; for tests and bug hunts).
        record: a file for what happens in the run, without prompts and tokens, which ``april replay`` runs again: its
            name, or an :class:`april.RunRecord` with a size limit. See docs/report.md.
        progress: a line in ``next_batch`` that says how the step stands: None: drawn on a terminal or in a notebook,
            elsewhere written if it takes long; False: never; or a rich ``Console``. See docs/report.md.
        exporters: where the metrics of each batch go, such as :class:`april.export.TensorBoard`; closed with this.
        sample_texts: responses per batch that they get as text, decoded by ``tokenizer``.

    Raises:
        ConfigError: before anything starts, if the arguments contradict each other or the engines.
    """

    _loop_type: type[LoopThread] = LoopThread
    _gateway_type: Callable[..., Gateway] = Gateway
    _gathers = False
    """True if whoever calls this brings the ranks together around it, as engines with ``gathers_weights`` need."""
    _refuse_prompt: Callable[[Prompt], None] | None = None
    """The check of a subclass that cannot use every prompt; see :class:`PromptSource`."""

    def __init__(
        self,
        config: Config,
        *,
        prompts: Iterable[Any],
        reward: Callable[..., Any] | NotGiven | None = NotGiven.REWARD,
        group_reward: Callable[..., Any] | None = None,
        filter: Callable[..., Any] | None = None,
        rollout: RolloutFunction | BlockingRolloutFunction = single_turn,
        model: Any = None,
        engines: Sequence[Engine] | None = None,
        tokenizer: Any = None,
        processor: Any = None,
        renderer: Any = None,
        commit_s: float = COMMIT_S,
        alive_s: float = ALIVE_S,
        check: bool = False,
        record: str | os.PathLike[str] | RunRecord | None = None,
        hosts: Hosts | None = None,
        progress: Any = None,
        exporters: Sequence[Exporter] = (),
        sample_texts: int = 0,
    ) -> None:
        if not isinstance(config, Config):
            raise ConfigError(
                f"config must be an april.Config, got {type(config).__name__}; Config.from_mapping and "
                "Config.from_yaml make one"
            )
        if isinstance(reward, NotGiven):
            reward = None
            if group_reward is None:
                log.warning(
                    "no reward function is given: the rewards of all batches are 0; give reward= or group_reward=, or "
                    "reward=None if that is meant"
                )
        check_functions(config, rollout, reward, group_reward, filter)
        if engines is not None and (isinstance(engines, str) or not isinstance(engines, Sequence)):
            raise ConfigError(f"engines must be a list of engine objects, got {type(engines).__name__}")
        self.config = config
        for doubt in doubts_of(config):
            log.warning("%s", doubt)
        images = None if processor is None else Images(processor, config.images)
        tokenizer = images.tokenizer if images is not None and tokenizer is None else tokenizer
        detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        if config.sampling.stop and detokenizer is None:
            raise ConfigError("sampling.stop: stop strings are matched on text; give the scheduler tokenizer=...")
        settings = config.core_settings(
            has_reward=reward is not None or group_reward is not None,
            group_reward=group_reward is not None,
            has_filter=filter is not None,
            run_id=int.from_bytes(os.urandom(8), "big"),
            attachments=() if images is None else (images.kind,),
        )
        self._sampling = config.sampling_params(() if images is None else images.banned_ids)
        self._gateway = self._gateway_type(tokenizer, renderer, commit_s, alive_s, images)
        functions = UserFunctions(rollout, reward, group_reward, filter, detokenizer, self._gateway, images)
        self._asking: object | None = None  # the call that waits for a batch
        self._update: TrainerUpdate | None = None  # the last weight update, until a call has heard its end
        self._adapters = AdapterUpdates(config)
        self._adapted: str | None = None  # the directory of an adapter that april has written for it
        self._thread = self._loop_type()
        others: OtherHosts | None = None
        made: Sequence[Engine] = ()

        async def undo() -> None:
            if others is not None:
                await others.close()  # whoever came in is told
            await close_abandoned(made)

        try:
            self._observers = Observers(config, progress, exporters, sample_texts, detokenizer, self._thread)
            if engines is None and hosts is not None and model is None and isinstance(config.engine, EmbeddedConfig):
                engines = [] if config.engine.model is None else None
            if engines is None:
                seen_by = None if images is None else images.processor
                engines = made = create_engines(config.engine, model, config.seed, self._thread.run, seen_by)
            self._engines = list(engines)
            kinds = settings.attachments
            check_engines(config, self._engines, gathers=self._gathers, hosts=hosts is not None, attachments=kinds)
            if hosts is not None:
                others = self._thread.call(
                    lambda: hosts.begin(
                        config, tokenizer=detokenizer is not None, sampling=self._sampling, attachments=kinds
                    )
                )
                if not self._engines:
                    self._thread.run(others.first)
            first = [*map(limits_of, self._engines), *(() if others is None else others.first_engines)]
            self._vocab_size: int = min(engine.vocab_size for engine in first)
            self._reader = PromptReader(self._vocab_size, tokenizer, images)
            source = PromptSource(prompts, self._reader, config.passes, self._refuse_prompt)
            rollouts = RolloutSettings(
                sampling=self._sampling, allow_mismatch=config.allow_mismatch,
                function_timeout_s=config.function_timeout_s, stall_timeout_s=config.stall_timeout_s,
                warn_after_s=config.warned_after_s,
            )  # fmt: skip
            self._driver = self._thread.call(
                lambda: RolloutDriver(
                    settings, rollouts, self._engines, source, functions, others,
                    DriverOptions(
                        check=check, draws_beside=self._thread.threads_wake_it, config=config.to_mapping(),
                        record=record if record is None or isinstance(record, RunRecord) else RunRecord(record),
                        delivered=self._observers.delivered, blocked=self._thread.blocked,
                        fits=partial(fits, config, {e.name: e.capabilities for e in self._engines}),
                    ),
                )
            )  # fmt: skip
        except BaseException:
            self._thread.begin_to_stop(undo)
            self._thread.stop()
            raise
        self._observers.driver = self._driver
        recorder = self._driver.recorder
        ends = [*(() if recorder is None else (recorder.end,)), *self._observers.ends]
        self._close_abandoned = partial(close_abandoned, self._engines, self._driver.local.worker_threads, ends)
        dropped = partial(self._close_abandoned, dropped=True)
        self._dropped = weakref.finalize(self, self._thread.begin_to_stop, dropped)
        self._dropped.atexit = False

    # ---------------------------------------------------------------- one step

    def next_batch(self) -> Batch:
        """The next batch of N groups (fewer only at the end of the data); blocks until it is there.

        An interrupted call loses nothing: the next one returns the batch.

        Raises:
            DataExhausted: the source has ended and every prompt is settled.
            RolloutError: rollouts or rewards fail again and again, a prompt is unusable, or another call is waiting. Or
                more than ``max_staleness`` batches are out, delivered and not trained: what is generated now would be
                too old when it is trained, so train first.
            EngineError: a weight update broke off, so the engines' weights are not whole; update again first.
            InvariantError: april's books do not balance.
            SchedulerClosed: after :meth:`close`.
        """
        me = object()
        try:
            self._ask(me)
            with self._observers.waiting():
                batch = self._thread.run(partial(self._driver.wait_batch, blocks=True))
            # signal handlers run at calls and in loops: from here on none can keep the batch from the caller
            self._driver.handed_out = batch.id
            return batch
        finally:
            if self._asking is me:
                self._asking = None

    async def anext_batch(self) -> Batch:
        """:meth:`next_batch` for a trainer with an event loop of its own. Cancelling it loses nothing.

        It may be asked for while the trainer trains on the batches before. Each of those brings one weight update, and
        this batch is planned for the weights after them: ``max_staleness`` holds when it is trained. While more batches
        than ``max_staleness`` are out, it waits for a weight update.
        """
        await asyncio.sleep(0)  # a call that was cancelled just now leaves first
        me = object()
        try:
            self._ask(me)
            with self._observers.waiting():
                batch = await self._thread.run_async(self._driver.wait_batch)
            self._driver.handed_out = batch.id
            return batch
        finally:
            if self._asking is me:
                self._asking = None

    def _ask(self, me: object) -> None:
        """Let one call at a time ask: until a batch is handed out, it is the next one for everybody."""
        with _ASKING:
            if self._asking is None:
                self._asking = me
                return
        refuse_inside_user_code()  # which says more
        raise RolloutError(
            "next_batch was called while another call waits for the same batch; ask for one batch after the other"
        )

    def weight_update(
        self, path: str | None = None, transfer: Callable[[], Any] | None = None, trained: int | None = None,
        weights: Any = None,
    ) -> PolicyVersion:  # fmt: skip
        """Tell april that the trainer has updated: commits what was trained and raises the policy version.

        Args:
            path: directory from which the engines load the new weights, where they can; servers get it as an absolute
                path.
            transfer: called here, in the trainer's thread, while the engines are paused, to hand weights over.
                None of the three: the engines read the model in place, as embedded ones do. Servers do not, so this is
                refused.
            weights: a module, a mapping, or an iterable of (Hugging Face name, tensor) that can be gone through again:
                sent from this process to the engines, in buckets, without a directory. An engine that fails meanwhile
                is left out if there are others. Of a module with an adapter (PEFT LoRA) the adapter alone is written
                into a directory of april's own, where all engines take adapters. See docs/weights.md.
            trained: number (``batch.id``) of the last batch that these weights were trained on; it and those before it
                are committed. None: the oldest batch that is out and of no update before this one, as each is made of
                one batch, in the order of delivery. Name it if one update trains several, or if one batch brings
                several updates while others are out.

        Returns:
            The new version. If ``transfer`` or a load raises, the version stays and generation goes on. Not so if
            some engines have loaded and others have not, or if servers may have a part of what ``transfer`` hands
            over: then whoever waits for a batch or an evaluation, or asks for one, gets an EngineError, until a call
            has reached them all. An engine that was found dead before is left out until a later call has reached it.

        Raises:
            ConfigError: an argument has a wrong type, there are servers and none of the three is given, or there is no
                such batch; nothing has happened.
            EngineError: an engine could not be paused or could not load.
            SchedulerClosed: after :meth:`close`.

        A call that a signal handler interrupts (Ctrl-C) has either not begun or goes on to its end; inside ``transfer``
        it is as any other exception there. Called again with the same arguments (without ``trained``: before the next
        batch), it waits for that end instead of updating twice; :attr:`version` tells what is in force. See
        docs/restarts.md.
        """
        run = partial(self._driver.update_weights, trained=trained)
        return self._with_weights("weight_update", run, path, transfer, trained, weights)

    async def aweight_update(
        self, path: str | None = None, transfer: Callable[[], Any] | None = None, trained: int | None = None,
        weights: Any = None,
    ) -> PolicyVersion:  # fmt: skip
        """:meth:`weight_update` in a thread, for a trainer with an event loop of its own."""
        return await asyncio.to_thread(self.weight_update, path, transfer, trained, weights)

    def commit(self, batch_id: int) -> None:
        """The trainer is done with this batch and those before it, and no weight update of their own follows.

        For whoever only generates, and for gradients that are accumulated over batches: the batch is no longer out, and
        no state has it. Does not wait for anything.

        Raises:
            ConfigError: there is no such batch.
        """
        self._thread.call(lambda: self._driver.commit(batch_id))

    def lower_staleness(self, to: int | None = None) -> int:
        """Draw further prompts to be trained within ``to`` weight updates; None means one less. Returns the bound.

        What was drawn before keeps the bound that it had, and nothing is dropped for it: all that is trained keeps the
        new bound once that has been delivered. It lasts over restarts, until ``max_staleness`` is configured otherwise.

        Raises:
            ConfigError: it is not between 0 and the present bound.
        """
        return self._thread.call(lambda: self._driver.lower_staleness(to))

    def evaluate(
        self, prompts: Iterable[Any], *, n_samples: int = 1, temperature: float | None = None,
        top_p: float | None = None, max_tokens: int | None = None, seed: int = 0,
    ) -> EvaluationResult:  # fmt: skip
        """Score the present policy on ``prompts``; training loses nothing.

        Stepwise, training's requests are ended and training waits. With ``generation: continuous`` training goes on,
        and only a weight update waits.

        Sampling defaults to that of training. With the same weights and seed the result is the same on engines
        that honour seeds.

        Raises:
            ConfigError: an argument is out of range, or a prompt is unusable.
            RolloutError: no reward function, or a rollout or reward failed; the prompt is named.
            EngineError: no engine is left, or a request broke off again and again; it begins anew each time.
        """
        return self._thread.run(self._evaluation(prompts, n_samples, temperature, top_p, max_tokens, seed))

    async def aevaluate(
        self, prompts: Iterable[Any], *, n_samples: int = 1, temperature: float | None = None,
        top_p: float | None = None, max_tokens: int | None = None, seed: int = 0,
    ) -> EvaluationResult:  # fmt: skip
        """:meth:`evaluate` for a trainer with an event loop of its own."""
        arguments = prompts, n_samples, temperature, top_p, max_tokens, seed
        run = await asyncio.to_thread(self._evaluation, *arguments) if self._reader.is_slow else None
        return await self._thread.run_async(self._evaluation(*arguments) if run is None else run)

    def _evaluation(
        self, prompts: Iterable[Any], n_samples: int, temperature: float | None, top_p: float | None,
        max_tokens: int | None, seed: int,
    ) -> Callable[[], Coroutine[Any, Any, EvaluationResult]]:  # fmt: skip
        """The evaluation to be run, after everything that can be checked here, in the caller's thread."""
        limit = 1 if max_tokens is None else max_tokens
        for name, value, least in (("n_samples", n_samples, 1), ("max_tokens", limit, 1), ("seed", seed, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"evaluate: {name} must be a whole number and at least {least}, got {value!r}")
            if value > MOST and name != "seed":
                raise ConfigError(f"evaluate: {name} must be at most {MOST:,}, got {without_contents(value)}")
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
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
            raise ConfigError(f"evaluate: prompts must be an iterable of prompts, got {type(prompts).__name__}")
        checked = [self._reader.read(p, i) for i, p in enumerate(prompts)]
        if not checked:
            raise ConfigError("evaluate: there are no prompts")
        return partial(self._driver.evaluate, checked, n_samples, exact_types(sampling), seed)

    # ---------------------------------------------------------------- data and restarts

    def extend(self, prompts: Iterable[Any]) -> None:
        """More prompts after those there are, also once they have ended.

        Raises:
            ConfigError: not an iterable, or the last epoch has not begun: the prompts must be the same in every pass.
        """
        self._thread.call(lambda: self._driver.extend(prompts))

    def state_dict(self, trained_through: int | None = None) -> dict[str, Any]:
        """Everything that must survive a restart, for the trainer's own checkpoint; may be called at any time.

        Plain numbers, strings, bytes, lists and dicts, and the ``data`` of the held prompts as it was given. Tokens
        that engines have generated so far are in it, also those of running requests. It is sealed by a checksum of
        its values. There are no empty bytes in it, which ``torch.load(weights_only=True)`` does not read; any in your
        prompts' ``data`` are yours.

        Args:
            trained_through: number (``batch.id``) of the last batch that the weights in the checkpoint were trained on;
                later batches are delivered again after a restart. None: the last batch committed by a weight update.

        Raises:
            CheckpointError: no such batch, or a later one is committed already.
        """
        if self._driver.hosts is not None:
            self._thread.run(self._driver.caught_up)
        return self._thread.call(lambda: self._driver.state_dict(trained_through))

    def load_state_dict(
        self, state: dict[str, Any], path: str | None = None, transfer: Callable[[], Any] | None = None,
        weights: Any = None,
    ) -> PolicyVersion:  # fmt: skip
        """Go on from a saved state; before the first batch. Begins a new incarnation of the policy version.

        The prompts must be the same as before, in their order; those drawn already are compared and skipped.
        Unfinished single-turn responses go on exactly where they stood. Several turns: the rollout functions begin
        again, and what their calls had generated is answered from the state as long as they ask the same.

        Args:
            path: how the engines get the weights of the checkpoint, as in :meth:`weight_update`.
            transfer: the same.
            weights: the same. None of the three: they read the model in place, which has them already. Servers hold
                whatever they were started with, or the weights of a run that went on after the checkpoint, so that is
                refused there.

        Returns:
            The policy version: that of the weights in the checkpoint, in the new incarnation. Tokens that these weights
            generated before the restart are not stale under it.

        Raises:
            CheckpointError: the state was changed, or is of other prompts, or of settings or engines with which it
                cannot go on (docs/restarts.md has the list); nothing has changed then.
            ConfigError: an argument has a wrong type, or there are servers and none of the three is given;
                nothing has changed.
            EngineError: an engine could not be paused, or could not load; the same state may be loaded again.
        """
        load = partial(self._driver.load_state_dict, state)
        return self._with_weights("load_state_dict", load, path, transfer, id(state), weights)

    async def aload_state_dict(
        self, state: dict[str, Any], path: str | None = None, transfer: Callable[[], Any] | None = None,
        weights: Any = None,
    ) -> PolicyVersion:  # fmt: skip
        """:meth:`load_state_dict` in a thread, for a trainer with an event loop of its own."""
        return await asyncio.to_thread(self.load_state_dict, state, path, transfer, weights)

    def _with_weights(
        self, what: str, run: Callable[..., Coroutine[Any, Any, PolicyVersion]], path: Any, transfer: Any,
        named: int | None, weights: Any = None,
    ) -> PolicyVersion:  # fmt: skip
        """``run(path, update=...)`` of the driver, where ``transfer`` runs here, in the caller's thread.

        A call that was interrupted and is made again goes on with the update that it had begun. It is the same call if
        path, ``named``, the last batch handed out, and whether there is a transfer are the same.
        """
        if path is not None and not isinstance(path, (str, os.PathLike)):
            raise ConfigError(
                f"{what}: path must be the name of a directory, got {type(path).__name__}; a function that "
                "hands the weights over is given as transfer=, a model that is read in place not at all"
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
        # april's own transfers have limits of their own, and on a virtual clock a thread takes no time
        limited = weights is None and self._thread.threads_wake_it
        limit_s = 2 * self.config.outage_deadline_s if limited else None
        asked = (what, path, transfer is not None, weights is not None, named, handed_out)
        call = self._update
        if call is None or not call.is_for(asked):
            self._adapted = None
            if weights is not None:
                self._adapted, weights = self._adapters.prepare(what, weights, self._engines, self._elsewhere())
            if weights is not None:
                sender = self._sender()
                sender.refuse_engines(what, self._elsewhere())
                hand_over = partial(sender.send, weight_source(weights))
            call = TrainerUpdate(self._thread, hand_over, asked, sender, limit_s)
            self._update = call
        path = path or self._adapted
        version = call.carry_out(lambda update: run(path, update=update))
        if self._update is call:
            self._update = None
            if self._adapted is not None:
                self._adapters.done(self._engines, self._thread.call)
            self._adapted = None
        return version

    def _elsewhere(self) -> list[str]:
        """Engines of other processes that do not read the trainer's model in place."""
        hosts = self._driver.hosts
        return [] if hosts is None else self._thread.call(lambda: list(hosts.servers))

    def _sender(self) -> WeightSender:
        """A sender to the engines of this process, whose calls run on the loop."""

        def ask(calls: Sequence[Coroutine[Any, Any, Any]]) -> Sequence[Reply[Any]]:
            return self._thread.call(lambda: [self._thread.follow(call) for call in calls])

        engines = {e.name: e for e in self._engines}
        return WeightSender(engines, ask, self.config.outage_deadline_s, elsewhere=self._elsewhere)

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
        """Copies of the token and the prompt ledger: observed == delivered + held + sum(dropped), always."""

        def copy() -> dict[str, Ledger]:
            core = self._driver.core
            return {
                name: Ledger(b.observed, b.delivered, b.held, b.dropped.copy())
                for name, b in (("tokens", core.tokens), ("prompts", core.prompts))
            }

        return self._thread.call(copy)

    def held_groups(self) -> frozenset[int]:
        """Numbers of the groups in april's books: drawn, and neither delivered whole nor dropped."""
        return self._thread.call(lambda: frozenset(self._driver.core.buffer.groups))

    def validate(self) -> None:
        """Cross-check all of april's books now; raises InvariantError."""
        self._thread.call(self._driver.core.validate)

    def story(self, group: int, index: int) -> str:
        """The history of one sample, one line per transition."""
        return self._thread.call(lambda: self._driver.core.story(SampleId(group, index)))

    def __repr__(self) -> str:
        try:
            return f"<RolloutScheduler {self._thread.call(lambda: repr(self._driver))}>"
        except SchedulerClosed:
            return "<RolloutScheduler closed>"
        except RolloutError:
            return "<RolloutScheduler of another process>"

    def close(self) -> None:
        """End all requests, functions and engines; idempotent. In a process that was forked off it does nothing.

        Functions have a few seconds to end (CLOSE_PATIENCE_S); those that do not, in threads too, are left behind.
        """
        if not self._thread.here:
            return
        self._dropped.detach()
        try:
            closing = self._thread.submit(self._driver.close)
        except SchedulerClosed:
            self._thread.stop()
            self._observers.close()  # an interrupt may have kept the close before from it
            return
        ended = None
        try:
            ended = self._thread.waits_for(closing)
        finally:
            if not ended:
                self._thread.begin_to_stop(self._give_up)
            self._thread.stop(answers=ended is not False)
            self._gateway.close()
            self._observers.close()
            self._adapters.close()
        error = closing.error()
        if error is not None and not isinstance(error, CancelledError):
            raise error

    async def _give_up(self) -> None:
        """End what is left after an interrupted close."""
        await self._close_abandoned()
        if self._driver.hosts is not None:
            await self._driver.hosts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)


def check_functions(
    config: Config,
    rollout: Callable[..., Any],
    reward: Callable[..., Any] | None,
    group_reward: Callable[..., Any] | None,
    filter: Callable[..., Any] | None,
) -> None:
    """Refuse functions that cannot be called, or that contradict each other or the configuration."""
    if reward is not None and group_reward is not None:
        raise ConfigError("give reward or group_reward, not both")
    if group_reward is not None and config.delivers_parts:
        raise ConfigError(
            f"group_reward scores whole groups, and group_quorum={shown(config.group_quorum)} delivers parts of them; "
            "give reward, or set group_quorum: 1"
        )
    check_function("rollout", rollout, PARAMETERS["rollout"])
    check_signatures(reward=reward, group_reward=group_reward, filter=filter)
    if filter is rewards_differ and (config.n_samples_per_prompt == 1 or reward is group_reward is None):
        raise ConfigError(
            "filter=rewards_differ would reject every group; it needs a reward and n_samples_per_prompt above 1"
        )


PATIENCE_S = 10.0
"""Seconds that engines have to close."""


async def close_abandoned(
    engines: Sequence[Engine], threads: WorkerThreads | None = None, ends: Sequence[Callable[[], None]] = (),
    *, dropped: bool = False,
) -> None:  # fmt: skip
    """Close what is left of a scheduler that was never made, was ``dropped``, or did not close: the last on the loop.

    The driver and the user's functions are not among the arguments: they may hold the scheduler, which would then never
    be dropped. ``ends`` are called when the engines are closed; none of them raises.
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


P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class PartialRollout(Protocol[P, R]):
    """A rollout function that can make its own scheduler."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The function itself."""
        ...

    def scheduler(self, config: Config, **arguments: Any) -> RolloutScheduler:
        """A scheduler for this function; takes everything that :class:`RolloutScheduler` takes, apart from rollout."""
        ...


def partial_rollout(function: Callable[P, R]) -> PartialRollout[P, R]:
    """Decorator for ``(prompt, llm)``, async, or plain (then ``llm.generate`` blocks)::

        @april.partial_rollout
        async def rollout(prompt, llm): ...

        with rollout.scheduler(config, prompts=prompts, reward=reward, model=model) as rollouts:
            batch = rollouts.next_batch()

    The function can be called as before, and given to a scheduler as ``rollout=``.

    Raises:
        ConfigError: what is decorated cannot be called with (prompt, llm).
    """
    check_function("partial_rollout", function, ("prompt", "llm"))
    wrapper: Any
    if is_async(function):

        async def call_async(*args: P.args, **kwargs: P.kwargs) -> Any:
            return await cast(Any, function(*args, **kwargs))

        wrapper = call_async
    else:

        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            return function(*args, **kwargs)

        wrapper = call
    functools.update_wrapper(wrapper, function)

    def scheduler(config: Config, **arguments: Any) -> RolloutScheduler:
        return RolloutScheduler(config, rollout=wrapper, **arguments)

    scheduler.__doc__ = PartialRollout.scheduler.__doc__
    wrapper.scheduler = scheduler
    return cast("PartialRollout[P, R]", wrapper)
