"""The scheduler for a trainer with many processes (ranks); every rank gets the interface of RolloutScheduler.

The rule: every rank makes each call that changes something, in the same order and with the same arguments. A call that
changes nothing may be made by a single rank. The RolloutScheduler runs in rank 0's process; all ranks, rank 0 included,
send their calls to a server there.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from pydantic import SecretStr

from april.config.engines import AprilEngineConfig
from april.config.settings import Config
from april.core.batch import Batch, SplitBy
from april.core.types import Prompt
from april.core.versions import PolicyVersion
from april.driver.detokenizer import Detokenizer
from april.driver.loop_thread import Reply
from april.driver.rewards import EvaluationResult
from april.driver.tracebacks import shorten
from april.driver.user_code import call_user_code, describe, refuse_inside_user_code
from april.engines.protocol import Engine, GathersWeights, ShowsWeights
from april.engines.served.client import connect_april
from april.engines.weight_transfer import TakesTensors
from april.errors import AprilError, ConfigError, RankError, RolloutError, SchedulerClosed
from april.images.image_placer import load_processor
from april.processes import rank_packing as packing
from april.processes.rank_client import RankClient
from april.processes.rank_engines import RankEngines, shares_trainer_weights
from april.processes.rank_messages import CallRequest, Step, error_from_message
from april.processes.rank_server import RankServer, RunOnAllRanks
from april.processes.rank_weights import STEPS, CopyBucket, GatheredWeights, RankWeights
from april.processes.ranks import Ranks, Rendezvous
from april.scheduler import BatchIterator, RolloutScheduler
from april.serialization.own_values import pack, unpack
from april.weights.source import Bucket, WeightSource


def engines_to_gather(engines: Iterable[Engine]) -> list[GathersWeights]:
    """Return the engines whose weights are sharded over the ranks."""
    return [e for e in engines if e.capabilities.gathers_weights and isinstance(e, GathersWeights)]


log = logging.getLogger("april")


def packed_weight_sample(engines: Iterable[Engine]) -> bytes:
    """Return float32 values of this rank's weights, for :func:`warn_if_weights_differ`.

    The result is empty if this rank has no model, or if the ranks gather the weights anyway.
    """
    showing = (e for e in engines if isinstance(e, ShowsWeights) and not e.capabilities.gathers_weights)
    engine = next(showing, None)
    return b"" if engine is None else np.ascontiguousarray(engine.weight_sample(), np.float32).tobytes()


def warn_if_weights_differ(rank: int, own: bytes, first: bytes) -> bool:
    """Return True, and warn, if the sample values of this rank are not those of rank 0."""
    if not (own and first) or own == first:
        return False
    here, there = np.frombuffer(own, np.float32), np.frombuffer(first, np.float32)
    how = "another model"
    if len(here) == len(there):
        how = f"largest difference of {len(here):,} values: {np.nanmax(np.abs(here - there)):.2g}"
    log.warning(
        "rank %d does not generate from the weights of rank 0 (%s), so its log-probabilities do not belong to the "
        "model that is trained with them; train one model on all ranks (DistributedDataParallel, or average the "
        "gradients), or give model= on rank 0 only", rank, how,
    )  # fmt: skip
    return True


class PendingCall:
    """A call of this rank that has not ended yet; ``call_text`` is the name and arguments of the call."""

    def __init__(self, number: int, call_text: str) -> None:
        self.number = number
        self.call_text = call_text
        self.steps_done = 0
        self.step_error: Exception | None = None
        self.outcome = Reply[Any]()
        """Result of the call, once it has ended here and on the other ranks."""
        self.has_caller = True
        """True while a caller waits for the call, in any thread."""
        self.step_result = b""
        self.finished = False
        """True once the call is over, also if an interrupt in one of its steps has ended it for all ranks."""
        self.weights: RankWeights | None = None
        """Weights that the call sends. A call that is made again after an interrupt keeps its first ones."""
        self._runner: int | None = None

    def run(self, body: Callable[[PendingCall], Any]) -> None:
        """Carry out the call, or wait for the thread that does so; after an interrupt the call can be continued."""
        if self._runner is not None:
            if self._runner == threading.get_ident():
                raise RolloutError(f"a signal handler called {self.call_text} during {self.call_text}")
            self.outcome.wait()
        if self.outcome.done():
            return
        self._runner = threading.get_ident()
        try:
            self.outcome.set(body(self))
        except Exception as error:
            self.outcome.set(None, error)
        finally:
            self._runner = None

    def request(self, **more: Any) -> CallRequest:
        """Return this rank's next request."""
        return CallRequest(call_number=self.number, call_text=self.call_text, steps_done=self.steps_done, **more)

    def value_or_error(self) -> tuple[Any, BaseException | None]:
        """Return (result, error); one of the two is None."""
        error = self.outcome.error()
        return (None if error is not None else self.outcome.result()), error


