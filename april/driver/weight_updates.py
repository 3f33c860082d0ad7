"""New weights on all engines, or it is known which have them: pauses, versions, and engines that are left out.

Invariant: the core hears of a version only when every engine that may get requests for it has confirmed it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from april.core import events as ev
from april.core.state import RolloutCore
from april.core.versions import PolicyVersion
from april.driver.user_code import describe
from april.engines.protocol import Engine
from april.errors import EngineBusy, EngineError, EngineUnreachable

log = logging.getLogger("april")

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
        """Why nothing may be generated: the engines hold different weights."""
        self._path: str | None = None
        self._transferred = False

    async def change(
        self,
        version: PolicyVersion,
        path: str | None = None,
        transfer: Callable[[], Awaitable[None]] | None = None,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Pause, await ``transfer``, give every engine the version, call ``then``, tell the core, resume.

        An engine that cannot be reached is left out if there are others: it is quarantined, and gets no requests before
        it has these weights or later ones. If some engines have loaded the new weights and others have refused them,
        training stays paused until an update has reached them all.

        Raises whatever ``transfer`` raises, and EngineError; the version stays then.
        """
        dead: set[str] = set()
        try:
            paused = await self.on_all_engines("pause", lambda engine: engine.pause())
            dead |= self._leave_out({name: error for name, error in paused.items() if error is not None})
            _raise_first({name: error for name, error in paused.items() if name not in dead})
            if transfer is not None:
                await transfer()
            await self._give(version, path, then, dead)
            self._path, self._transferred = path, transfer is not None or path is None
        finally:
            # an engine that stays paused would hold up everything for ever
            resuming = self.on_all_engines("resume", lambda engine: engine.resume(), without=dead)
            results, cancelled = await _to_its_end(resuming)
            if self._core.clock.current == version:
                # the update is done, whatever a single engine makes of its resumption
                dead |= self._leave_out({name: error for name, error in results.items() if error is not None})
                results = {name: error for name, error in results.items() if name not in dead}
            if not self._closed():  # closed engines need not resume
                _raise_first(results)
            if cancelled is not None:
                raise cancelled

    def _leave_out(self, failed: Mapping[str, BaseException]) -> set[str]:
        """Engines that failed and can be done without: quarantined now, until a probe finds them well."""
        if not failed or len(failed) == len(self._engines):
            return set()
        for name, error in failed.items():
            log.warning("engine %s is left out of the weight update: %s", name, describe(error))
            self._post(ev.EngineFailed(name))
        return set(failed)

    async def _give(
        self, version: PolicyVersion, path: str | None, then: Callable[[], None], dead: set[str]
    ) -> None:
        """All engines take the new weights, or it is known which did; a cancellation takes effect afterwards."""
        patience_s = self._core.settings.outage_deadline_s
        loading = self.on_all_engines("update_weights", lambda e: e.update_weights(version, path), patience_s, dead)
        results, cancelled = await _to_its_end(loading)
        lost = {n: e for n, e in results.items() if isinstance(e, (EngineUnreachable, EngineBusy))}
        if len(lost) < len(results):
            dead |= self._leave_out(lost)
        results = {name: error for name, error in results.items() if name not in dead}
        self._note_half_update(results)
        _raise_first(results)
        then()
        self._post(ev.WeightsUpdated(version, tuple(results) if dead else None))
        if cancelled is not None:
            raise cancelled

    def _note_half_update(self, results: Errors) -> None:
        """Engines with different weights must not generate for one version."""
        failed = {name: error for name, error in results.items() if error is not None}
        if not failed:
            self.half_updated = None
        elif len(failed) < len(results):
            done = [name for name in results if name not in failed]
            why = "; ".join(f"{name}: {describe(error)}" for name, error in failed.items())
            self.half_updated = (
                f"the last weight update reached engines {done} and not {list(failed)} ({why}); "
                "call weight_update again before the next batch"
            )

    def raise_if_half_updated(self) -> None:
        """EngineError while the engines hold different weights."""
        if self.half_updated is not None:
            raise EngineError(self.half_updated)

    async def repeat(self, engine: Engine) -> PolicyVersion | None:
        """Give the present weights to one engine that came back with others; None: april does not know where they are.

        Before the first update the weights are those with which all servers were started.

        Raises:
            EngineError: the engine did not take them.
        """
        version = self._core.clock.current
        if self._transferred or self.half_updated is not None:
            return None
        settings = self._core.settings
        async with asyncio.timeout(settings.abort_deadline_s):
            await engine.pause()
        try:
            async with asyncio.timeout(settings.outage_deadline_s):
                await engine.update_weights(version, self._path)
        finally:
            async with asyncio.timeout(settings.abort_deadline_s):
                await engine.resume()
        return version

    async def on_all_engines(
        self,
        what: str,
        method: Callable[[Engine], Coroutine[Any, Any, None]],
        patience_s: float | None = None,
        without: set[str] | None = None,
    ) -> Errors:
        """Call all engines at once and wait for every one of them; the errors by engine.

        One without an answer after ``patience_s`` (None: abort_deadline_s) has failed: nobody waits for ever for an
        engine that hangs.
        """
        seconds = self._core.settings.abort_deadline_s if patience_s is None else patience_s

        async def call(engine: Engine) -> None:
            limit = asyncio.timeout(seconds)
            try:
                async with limit:
                    await method(engine)
            except TimeoutError:
                if not limit.expired():
                    raise
                raise EngineUnreachable(
                    f"engine {engine.name} has not answered {what} in {seconds:g} s"
                ) from None

        engines = {name: engine for name, engine in self._engines.items() if name not in (without or ())}
        results = await asyncio.gather(*map(call, engines.values()), return_exceptions=True)
        return dict(zip(engines, results, strict=True))


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


def _raise_first(results: Errors) -> None:
    for error in results.values():
        if error is not None:
            raise error
