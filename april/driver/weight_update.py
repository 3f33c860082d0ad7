"""A weight update outside of the core: from the trainer's call to the new version, or to the error that ends it.

The engines get new weights in an update or when a state is loaded; both are one :class:`WeightUpdate`, which the
trainer's thread, the loop and the core know by the same object or its number. ``april.core.weight_updates`` decides
what happens to the engines.

Invariant: an update either does not happen or goes on to its end, whether or not anybody still waits for it. Its
progress is one attribute each, set by one assignment, so a signal handler cannot interrupt a change of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

from april.core import commands as do
from april.core import events as ev
from april.core.types import OnWeightUpdate
from april.core.versions import PolicyVersion
from april.driver.loop_thread import LoopThread, Reply, result_of
from april.driver.user_code import call_user_code, describe
from april.engines.http.adapter_files import why_refused
from april.engines.http.weight_directories import is_adapter
from april.engines.protocol import Engine
from april.errors import ConfigError, EngineError, RolloutError
from april.weights.sender import WeightSender

log = logging.getLogger("april")

Transfer = Callable[[], Awaitable[None]]
"""Hands the weights over while the engines are paused."""


class WeightUpdate:
    """An update, or a load of a state, whose transfer is awaited on the loop.

    Args:
        transfer: awaited in the task of :meth:`ended`.
    """

    restore: Callable[[], None]
    """Called when a saved state goes into the core."""

    sender: WeightSender | None = None
    """april's own, where it is what the transfer uses: it knows what each engine has got."""

    def __init__(self, transfer: Transfer | None = None) -> None:
        self._transfer = transfer
        self.transfers = transfer is not None
        self.number = 0
        self.engines: tuple[str, ...] = ()
        """Those that are paused for it, once they are."""

    def begin(self, number: int) -> None:
        """Begin to wait for the update of this number."""
        loop = asyncio.get_running_loop()
        self.number = number
        self.engines_paused: asyncio.Future[None] = loop.create_future()
        self.version: asyncio.Future[PolicyVersion] = loop.create_future()

    async def ended(self, updates: OpenUpdates) -> PolicyVersion:
        """Hand over when the engines are paused, and wait for the end; returns the version then.

        The caller may be cancelled; what the engines are doing then is carried to its end first.

        Raises whatever the transfer or a call of an engine raises.
        """
        transfer, cancelled = self._transfer, None
        while not self.version.done():
            try:
                if transfer is not None and self.engines_paused.done():
                    begun, transfer = transfer, None
                    await updates.hand_over(self, begun)
                else:
                    waits: list[asyncio.Future[Any]] = [self.version]
                    waits += [] if transfer is None else [self.engines_paused]
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError as cancellation:
                cancelled, transfer = cancellation, None
                updates.cancel(self.number)
        version = self.version.result()
        if cancelled is not None:
            raise cancelled
        return version

    @property
    def not_given(self) -> tuple[ev.NotGiven, ...] | None:
        """The engines that did not get what was sent; None: nobody knows."""
        if self.sender is None or not self.sender.knows:
            return None
        return tuple(ev.NotGiven(name, fate.why, fate.torn) for name, fate in self.sender.left_out.items())

    def fail(self, error: BaseException) -> None:
        """End it with an error, unless it has ended."""
        if not self.version.done():
            self.version.set_exception(error)
            self.version.exception()  # its caller may have gone


