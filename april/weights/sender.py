"""One transfer of weights to engines: who gets them, in which phase, within which limits, and what came of each.

A transfer goes over all engines at once, in rounds. A round that an engine breaks ends for all of them; the next one is
a new group without that engine, and sends everything again. So each round but the last loses an engine, and what an
engine does costs the others time and nothing else.

Invariant: no wait is longer than the limit, and every call that is made to an engine has ended before the next round.
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
"""Share of the limit after which a worker gives up that waits for others: so its answer comes before the limit of its
engine's call, and an engine that does not answer is one that hangs itself."""


class Answer(Protocol):
    """The end of a call that runs on the loop: its value, or its error."""

    def done(self) -> bool:
        """Return whether it has ended."""
        ...

    def wait(self) -> bool:
        """Wait for the end."""
        ...

    def result(self) -> tuple[Any, Exception | None]:
        """Value and error, of which one is None."""
        ...


Ask = Callable[[Sequence[Coroutine[Any, Any, tuple[Any, Exception | None]]]], Sequence[Answer]]
"""Starts calls on april's loop."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An engine that did not get the weights."""

    why: str
    """One sentence that names engine, phase and tensor."""
    torn: bool
    """It may have a part of them, and is of no version now; if not, it has what it had."""


class _Broken(Exception):
    """A round has been broken by engines, in a phase."""


@dataclass(slots=True)
class _Lane:
    """Engines that are in one group."""

    backend: str
    handshake: Handshake
    engines: list[str]
    group: Group | None = None


@dataclass(slots=True)
class _Calls:
    """Calls of one phase, by engine."""

    doing: str
    """The phase, as it ends "engine E failed ..."."""
    answers: dict[str, Answer]
    first: frozenset[str] = frozenset()
    """Those that had failed when the round was found to be broken."""

    def failed(self) -> dict[str, Exception]:
        """The errors that are here."""
        ended = {name: answer.result()[1] for name, answer in self.answers.items() if answer.done()}
        return {name: error for name, error in ended.items() if error is not None}


@dataclass(slots=True)
class WeightSender:
    """Sends weights to engines in the thread that calls :meth:`send`, which is that of the trainer.

    Args:
        engines: those of this process, by name.
        ask: starts their calls.
        limit_s: for each call of an engine, and for the sender's part of it.
        elsewhere: the engines of other processes that do not read the trainer's model; called as the sending begins.
    """

    engines: Mapping[str, Engine]
    ask: Ask
    limit_s: float
    open_group: Callable[..., Any] = open_group
    now: Callable[[], float] = time.monotonic
    elsewhere: Callable[[], Iterable[str]] = tuple
    left_out: dict[str, LeftOut] = field(default_factory=dict)
    """Engines that did not get the weights; all others that were sent to have all of them."""
    knows: bool = True
    """``left_out`` is right; not so while weights are on their way, nor where the end of a transfer was broken off."""
    torn: set[str] = field(default_factory=set)
    """Engines that have got a part of them in some round, and not all since."""

    def refuse_engines(self, what: str, elsewhere: Sequence[str] = ()) -> None:
        """Raise ConfigError, of the call ``what``, if some engine cannot be sent weights, or is in another process."""
        if elsewhere:
            raise ConfigError(
                f"{what}: engine {elsewhere[0]} is in another process, and weights= go to the engines of this one; "
                "give path=, or transfer="
            )
        for name, engine in self.engines.items():
            can = engine.capabilities
            if not (can.collective or can.takes_tensors or can.shares_weights):
                raise ConfigError(
                    f"{what}: engine {name} takes no weights from the trainer's process (april doctor says by "
                    "which flags of its server it would); give path=, or transfer="
                )

    def send(self, source: Weights, names: Sequence[str]) -> None:
        """Send the weights to these engines.

        Raises:
            EngineError: none of them has got the weights; ``left_out`` says of each what it has.
            Exception: whatever the weights raise as they are gone through.
        """
        for name in set(self.elsewhere()).intersection(names):
            why = f"engine {name} came from another process as weights= were about to go to the engines of this one"
            self.left_out[name] = LeftOut(why, torn=False)
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
                    f"{_sentence(blamed)}; the others cannot be sent the weights again, as they were given as an "
                    "iterator: give a module, a mapping, or what can be gone through again"
                )
        self.knows = True
        if names and self.left_out.keys() == set(names):
            raise EngineError(_sentence(self.left_out))

    def _reads(self, name: str, source: Weights) -> bool:
        """Return whether an engine generates from these weights where they are."""
        engine = self.engines.get(name)
        if engine is None:
            return True  # another process has it
        if not engine.capabilities.takes_tensors:
            return engine.capabilities.shares_weights
        return isinstance(engine, TakesTensors) and source.module is not None and engine.reads(source.module)


