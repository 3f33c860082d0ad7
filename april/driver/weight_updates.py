"""New weights on all engines, or it is known which have them: pauses, versions, and engines that are left out.

Invariant: the core hears of a version only when every engine that may get requests for it has confirmed it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from april.core import events as ev
from april.core.state import RolloutCore
from april.core.versions import PolicyVersion
from april.driver.user_code import describe
from april.engines.http.weight_directories import why_unloadable
from april.engines.protocol import Engine
from april.errors import ConfigError, EngineBusy, EngineError, EngineUnreachable

log = logging.getLogger("april")

QUARANTINED_PATIENCE_S = 2.0
"""Longest wait of a weight update for an engine that is not well anyway to pause."""

T = TypeVar("T")
Errors = dict[str, BaseException | None]
"""What a call of every engine came to: None, or the error."""


class WeightUpdates:
    """Changes the weights of the engines while nothing generates; ``post`` takes events for the core."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        core: RolloutCore,
        post: Callable[[ev.Event], None],
        closed: Callable[[], bool],
    ) -> None:
        self._engines = engines
        self._core = core
        self._post = post
        self._closed = closed
        self.half_updated: str | None = None
        """Why nothing may be generated: the engines hold different weights, or such as nobody has told of."""
        self.moves = 0
        """Grows when an update begins and when it ends; odd while one runs."""
        self._changing = asyncio.Lock()
        self._path: str | None = None
        self._known = True
        """The present weights are those of ``_path``, or, where that is None, those of every server's start."""
        self._healing: dict[str, asyncio.Event] = {}
        self._unopened: set[str] = set()
        """Engines that may still be paused."""
        self._torn: set[str] = set()
        """Engines that were asked to load something and have not said that they did."""

    async def change(
        self,
        version: PolicyVersion,
        path: str | None = None,
        transfer: Callable[[], Awaitable[None]] | None = None,
        then: Callable[[], None] = lambda: None,
        trained: int | None = None,
    ) -> None:
        """Pause, await ``transfer``, give every engine the version, call ``then``, tell the core, resume.

        ``trained``: the last batch that the new weights were trained on, for the core.

        An engine that cannot be reached is left out if there are others: it is quarantined, and gets no requests before
        it has these weights or later ones. If some engines have loaded the new weights and others have refused them,
        training stays paused until an update has reached them all.

        Raises whatever ``transfer`` raises, and EngineError; the version stays then.
        """
        async with self._changing:
            self.moves += 1
            try:
                await self._change(version, path, transfer, then, trained)
            finally:
                self.moves += 1

    async def _change(
        self,
        version: PolicyVersion,
        path: str | None,
        transfer: Callable[[], Awaitable[None]] | None,
        then: Callable[[], None],
        trained: int | None,
    ) -> None:
        while len(self._healing) == len(self._engines):
            await next(iter(self._healing.values())).wait()
        # an engine that gets the present weights at this moment gets the new ones afterwards: nobody waits for it
        dead = set(self._healing)
        try:
            asked = set(self._engines) - dead
            self._unopened |= asked
            paused = await self.on_all_engines("pause", lambda engine: engine.pause(), without=dead, hurry=True)
            dead |= self._leave_out({name: error for name, error in paused.items() if error is not None}, dead)
            _raise_first({name: error for name, error in paused.items() if name not in dead})
            if transfer is not None:
                await self._transferred(transfer)
            await self._give(version, path, transfer is not None, then, trained, dead)
        finally:
            # an engine that stays paused would hold up everything for ever
            resuming = self.on_all_engines("resume", lambda engine: engine.resume(), without=dead)
            results, cancelled = await _to_its_end(resuming)
            self._unopened -= {name for name, error in results.items() if error is None}
            failed = {name: error for name, error in results.items() if error is not None}
            if not self._closed():  # closed engines need not resume
                left_out = self._leave_out(failed, dead)
                if self._core.clock.current == version:
                    # the update is done, whatever a single engine makes of its resumption
                    failed = {name: error for name, error in failed.items() if name not in left_out}
                for name in failed:
                    self._post(ev.EngineFailed(name))
                _raise_first(failed)
            if cancelled is not None:
                raise cancelled

    async def _transferred(self, transfer: Callable[[], Awaitable[None]]) -> None:
        """Await it; servers with a part of the new weights must not generate as if they had the old ones."""
        try:
            await transfer()
        except BaseException as error:
            if any(engine.capabilities.remote for engine in self._engines.values()):
                why = "interrupted" if isinstance(error, asyncio.CancelledError) else describe(error)
                self.half_updated = (
                    f"the last transfer of weights was broken off ({why}), and nobody knows what the servers have of "
                    "it; call weight_update again before the next batch"
                )
            raise

    def _leave_out(self, failed: Mapping[str, BaseException], dead: set[str]) -> set[str]:
        """Engines that failed and can be done without, as not all others are ``dead``: quarantined until a probe."""
        if len(dead.union(failed)) == len(self._engines):
            return set()
        for name, error in failed.items():
            log.warning("engine %s is left out of the weight update: %s", name, describe(error))
            self._post(ev.EngineFailed(name))
        return set(failed)

    async def _give(
        self, version: PolicyVersion, path: str | None, written: bool, then: Callable[[], None], trained: int | None,
        dead: set[str],
    ) -> None:  # fmt: skip
        """All engines take the new weights, or it is known which did; a cancellation takes effect afterwards."""
        patience_s = self._core.settings.outage_deadline_s
        loading = self.on_all_engines("update_weights", lambda e: e.update_weights(version, path), patience_s, dead)
        results, cancelled = await _to_its_end(loading)
        self._note_torn(results, loads=path is not None)
        lost = {n: e for n, e in results.items() if isinstance(e, (EngineUnreachable, EngineBusy))}
        dead |= self._leave_out(lost, dead)
        results = {name: error for name, error in results.items() if name not in dead}
        self._note_half_update(results, written)
        _raise_first(results)
        assert results, "an update that reached no engine is none"
        self._path, self._known = path, path is not None and not written
        then()
        self._post(ev.WeightsUpdated(version, tuple(results) if dead else None, trained))
        if cancelled is not None:
            raise cancelled

    def _note_torn(self, results: Errors, *, loads: bool) -> None:
        """What an engine has of which nobody knows what it made of an update must be told to the core."""
        for name, error in results.items():
            if error is None:
                self._torn.discard(name)
            elif not isinstance(error, EngineBusy):
                if loads:
                    self._torn.add(name)
                if isinstance(error, EngineUnreachable):
                    self._post(ev.EngineStale(name))
                    self._post(ev.EngineFailed(name))

    def _note_half_update(self, results: Errors, written: bool) -> None:
        """Engines with different weights must not generate for one version, nor those of a transfer for an old one."""
        failed = {name: error for name, error in results.items() if error is not None}
        if not failed:
            self.half_updated = None
        elif written or len(failed) < len(results):
            done = [name for name in results if name not in failed]
            why = "; ".join(f"{name}: {describe(error)}" for name, error in failed.items())
            self.half_updated = (
                f"the last weight update reached engines {done} and not {list(failed)} ({why}); "
                "call weight_update again before the next batch"
            )

    def refuse(self, why: str) -> None:
        """Nothing is generated before an update has reached all engines: weights were written without one."""
        self.half_updated = why

    def raise_if_half_updated(self) -> None:
        """EngineError while the engines hold different weights, or such as nobody has told of."""
        if self.half_updated is not None:
            raise EngineError(self.half_updated)

    async def mend(self, name: str, *, current: bool) -> PolicyVersion | None:
        """Give one engine that came back what it lacks: the present weights (not ``current``), or its resumption.

        None: april does not know where the present weights are, so it waits for the next update. Before the first
        update they are those with which all servers were started.

        Raises:
            EngineError: the engine did not take them.
        """
        engine, states, given = self._engines[name], self._core.engines.states, None
        while True:
            async with self._changing:  # not in the middle of an update
                version, path = self._core.clock.current, self._path
                if given == version or (current and states[name].version == version):
                    if name in self._unopened:
                        await self._open(engine)
                    return version
                if not self._known or self.half_updated is not None or (path is None and name in self._torn):
                    return None
                self._healing[name] = asyncio.Event()
            try:
                await self._load(engine, version, path)
                given = version
            finally:
                self._healing.pop(name).set()

    def is_open(self, name: str) -> bool:
        """Whether an engine was resumed since it was last paused."""
        return name not in self._unopened or self.moves % 2 == 1

    async def _load(self, engine: Engine, version: PolicyVersion, path: str | None) -> None:
        settings = self._core.settings
        self._unopened.add(engine.name)
        try:
            await self._in_time(engine, "pause", engine.pause, settings.abort_deadline_s)
            seconds = settings.outage_deadline_s
            await self._in_time(engine, "update_weights", lambda: engine.update_weights(version, path), seconds)
            self._torn.discard(engine.name)
        finally:
            await self._open(engine)

    async def _open(self, engine: Engine) -> None:
        await self._in_time(engine, "resume", engine.resume, self._core.settings.abort_deadline_s)
        self._unopened.discard(engine.name)

    async def on_all_engines(
        self,
        what: str,
        method: Callable[[Engine], Coroutine[Any, Any, None]],
        patience_s: float | None = None,
        without: set[str] | None = None,
        *,
        hurry: bool = False,
    ) -> Errors:
        """Call all engines at once and wait for every one of them; the errors by engine.

        One without an answer after ``patience_s`` (None: abort_deadline_s) has failed: nobody waits for ever for an
        engine that hangs. ``hurry``: quarantined engines have QUARANTINED_PATIENCE_S, if there are others.
        """
        seconds = self._core.settings.abort_deadline_s if patience_s is None else patience_s
        engines = {name: engine for name, engine in self._engines.items() if name not in (without or ())}
        states = self._core.engines.states
        ill = {name for name in engines if hurry and states[name].quarantined}
        if len(ill) == len(engines):
            ill = set()

        def call(name: str, engine: Engine) -> Coroutine[Any, Any, None]:
            limit = min(seconds, QUARANTINED_PATIENCE_S) if name in ill else seconds
            return self._in_time(engine, what, lambda: method(engine), limit)

        results = await asyncio.gather(*(call(n, e) for n, e in engines.items()), return_exceptions=True)
        return dict(zip(engines, results, strict=True))

    async def _in_time(
        self, engine: Engine, what: str, method: Callable[[], Coroutine[Any, Any, None]], seconds: float
    ) -> None:
        """EngineUnreachable if it takes longer."""
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                await method()
        except TimeoutError:
            if not limit.expired():
                raise
            raise EngineUnreachable(f"engine {engine.name} has not answered {what} in {seconds:g} s") from None


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


async def _to_its_end(coroutine: Coroutine[Any, Any, T]) -> tuple[T, asyncio.CancelledError | None]:
    """Its result, and the cancellation that came meanwhile and is to be raised when the result is taken care of."""
    task = asyncio.get_running_loop().create_task(coroutine)
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    return task.result(), cancelled


def _raise_first(results: Mapping[str, BaseException | None]) -> None:
    for error in results.values():
        if error is not None:
            raise error