class TrainerUpdate(WeightUpdate):
    """An update that a thread of the trainer has called for, which runs the transfer itself.

    Args:
        thread: the loop's.
        transfer: called in the trainer's thread with the engines that are paused.
        asked: the call, its path and whether it transfers; an interrupted call that is made again is known by them.
        sender: april's own, which the transfer uses.
        limit_s: for a transfer of the trainer's own, after which the update is given up; None: no limit, or its own.
    """

    def __init__(
        self, thread: LoopThread, transfer: Callable[[Sequence[str]], Any] | None, asked: tuple[object, ...],
        sender: WeightSender | None = None, limit_s: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(None if transfer is None else self._hand_over)
        self.sender, self._limit_s = sender, limit_s
        self._given_up = ""
        """The reason why the transfer is not waited for any more."""
        self._thread = thread
        self._function = transfer
        self._asked = asked
        self._asker: int | None = None
        """The thread that is about to hand over and waits for the end."""
        self._transferred = transfer is None
        self._void: BaseException | None = None
        """The error that interrupted the caller before it had handed over anything: the update does not happen."""
        self._reply: Reply[PolicyVersion] | None = None
        self._ready = Reply[None]()
        """The engines are paused, or the update has ended already."""
        self._handed_over: asyncio.Future[None] | None = None

    # ---------------------------------------------------------------- the trainer's thread

    def is_for(self, asked: tuple[object, ...]) -> bool:
        """Return whether this update, whose end nobody has heard, is the one that is ``asked`` for now."""
        failed = self._reply is not None and self._reply.done() and self._reply.error() is not None
        return self._asked == asked and self._void is None and not failed

    def carry_out(self, run: Callable[[WeightUpdate], Coroutine[Any, Any, PolicyVersion]]) -> PolicyVersion:
        """Begin the update, hand over the weights and wait for its end, as far as that is not done.

        ``run`` is the driver's coroutine for it. Returns the new version.

        Raises:
            RolloutError: called by a signal handler in the middle of the transfer, which would wait for itself.
        """
        if self._transferred or self._asker is not None:
            if not self._transferred and self._asker == threading.get_ident():
                raise RolloutError("a signal handler asks for the weight update in the middle of which it was called")
            reply = self._begin(run)
            self._wake()  # its caller may have had no time to
            reply.wait()
            return result_of(reply)
        try:
            self._asker = threading.get_ident()
            reply = self._begin(run)
            self._ready.wait()
            if not reply.done():
                call_user_code(self._transfer_here)
                self._wake()
            reply.wait()
        except BaseException as error:
            # of the transfer, or of a signal handler, from anywhere above; or of another one, from here
            self._void = None if self._transferred else error
            try:
                self._wake()
            finally:
                self._wake()
            if self._void is not None and self._reply is not None:
                self._reply.wait()  # the engines go on with the version that they have
            if self._given_up and isinstance(error, KeyboardInterrupt):
                raise EngineError(self._given_up) from None
            raise
        finally:
            self._asker = None
        return result_of(reply)

    def _transfer_here(self) -> None:
        assert self._function is not None
        self._function(self.engines)
        self._transferred = True

    def _begin(self, run: Callable[[WeightUpdate], Coroutine[Any, Any, PolicyVersion]]) -> Reply[PolicyVersion]:
        """Begin the update once, however often an interrupted thread asks for it."""

        def begun() -> Reply[PolicyVersion]:
            if self._reply is None:
                self._reply = self._thread.follow(run(self), lambda _: self._ready.give(None))
            return self._reply

        return self._thread.call(begun)

    def _wake(self) -> None:
        self._thread.call_later(self._go_on)

    # ---------------------------------------------------------------- the loop

    async def _hand_over(self) -> None:
        self._handed_over = asyncio.get_running_loop().create_future()
        self._ready.give(None)
        self._go_on()
        try:
            async with asyncio.timeout(self._limit_s):
                await self._handed_over
        except TimeoutError:
            self._given_up = (
                f"weight_update: its transfer function had not returned in {self._limit_s:g} s, and nobody knows what "
                "the servers have of the new weights; call weight_update again, with a transfer that ends, or raise "
                "outage_deadline_s, of which this is twice as long"
            )
            log.error("%s", self._given_up)
            self._interrupt()
            raise EngineError(self._given_up) from None

    def _interrupt(self) -> None:
        """Let the trainer's thread out of its function, as Ctrl-C would; others hear when it returns."""
        main = threading.main_thread().ident
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if main is not None and self._asker == main and usual and not self._transferred:
            signal.pthread_kill(main, signal.SIGINT)

    def _go_on(self) -> None:
        waits = self._handed_over
        if waits is None or waits.done():
            return
        if self._void is not None:
            waits.cancel(describe(self._void))
        elif self._transferred:
            waits.set_result(None)


class OpenUpdates:
    """The updates that have begun and not ended, by number, and what the core says of them; ``post`` takes events."""

    def __init__(self, post: Callable[[ev.Event], None]) -> None:
        self._post = post
        self._open: dict[int, WeightUpdate] = {}
        self._errors: dict[int, BaseException] = {}
        """The errors of engine calls, by call (0 is the transfer), for whoever waits for an update."""
        self._last = 0

    def begin(self, update: WeightUpdate, **request: Any) -> None:
        """Ask the core for an update (``request``: fields of UpdateRequested), whose end must be awaited."""
        self._last += 1
        update.begin(self._last)
        self._open[update.number] = update
        self._post(
            ev.UpdateRequested(
                update=update.number, transfers=update.transfers, sends=update.sender is not None, **request
            )
        )

    async def hand_over(self, update: WeightUpdate, transfer: Transfer) -> None:
        """Await the transfer and tell the core how it ended."""
        number = update.number
        try:
            await transfer()
        except BaseException as error:
            self._errors[0] = error
            why = describe(error)
            if isinstance(error, asyncio.CancelledError):
                why = str(error) or "interrupted"
            self._post(ev.HandedOver(number, why, update.not_given))
        else:
            self._post(ev.HandedOver(number, None, update.not_given))

    def cancel(self, number: int) -> None:
        """Tell the core that the caller was cancelled."""
        self._post(ev.UpdateCancelled(number))

    def failed(self, call: int, error: BaseException) -> None:
        """Keep the error of an engine's call."""
        if self._open:
            self._errors[call] = error

    def fail(self, error: BaseException) -> None:
        """End all of them with an error."""
        for update in self._open.values():
            update.fail(error)

    # ---------------------------------------------------------------- commands of the core

    def transfer_now(self, command: do.HandOver) -> None:
        """Let the transfer begin: the engines are paused."""
        update = self._open[command.update]
        update.engines = command.engines
        update.engines_paused.set_result(None)

    def restore(self, command: do.Restore) -> None:
        """Put the saved state into the core."""
        self._open[command.update].restore()
        self._post(ev.Restored(command.update))

    def end(self, command: do.UpdateEnded) -> None:
        """End an update with its version or error."""
        update = self._open.pop(command.update)
        if command.failed is not None:
            update.fail(EngineError(command.why) if command.why else self._errors[command.failed])
        elif not update.version.done():
            update.version.set_result(command.version)
        if not self._open:
            self._errors.clear()


UNCHANGED = {
    "weight_update": "would keep the old weights under the new version",
    "load_state_dict": "would keep the weights that they have now, whatever they are, under the checkpoint's version",
}
"""The consequence for servers if nobody gives them weights, by the call that changes the version."""


def directory_for(
    engines: Iterable[Engine], servers: Sequence[str], path: str | None, *, written: bool, what: str = "weight_update",
    in_flight: OnWeightUpdate = OnWeightUpdate.RESUBMIT,
) -> str | None:  # fmt: skip
    """The path of an update as all engines understand it: absolute for servers, which run in another directory.

    Args:
        engines: those of this process.
        servers: names of those, here and elsewhere, that do not read the trainer's own model.
        written: the weights are handed over by a transfer.
        what: name of the call.
        in_flight: what requests do meanwhile.

    Raises:
        ConfigError: neither a path nor a transfer is given, and there are servers: theirs would be other weights than
            those that the version means; or the path is one of an adapter that an engine cannot take.
    """
    if path is not None and is_adapter(path):
        if in_flight is not OnWeightUpdate.RESUBMIT:
            raise ConfigError(
                f"{what}: {path} is an adapter, which a request keeps to its end: on_weight_update: {in_flight} would "
                "leave those in flight on old ones; set on_weight_update: resubmit"
            )
        for engine in engines:
            can = engine.capabilities
            if (why := why_refused(path, can.adapters)) is not None:
                need = can.adapters_need or "save a merged copy of the whole model"
                more = "" if can.adapters is not None else f"; {need}"
                raise ConfigError(f"{what}: engine {engine.name}: {why}{more}")
    if servers and path is None and not written:
        raise ConfigError(
            f"{what}: {', '.join(servers)} {UNCHANGED[what]}; give path=, a directory that every server can read, or "
            "transfer=, a function that hands the weights over (one that does nothing says that the servers have them "
            "already)"
        )
    return absolute(path) if servers and path is not None else path


def absolute(path: str | os.PathLike[str]) -> str:
    """A path that other processes find too; an address (``s3://...``), which some engines take, stays as it is."""
    path = os.fspath(path)
    return path if "://" in path else os.path.abspath(path)
