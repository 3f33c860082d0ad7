"""Sends one set of weights to all engines, in phases with time limits, and records the outcome for each engine.

A transfer sends to all engines at once, in rounds. If an engine fails, the round ends for all engines, and the next
round sends everything again, through a new group without the engine that failed. The transfer ends with the first round
in which no engine fails, so an engine that fails costs the others only time.

Invariant: no wait is longer than ``WeightSender.limit_s``, and all calls to engines end before the next round begins.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from april.core.events import TransferFailure
from april.engines.protocol import Engine
from april.engines.weight_transfer import Handshake, ReceivesWeights, TakesTensors, TensorSpec
from april.errors import AprilError, ConfigError, EngineError, EngineUnreachable
from april.weights.group import Group, open_group
from april.weights.source import Bucket, Weights

WORKER_LIMIT_SHARE = 0.75
"""Fraction of ``limit_s`` for which a worker waits for other workers. Its error thus arrives within ``limit_s``, so an
engine that does not answer within ``limit_s`` is stuck itself, and does not just wait for another engine."""


class PendingCall(Protocol):
    """The pending result of a call on april's loop."""

    def done(self) -> bool:
        """Return True if the call has ended."""
        ...

    def wait(self) -> bool:
        """Wait until the call has ended."""
        ...

    def result(self) -> tuple[Any, Exception | None]:
        """Return (value, error); one of the two is None."""
        ...


StartCalls = Callable[[Sequence[Coroutine[Any, Any, tuple[Any, Exception | None]]]], Sequence[PendingCall]]
"""Starts calls on april's loop and returns their pending results."""


class _RoundFailed(Exception):
    """Raised when engines have failed during a round."""


@dataclass(slots=True)
class _EngineGroup:
    backend: str
    handshake: Handshake
    engines: list[str]
    group: Group | None = None


@dataclass(slots=True)
class WeightSender:
    """Sends weights to engines, in the trainer's thread, which calls :meth:`send`.

    Args:
        engines: engines of this process, by name.
        start_calls: function that starts calls to engines on april's loop.
        limit_s: seconds allowed for each call to an engine, and for the sender's own work during the call.
    """

    engines: Mapping[str, Engine]
    start_calls: StartCalls
    limit_s: float
    open_group: Callable[..., Any] = open_group
    now: Callable[[], float] = time.monotonic
    left_out: dict[str, TransferFailure] = field(default_factory=dict)
    """Engines that did not get the weights; all other engines of the transfer have all of them."""
    outcome_known: bool = True
    """True if ``left_out`` is correct; False during a transfer, and after one whose end was interrupted."""
    partially_updated: set[str] = field(default_factory=set)
    """Engines that got only some weights in a round and have not got all weights since."""

    def refuse_engines(self, what: str) -> None:
        """Raise ConfigError if an engine cannot be sent weights; ``what`` names the caller in the message."""
        for name, engine in self.engines.items():
            can = engine.capabilities
            if not (can.collective or can.takes_tensors or can.shares_weights):
                raise ConfigError(
                    f"{what}: engine {name} accepts no weights from the trainer's process (april doctor shows with "
                    "which flags its server would); give path=, or transfer="
                )

    def send(self, source: Weights, names: Sequence[str]) -> None:
        """Send the weights to these engines.

        Raises:
            EngineError: no engine has got the weights; ``left_out`` says what each engine has.
            Exception: whatever reading the weights raises.
        """
        remaining = [name for name in names if name not in self.left_out and not self._shares_weights(name, source)]
        while remaining:
            transfer = _Round(self, remaining, source)
            try:
                transfer.run()
            except _RoundFailed:
                transfer.leave_groups()
            except BaseException:
                transfer.leave_groups()
                self.left_out |= transfer.outcomes(remaining)
                self.outcome_known = True
                raise
            else:
                self.outcome_known = True
                return
            failed = transfer.outcomes(transfer.failed_engines)
            self.left_out |= failed
            remaining = [name for name in remaining if name not in failed]
            if remaining and transfer.source_read and not source.repeatable:
                self.left_out |= transfer.outcomes(remaining)
                self.outcome_known = True
                raise EngineError(
                    f"{_failure_sentence(failed)}; the weights cannot be sent to the other engines again, because they "
                    "were given as an iterator: give a module, a mapping, or an object that can be iterated again"
                )
        self.outcome_known = True
        if names and self.left_out.keys() == set(names):
            raise EngineError(_failure_sentence(self.left_out))

    def _shares_weights(self, name: str, source: Weights) -> bool:
        """Return True if an engine generates from the trainer's own weights, so that nothing is sent to it."""
        engine = self.engines.get(name)
        if engine is None:
            return True  # the engine is in another process
        if not engine.capabilities.takes_tensors:
            return engine.capabilities.shares_weights
        return isinstance(engine, TakesTensors) and source.module is not None and engine.reads(source.module)


