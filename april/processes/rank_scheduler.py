"""The scheduler of a trainer of many processes: the face of RolloutScheduler on every rank.

The rule: a call that changes something is made by every rank, in the same order, with the same arguments; a call that
only looks is answered to whoever asks. The RolloutScheduler is in rank 0's process, and so is the center that makes its
calls; rank 0 is a rank as any other.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np

from april.agents.gateway import OPTIONS
from april.config.settings import Config
from april.core.batch import Batch, SplitBy
from april.core.ledger import Ledger
from april.core.types import Prompt
from april.core.versions import PolicyVersion
from april.driver.detokenizer import Detokenizer
from april.driver.local_host import Hosts
from april.driver.loop_thread import Reply
from april.driver.rewards import EvaluationResult
from april.driver.user_code import call_user_code, refuse_inside_user_code
from april.engines.protocol import Engine, GathersWeights, ShowsWeights
from april.engines.weight_routes import TakesTensors
from april.errors import ConfigError, RankError, RolloutError, SchedulerClosed
from april.images.placing import loaded
from april.processes import content
from april.processes import rank_messages as say
from april.processes.center import Center, OnAll
from april.processes.content import unpack_call
from april.processes.member import Member
from april.processes.rank_host import FUNCTIONS, Brought, RankHost
from april.processes.rank_weights import STEPS, RankWeights, Take, WeightsOfAll
from april.processes.ranks import MeetingPoint, Ranks
from april.processes.remote_hosts import HostListener
from april.scheduler import RolloutScheduler
from april.weights.source import Bucket, WeightSource


def gathering(engines: Iterable[Engine]) -> list[GathersWeights]:
    """Return the engines whose weights are spread over the ranks."""
    return [e for e in engines if e.capabilities.gathers_weights and isinstance(e, GathersWeights)]


def gather(engines: Iterable[Engine]) -> None:
    """Collective; see :class:`april.engines.protocol.GathersWeights`."""
    for engine in gathering(engines):
        engine.gather()


def release(engines: Iterable[Engine]) -> None:
    """The end of it, which waits for no other rank."""
    for engine in gathering(engines):
        engine.release()


log = logging.getLogger("april")


def sampled(engines: Iterable[Engine]) -> bytes:
    """Values of the model that is on this rank, float32; empty: none is, or the ranks gather its weights anyway."""
    showing = (e for e in engines if isinstance(e, ShowsWeights) and not e.capabilities.gathers_weights)
    engine = next(showing, None)
    return b"" if engine is None else np.ascontiguousarray(engine.weight_sample(), np.float32).tobytes()


def differ(rank: int, own: bytes, first: bytes) -> bool:
    """Warn if the values of this rank are not those of rank 0; whether they are not."""
    if not (own and first) or own == first:
        return False
    here, there = np.frombuffer(own, np.float32), np.frombuffer(first, np.float32)
    how = "another model"
    if len(here) == len(there):
        how = f"largest difference of {len(here):,} values: {np.nanmax(np.abs(here - there)):.2g}"
    log.warning(
        "rank %d does not generate from the weights of rank 0 (%s), so log-probabilities are not those of the model "
        "that is trained on them; train one model on all ranks (DistributedDataParallel, or average the gradients), or "
        "give model= on rank 0 only", rank, how,
    )  # fmt: skip
    return True


class OpenCall:
    """Call number ``number``, whose name and arguments are ``what``."""

    def __init__(self, number: int, what: str) -> None:
        self.number = number
        self.what = what
        self.steps = 0
        """Steps that this rank has carried out, and said so."""
        self.carried = 0
        """Steps that this rank has carried out."""
        self.failed: Exception | None = None
        """The error of a step on this rank."""
        self.outcome = Reply[Any]()
        """The result, once the call has ended here and for the others."""
        self.wanted = True
        """True while a caller waits for it, in whatever thread."""
        self.over = False
        """True once an interrupt of this rank in a step has ended it for all; it cannot go on."""
        self.weights: RankWeights | None = None
        """The weights that are sent by it, as they were given when it was first made."""
        self._runner: int | None = None

    def run(self, body: Callable[[OpenCall], Any], leave: Callable[[int], None]) -> None:
        """Carry it out, or wait for the thread that does; an interrupt leaves it open."""
        if self._runner is not None:
            if self._runner == threading.get_ident():
                raise RolloutError(f"{self.what} was called in the middle of itself, by a signal handler")
            self.outcome.wait()
        if self.outcome.done():
            return
        self._runner = threading.get_ident()
        try:
            self.outcome.give(body(self))
        except Exception as error:
            self.outcome.give(None, error)
        except BaseException:
            leave(self.number)
            raise
        finally:
            self._runner = None

    def ended(self) -> tuple[Any, BaseException | None]:
        """Return the result and the error, of which one is None."""
        error = self.outcome.error()
        return (None if error is not None else self.outcome.result()), error


TRANSFER = "transfer"
GATHER = "gathering of the weights"
FAREWELL_S = 5.0
"""Longest wait of a rank's host for the end of rank 0's scheduler."""
JOIN = "joining"
Transfer = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call that is made together."""

    what: str
    """name and arguments, as the ranks compare them"""
    method: str
    """of the scheduler, or JOIN"""
    arguments: tuple[Any, ...] = ()
    """of rank 0"""
    named: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[bytes], Any] = content.unpack_plain
    """what the ranks make of its result"""
    transfer: Transfer | None = None
    """the step of that name, here"""
    weights: RankWeights | None = None
    """what its steps of weights are about, here"""