TRANSFER = "transfer"
GATHER = "gathering of the weights"
ENGINE_RELEASE_S = 5.0
"""Seconds that a rank which closes waits for rank 0's scheduler to release the rank's engines."""
JOIN = "joining"
MAX_ARGUMENT_CHARS = 200
"""Maximum number of characters of an argument in the text that the ranks compare."""
RANK_0_ARGUMENTS = frozenset({"prompts", "state", "api_key"})
"""Arguments that only rank 0 needs to give; those of other ranks are ignored."""
OBJECT_ARGUMENTS = frozenset({"transfer", "weights", "engine"})
"""Arguments for which every rank gives an object of its own, so that the ranks cannot compare them."""


@dataclass(frozen=True, kw_only=True)
class _MethodCall:
    """A call that the ranks make together."""

    call_text: str
    """Name and arguments of the method, as the ranks compare them."""
    method: str
    """Name of the method of RolloutScheduler, or JOIN."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments by name; the scheduler uses those of rank 0."""
    weights: RankWeights | None = None


P = ParamSpec("P")
T = TypeVar("T")


def on_all_ranks(method: Callable[Concatenate[RolloutScheduler, P], T]) -> Callable[Concatenate[RankScheduler, P], T]:
    """Turn a method of RolloutScheduler into one that all ranks call together; an async one runs in a thread."""
    signature = inspect.signature(method)

    @wraps(method)
    def collective(self: RankScheduler, *arguments: P.args, **named: P.kwargs) -> Any:
        return self._run(self._method_call(method.__name__, signature.bind(self, *arguments, **named)))

    @wraps(method)
    async def in_thread(self: RankScheduler, *arguments: P.args, **named: P.kwargs) -> Any:
        name = method.__name__.removeprefix("a")
        return await self._run_async(self._method_call(name, signature.bind(self, *arguments, **named)))

    return in_thread if inspect.iscoroutinefunction(method) else collective  # type: ignore[return-value]


