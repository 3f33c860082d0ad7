"""Runs the trainer's part of a weight update: its request, the transfer of the weights, and the result.

Engines get new weights in an update or when a saved state is loaded. Both are a :class:`WeightUpdate`: the trainer's
thread and the event loop share the object, and the core knows the update by its number. ``april.core.weight_updates``
decides what happens to the engines.

Invariant: an update either does not happen or runs to its end, even if its caller stops waiting. Each stage of its
progress is one attribute, set by one assignment, so that a signal handler cannot interrupt the change.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
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
"""Coroutine function that gives the engines the new weights; it is awaited while they are paused."""


class WeightUpdate:
    """A weight update, or the load of a saved state, whose transfer is awaited on the event loop.

    Args:
        transfer: Coroutine function that :meth:`ended` awaits; None if the engines load the weights themselves.
    """

    restore: Callable[[], None]
    """Callback that puts a saved state into the core; set only when a state is loaded."""

    sender: WeightSender | None = None
    """april's weight sender, which knows the engines that got all weights; None if the transfer does not use it."""

    def __init__(self, transfer: Transfer | None = None) -> None:
        self._transfer = transfer
        self.transfers = transfer is not None
        self.number = 0
        self.engines: tuple[str, ...] = ()
        """Names of the engines that are paused for the update; empty before they are paused."""

    def begin(self, number: int) -> None:
        """Set the update's number, and create the futures ``engines_paused`` and ``version``."""
        loop = asyncio.get_running_loop()
        self.number = number
        self.engines_paused: asyncio.Future[None] = loop.create_future()
        self.version: asyncio.Future[PolicyVersion] = loop.create_future()

    async def ended(self, updates: OpenUpdates) -> PolicyVersion:
        """Run the transfer once the engines are paused, wait for the end, and return the new version.

        If the caller is cancelled, this cancels the update and still waits for its end. Raises the errors of the
        transfer and of engine calls.
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
                updates.post(ev.UpdateCancelled(self.number))
        version = self.version.result()
        if cancelled is not None:
            raise cancelled
        return version

    @property
    def not_given(self) -> tuple[ev.TransferFailure, ...] | None:
        """Engines that did not get all weights that were sent; None if this is unknown."""
        if self.sender is None or not self.sender.outcome_known:
            return None
        return tuple(self.sender.left_out.values())

    def fail(self, error: BaseException) -> None:
        """End the update with an error, unless it has ended."""
        if not self.version.done():
            self.version.set_exception(error)
            self.version.exception()  # keeps asyncio from logging the error if the caller is gone


class TrainerUpdate(WeightUpdate):
    """A weight update that the trainer's thread requests, and whose transfer function runs in that thread.

    Args:
        transfer: Function that gives the weights to the paused engines, whose names are its argument; None if the
            engines load the weights themselves.
        asked: Call name, path and other arguments, by which an interrupted call is recognised when it is repeated.
        limit_s: Maximum number of seconds for the transfer function, after which the update fails; None means no limit.
    """

    def __init__(
        self, thread: LoopThread, transfer: Callable[[Sequence[str]], Any] | None, asked: tuple[object, ...],
        sender: WeightSender | None = None, limit_s: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(None if transfer is None else self._hand_over)
        self.sender, self._limit_s = sender, limit_s
        self._timeout_error = ""
        """Error message if the transfer has taken longer than ``limit_s``; otherwise empty."""
        self._thread = thread
        self._function = transfer
        self._request = asked
        self._caller_thread: int | None = None
        """Identifier of the thread that runs the transfer and waits for the end; None if no thread does."""
        self._transferred = transfer is None
        self._interruption: BaseException | None = None
        """Error that interrupted the caller before the transfer was complete, so that there is no update; else None."""
        self._reply: Reply[PolicyVersion] | None = None
        self._ready = Reply[None]()
        """Thread-safe future, done once the engines are paused, or once the update has ended without a pause."""
        self._handed_over: asyncio.Future[None] | None = None

    # ---------------------------------------------------------------- the trainer's thread

    def repeats(self, asked: tuple[object, ...]) -> bool:
        """Return whether a call with these arguments repeats an interrupted call for this update, to get its result."""
        failed = self._reply is not None and self._reply.done() and self._reply.error() is not None
        return self._request == asked and self._interruption is None and not failed

    def carry_out(self, run: Callable[[WeightUpdate], Coroutine[Any, Any, PolicyVersion]]) -> PolicyVersion:
        """Start the update, run the transfer, wait for the end, and return the new version.

        ``run`` makes the driver's coroutine for the update. A repeated call skips the steps that are done already.

        Raises:
            RolloutError: a signal handler called this in the middle of the transfer, so it would wait for itself.
        """
        if self._transferred or self._caller_thread is not None:
            if not self._transferred and self._caller_thread == threading.get_ident():
                raise RolloutError("a signal handler called weight_update during a weight update")
            reply = self._begin(run)
            self._report_progress()  # the interrupted caller may not have reported its progress
            reply.wait()
            return result_of(reply)
        try:
            self._caller_thread = threading.get_ident()
            reply = self._begin(run)
            self._ready.wait()
            if not reply.done():
                call_user_code(self._transfer_here)
                self._report_progress()
            reply.wait()
        except BaseException as error:
            # the transfer or a signal handler raised; another signal may come even here, so progress is reported twice
            self._interruption = None if self._transferred else error
            try:
                self._report_progress()
            finally:
                self._report_progress()
            if self._interruption is not None and self._reply is not None:
                self._reply.wait()  # until the engines have resumed with the old version
            if self._timeout_error and isinstance(error, KeyboardInterrupt):
                raise EngineError(self._timeout_error) from None
            raise
        finally:
            self._caller_thread = None
        return result_of(reply)

    def _transfer_here(self) -> None:
        assert self._function is not None
        self._function(self.engines)
        self._transferred = True

    def _begin(self, run: Callable[[WeightUpdate], Coroutine[Any, Any, PolicyVersion]]) -> Reply[PolicyVersion]:
        """Start the update on the loop; a repeated call returns the same reply."""

        def begun() -> Reply[PolicyVersion]:
            if self._reply is None:
                self._reply = self._thread.follow(run(self), lambda _: self._ready.set(None))
            return self._reply

        return self._thread.call(begun)

    def _report_progress(self) -> None:
        self._thread.call_later(self._finish_transfer)

    # ---------------------------------------------------------------- the loop

    async def _hand_over(self) -> None:
        self._handed_over = asyncio.get_running_loop().create_future()
        self._ready.set(None)
        self._finish_transfer()
        try:
            async with asyncio.timeout(self._limit_s):
                await self._handed_over
        except TimeoutError:
            self._timeout_error = (
                f"weight_update: its transfer function did not return within {self._limit_s:g} s, so april does not "
                "know which weights the servers have; call weight_update again with a transfer that ends, or raise "
                "outage_deadline_s, which is half of this limit"
            )
            log.error("%s", self._timeout_error)
            self._interrupt()
            raise EngineError(self._timeout_error) from None

    def _interrupt(self) -> None:
        """Interrupt a transfer in the main thread, as Ctrl-C would; a transfer in another thread goes on."""
        main = threading.main_thread().ident
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if main is not None and self._caller_thread == main and usual and not self._transferred:
            signal.pthread_kill(main, signal.SIGINT)

    def _finish_transfer(self) -> None:
        waits = self._handed_over
        if waits is None or waits.done():
            return
        if self._interruption is not None:
            waits.cancel(describe(self._interruption))
        elif self._transferred:
            waits.set_result(None)


class OpenUpdates:
    """Holds the updates that have begun and not ended, and passes the core's commands on to them.

    ``post`` passes events to the core.
    """

    def __init__(self, post: Callable[[ev.Event], None]) -> None:
        self.post = post
        self._open: dict[int, WeightUpdate] = {}
        self._errors: dict[int, BaseException] = {}
        """Errors of engine calls by call number (0 is the transfer), to be raised in the trainer's call."""
        self._last = 0

    def begin(self, update: WeightUpdate, **request: Any) -> None:
        """Request an update from the core; ``request`` has fields of UpdateRequested. The caller must await its end."""
        self._last += 1
        update.begin(self._last)
        self._open[update.number] = update
        self.post(
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
            self.post(ev.HandedOver(number, why, update.not_given))
        else:
            self.post(ev.HandedOver(number, None, update.not_given))

    def failed(self, call: int, error: BaseException) -> None:
        """Remember the error of an engine call, to raise it in the trainer's call."""
        if self._open:
            self._errors[call] = error

    def fail(self, error: BaseException) -> None:
        """End all open updates with an error."""
        for update in self._open.values():
            update.fail(error)

    # ---------------------------------------------------------------- commands of the core

    def transfer_now(self, command: do.HandOver) -> None:
        """Let the transfer start, as the engines are paused now."""
        update = self._open[command.update]
        update.engines = command.engines
        update.engines_paused.set_result(None)

    def restore(self, command: do.Restore) -> None:
        """Put the saved state into the core."""
        self._open[command.update].restore()
        self.post(ev.Restored(command.update))

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
    "load_state_dict": "would keep their current weights under the checkpoint's version",
}
"""Part of an error message, by the name of the trainer's call: what servers without new weights would do."""