class OwnScheduler(RolloutScheduler):
    """The RolloutScheduler behind a center, with the results of its calls packed for the ranks.

    Args:
        split_by: how batches are split.
        travels: prompts' data goes to other processes with their responses, so it must be plain.
        options: of the RolloutScheduler.
    """

    _gathers = True

    def __init__(self, config: Config, *, ranks: Ranks, split_by: SplitBy, travels: bool, **options: Any) -> None:
        self._ranks, self._split_by, self._travels = ranks, split_by, travels
        self._refuse_prompt = refuse_to_draw if travels else None
        super().__init__(config, **options)

    @property
    def batches_out(self) -> list[int]:
        """Numbers of the batches that are delivered and not committed."""
        return self._thread.call(lambda: list(self._driver.core.leased))

    def read_prompt(self, item: Any) -> Prompt:
        """The prompt that the first item is; raises ConfigError."""
        return self._reader.read(item, 0)

    def carry_out(self, asked: Any, on_all: OnAll, shares: Sequence[int]) -> tuple[Any, Sequence[bytes]]:
        """Make a call; return its result, and what the ranks get, rank 0 nothing if it is here."""
        hand_over = partial(on_all, TRANSFER)
        if isinstance(asked, bytes):
            method, arguments, named = unpack_call(asked, hand_over)
        else:
            given = asked.method in ("weight_update", "load_state_dict")
            arguments = [hand_over if given and callable(a) else a for a in asked.arguments]
            method, named = asked.method, asked.named
            if asked.weights is not None:
                named = {**named, "weights": WeightsOfAll(asked.weights, on_all)}
        if method == JOIN:
            if missing := set(range(self._ranks.shares)) - set(shares):
                raise ConfigError(f"ranks: nobody has the data_rank {min(missing)}, of data_size {self._ranks.shares}")
            if arguments:
                on_all(JOIN, content.pack_plain(arguments))
            return None, [content.pack_plain(None)] * len(shares)
        if method in ("next_batch", "evaluate") and gathering(self.engines):
            on_all(GATHER)
        result = getattr(self, method)(*arguments, **named)
        here = not isinstance(asked, bytes)
        if isinstance(result, Batch):
            if self._travels:
                for prompt in {s.id.group: s.prompt for s in result.samples}.values():
                    content.refuse_not_plain(prompt)
            parts = result.split(self._ranks.shares, self._split_by)
            packed = {share: content.pack_batch(parts[share]) for share in set(shares[here:])}
            return parts[shares[0]], [packed.get(share, b"") for share in shares]
        if isinstance(result, PolicyVersion):
            one = content.pack_update(result, sampled(self.engines))
        elif isinstance(result, EvaluationResult):
            one = content.pack_evaluation(result)
        else:
            one = content.pack_plain(result)
        return result, [one] * len(shares)

    def look(self, method: str, arguments: list[Any]) -> bytes:
        """Answer what a rank that has no scheduler itself wants to know."""
        if method not in content.LOOKS:
            raise RolloutError(f"a rank cannot ask for {method}")
        return content.LOOKS[method][0](self.found(method, *arguments))

    def found(self, method: str, *arguments: Any) -> Any:
        """Return a property, or what a method returns."""
        value = getattr(self, method)
        return value(*arguments) if callable(value) else value


