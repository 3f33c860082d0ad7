"""The scheduler of a trainer of many processes: the face of RolloutScheduler on every rank.

Rank 0 has the RolloutScheduler. The rule: a call that changes something is made by every rank, in the same order, with
the same arguments; a call that only looks is answered to whoever asks.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

from april.config.settings import Config
from april.core.batch import Batch
from april.core.batch_shares import SplitBy
from april.core.ledger import Ledger
from april.core.versions import PolicyVersion
from april.driver.detokenizer import Detokenizer
from april.driver.prompt_source import as_prompt
from april.driver.rewards import EvaluationResult
from april.driver.user_code import call_user_code, describe, refuse_inside_user_code
from april.engines.protocol import Engine
from april.errors import ConfigError, RankError, RolloutError, SchedulerClosed
from april.processes import content
from april.processes import rank_messages as say
from april.processes.center import Center
from april.processes.gathering import gather, gathering, release
from april.processes.member import Member
from april.processes.open_call import OpenCall
from april.processes.own_scheduler import OwnScheduler, refuse_to_draw
from april.processes.rank_host import FUNCTIONS, Brought, RankHost
from april.processes.ranks import Ranks, any_port
from april.processes.remote_hosts import HostDoor, HostListener
from april.processes.replicas import differ, sampled
from april.scheduler import RolloutScheduler

TRANSFER = "transfer"
GATHER = "gathering of the weights"
FAREWELL_S = 5.0
"""Longest wait of a rank's host for the end of rank 0's scheduler."""
JOIN = "joining"
Transfer = Callable[[], Any]


class _OnAll(Protocol):
    """Has every rank carry out a step, here as ``function``."""

    def __call__(self, step: str, function: Transfer, content: bytes = b"") -> None: ...


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call that is made together."""

    what: str
    """name and arguments, as the ranks compare them"""
    run: Callable[[_OnAll], Any]
    """what rank 0 does; when its scheduler has returned, nothing is called any more that a signal could interrupt"""
    read: Callable[[bytes], Any]
    """what the others make of its result"""
    transfer: Transfer | None = None
    """the step of that name, here"""
    generates: bool = False
    """weights that are spread over the ranks are whole on all of them meanwhile, where engines need that"""