def directory_for(
    engines: Mapping[str, Engine], path: str | None, *, written: bool, what: str = "weight_update",
    in_flight: OnWeightUpdate = OnWeightUpdate.RESUBMIT,
) -> str | None:  # fmt: skip
    """Check the path of an update, and return it as the engines need it: absolute if there are servers.

    Servers are engines that are remote and do not share the trainer's weights. ``written`` says that a transfer gives
    the engines the weights, ``what`` is the name of the trainer's call, for messages.

    Raises:
        ConfigError: there are servers, but neither a path nor a transfer, so they would keep the old weights; or the
            path holds an adapter (LoRA) that an engine cannot load, or that ``in_flight`` does not allow.
    """
    able = {name: engine.capabilities for name, engine in engines.items()}
    servers = [name for name, can in able.items() if can.remote and not can.shares_weights]
    if path is not None and is_adapter(path):
        if in_flight is not OnWeightUpdate.RESUBMIT:
            raise ConfigError(
                f"{what}: {path} is an adapter, and a request keeps its adapter until it ends, so on_weight_update: "
                f"{in_flight} would leave requests in flight on old weights; set on_weight_update: resubmit"
            )
        for name, can in able.items():
            if (why := why_refused(path, can.adapters)) is not None:
                need = can.needs.get("adapters", "save a merged copy of the whole model")
                more = "" if can.adapters is not None else f"; {need}"
                raise ConfigError(f"{what}: engine {name}: {why}{more}")
    if servers and path is None and not written:
        raise ConfigError(
            f"{what}: {', '.join(servers)} {UNCHANGED[what]}; give path=, a directory that every server can read, or "
            "transfer=, a function that hands the weights over (a function that does nothing means that the servers "
            "already have them)"
        )
    return absolute(path) if servers and path is not None else path


def absolute(path: str | os.PathLike[str]) -> str:
    """Return an absolute path, for processes with another working directory; URLs (``s3://...``) are not changed."""
    path = os.fspath(path)
    return path if "://" in path else os.path.abspath(path)