class Looks:
    """The methods of :class:`april.RolloutScheduler` that change nothing, for a scheduler in another process."""

    def _look(self, method: str, *arguments: Any) -> Any:
        raise NotImplementedError

    def state_dict(self, trained_through: int | None = None) -> dict[str, Any]:
        """Return the whole state, for one rank to save, also after a RankError; see
        :meth:`april.RolloutScheduler.state_dict`.
        """
        return self._look("state_dict", trained_through)  # type: ignore[no-any-return]

    @property
    def version(self) -> PolicyVersion:
        """The current policy version."""
        return self._look("version")  # type: ignore[no-any-return]

    def ledger(self) -> dict[str, Ledger]:
        """Return the books; see :meth:`april.RolloutScheduler.ledger`."""
        return self._look("ledger")  # type: ignore[no-any-return]

    def held_groups(self) -> frozenset[int]:
        """Return the groups that are held; see :meth:`april.RolloutScheduler.held_groups`."""
        return self._look("held_groups")  # type: ignore[no-any-return]

    def validate(self) -> None:
        """Cross-check the books; see :meth:`april.RolloutScheduler.validate`."""
        self._look("validate")

    def story(self, group: int, index: int) -> str:
        """Tell a sample's history; see :meth:`april.RolloutScheduler.story`."""
        return self._look("story", group, index)  # type: ignore[no-any-return]


