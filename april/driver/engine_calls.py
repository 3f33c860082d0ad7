"""Calls of engines that the core asks for, and the trainer's part of a weight update: executed, and reported.

What follows from how a call ended is decided in ``april.core.weight_updates`` and ``april.core.engine_recovery``.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

from april.core import commands as do
from april.core import events as ev
from april.core.versions import PolicyVersion
from april.driver.user_code import describe, own_cancellation
from april.engines.http.weight_directories import why_unloadable
from april.engines.protocol import Engine
from april.errors import ConfigError, EngineBusy, EngineUnreachable

log = logging.getLogger("april")

PROBE_TIMEOUT_S = 10.0
"""A probe without an answer for this long counts as unwell."""


@dataclass(slots=True, kw_only=True)
class _Update:
    """A weight update that somebody waits for."""

    handing_over: asyncio.Future[None]
    ended: asyncio.Future[PolicyVersion]
    restore: Callable[[], None]


class EngineCalls:
    """Executes the core's calls; ``post`` takes events, ``spawn`` starts background tasks."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        post: Callable[[ev.Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._engines = engines
        self._post = post
        self._spawn = spawn
        self._running: dict[str, asyncio.Task[None]] = {}
        self._probes: set[asyncio.Task[None]] = set()
        self._updates: dict[int, _Update] = {}
        self._errors: dict[int, BaseException] = {}
        """By call, for whoever waits for an update."""
        self._last_update = 0

    # ---------------------------------------------------------------- weight updates

    async def update(
        self,
        transfer: Callable[[], Awaitable[None]] | None = None,
        restore: Callable[[], None] = lambda: None,
        **request: Any,
    ) -> PolicyVersion:
        """Ask the core for an update (``request``: fields of UpdateRequested), and wait for its end; the version then.

        ``transfer`` runs in the task of the caller, which may be cancelled there; what the engines are doing then is
        carried to its end first.

        Raises whatever ``transfer`` or a call of an engine raises.
        """
        loop = asyncio.get_running_loop()
        update = _Update(handing_over=loop.create_future(), ended=loop.create_future(), restore=restore)
        self._last_update += 1
        number = self._last_update
        self._updates[number] = update
        self._post(ev.UpdateRequested(update=number, transfers=transfer is not None, **request))
        cancelled: asyncio.CancelledError | None = None
        while not update.ended.done():
            try:
                if transfer is not None and update.handing_over.done():
                    begun, transfer = transfer, None
                    await self._hand_over(number, begun)
                else:
                    waits: list[asyncio.Future[Any]] = [update.ended]
                    waits += [] if transfer is None else [update.handing_over]
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError as cancellation:
                cancelled, transfer = cancellation, None
                self._post(ev.UpdateCancelled(number))
        version = update.ended.result()
        if cancelled is not None:
            raise cancelled
        return version

    async def _hand_over(self, number: int, transfer: Callable[[], Awaitable[None]]) -> None:
        try:
            await transfer()
        except BaseException as error:
            self._errors[0] = error
            why = "interrupted" if isinstance(error, asyncio.CancelledError) else describe(error)
            self._post(ev.HandedOver(number, why))
        else:
            self._post(ev.HandedOver(number))

    def hand_over(self, command: do.HandOver) -> None:
        """The engines are paused for the transfer."""
        self._updates[command.update].handing_over.set_result(None)

    def restore(self, command: do.Restore) -> None:
        """The saved state goes into the core now."""
        self._updates[command.update].restore()
        self._post(ev.Restored(command.update))

    def update_ended(self, command: do.UpdateEnded) -> None:
        """Whoever waits for it goes on."""
        update = self._updates.pop(command.update)
        if not update.ended.done() and command.failed is not None:
            update.ended.set_exception(self._errors[command.failed])
        elif not update.ended.done():
            update.ended.set_result(command.version)
        if not self._updates:
            self._errors.clear()

    def fail(self, error: BaseException) -> None:
        """Nothing goes on; whoever waits is told."""
        for update in self._updates.values():
            if not update.ended.done():
                update.ended.set_exception(error)
                update.ended.exception()

    # ---------------------------------------------------------------- calls of engines

    def pause(self, command: do.PauseEngine) -> None:
        """Close an engine's admission."""
        self._call(command, "pause", self._engines[command.engine].pause)

    def load(self, command: do.LoadEngine) -> None:
        """Give an engine weights."""
        engine = self._engines[command.engine]
        self._call(command, "update_weights", lambda: engine.update_weights(command.version, command.path))

    def resume(self, command: do.ResumeEngine) -> None:
        """Open an engine's admission."""
        self._call(command, "resume", self._engines[command.engine].resume)

    def _call(
        self,
        command: do.PauseEngine | do.LoadEngine | do.ResumeEngine,
        what: str,
        method: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        name, before = command.engine, self._running.get(command.engine)
        errors: list[Exception] = []

        async def call() -> None:
            if before is not None and not before.done():
                before.cancel()
                await asyncio.wait([before])
            errors.extend(await self._in_time(name, what, method, command.within_s))

        def report(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                error = errors[0] if errors else None
                if error is not None and self._updates:
                    self._errors[command.call] = error
                why = "" if error is None else describe(error)
                self._post(ev.EngineCallEnded(name, command.call, _result(error), why))

        # a cancellation that came while it ran is heard of before its end
        self._running[name] = self._spawn(call())
        self._running[name].add_done_callback(report)

    async def _in_time(
        self, name: str, what: str, method: Callable[[], Coroutine[Any, Any, None]], seconds: float
    ) -> list[Exception]:
        """What it raised, if anything; EngineUnreachable if it took longer."""
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                await method()
        except TimeoutError as error:
            late = EngineUnreachable(f"engine {name} has not answered {what} in {seconds:g} s")
            return [late if limit.expired() else error]
        except Exception as error:
            return [error]
        except asyncio.CancelledError as error:
            return [own_cancellation(error)]
        return []

    def probe(self, command: do.ProbeEngine) -> None:
        """Ask an engine for its health."""
        task = self._spawn(self._probe(command))
        self._probes.add(task)
        task.add_done_callback(self._probes.discard)

    async def _probe(self, command: do.ProbeEngine) -> None:
        name = command.engine
        answer = ev.EngineProbed(engine=name, probe=command.probe, answered=False)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                health = await self._engines[name].health()
        except Exception as error:
            answer = replace(answer, detail=describe(error))
        except asyncio.CancelledError as error:
            answer = replace(answer, detail=str(own_cancellation(error)))
        else:
            load = health.load
            said = None
            if load is not None:
                said = ev.LoadReported(
                    engine=name,
                    running=load.running,
                    waiting=load.waiting,
                    kv_usage=load.kv_usage,
                    preemptions=load.preemptions,
                )
            answer = replace(
                answer, answered=True, ok=health.ok, current=health.current, detail=health.detail, load=said
            )
        self._post(answer)

    async def ask_all(self) -> None:
        """Until all servers have said how they are."""
        self._post(ev.EnginesAsked())
        if self._probes:
            await asyncio.wait(set(self._probes))

    async def close(self, within_s: float) -> None:
        """Close all engines at once; one that hangs is named and left."""
        engines = self._engines
        closing = (self._in_time(name, "close", engine.close, within_s) for name, engine in engines.items())
        for name, errors in zip(engines, await asyncio.gather(*closing), strict=True):
            for error in errors:
                log.error("engine %s could not be closed", name, exc_info=error)


def _result(error: Exception | None) -> ev.CallResult:
    if error is None:
        return ev.CallResult.DONE
    if isinstance(error, EngineUnreachable):
        return ev.CallResult.UNREACHABLE
    return ev.CallResult.BUSY if isinstance(error, EngineBusy) else ev.CallResult.REFUSED


UNCHANGED = {
    "weight_update": "would keep the old weights under the new version",
    "load_state_dict": "would keep the weights that they have now, whatever they are, under the checkpoint's version",
}
"""What servers do if nobody gives them weights, by the call that changes the version."""


def directory_for(
    engines: Mapping[str, Engine], path: str | None, *, written: bool, what: str = "weight_update"
) -> str | None:
    """The path of an update as all engines understand it: absolute for servers, which run in another directory.

    Raises:
        ConfigError: neither a path nor a transfer (``written``), and there are servers: theirs would be other weights
            than those that the version means; or the path is one of an adapter. ``what``: the call that was made.
    """
    if path is not None and (why := why_unloadable(path)) is not None:
        raise ConfigError(f"{what}: {why}")
    servers = [name for name, engine in engines.items() if engine.capabilities.remote]
    if servers and path is None and not written:
        raise ConfigError(
            f"{what}: {', '.join(servers)} {UNCHANGED[what]}; give path=, a directory that every server can read, or "
            "transfer=, a function that hands the weights over (one that does nothing says that the servers have them "
            "already)"
        )
    return os.path.abspath(path) if servers and path is not None else path