class RankScheduler:
    """One scheduler for all ranks of a trainer; every rank makes one, with the same configuration.

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
        hosts: of rank 0, as in :class:`april.RolloutScheduler`; the ranks are no hosts then.
        options: all else that :class:`april.RolloutScheduler` takes.

    Raises:
        ConfigError: as in :class:`april.RolloutScheduler`, on all ranks; or the data of the first prompt is not plain.
        RankError: another rank is missing, has failed, or has another configuration.
    """

    _own: OwnScheduler | None = None
    """Of rank 0."""
    _host: RankHost | None = None
    """Of a rank that is not 0."""

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
        hosts: HostDoor | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(config, Config) or not isinstance(ranks, Ranks):
            raise ConfigError("RankScheduler needs an april.Config and an april.Ranks, such as april.Ranks.of_torch()")
        self._split_by = split_by
        seat = Center(ranks, self._look, self._end_waits) if ranks.rank == 0 else Member(ranks)
        self._sit_down(config, ranks, seat, tokenizer)
        functions = {name: options[name] for name in FUNCTIONS if name in options}
        self._brought = brought = Brought(
            config=config, ranks=ranks, spread=spread, model=model, engines=engines, tokenizer=tokenizer,
            functions=functions,
        )  # fmt: skip
        point = ranks.meeting_point()

        def create(on_all: _OnAll) -> None:
            self._check_shares()
            if spread and hosts is not None:
                raise ConfigError("give hosts= or spread=True: the ranks are hosts by themselves")
            door = None
            if ranks.world_size > 1 and hosts is None and brought.lends:
                door = HostListener(point.token, any_port(ranks.address), deadline_s=ranks.rank_deadline_s)
            try:
                own = self._own = OwnScheduler(
                    brought.own_config, prompts=prompts, model=model, engines=engines, tokenizer=tokenizer,
                    hosts=door or hosts, travels=ranks.world_size > 1, **options,
                )  # fmt: skip
            except BaseException:
                if door is not None:
                    door.discard()
                raise
            self._check_data(own, prompts)
            if door is not None:
                on_all(JOIN, lambda: None, content.pack_plain([door.address, bool(gathering(own.engines))]))

        what = f"RankScheduler(config {_digest(config)}, split_by={split_by!r}, data_size={ranks.shares}, {brought})"
        try:
            self._seat.open(point)
            self._together(_Call(what=what, run=create, read=content.unpack_plain))
        except BaseException as error:
            self._leave(error)
            raise

    def _sit_down(self, config: Config, ranks: Ranks, seat: Center | Member, tokenizer: Any, first: int = 0) -> None:
        """What every rank has; ``first``: number of its first call."""
        self.config = config
        self.ranks = ranks
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._seat: Center | Member = seat
        self._calls = first
        self._open: OpenCall | None = None
        """A call of which nobody here has heard the end."""
        self._closed = False
        self._warned = False
        """That its weights are not those of rank 0."""

    def _check_shares(self) -> None:
        """Every share of a batch has somebody who gets it."""
        assert isinstance(self._seat, Center)
        if missing := set(range(self.ranks.shares)) - set(self._seat.shares):
            raise ConfigError(f"ranks: nobody has the data_rank {min(missing)}, of data_size {self.ranks.shares}")

    def _check_data(self, own: OwnScheduler, prompts: Iterable[Any]) -> None:
        """Of the first prompt, where looking takes none away."""
        if self.ranks.world_size > 1 and isinstance(prompts, Sequence) and prompts:
            try:
                first = as_prompt(prompts[0], own.vocab_size, 0)
            except ConfigError:
                return  # reported when it is drawn
            refuse_to_draw(first)

    def _join_rank_0(self, address: str, gathers: bool) -> None:
        """As a host, if there is something to bring; there must where the weights are to be gathered."""
        assert isinstance(self._seat, Member)
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
        self, path: str | None = None, transfer: Transfer | None = None, trained: int | None = None
    ) -> PolicyVersion:
        """See :meth:`april.RolloutScheduler.weight_update`; here ``transfer`` is called on every rank.

        It is called in each trainer's thread while all engines are paused, so the ranks' own collectives work inside.
        If it raises on one rank, that rank is named in the error of all the others, and the version stays.
        """
        return self._together(self._weight_update(path, transfer, trained))  # type: ignore[no-any-return]

    async def aweight_update(
        self, path: str | None = None, transfer: Transfer | None = None, trained: int | None = None
    ) -> PolicyVersion:
        """:meth:`weight_update` in a thread."""
        return await self._together_async(self._weight_update(path, transfer, trained))  # type: ignore[no-any-return]

    def commit(self, batch_id: int) -> None:
        """See :meth:`april.RolloutScheduler.commit`."""
        what = f"commit({_text(batch_id)})"
        self._together(_Call(what=what, run=lambda _: self._rollouts.commit(batch_id), read=content.unpack_plain))

    def lower_staleness(self, to: int | None = None) -> int:
        """See :meth:`april.RolloutScheduler.lower_staleness`."""
        what = f"lower_staleness({_text(to)})"
        call = _Call(what=what, run=lambda _: self._rollouts.lower_staleness(to), read=content.unpack_plain)
        return self._together(call)  # type: ignore[no-any-return]

    def evaluate(
        self, prompts: Iterable[Any], *, n_samples: int = 1, temperature: float | None = None,
        top_p: float | None = None, max_tokens: int | None = None, seed: int = 0,
    ) -> EvaluationResult:  # fmt: skip
        """See :meth:`april.RolloutScheduler.evaluate`: the result is whole on every rank.

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
        """See :meth:`april.RolloutScheduler.extend`; the prompts are those that rank 0 gives."""
        call = _Call(what="extend()", run=lambda _: self._rollouts.extend(prompts), read=content.unpack_plain)
        self._together(call)

    def load_state_dict(
        self, state: dict[str, Any], path: str | None = None, transfer: Transfer | None = None
    ) -> PolicyVersion:
        """See :meth:`april.RolloutScheduler.load_state_dict`; ``transfer`` is called on every rank.

        The state is the one that rank 0 gives, whatever number of ranks it is of; the others may give it too, or {}.
        """
        return self._together(self._load(state, path, transfer))  # type: ignore[no-any-return]

    async def aload_state_dict(
        self, state: dict[str, Any], path: str | None = None, transfer: Transfer | None = None
    ) -> PolicyVersion:
        """:meth:`load_state_dict` in a thread."""
        return await self._together_async(self._load(state, path, transfer))  # type: ignore[no-any-return]

    # ---------------------------------------------------------------- made by whoever wants to know

    def state_dict(self, trained_through: int | None = None) -> dict[str, Any]:
        """See :meth:`april.RolloutScheduler.state_dict`: whole, for one rank to save. Also after a RankError."""
        if self._own is not None:
            return self._own.state_dict(trained_through)
        return content.unpack_plain(self._ask("state_dict", trained_through))  # type: ignore[no-any-return]

    @property
    def version(self) -> PolicyVersion:
        """The current policy version."""
        return self._own.version if self._own is not None else content.unpack_version(self._ask("version"))

    @property
    def engines(self) -> list[Engine]:
        """The engine objects of this process."""
        if self._own is not None:
            return self._own.engines
        return [] if self._host is None else list(self._host.engines)

    def ledger(self) -> dict[str, Ledger]:
        """See :meth:`april.RolloutScheduler.ledger`."""
        return self._own.ledger() if self._own is not None else content.unpack_ledgers(self._ask("ledger"))

    def held_groups(self) -> frozenset[int]:
        """See :meth:`april.RolloutScheduler.held_groups`."""
        if self._own is not None:
            return self._own.held_groups()
        return frozenset(content.unpack_plain(self._ask("held_groups")))

    def validate(self) -> None:
        """See :meth:`april.RolloutScheduler.validate`."""
        if self._own is not None:
            self._own.validate()
        else:
            self._ask("validate")

    def story(self, group: int, index: int) -> str:
        """See :meth:`april.RolloutScheduler.story`."""
        if self._own is not None:
            return self._own.story(group, index)
        return content.unpack_plain(self._ask("story", group, index))  # type: ignore[no-any-return]

    def _ask(self, method: str, *arguments: Any) -> bytes:
        assert isinstance(self._seat, Member)
        return self._seat.ask(method, *arguments)

    def _look(self, method: str, arguments: list[Any]) -> bytes:
        """Rank 0 answers another rank."""
        return look(self._rollouts, method, arguments)

    # ---------------------------------------------------------------- what the calls are

    def _next_batch(self) -> _Call:
        return _Call(
            what="next_batch()", run=lambda _: self._rollouts.next_batch(), read=content.unpack_batch, generates=True
        )

    def _weight_update(self, path: Any, transfer: Any, trained: int | None) -> _Call:
        def run(on_all: _OnAll) -> PolicyVersion:
            return self._rollouts.weight_update(path, transfer and (lambda: on_all(TRANSFER, transfer)), trained)

        what = f"weight_update(path={_text(path)}, transfer={_given(transfer)}, trained={_text(trained)})"
        return _Call(what=what, run=run, read=self._read_version, transfer=transfer)

    def _load(self, state: Any, path: Any, transfer: Any) -> _Call:
        def run(on_all: _OnAll) -> PolicyVersion:
            return self._rollouts.load_state_dict(state, path, transfer and (lambda: on_all(TRANSFER, transfer)))

        what = f"load_state_dict(path={_text(path)}, transfer={_given(transfer)})"
        return _Call(what=what, run=run, read=self._read_version, transfer=transfer)

    def _read_version(self, packed: bytes) -> PolicyVersion:
        """With the weights of rank 0, if it has a model: this rank generates from the same ones."""
        version, first = content.unpack_update(packed)
        if not self._warned:
            self._warned = differ(self.ranks.rank, sampled(self.engines), first)
        return version

    def _evaluate(self, prompts: Any, **arguments: Any) -> _Call:
        what = f"evaluate({', '.join(f'{name}={_text(value)}' for name, value in arguments.items())})"
        return _Call(
            what=what, run=lambda _: self._rollouts.evaluate(prompts, **arguments), generates=True,
            read=partial(content.unpack_evaluation, detokenizer=self._detokenizer),
        )  # fmt: skip

    # ---------------------------------------------------------------- how they are made

    def _together(self, made: _Call) -> Any:
        """Make a call with all ranks: rank 0 runs it, the others read what it sends; returns what came of it."""
        call = self._enter(made.what)
        try:
            call.run(partial(self._body, made), self._seat.leave)
            value, error = call.ended()
            self._seat.end(call.number)
            call.over = True
        finally:  # nothing is called from here on: no signal handler comes between the caller and the result
            call.wanted = False
            if call.over:
                self._calls, self._open = call.number + 1, None
        if error is not None:
            raise error
        return value

    async def _together_async(self, made: _Call) -> Any:
        """The same in a thread; who is cancelled leaves it to the next one who makes the same call."""
        call = self._enter(made.what)
        try:
            await asyncio.to_thread(call.run, partial(self._body, made), self._seat.leave)
            value, error = call.ended()
            self._seat.end(call.number)
            call.over = True
        finally:
            call.wanted = False
            if call.over:
                self._calls, self._open = call.number + 1, None
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
            call = OpenCall(self._calls if call is None else call.number, what)
        call.wanted = True
        self._open = call
        return call

    def _body(self, made: _Call, call: OpenCall) -> Any:
        if isinstance(self._seat, Center):
            return self._as_rank_0(self._seat, made, call)
        return self._as_another_rank(self._seat, made, call)

    def _as_rank_0(self, seat: Center, made: _Call, call: OpenCall) -> Any:
        def on_all(step: str, function: Transfer, content: bytes = b"") -> None:
            try:
                seat.step(call.number, step, function, content)
            except RankError:
                raise
            except BaseException as error:
                failed.append(f"the {step} of rank 0 raised {describe(error)}")
                raise

        failed: list[str] = []
        seat.meet(call.number, call.what)
        if call.result is None:
            try:
                if made.generates and gathering(self.engines):
                    on_all(GATHER, lambda: gather(self.engines))
                call.result = made.run(on_all), None
            except Exception as error:
                call.result = None, error
            except BaseException:
                if failed:
                    seat.answer(call.number, say.told_of_rank_0(failed[0]))
                    call.over = True
                raise
        release(self.engines)
        result, wrong = call.result
        if wrong is None:
            try:
                own, packed = self._pack(result)
            except Exception as error:
                wrong = error
        if wrong is not None:
            seat.answer(call.number, say.told_of_rank_0(failed[0]) if failed else say.told(wrong))
            raise wrong
        if not seat.answer(call.number, packed):
            seat.raise_if_broken()
        return own

    def _as_another_rank(self, seat: Member, made: _Call, call: OpenCall) -> Any:
        if call.failed is not None:
            raise call.failed
        seat.arrive(call.number, call.what)
        while isinstance(message := seat.next(call.number, call.steps), say.Step):
            if call.carried == call.steps:
                try:
                    self._step(made, message)
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
        if message.error is not None:
            raise say.error_of(message.error)
        return made.read(message.content)

    def _step(self, made: _Call, message: say.Step) -> None:
        """Carry out here what rank 0 wants of all."""
        if message.step == JOIN:
            self._join_rank_0(*content.unpack_plain(message.content))
        elif message.step == GATHER:
            gather(self.engines)
        else:
            assert made.transfer is not None
            call_user_code(made.transfer)

    def _pack(self, result: Any) -> tuple[Any, Sequence[bytes]]:
        """What rank 0 returns, and what each rank gets."""
        seat, ranks = self._seat, self.ranks
        assert isinstance(seat, Center)
        if isinstance(result, Batch):
            if ranks.world_size > 1:
                for prompt in {s.id.group: s.prompt for s in result.samples}.values():
                    content.refuse_not_plain(prompt)
            shares = result.split(ranks.shares, self._split_by)
            packed = {share: content.pack_batch(shares[share]) for share in set(seat.shares[1:])}
            return shares[ranks.share], [packed.get(share, b"") for share in seat.shares]
        if isinstance(result, PolicyVersion):
            return result, [content.pack_update(result, sampled(self.engines))] * ranks.world_size
        one = content.pack_evaluation(result) if isinstance(result, EvaluationResult) else content.pack_plain(result)
        return result, [one] * ranks.world_size

    @property
    def _rollouts(self) -> OwnScheduler:
        if self._own is None:
            raise SchedulerClosed("rank 0 has no scheduler (yet)")
        return self._own

    def _end_waits(self, why: RankError) -> None:
        if self._own is not None:
            self._own.end_waits(why)

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


def look(rollouts: RolloutScheduler, method: str, arguments: list[Any]) -> bytes:
    """What a rank that has no scheduler itself wants to know."""
    match method:
        case "state_dict":
            return content.pack_plain(rollouts.state_dict(*arguments))
        case "version":
            return content.pack_plain(rollouts.version)
        case "ledger":
            return content.pack_ledgers(rollouts.ledger())
        case "held_groups":
            return content.pack_plain(sorted(rollouts.held_groups()))
        case "validate":
            rollouts.validate()
            return b""
        case "story":
            return content.pack_plain(rollouts.story(*arguments))
    raise RolloutError(f"a rank cannot ask for {method}")


def _text(value: Any) -> str:
    """An argument as the ranks compare it."""
    return repr(os.fspath(value) if isinstance(value, os.PathLike) else value)[:200]


def _given(function: Any) -> str:
    return "None" if function is None else "given"


def _digest(config: Config) -> str:
    """Of the settings; ranks with others are told apart."""
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:12]