class RankScheduler(Looks):
    """The scheduler for all ranks of a trainer; every rank makes one, with the same configuration.

    Args:
        config: see :class:`april.Config`.
        ranks: which rank this process is; :meth:`april.Ranks.of_torch` finds out under ``torch.distributed``.
        split_by: how batches are split; see :meth:`april.Batch.split`.
        spread: every rank reads the streams of its part of the servers, and runs rollout functions, rewards and filters
            for a part of the groups; every rank gives the same functions then. False: rank 0 does it all, and only the
            engines of the ranks' own models are elsewhere.
        prompts: of rank 0; the other ranks may give them or leave them out, as all that follows. Their ``data`` goes to
            the ranks that get their responses, so it must be plain: numbers, text, bytes, lists and dicts.
        model: the model object for an embedded engine: of every rank, so that each generates, or of rank 0 only. Of
            every rank where FSDP2 has sharded it.
        engines: engine objects, instead; the same goes for them.
        tokenizer: as in :class:`april.RolloutScheduler`; the other ranks need theirs for the text of evaluations.
        processor: as in :class:`april.RolloutScheduler`; of every rank that has a model of its own.
        hosts: of rank 0, as in :class:`april.RolloutScheduler`; the ranks are no hosts then.
        options: all else that :class:`april.RolloutScheduler` takes.

    Raises:
        ConfigError: as in :class:`april.RolloutScheduler`, on all ranks; or the data of the first prompt is not plain.
        RankError: another rank is missing, has failed, or has another configuration.
    """

    _own: OwnScheduler | None = None
    _center: Center | None = None
    """The scheduler and the center, in rank 0's process only."""
    _host: RankHost | None = None
    """The host of a rank that is not 0."""

    def __init__(
        self,
        config: Config,
        *,
        ranks: Ranks,
        split_by: SplitBy = "samples",
        spread: bool = False,
        prompts: Iterable[Any] = (),
        model: Any = None,
        engines: Sequence[Engine] | None = None,
        tokenizer: Any = None,
        processor: Any = None,
        hosts: Hosts | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(config, Config) or not isinstance(ranks, Ranks):
            raise ConfigError("RankScheduler needs an april.Config and an april.Ranks, such as april.Ranks.of_torch()")
        processor = loaded(processor)
        if tokenizer is None:
            tokenizer = getattr(processor, "tokenizer", None)
        if ranks.rank == 0:
            self._center = Center(ranks)
        self._sit_down(config, ranks, Member(ranks, local=self._center), tokenizer)
        functions = {name: options[name] for name in FUNCTIONS if name in options}
        self._brought = brought = Brought(
            config=config, ranks=ranks, spread=spread, model=model, engines=engines, tokenizer=tokenizer,
            processor=processor, functions=functions,
            agents={name: options[name] for name in OPTIONS if name in options},
        )  # fmt: skip
        what = f"RankScheduler(config {_digest(config)}, split_by={split_by!r}, data_size={ranks.shares}, {brought})"
        point = ranks.meeting_point()
        try:
            self._seat.open(point)
            arguments: tuple[Any, ...] = ()
            if self._center is not None:
                own = dict(
                    prompts=prompts, model=model, engines=engines, tokenizer=tokenizer, processor=processor, **options
                )  # fmt: skip
                arguments = self._begin(self._center, point, split_by, hosts, own)
            self._together(_Call(what=what, method=JOIN, arguments=arguments))
        except BaseException as error:
            self._leave(error)
            raise

    def _begin(
        self, center: Center, point: MeetingPoint, split_by: SplitBy, hosts: Hosts | None, options: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Make the scheduler, on rank 0; what the others must know to bring engines and functions.

        What goes wrong is raised on all ranks, once they have come.
        """
        ranks, brought = self.ranks, self._brought
        several = ranks.world_size > 1
        if several:
            address = ""
            try:
                address = center.listen(point.token)
            finally:
                point.publish(address)
        door = None
        try:
            if brought.spread and hosts is not None:
                raise ConfigError("give hosts= or spread=True: the ranks are hosts by themselves")
            if several and hosts is None and brought.lends:
                same_interface = f"{ranks.address.rpartition(':')[0]}:0"
                door = HostListener(point.token, same_interface, deadline_s=ranks.rank_deadline_s)
            self._own = OwnScheduler(
                brought.own_config, ranks=ranks, split_by=split_by, travels=several, hosts=door or hosts, **options
            )
            self._check_data(self._own, options["prompts"])
        except BaseException as error:
            if door is not None and self._own is None:
                door.discard()
            if not isinstance(error, Exception):
                raise
            center.begin(error)
            return ()
        center.begin(self._own)
        return () if door is None else (door.address, bool(gathering(self._own.engines)))

    def _sit_down(self, config: Config, ranks: Ranks, seat: Member, tokenizer: Any) -> None:
        """Set up what every rank has."""
        self.config = config
        self.ranks = ranks
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._seat = seat
        self._open: OpenCall | None = None
        """A call of which nobody here has heard the end."""
        self._closed = False
        self._warned = False
        """That its weights are not those of rank 0."""

    def _check_data(self, own: OwnScheduler, prompts: Iterable[Any]) -> None:
        """Look at the data of the first prompt, where looking takes none away."""
        if self.ranks.world_size > 1 and isinstance(prompts, Sequence) and prompts:
            try:
                first = own.read_prompt(prompts[0])
            except ConfigError:
                return  # reported when it is drawn
            refuse_to_draw(first)

    def _join_rank_0(self, address: str, gathers: bool) -> None:
        """As a host, if there is something to bring; there must where the weights are to be gathered."""
        if self._brought.anything:
            self._host = RankHost(self._brought, address, self._seat.token)
        if gathers and not gathering(self.engines):
            raise ConfigError(
                "the parameters of rank 0's model are sharded over the ranks, so every rank gives its model: model="
            )

    # ---------------------------------------------------------------- made by all ranks

    def next_batch(self) -> Batch:
        """This rank's share of the next batch; see :meth:`april.RolloutScheduler.next_batch` and ``batch.share``.

        At the end of the data a share may be empty. DataExhausted comes on all ranks, at the same call.
        """
        return self._together(self._next_batch())  # type: ignore[no-any-return]

    async def anext_batch(self) -> Batch:
        """:meth:`next_batch` in a thread. Cancelling it loses nothing: called again, it returns the same share."""
        return await self._together_async(self._next_batch())  # type: ignore[no-any-return]

    def weight_update(
        self, path: str | None = None, transfer: Transfer | None = None, trained: int | None = None,
        weights: Any = None,
    ) -> PolicyVersion:  # fmt: skip
        """Update the weights as :meth:`april.RolloutScheduler.weight_update` does; here ``transfer`` is called, and
        ``weights`` are given, on every rank.

        The function is called in each trainer's thread while all engines are paused, so the ranks' own collectives
        work inside. Weights that are spread over the ranks are put together bucket by bucket, and rank 0 sends them. If
        either fails on one rank, that rank is named in the error of all the others, and the version stays.
        """
        return self._together(self._weight_update(path, transfer, trained, weights))  # type: ignore[no-any-return]

    async def aweight_update(
        self, path: str | None = None, transfer: Transfer | None = None, trained: int | None = None,
        weights: Any = None,
    ) -> PolicyVersion:  # fmt: skip
        """:meth:`weight_update` in a thread."""
        call = self._weight_update(path, transfer, trained, weights)
        return await self._together_async(call)  # type: ignore[no-any-return]

    def commit(self, batch_id: int) -> None:
        """Commit a batch; see :meth:`april.RolloutScheduler.commit`."""
        self._together(_Call(what=f"commit({_text(batch_id)})", method="commit", arguments=(batch_id,)))

    def lower_staleness(self, to: int | None = None) -> int:
        """Lower the staleness; see :meth:`april.RolloutScheduler.lower_staleness`."""
        call = _Call(what=f"lower_staleness({_text(to)})", method="lower_staleness", arguments=(to,))
        return self._together(call)  # type: ignore[no-any-return]

    def evaluate(
        self, prompts: Iterable[Any], *, n_samples: int = 1, temperature: float | None = None,
        top_p: float | None = None, max_tokens: int | None = None, seed: int = 0,
    ) -> EvaluationResult:  # fmt: skip
        """Evaluate as :meth:`april.RolloutScheduler.evaluate` does: the result is whole on every rank.

        The prompts are those that rank 0 gives; the other ranks may give the same, or None.
        """
        call = self._evaluate(
            prompts, n_samples=n_samples, temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed
        )
        return self._together(call)  # type: ignore[no-any-return]

    async def aevaluate(
        self, prompts: Iterable[Any], *, n_samples: int = 1, temperature: float | None = None,
        top_p: float | None = None, max_tokens: int | None = None, seed: int = 0,
    ) -> EvaluationResult:  # fmt: skip
        """:meth:`evaluate` in a thread."""
        call = self._evaluate(
            prompts, n_samples=n_samples, temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed
        )
        return await self._together_async(call)  # type: ignore[no-any-return]

    def extend(self, prompts: Iterable[Any]) -> None:
        """Add prompts, those that rank 0 gives; see :meth:`april.RolloutScheduler.extend`."""
        self._together(_Call(what="extend()", method="extend", arguments=(prompts,)))

    def load_state_dict(
        self, state: dict[str, Any], path: str | None = None, transfer: Transfer | None = None, weights: Any = None
    ) -> PolicyVersion:
        """Go on from a state as :meth:`april.RolloutScheduler.load_state_dict` does; ``transfer`` is called, and
        ``weights`` are given, on every rank.

        The state is the one that rank 0 gives, whatever number of ranks it is of; the others may give it too, or {}.
        """
        return self._together(self._load(state, path, transfer, weights))  # type: ignore[no-any-return]

    async def aload_state_dict(
        self, state: dict[str, Any], path: str | None = None, transfer: Transfer | None = None, weights: Any = None
    ) -> PolicyVersion:
        """:meth:`load_state_dict` in a thread."""
        call = self._load(state, path, transfer, weights)
        return await self._together_async(call)  # type: ignore[no-any-return]

    # ---------------------------------------------------------------- made by whoever wants to know

    @property
    def engines(self) -> list[Engine]:
        """The engine objects of this process."""
        if self._own is not None:
            return self._own.engines
        return [] if self._host is None else list(self._host.engines)

    def _look(self, method: str, *arguments: Any) -> Any:
        if self._own is not None:
            return self._own.found(method, *arguments)
        return content.LOOKS[method][1](self._seat.ask(method, *arguments))

    # ---------------------------------------------------------------- what the calls are

    def _next_batch(self) -> _Call:
        return _Call(what="next_batch()", method="next_batch", read=content.unpack_batch)

    def _weight_update(self, path: Any, transfer: Any, trained: int | None, weights: Any = None) -> _Call:
        sent = "" if weights is None else ", weights=given"
        what = f"weight_update(path={_text(path)}, transfer={_given(transfer)}, trained={_text(trained)}{sent})"
        return _Call(
            what=what, method="weight_update", arguments=(path, transfer, trained), read=self._read_version,
            transfer=transfer, weights=self._weights(weights),
        )  # fmt: skip

    def _weights(self, given: Any) -> RankWeights | None:
        return None if given is None else RankWeights(given, sends=self.ranks.rank == 0, takes=self._taking)

    def _taking(self, source: WeightSource) -> Take | None:
        """What gives a bucket to the engines of this rank that have models of their own; None: there are none."""
        host, engines = self._host, [e for e in self.engines if isinstance(e, TakesTensors)]
        wanting = [e for e in engines if not (source.module is not None and e.reads(source.module))]
        if host is None or not wanting:
            return None

        def take(bucket: Bucket) -> None:
            for engine in wanting:
                host.run(partial(engine.take, bucket.specs, bucket.tensors, bucket.last))

        return take

    def _load(self, state: Any, path: Any, transfer: Any, weights: Any = None) -> _Call:
        sent = "" if weights is None else ", weights=given"
        what = f"load_state_dict(path={_text(path)}, transfer={_given(transfer)}{sent})"
        return _Call(
            what=what, method="load_state_dict", arguments=(state, path, transfer), read=self._read_version,
            transfer=transfer, weights=self._weights(weights),
        )  # fmt: skip

    def _read_version(self, packed: bytes) -> PolicyVersion:
        """With the weights of rank 0, if it has a model: this rank generates from the same ones."""
        version, first = content.unpack_update(packed)
        if not self._warned:
            self._warned = differ(self.ranks.rank, sampled(self.engines), first)
        return version

    def _evaluate(self, prompts: Any, **arguments: Any) -> _Call:
        what = f"evaluate({', '.join(f'{name}={_text(value)}' for name, value in arguments.items())})"
        return _Call(
            what=what, method="evaluate", arguments=(prompts,), named=arguments,
            read=partial(content.unpack_evaluation, detokenizer=self._detokenizer),
        )  # fmt: skip

    # ---------------------------------------------------------------- how they are made

    def _together(self, made: _Call) -> Any:
        """Make a call with all ranks; returns what came of it."""
        call = self._enter(made.what)
        try:
            call.run(partial(self._body, made), self._seat.leave)
            value, error = call.ended()
            self._seat.end(call.number)
            call.over = True
        finally:  # nothing is called from here on: no signal handler comes between the caller and the result
            call.wanted = False
            if call.over:
                self._seat.first, self._open = call.number + 1, None
        if error is not None:
            raise error
        return value

    async def _together_async(self, made: _Call) -> Any:
        """Make a call in a thread; a caller who is cancelled leaves it to the next one who makes the same call."""
        call = self._enter(made.what)
        try:
            await asyncio.to_thread(call.run, partial(self._body, made), self._seat.leave)
            value, error = call.ended()
            self._seat.end(call.number)
            call.over = True
        finally:
            call.wanted = False
            if call.over:
                self._seat.first, self._open = call.number + 1, None
        if error is not None:
            raise error
        return value

    def _enter(self, what: str) -> OpenCall:
        """The call that is made now: the one that an interrupt has left open, or a new one."""
        refuse_inside_user_code()
        if self._closed:
            raise SchedulerClosed("this scheduler is closed; create a new one")
        self._seat.raise_if_broken()
        call = self._open
        if call is not None and call.wanted:
            raise RolloutError(f"{what} was called while {call.what} is waited for; make one call after the other")
        if call is None or call.what != what:
            # in place of another one that was interrupted: the others are told that the calls differ
            call = OpenCall(self._seat.first if call is None else call.number, what)
        call.wanted = True
        self._open = call
        return call

    def _arguments(self, made: _Call, call: OpenCall) -> bytes:
        """Return what the center needs of this rank to make the call."""
        if self._center is not None:
            self._center.asked = made
        return b""

    def _body(self, made: _Call, call: OpenCall) -> Any:
        seat = self._seat
        if call.failed is not None:
            raise call.failed
        call.weights = call.weights or made.weights
        seat.arrive(call.number, call.what, self._arguments(made, call))
        while isinstance(message := seat.next(call.number, call.steps), say.Step):
            if call.carried == call.steps:
                try:
                    self._step(made, call, message)
                except BaseException as error:
                    if isinstance(error, Exception):
                        call.failed = error
                    seat.done(call.number, message.step, error)
                    release(self.engines)
                    call.over = call.failed is None
                    raise
                call.carried = call.steps + 1
            seat.done(call.number, message.step)
            call.steps = call.carried
        release(self.engines)
        if self._center is not None:  # it is all here
            value, wrong = self._center.outcome
            if wrong is not None:
                raise wrong
            return value
        if message.error is not None:
            raise say.error_of(message.error)
        return made.read(message.content)

    def _step(self, made: _Call, call: OpenCall, message: say.Step) -> None:
        """Carry out here what all ranks do now."""
        if message.step == JOIN:
            if self._center is None:
                self._join_rank_0(*content.unpack_plain(message.content))
        elif message.step == GATHER:
            gather(self.engines)
        elif message.step in STEPS:
            assert call.weights is not None
            call.weights.step(message.step, message.content)
        else:
            assert made.transfer is not None
            call_user_code(made.transfer)

    # ---------------------------------------------------------------- the end

    def __repr__(self) -> str:
        call = self._open
        waits = f", in {call.what}" if call is not None and call.wanted else ""
        rank = f"rank {self.ranks.rank} of {self.ranks.world_size}{waits}"
        return f"<RankScheduler {rank}{'' if self._own is None else f' {self._own!r}'}>"

    def close(self) -> None:
        """Leave. Rank 0 waits for the others to close too, for they may still look at something; then all ends."""
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        self._closed = True
        broken = self._seat.broken
        if broken is not None and error is not None and not isinstance(error, RankError):
            error.add_note(f"april: {broken}")  # which says why a collective of the trainer's has failed
        with ExitStack() as ends:  # each of them, the last one first, whatever interrupts another
            if self._host is not None:
                # nobody is told that a host has gone where all ranks end
                ends.callback(self._host.close, 0.0 if error is not None or broken is not None else FAREWELL_S)
            if self._own is not None:
                ends.callback(self._own.close)
            if self._center is not None:
                ends.callback(self._center.close, error, wait=error is None)
            ends.callback(self._seat.close, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self._leave, error)


def refuse_to_draw(prompt: Prompt) -> None:
    """Raise ConfigError for a prompt whose responses could be shared with nobody."""
    try:
        content.refuse_not_plain(prompt)
    except RolloutError as error:
        raise ConfigError(str(error)) from None


def _text(value: Any) -> str:
    """An argument as the ranks compare it."""
    return repr(os.fspath(value) if isinstance(value, os.PathLike) else value)[:200]


def _given(function: Any) -> str:
    return "None" if function is None else "given"


def _digest(config: Config) -> str:
    """Return a digest of the settings, by which others are told apart."""
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:12]
