"""Sends one set of weights to all engines, in phases with time limits, and records the outcome for each engine.

A transfer sends to all engines at once, in rounds. If an engine fails, the round ends for all of them, and the next
round sends everything again through a new group without that engine. So each round but the last loses an engine, and an
engine that fails costs the others time and nothing else.

Invariant: no wait is longer than the limit, and every call to an engine has ended before the next round begins.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from april.engines.protocol import Engine
from april.engines.weight_routes import Handshake, ReceivesWeights, TakesTensors, TensorSpec
from april.errors import AprilError, ConfigError, EngineError, EngineUnreachable
from april.weights.group import Group, open_group
from april.weights.source import Bucket, Weights

EARLIER = 0.75
"""Share of the limit after which a worker stops waiting for others. Its error then comes before the limit of its
engine's call, so an engine that does not answer is one that hangs itself."""


class Answer(Protocol):
    """The pending result of a call on april's loop."""

    def done(self) -> bool:
        """Return True if the call has ended."""
        ...

    def wait(self) -> bool:
        """Wait until the call has ended."""
        ...

    def result(self) -> tuple[Any, Exception | None]:
        """Return (value, error), of which one is None."""
        ...


Ask = Callable[[Sequence[Coroutine[Any, Any, tuple[Any, Exception | None]]]], Sequence[Answer]]
"""Starts calls on april's loop and returns their pending results."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An engine that did not get the weights."""

    why: str
    """One sentence that names engine, phase and tensor."""
    torn: bool
    """True if the engine may have only some of the weights, and so no valid version; False if it kept its old ones."""


class _Broken(Exception):
    """Raised when engines have failed during a round."""


@dataclass(slots=True)
class _Lane:
    """The engines that share one group."""

    backend: str
    handshake: Handshake
    engines: list[str]
    group: Group | None = None


@dataclass(slots=True)
class _Calls:
    """The calls to all engines in one phase, by engine."""

    doing: str
    """Phase, in words that complete "engine E failed ..."."""
    answers: dict[str, Answer]
    first: frozenset[str] = frozenset()
    """Engines whose calls had failed when the failure of the round was noticed."""

    def failed(self) -> dict[str, Exception]:
        """Return the errors that have arrived so far, by engine."""
        ended = {name: answer.result()[1] for name, answer in self.answers.items() if answer.done()}
        return {name: error for name, error in ended.items() if error is not None}


@dataclass(slots=True)
class WeightSender:
    """Sends weights to engines, in the thread that calls :meth:`send`, which is the trainer's.

    Args:
        engines: engines of this process, by name.
        ask: function that starts calls to engines on april's loop.
        limit_s: seconds allowed for each call to an engine, and for the sender's own part of it.
    """

    engines: Mapping[str, Engine]
    ask: Ask
    limit_s: float
    open_group: Callable[..., Any] = open_group
    now: Callable[[], float] = time.monotonic
    left_out: dict[str, LeftOut] = field(default_factory=dict)
    """Engines that did not get the weights; all other engines of the transfer have all of them."""
    knows: bool = True
    """True if ``left_out`` is right. False during a transfer, and after one whose end was interrupted."""
    torn: set[str] = field(default_factory=set)
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
        left = [name for name in names if name not in self.left_out and not self._reads(name, source)]
        while left:
            transfer = _Round(self, left, source)
            try:
                transfer.run()
            except _Broken:
                transfer.end()
            except BaseException:
                transfer.end()
                self.left_out |= transfer.fates(left)
                self.knows = True
                raise
            else:
                self.knows = True
                return
            blamed = transfer.fates(transfer.blamed)
            self.left_out |= blamed
            left = [name for name in left if name not in blamed]
            if left and transfer.drew and not source.repeatable:
                self.left_out |= transfer.fates(left)
                self.knows = True
                raise EngineError(
                    f"{_sentence(blamed)}; the weights cannot be sent to the other engines again, because they were "
                    "given as an iterator: give a module, a mapping, or an object that can be iterated again"
                )
        self.knows = True
        if names and self.left_out.keys() == set(names):
            raise EngineError(_sentence(self.left_out))

    def _reads(self, name: str, source: Weights) -> bool:
        """Return True if an engine generates from the trainer's own weights, so that nothing is sent to it."""
        engine = self.engines.get(name)
        if engine is None:
            return True  # the engine is in another process
        if not engine.capabilities.takes_tensors:
            return engine.capabilities.shares_weights
        return isinstance(engine, TakesTensors) and source.module is not None and engine.reads(source.module)