class _Round:
    """One try to send everything to some engines."""

    def __init__(self, sender: WeightSender, names: Sequence[str], source: Weights) -> None:
        self._sender, self._names, self._source = sender, list(names), source
        self._lanes: list[_Lane] = []
        self._calls = _Calls("to begin", {})
        self._begun = self._sent = False
        self._left: dict[str, bool] = {}
        self.drew = False
        """The weights were looked at."""
        self.blamed: list[str] = []
        self._errors: dict[str, str] = {}

    # ---------------------------------------------------------------- the plan

    def run(self) -> None:
        """Raises _Broken if engines have broken it, and whatever the weights raise."""
        self._meet()
        self._sender.knows, self._begun = False, True
        self._all("to make ready for new weights", lambda name: self._receiver(name).begin(), self._receivers)
        self.drew = True
        passing: Any = self._source.buckets()
        with closing(passing):
            for bucket in passing:
                self._send(bucket)
        self._all("to put the weights into use", lambda name: self._receiver(name).finish(), self._receivers)

    def _meet(self) -> None:
        ranks = self._all("to say how many workers it has", lambda name: self._receiver(name).ranks(), self._receivers)
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
            "to meet the sender",
            lambda name: self._receiver(name).join(replace(meeting, rank_offset=offsets[name])),
            lane.engines, lambda goes_on: group.connect(goes_on),
        )  # fmt: skip

    def _send(self, bucket: Bucket) -> None:
        # those of wide numbers first: then each begins where its dtype may, also in a buffer without gaps
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
        self._with(f"to take {_some(specs)}", take, self._names, broadcast)

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
        """Make a call to each engine; returns what they answer."""
        return self._with(doing, call, names, lambda goes_on: None)

    def _with(
        self, doing: str, call: Callable[[str], Coroutine[Any, Any, Any]], names: Sequence[str],
        here: Callable[[Callable[[], None]], None],
    ) -> dict[str, Any]:  # fmt: skip
        """Make a call to each engine, and do this end's part meanwhile."""
        sender = self._sender
        made = [_limited(call(name), name, doing, sender.limit_s) for name in names]
        self._calls = calls = _Calls(doing, dict(zip(names, sender.ask(made), strict=True)))
        late = sender.now() + sender.limit_s

        def goes_on() -> None:
            if calls.failed():
                raise _Broken
            if sender.now() > late:
                raise EngineUnreachable(f"the engines failed {doing} in {sender.limit_s:g} s")

        try:
            here(goes_on)
        except (_Broken, EngineUnreachable, RuntimeError) as error:
            # a group breaks as one of its members does, which its own call tells
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
        """Wait for what is still on its way, and find out who has broken the round.

        Those that do not answer; where all do, those that had failed before this end gave up: an error that follows is
        that of a worker which the others have left alone.
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
        """End a round that is broken: no call is on its way then, and every engine that answers is out of its group."""
        self._close()
        for answer in self._calls.answers.values():
            answer.wait()
        asked = [name for name in self._receivers if name not in self.blamed or not self._unreachable(name)]
        answers = self._sender.ask([_left(self._receiver(name), self._sender.limit_s) for name in asked])
        for name, answer in zip(asked, answers, strict=True):
            answer.wait()
            self._left[name] = answer.result()[0] is True
        # for good: after a later round, of which it got nothing, an engine says that it is as it was before that one
        self._sender.torn |= {name for name in self._names if self._tore(name)}

    def _tore(self, name: str) -> bool:
        """Return whether an engine may have got a part of the weights in this round, and not all."""
        if not self._engine(name).capabilities.collective:
            return self._sent
        return self._begun and not self._left.get(name, False)

    def _unreachable(self, name: str) -> bool:
        return isinstance(self._calls.failed().get(name), EngineUnreachable)

    def fates(self, names: Iterable[str]) -> dict[str, LeftOut]:
        """What became of these engines, after the round has ended."""
        why = f"the transfer was broken off when engines were {self._calls.doing}"
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
        return None, EngineUnreachable(f"it has not answered in {limit_s:g} s")
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
    """The address by which the engines elsewhere reach this machine; those on it reach it by any of its own."""
    found = list(dict.fromkeys(addresses))
    return next((a for a in found if not a.startswith("127.") and a != "::1"), found[0])