class SharedScheduler(RolloutScheduler):
    """The RolloutScheduler behind a rank server; it packs the results of its calls for the ranks.

    Args:
        split_by: how batches are split; see :meth:`april.Batch.split`.
        crosses_processes: True if batches are sent to other processes, so that their prompts' data must be plain.
        options: other arguments of the RolloutScheduler.
    """

    _gathers = True

    def __init__(
        self, config: Config, *, ranks: Ranks, split_by: SplitBy, crosses_processes: bool, **options: Any
    ) -> None:
        self._ranks, self._split_by, self._crosses_processes = ranks, split_by, crosses_processes
        self._refuse_prompt = refuse_unsendable if crosses_processes else None
        super().__init__(config, **options)

    @property
    def uncommitted_batches(self) -> list[int]:
        """Numbers of the batches that are delivered and not committed."""
        return self._thread.call(lambda: list(self._driver.core.leased))

    def execute(self, request: Any, on_all: RunOnAllRanks, shares: Sequence[int]) -> tuple[Any, Sequence[bytes]]:
        """Make a call; return its result, and the packed result for each rank, except for a rank 0 in this process."""
        transfer = partial(on_all, TRANSFER)
        if isinstance(request, bytes):
            method, arguments = packing.unpack_call(request, transfer)
        else:
            method, arguments = request.method, dict(request.arguments)
            if callable(arguments.get("transfer")):
                arguments["transfer"] = transfer
            if request.weights is not None:
                arguments["weights"] = GatheredWeights(request.weights, on_all)
        if method == JOIN:
            if missing := set(range(self._ranks.shares)) - set(shares):
                raise ConfigError(f"ranks: no rank has the data_rank {min(missing)}, of data_size {self._ranks.shares}")
            if arguments:
                self._add_rank_engines(on_all(JOIN, pack(arguments["gathers"])), arguments["key"])
            return None, [pack(None)] * len(shares)
        if method in ("next_batch", "evaluate") and engines_to_gather(self.engines):
            on_all(GATHER)
        result = getattr(self, method)(**arguments)
        here = not isinstance(request, bytes)
        if isinstance(result, Batch):
            if self._crosses_processes:
                for prompt in {s.id.group: s.prompt for s in result.samples}.values():
                    packing.refuse_not_plain(prompt)
            parts = result.split(self._ranks.shares, self._split_by)
            packed = {share: pack(parts[share]) for share in set(shares[here:])}
            return parts[shares[0]], [packed.get(share, b"") for share in shares]
        content: Any = result
        if isinstance(result, PolicyVersion):
            content = result, packed_weight_sample(self.engines)
        elif isinstance(result, EvaluationResult):
            content = packing.with_detokenizer(result, None)
        return result, [pack(content)] * len(shares)

    def _add_rank_engines(self, offers: Mapping[int, bytes], key: str) -> None:
        urls = [url for rank in sorted(offers) if offers[rank] for url in unpack(offers[rank], list[str])]
        if urls:
            offered = AprilEngineConfig(urls=tuple(urls), api_key=SecretStr(key))
            for engine in self._thread.run(lambda: connect_april(offered)):
                self.add_engine(engine)

    def query(self, method: str, arguments: list[Any]) -> bytes:
        """Answer a query of a rank in another process."""
        if method not in packing.QUERY_RESULTS:
            raise RolloutError(f"a rank cannot call {method}")
        return pack(self.value_of(method, *arguments))

    def value_of(self, method: str, *arguments: Any) -> Any:
        """Return the value of a property, or the result of a method."""
        value = getattr(self, method)
        return value(*arguments) if callable(value) else value


def on_one_rank(method: Callable[Concatenate[RolloutScheduler, P], T]) -> Callable[Concatenate[RankScheduler, P], T]:
    """Turn a method of RolloutScheduler that changes nothing into one that a single rank may call."""
    signature = inspect.signature(method)

    @wraps(method)
    def query(self: RankScheduler, *arguments: P.args, **named: P.kwargs) -> T:
        _, *given = signature.bind(self, *arguments, **named).args
        return self._query(method.__name__, *map(packing.plain_argument, given))  # type: ignore[no-any-return]

    return query  # type: ignore[return-value]