class _Round:
    """One attempt to send all weights to some engines."""

    def __init__(self, sender: WeightSender, names: Sequence[str], source: Weights) -> None:
        self._sender, self._names, self._source = sender, list(names), source
        self._lanes: list[_Lane] = []
        self._calls = _Calls("to begin", {})
        self._begun = self._sent = False
        self._left: dict[str, bool] = {}
        self.drew = False
        """True once reading of the weights has begun."""
        self.blamed: list[str] = []
        self._errors: dict[str, str] = {}

    # ---------------------------------------------------------------- the plan

    def run(self) -> None:
        """Run the round; raises _Broken if engines fail, and whatever reading the weights raises."""
        self._meet()
        self._sender.knows, self._begun = False, True
        self._all("to prepare for new weights", lambda name: self._receiver(name).begin(), self._receivers)
        self.drew = True
        passing: Any = self._source.buckets()
        with closing(passing):
            for bucket in passing:
                self._send(bucket)
        self._all("to put the weights into use", lambda name: self._receiver(name).finish(), self._receivers)

    def _meet(self) -> None:
        ranks = self._all((
            "to report how many workers it has"
        ), lambda name: self._receiver(name).ranks(), self._receivers)
        lanes: dict[tuple[str, Handshake], _Lane] = {}
        for name in self._receivers:
            key = self._engine(name).capabilities.collective[0], self._receiver(name).handshake
            lanes.setdefault(key, _Lane(*key, [])).engines.append(name)
        self._lanes = list(lanes.values())
        for lane in self._lanes:
            self._join(lane, ranks)

    def _join(self, lane: _Lane, ranks: Mapping[str, int]) -> None:
        sender, offsets, size = self._sender, {}, 1
        for name in lane.engines:
            offsets[name] = size
            size += ranks[name]
        address = _one_of(self._receiver(name).sender_address for name in lane.engines)
        lane.group, meeting = sender.open_group(
            lane.backend, lane.handshake, address, size, EARLIER * sender.limit_s, self._source.bucket_bytes
        )
        group = lane.group
        assert group is not None
        self._with(
            "to connect to the sender",
            lambda name: self._receiver(name).join(replace(meeting, rank_offset=offsets[name])),
            lane.engines, lambda goes_on: group.connect(goes_on),
        )  # fmt: skip

    def _send(self, bucket: Bucket) -> None:
        # widest dtypes first: then each tensor is aligned, even in a buffer without gaps
        order = sorted(range(len(bucket.specs)), key=lambda i: -bucket.tensors[i].element_size())
        specs, tensors = [bucket.specs[i] for i in order], [bucket.tensors[i] for i in order]

        def take(name: str) -> Coroutine[Any, Any, None]:
            engine = self._engine(name)
            if isinstance(engine, TakesTensors) and engine.capabilities.takes_tensors:
                return engine.take(specs, tensors, bucket.last)
            return self._receiver(name).receive(specs, bucket.last)

        def broadcast(goes_on: Callable[[], None]) -> None:
            for lane in self._lanes:
                if lane.group is not None:
                    lane.group.broadcast(tensors, specs, goes_on)

        self._sent = True
        self._with(f"to receive {_some(specs)}", take, self._names, broadcast)

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

    def _all(self, doing: str, call: Callable[[str], Coroutine[Any, Any, Any]], names: Sequence[str]) -> dict[str, Any]:
        """Make a call to each engine and return the answers."""
        return self._with(doing, call, names, lambda goes_on: None)

    def _with(
        self, doing: str, call: Callable[[str], Coroutine[Any, Any, Any]], names: Sequence[str],
        here: Callable[[Callable[[], None]], None],
    ) -> dict[str, Any]:  # fmt: skip
        """Make a call to each engine, do the sender's part (``here``) meanwhile, and return the answers."""
        sender = self._sender
        made = [_limited(call(name), name, doing, sender.limit_s) for name in names]
        self._calls = calls = _Calls(doing, dict(zip(names, sender.ask(made), strict=True)))
        late = sender.now() + sender.limit_s

        def goes_on() -> None:
            if calls.failed():
                raise _Broken
            if sender.now() > late:
                raise EngineUnreachable(f"the engines failed {doing} within {sender.limit_s:g} s")

        try:
            here(goes_on)
        except (_Broken, EngineUnreachable, RuntimeError) as error:
            # a group breaks when one of its members does, and that member's own call says so
            calls.first = frozenset(calls.failed())
            self._close()
            self._settle()
            if not self.blamed:
                raise
            raise _Broken from error
        for answer in calls.answers.values():
            answer.wait()
        if calls.failed():
            calls.first = frozenset(calls.failed())
            self._close()
            self._settle()
            raise _Broken
        return {name: answer.result()[0] for name, answer in calls.answers.items()}

    def _settle(self) -> None:
        """Wait for the calls that are still running, and find the engines that broke the round.

        They are the engines that do not answer. If all answer, they are those that had failed before the sender gave
        up: later errors come from workers that the failed ones left alone.
        """
        calls = self._calls
        for answer in calls.answers.values():
            answer.wait()
        failed = calls.failed()
        gone = [name for name, error in failed.items() if isinstance(error, EngineUnreachable)]
        self.blamed = gone or [name for name in failed if name in calls.first] or list(failed)
        self._errors = {name: f"engine {name} failed {calls.doing}: {_words(e)}" for name, e in failed.items()}

    def _close(self) -> None:
        for lane in self._lanes:
            if lane.group is not None:
                lane.group.close()
                lane.group = None

    def end(self) -> None:
        """End a broken round: afterwards no call is running, and every engine that answers has left its group."""
        self._close()
        for answer in self._calls.answers.values():
            answer.wait()
        asked = [name for name in self._receivers if name not in self.blamed or not self._unreachable(name)]
        answers = self._sender.ask([_left(self._receiver(name), self._sender.limit_s) for name in asked])
        for name, answer in zip(asked, answers, strict=True):
            answer.wait()
            self._left[name] = answer.result()[0] is True
        # kept for later rounds: an engine that got nothing in one of those reports only that it is unchanged since
        self._sender.torn |= {name for name in self._names if self._tore(name)}

    def _tore(self, name: str) -> bool:
        """Return True if an engine may have only some of the new weights after this round."""
        if not self._engine(name).capabilities.collective:
            return self._sent
        return self._begun and not self._left.get(name, False)

    def _unreachable(self, name: str) -> bool:
        return isinstance(self._calls.failed().get(name), EngineUnreachable)

    def fates(self, names: Iterable[str]) -> dict[str, LeftOut]:
        """Return what each of these engines has, after the round has ended."""
        why = f"the transfer was interrupted when engines were {self._calls.doing}"
        return {name: LeftOut(self._errors.get(name, why), torn=name in self._sender.torn) for name in names}


async def _limited(
    call: Coroutine[Any, Any, Any], name: str, doing: str, limit_s: float
) -> tuple[Any, Exception | None]:
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


async def _left(engine: ReceivesWeights, limit_s: float) -> tuple[Any, Exception | None]:
    with suppress(Exception):
        async with asyncio.timeout(limit_s):
            return await engine.leave(), None
    return False, None


def _some(specs: Sequence[TensorSpec]) -> str:
    if len(specs) == 1:
        return f"tensor {specs[0].name}"
    return f"tensors {specs[0].name} to {specs[-1].name}"


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, AprilError) else f"{type(error).__name__}: {error}"


def _sentence(left_out: Mapping[str, LeftOut]) -> str:
    return "; ".join(fate.why for fate in left_out.values())


def _one_of(addresses: Iterable[str]) -> str:
    """Return the sender's address that engines on other machines can reach; engines on this machine can reach any."""
    found = list(dict.fromkeys(addresses))
    return next((a for a in found if not a.startswith("127.") and a != "::1"), found[0])