class _Round:
    def __init__(self, sender: WeightSender, names: Sequence[str], source: Weights) -> None:
        self._sender, self._names, self._source = sender, list(names), source
        self._groups: list[_EngineGroup] = []
        self._phase = "to begin"
        """Name of the present phase, for an error message of the form "engine E failed <phase>"."""
        self._pending: dict[str, PendingCall] = {}
        """Calls to the engines in the present phase."""
        self._started = self._tensors_sent = False
        self._left_group: dict[str, bool] = {}
        self.source_read = False
        """True once reading of the weights has begun."""
        self.failed_engines: list[str] = []
        self._errors: dict[str, str] = {}

    # ---------------------------------------------------------------- the plan

    def run(self) -> None:
        """Run the round; raises _RoundFailed if engines fail, and whatever reading the weights raises."""
        self._form_groups()
        self._sender.outcome_known, self._started = False, True
        self._call_all("to prepare for new weights", lambda name: self._receiver(name).begin(), self._receivers)
        self.source_read = True
        buckets: Any = self._source.buckets()
        with closing(buckets):
            for bucket in buckets:
                self._send_bucket(bucket)
        self._call_all("to put the weights into use", lambda name: self._receiver(name).finish(), self._receivers)

    def _form_groups(self) -> None:
        phase = "to report how many workers it has"
        ranks = self._call_all(phase, lambda name: self._receiver(name).ranks(), self._receivers)
        groups: dict[tuple[str, Handshake], _EngineGroup] = {}
        for name in self._receivers:
            key = self._engine(name).capabilities.collective[0], self._receiver(name).handshake
            groups.setdefault(key, _EngineGroup(*key, [])).engines.append(name)
        self._groups = list(groups.values())
        for engine_group in self._groups:
            self._join(engine_group, ranks)

    def _join(self, engine_group: _EngineGroup, ranks: Mapping[str, int]) -> None:
        sender, offsets, size = self._sender, {}, 1
        for name in engine_group.engines:
            offsets[name] = size
            size += ranks[name]
        address = _reachable_address(self._receiver(name).sender_address for name in engine_group.engines)
        engine_group.group, invitation = sender.open_group(
            engine_group.backend, engine_group.handshake, address, size, WORKER_LIMIT_SHARE * sender.limit_s,
            self._source.bucket_bytes,
        )  # fmt: skip
        group = engine_group.group
        assert group is not None
        self._call_all(
            "to connect to the sender",
            lambda name: self._receiver(name).join(replace(invitation, rank_offset=offsets[name])),
            engine_group.engines, group.connect,
        )  # fmt: skip

    def _send_bucket(self, bucket: Bucket) -> None:
        # send the widest dtypes first, so that each tensor is aligned even in a buffer without gaps
        order = sorted(range(len(bucket.specs)), key=lambda i: -bucket.tensors[i].element_size())
        specs, tensors = [bucket.specs[i] for i in order], [bucket.tensors[i] for i in order]

        def receive(name: str) -> Coroutine[Any, Any, None]:
            engine = self._engine(name)
            if isinstance(engine, TakesTensors) and engine.capabilities.takes_tensors:
                return engine.take(specs, tensors, bucket.last)
            return self._receiver(name).receive(specs, bucket.last)

        def broadcast(check: Callable[[], None]) -> None:
            for engine_group in self._groups:
                if engine_group.group is not None:
                    engine_group.group.broadcast(tensors, specs, check)

        self._tensors_sent = True
        self._call_all(f"to receive {_tensor_names(specs)}", receive, self._names, broadcast)

    # ---------------------------------------------------------------- calls of engines

    @property
    def _receivers(self) -> list[str]:
        return [name for name in self._names if self._engine(name).capabilities.collective]

    def _engine(self, name: str) -> Engine:
        return self._sender.engines[name]

    def _receiver(self, name: str) -> ReceivesWeights:
        engine = self._engine(name)
        assert isinstance(engine, ReceivesWeights)
        return engine

    def _call_all(
        self, phase: str, call: Callable[[str], Coroutine[Any, Any, Any]], names: Sequence[str],
        local_work: Callable[[Callable[[], None]], None] = lambda check: None,
    ) -> dict[str, Any]:  # fmt: skip
        """Make a call to each engine, do ``local_work`` (the sender's part) at the same time, return the answers."""
        sender = self._sender
        started = [_with_time_limit(call(name), sender.limit_s) for name in names]
        self._phase, self._pending = phase, dict(zip(names, sender.start_calls(started), strict=True))
        deadline = sender.now() + sender.limit_s

        def check() -> None:
            if self._call_errors():
                raise _RoundFailed
            if sender.now() > deadline:
                raise EngineUnreachable(f"the engines failed {phase} within {sender.limit_s:g} s")

        try:
            local_work(check)
        except (_RoundFailed, EngineUnreachable, RuntimeError) as error:
            # if a worker fails, the sender's group fails too; the call to the worker's engine then reports the cause
            self._find_failed_engines()
            if not self.failed_engines:
                raise
            raise _RoundFailed from error
        self._wait_for_calls()
        if self._call_errors():
            self._find_failed_engines()
            raise _RoundFailed
        return {name: answer.result()[0] for name, answer in self._pending.items()}

    def _call_errors(self) -> dict[str, Exception]:
        """Return the errors that have arrived so far in the present phase, by engine."""
        ended = {name: answer.result()[1] for name, answer in self._pending.items() if answer.done()}
        return {name: error for name, error in ended.items() if error is not None}

    def _wait_for_calls(self) -> None:
        for answer in self._pending.values():
            answer.wait()

    def _find_failed_engines(self) -> None:
        """Close the groups, wait for the calls that are still running, and find the engines that made the round fail.

        These are the engines that do not answer. If all answer, these are the engines whose calls had failed before the
        sender gave up, because later errors come from workers that waited for the failed engines.
        """
        first_failed = self._call_errors()
        self._close_groups()
        self._wait_for_calls()
        failed = self._call_errors()
        gone = [name for name, error in failed.items() if isinstance(error, EngineUnreachable)]
        self.failed_engines = gone or [name for name in failed if name in first_failed] or list(failed)
        for name, error in failed.items():
            said = str(error) if isinstance(error, AprilError) else f"{type(error).__name__}: {error}"
            self._errors[name] = f"engine {name} failed {self._phase}: {said}"

    def _close_groups(self) -> None:
        for engine_group in self._groups:
            if engine_group.group is not None:
                engine_group.group.close()
                engine_group.group = None

    def leave_groups(self) -> None:
        """End a broken round: afterwards no call is running, and every engine that answers has left its group."""
        self._close_groups()
        self._wait_for_calls()
        gone = [name for name, error in self._call_errors().items() if isinstance(error, EngineUnreachable)]
        asked = [name for name in self._receivers if name not in self.failed_engines or name not in gone]
        answers = self._sender.start_calls([_leave_group(self._receiver(name), self._sender.limit_s) for name in asked])
        for name, answer in zip(asked, answers, strict=True):
            answer.wait()
            self._left_group[name] = answer.result()[0] is True
        # keep those of earlier rounds: an engine that got no weights in this round still has its partial weights
        self._sender.partially_updated |= {name for name in self._names if self._is_partially_updated(name)}

    def _is_partially_updated(self, name: str) -> bool:
        """Return True if an engine may have only some of the new weights after this round."""
        if not self._engine(name).capabilities.collective:
            return self._tensors_sent
        return self._started and not self._left_group.get(name, False)

    def outcomes(self, names: Iterable[str]) -> dict[str, TransferFailure]:
        """Return why each of these engines lacks the weights, and whether it may have some of them."""
        why = f"the transfer was interrupted when engines were {self._phase}"
        partial = self._sender.partially_updated
        return {name: TransferFailure(name, self._errors.get(name, why), name in partial) for name in names}


async def _with_time_limit(call: Coroutine[Any, Any, Any], limit_s: float) -> tuple[Any, Exception | None]:
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await call, None
    except TimeoutError as error:
        if not limit.expired():
            return None, error
        return None, EngineUnreachable(f"it did not answer within {limit_s:g} s")
    except Exception as error:
        return None, error


async def _leave_group(engine: ReceivesWeights, limit_s: float) -> tuple[Any, Exception | None]:
    with suppress(Exception):
        async with asyncio.timeout(limit_s):
            return await engine.leave(), None
    return False, None


def _tensor_names(specs: Sequence[TensorSpec]) -> str:
    if len(specs) == 1:
        return f"tensor {specs[0].name}"
    return f"tensors {specs[0].name} to {specs[-1].name}"


def _failure_sentence(left_out: Mapping[str, TransferFailure]) -> str:
    return "; ".join(failure.why for failure in left_out.values())


def _reachable_address(addresses: Iterable[str]) -> str:
    """Return an address that engines on other machines can reach, if there is one; engines here reach every address."""
    found = list(dict.fromkeys(addresses))
    return next((a for a in found if not a.startswith("127.") and a != "::1"), found[0])