class RankScheduler(BatchIterator):
    """The scheduler for all ranks of a trainer; every rank makes one, with the same configuration.

    The methods are those of :class:`april.RolloutScheduler`. Every rank calls those that change something, with the
    same arguments:

    * ``next_batch`` returns this rank's share of the batch (``batch.share``), which may be empty at the end of the
      data; DataExhausted is raised on all ranks, at the same call.
    * ``weight_update`` and ``load_state_dict`` call ``transfer`` in each rank's thread while all engines are paused, so
      it may use the ranks' own collectives. They take ``weights`` from every rank: sharded weights are gathered bucket
      by bucket, and rank 0 sends them. If one rank fails, all others raise an error that names this rank, and the
      version does not change.
    * ``evaluate`` returns the whole result on every rank.
    * Prompts, a state and an engine object are taken from rank 0; the other ranks may give them, or None.

    Args:
        config: see :class:`april.Config`.
        ranks: which rank this process is; :meth:`april.Ranks.of_torch` finds out under ``torch.distributed``.
        split_by: how batches are split; see :meth:`april.Batch.split`.
        prompts: prompts, needed on rank 0; other ranks may leave out this argument and all that follow. The ``data`` of
            prompts goes to the ranks that get their responses, so it must be plain: numbers, text, bytes, lists, dicts.
        model: the model object for an embedded engine, on every rank so that each generates, or on rank 0 only. Every
            rank must give its model if FSDP2 has sharded the model.
        engines: engine objects instead of ``model``, on every rank or on rank 0 only.
        tokenizer: as in :class:`april.RolloutScheduler`; the other ranks need theirs for the text of evaluations.
        processor: as in :class:`april.RolloutScheduler`; needed on every rank that has a model of its own.
        options: all other arguments of :class:`april.RolloutScheduler`.

    Raises:
        ConfigError: as in :class:`april.RolloutScheduler`, on all ranks.
        RankError: another rank is missing, has failed, or has another configuration.
    """

    _scheduler: SharedScheduler | None = None
    _server: RankServer | None = None
    """Server for the ranks' calls; it and the scheduler are None except in rank 0's process."""
    _rank_engines: RankEngines | None = None
    """Engines of this rank that rank 0's scheduler uses; None on rank 0, or if there are none."""
    _rank_0_engines: Sequence[Engine] = ()
    """Engines of rank 0's process; empty on other ranks."""

    def __init__(
        self,
        config: Config,
        *,
        ranks: Ranks,
        split_by: SplitBy = "samples",
        prompts: Iterable[Any] = (),
        model: Any = None,
        engines: Sequence[Engine] | None = None,
        tokenizer: Any = None,
        processor: Any = None,
        **options: Any,
    ) -> None:
        if not isinstance(config, Config) or not isinstance(ranks, Ranks):
            raise ConfigError("RankScheduler needs an april.Config and an april.Ranks, such as april.Ranks.of_torch()")
        processor = load_processor(processor)
        if tokenizer is None:
            tokenizer = getattr(processor, "tokenizer", None)
        if ranks.rank == 0:
            self._server = RankServer(ranks)
        self._set_up(config, ranks, RankClient(ranks, server=self._server), tokenizer)
        self._model_arguments = model, engines, processor
        sizes = f"world_size={ranks.world_size}, data_size={ranks.shares}"
        digest = _text_digest(config.model_dump_json())  # so that the server refuses ranks with other settings
        call_text = f"RankScheduler(config {digest}, split_by={split_by!r}, {sizes})"
        rendezvous = ranks.rendezvous()
        try:
            self._client.join(rendezvous)
            arguments: dict[str, Any] = {}
            if self._server is not None:
                own = dict(
                    prompts=prompts, model=model, engines=engines, tokenizer=tokenizer, processor=processor, **options
                )  # fmt: skip
                arguments = self._create_scheduler(self._server, rendezvous, split_by, own)
            self._run(_MethodCall(call_text=call_text, method=JOIN, arguments=arguments))
        except BaseException as error:
            self._close(error)
            if isinstance(error, AprilError):
                shorten(error)
            raise

    def _create_scheduler(
        self, server: RankServer, rendezvous: Rendezvous, split_by: SplitBy, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Create the scheduler on rank 0 and return the arguments of the JOIN call.

        If this fails, the JOIN call raises the error on all ranks.
        """
        several = self.ranks.world_size > 1
        if several:
            address = ""
            try:
                address = server.listen(rendezvous.token)
            finally:
                rendezvous.publish(address)
        try:
            self._scheduler = SharedScheduler(
                self.config, ranks=self.ranks, split_by=split_by, crosses_processes=several, **options
            )
        except Exception as error:
            server.set_scheduler(error)
            return {}
        self._rank_0_engines = self._scheduler.engines
        server.set_scheduler(self._scheduler)
        embedded = several and (options["model"] is not None or options["engines"] is not None)
        return {"gathers": bool(engines_to_gather(self._rank_0_engines)), "key": rendezvous.token} if embedded else {}

    def _set_up(self, config: Config, ranks: Ranks, client: RankClient, tokenizer: Any) -> None:
        self.config = config
        self.ranks = ranks
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._client = client
        self._pending: PendingCall | None = None
        """A call whose result no caller on this rank has received yet."""
        self._closed = False
        self._warned = False
        """True once this rank was warned that its weights are not those of rank 0."""

    def _offer_engines(self, gathers: bool) -> bytes:
        """Create this rank's engines and return their packed addresses for rank 0; empty bytes if there are none.

        Raises ConfigError if rank 0's model is sharded and this rank has no part of it.
        """
        model, engines, processor = self._model_arguments
        if model is not None or engines is not None:
            client = self._client
            self._rank_engines = RankEngines(self.config, model, engines, processor, host=client.host, key=client.token)
        if gathers and not engines_to_gather(self.engines):
            raise ConfigError(
                "the parameters of rank 0's model are sharded over the ranks, so every rank must give its model: model="
            )
        return b"" if self._rank_engines is None else pack([server.url for server in self._rank_engines.servers])

    # ---------------------------------------------------------------- calls that all ranks make together

    next_batch = on_all_ranks(RolloutScheduler.next_batch)
    weight_update = on_all_ranks(RolloutScheduler.weight_update)
    evaluate = on_all_ranks(RolloutScheduler.evaluate)
    pause = on_all_ranks(RolloutScheduler.pause)
    resume = on_all_ranks(RolloutScheduler.resume)
    commit = on_all_ranks(RolloutScheduler.commit)
    lower_staleness = on_all_ranks(RolloutScheduler.lower_staleness)
    extend = on_all_ranks(RolloutScheduler.extend)
    load_state_dict = on_all_ranks(RolloutScheduler.load_state_dict)
    add_engine = on_all_ranks(RolloutScheduler.add_engine)
    remove_engine = on_all_ranks(RolloutScheduler.remove_engine)
    anext_batch = on_all_ranks(RolloutScheduler.anext_batch)
    aweight_update = on_all_ranks(RolloutScheduler.aweight_update)
    aevaluate = on_all_ranks(RolloutScheduler.aevaluate)
    apause = on_all_ranks(RolloutScheduler.apause)
    aresume = on_all_ranks(RolloutScheduler.aresume)
    aload_state_dict = on_all_ranks(RolloutScheduler.aload_state_dict)
    aadd_engine = on_all_ranks(RolloutScheduler.aadd_engine)
    aremove_engine = on_all_ranks(RolloutScheduler.aremove_engine)

    # ---------------------------------------------------------------- queries of a single rank

    state_dict = on_one_rank(RolloutScheduler.state_dict)  # works after a RankError, too
    ledger = on_one_rank(RolloutScheduler.ledger)
    held_groups = on_one_rank(RolloutScheduler.held_groups)
    validate = on_one_rank(RolloutScheduler.validate)
    record_report = on_one_rank(RolloutScheduler.record_report)
    story = on_one_rank(RolloutScheduler.story)

    @property
    def version(self) -> PolicyVersion:
        """The current policy version."""
        return self._query("version")  # type: ignore[no-any-return]

    @property
    def engines(self) -> list[Engine]:
        """Engine objects of this process."""
        return list(self._rank_0_engines if self._rank_engines is None else self._rank_engines.engines)

    def _query(self, method: str, *arguments: Any) -> Any:
        if self._scheduler is not None:
            return self._scheduler.value_of(method, *arguments)
        return unpack(self._client.query(method, *arguments), packing.QUERY_RESULTS[method])

    # ---------------------------------------------------------------- the arguments of a call

    def _method_call(self, method: str, bound: inspect.BoundArguments) -> _MethodCall:
        """Return the call of a method with these arguments, the first of which is the scheduler itself."""
        _, *given = bound.arguments
        arguments = {name: bound.arguments[name] for name in given}
        texts = {name: _argument_text(name, value) for name, value in arguments.items() if name not in RANK_0_ARGUMENTS}
        defaults = {name: _argument_text(name, p.default) for name, p in bound.signature.parameters.items()}
        argument_texts = ", ".join(f"{name}={text}" for name, text in texts.items() if text != defaults[name])
        weights = self._weights_to_send(arguments.pop("weights", None))
        return _MethodCall(call_text=f"{method}({argument_texts})", method=method, arguments=arguments, weights=weights)

    def _weights_to_send(self, given: Any) -> RankWeights | None:
        if given is None:
            return None
        return RankWeights(given, is_sender=self.ranks.rank == 0, make_copy=self._copy_function)

    def _copy_function(self, source: WeightSource) -> CopyBucket | None:
        """Return a function that copies a bucket into this rank's engines that need a copy; None if there are none."""
        rank_engines = self._rank_engines
        engines = [e for e in self.engines if isinstance(e, TakesTensors) and shares_trainer_weights(e)]
        receivers = [e for e in engines if not (source.module is not None and e.reads(source.module))]
        if rank_engines is None or not receivers:
            return None

        def copy(bucket: Bucket) -> None:
            for engine in receivers:
                rank_engines.thread.run(partial(engine.take, bucket.specs, bucket.tensors, bucket.last))

        return copy

    # ---------------------------------------------------------------- carrying out a call

    def _run(self, method_call: _MethodCall) -> Any:
        call = self._pending_call(method_call.call_text)
        try:
            call.run(partial(self._run_steps, method_call))
            value, error = call.value_or_error()
            call.finished = True
        finally:  # no calls from here on: Python might run a signal handler at a call, which would lose the result
            call.has_caller = False
            if call.finished:
                self._client.next_call, self._pending = call.number + 1, None
        if error is not None:
            shorten(error)
            raise error
        return value

    async def _run_async(self, method_call: _MethodCall) -> Any:
        """Make a call in a thread; if the caller is cancelled, the next caller of the same call continues it."""
        call = self._pending_call(method_call.call_text)
        try:
            await asyncio.to_thread(call.run, partial(self._run_steps, method_call))
            value, error = call.value_or_error()
            call.finished = True
        finally:
            call.has_caller = False
            if call.finished:
                self._client.next_call, self._pending = call.number + 1, None
        if error is not None:
            shorten(error)
            raise error
        return value

    def _pending_call(self, call_text: str) -> PendingCall:
        """Return the call to make now: the one that an interrupt has left open, or a new one."""
        refuse_inside_user_code()
        if self._closed:
            raise SchedulerClosed("this scheduler is closed; create a new one")
        self._client.raise_group_error()
        call = self._pending
        if call is not None and call.has_caller:
            raise RolloutError(
                f"{call_text} was called while {call.call_text} was still running; make one call after the other"
            )
        if call is None or call.call_text != call_text:
            # if this replaces an interrupted call, the server reports to all ranks that their calls differ
            call = PendingCall(self._client.next_call if call is None else call.number, call_text)
        call.has_caller = True
        self._pending = call
        return call

    def _packed_arguments(self, method_call: _MethodCall) -> bytes:
        """Give the call to a server in this process, or return its packed arguments for a server in another one."""
        if self._server is not None:
            self._server.rank0_request = method_call
        return b""

    def _run_steps(self, method_call: _MethodCall, call: PendingCall) -> Any:
        if call.step_error is not None:
            raise call.step_error
        call.weights = call.weights or method_call.weights
        self._client.raise_group_error()
        arguments = self._packed_arguments(replace(method_call, weights=call.weights))
        try:
            while True:
                answer = self._client.exchange(call.request(arguments=arguments, step_result=call.step_result))
                if not isinstance(answer, Step):
                    break
                try:
                    call.step_result = self._run_step(method_call, call, answer)
                except BaseException as error:
                    if isinstance(error, Exception):
                        call.step_error = error
                    self._client.report_failure(call.request(error=describe(error)))
                    call.finished = call.step_error is None
                    raise
                call.steps_done += 1
        finally:
            for engine in engines_to_gather(self.engines):
                engine.release()
        if self._server is not None:  # this process has the result itself, so none was packed
            value, failure = self._server.last_outcome
            if failure is not None:
                raise failure
            return value
        if answer.error is not None:
            raise error_from_message(answer.error)
        return self._unpack_result(method_call.method, answer.content)

    def _run_step(self, method_call: _MethodCall, call: PendingCall, message: Step) -> bytes:
        if message.name == JOIN:
            return b"" if self._server is not None else self._offer_engines(unpack(message.content, bool))
        if message.name == GATHER:
            for engine in engines_to_gather(self.engines):
                engine.gather()
        elif message.name in STEPS:
            assert call.weights is not None
            call.weights.step(message.name, message.content)
        else:
            call_user_code(method_call.arguments["transfer"])
        return b""

    def _unpack_result(self, method: str, content: bytes) -> Any:
        kind: Any = packing.CALL_RESULTS.get(method)
        result = unpack(content, kind)
        if isinstance(result, EvaluationResult):
            return packing.with_detokenizer(result, self._detokenizer)
        if not isinstance(result, tuple):
            return result
        version, first = result
        if not self._warned:  # a rank with a model should generate from the same weights as rank 0
            self._warned = warn_if_weights_differ(self.ranks.rank, packed_weight_sample(self.engines), first)
        return version

    # ---------------------------------------------------------------- closing

    def __repr__(self) -> str:
        rank = f"rank {self.ranks.rank} of {self.ranks.world_size}"
        return f"<RankScheduler {rank}{'' if self._scheduler is None else f' {self._scheduler!r}'}>"

    def close(self) -> None:
        """Close this rank's scheduler.

        Rank 0 waits until the other ranks close theirs, as these may still make calls. It then ends the run.
        """
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        self._closed = True
        broken = self._client.group_error
        if broken is not None and error is not None and not isinstance(error, RankError):
            error.add_note(f"april: {broken}")  # explains why a collective of the trainer has failed
        with ExitStack() as ends:  # makes these calls in reverse order, all of them even if one is interrupted
            if self._rank_engines is not None:
                # rank 0 must end its scheduler before these engines disappear
                ends.callback(
                    self._rank_engines.close, 0.0 if error is not None or broken is not None else ENGINE_RELEASE_S
                )
            if self._server is not None:
                ends.callback(self._server.stop)
            if self._scheduler is not None:
                ends.callback(self._scheduler.close)
            if self._server is not None:
                ends.callback(self._server.close, error, wait=error is None)
            ends.callback(self._client.close, error)


def refuse_unsendable(prompt: Prompt) -> None:
    """Raise ConfigError for a prompt whose data cannot be sent to other ranks."""
    try:
        packing.refuse_not_plain(prompt)
    except RolloutError as error:
        raise ConfigError(str(error)) from None


def _argument_text(name: str, value: Any) -> str:
    """Return an argument as text that the ranks compare; a long text is cut, and a digest of all of it appended."""
    if name in OBJECT_ARGUMENTS and value is not None and not isinstance(value, str):
        return "given"
    text = repr(packing.plain_value(value))
    return text if len(text) <= MAX_ARGUMENT_CHARS else f"{text[:MAX_ARGUMENT_CHARS]}... ({_text_digest(text)})"


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
