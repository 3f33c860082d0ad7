"""Adds and removes engines during a run, when the trainer asks or the user's discovery function finds a change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

from april.concurrency.worker_threads import run_in_thread
from april.config.engines import checked_url, name_at
from april.config.settings import Config
from april.driver.rollout_driver import RolloutDriver
from april.driver.user_code import describe, is_async, own_cancellation
from april.engines.fit import check_engines
from april.engines.kinds.factory import open_server
from april.engines.protocol import Engine
from april.errors import AprilError, ConfigError, EngineError, RolloutError

log = logging.getLogger("april")

Discover = Callable[[], Iterable[str] | Awaitable[Iterable[str]]]
"""Function that returns the addresses of the servers that exist now; plain or async."""
CLOSE_S = 10.0
"""Maximum number of seconds for closing an engine that was removed."""


class EngineRoster:
    """Adds engines to a running scheduler and removes them; must be used on its event loop.

    ``engines`` lists all engines of the scheduler; this class changes the list.
    """

    def __init__(
        self, config: Config, driver: RolloutDriver, engines: list[Engine], attachments: Sequence[str] = ()
    ) -> None:
        self._config, self._driver, self._engines, self._attachments = config, driver, engines, attachments
        self._joining: set[str] = set()
        """Names of engines whose servers are being connected to."""

    async def add(self, engine: Engine | str, api_key: str | None = None) -> str:
        """Add an engine object, or connect to the server at an address; returns the engine's name.

        Raises:
            ConfigError: the engine does not fit the configuration or the other engines, or its name is taken.
            EngineError: the server could not be reached.
        """
        if not isinstance(engine, str):
            return self._join(engine)
        url = checked_url(engine)
        name = name_at(url)
        self._driver.require_new(name)  # before connecting, which would end the server's current session
        if name in self._joining:
            raise ConfigError(f"add_engine: an engine {name} is already about to join")
        self._joining.add(name)
        try:
            found = await open_server(self._config.engine, url, api_key)
            try:
                return self._join(found)
            except BaseException:
                await found.close()
                raise
        finally:
            self._joining.discard(name)

    def _join(self, engine: Engine) -> str:
        check_engines(self._config, [engine], gathers=False, attachments=self._attachments)
        self._driver.add_engine(engine)
        self._engines.append(engine)
        log.info("engine %s has joined", engine.name)
        return engine.name

    async def remove(self, name: str, *, cut: bool) -> None:
        """Remove an engine once its requests have ended, and close it; ``cut`` aborts the requests."""
        engine = await self._driver.remove_engine(name, cut=cut)
        if engine not in self._engines:  # another call has removed it meanwhile
            return
        self._engines.remove(engine)
        log.info("engine %s has left", name)
        try:
            async with asyncio.timeout(CLOSE_S):
                await engine.close()
        except Exception as error:
            log.warning("engine %s has left and could not be closed: %s", name, describe(error))

    async def follow(self, discover: Discover, every_s: float, present: dict[str, str]) -> None:
        """Call ``discover`` every ``every_s`` seconds, and add and remove engines accordingly, until cancelled.

        ``present`` maps the addresses of the present engines to their names; it is kept up to date.
        """
        troubles: dict[str, str] = {}
        leaving: dict[str, asyncio.Task[None]] = {}
        while True:
            await asyncio.sleep(every_s)
            try:
                urls = await urls_of(discover)
            except Exception as error:
                self._warn(troubles, "discover", f"discover failed, so all engines stay: {describe(error)}")
                continue
            troubles.pop("discover", None)
            for url in [url for url in present if url not in urls]:
                leaving[url] = asyncio.ensure_future(self.remove(present.pop(url), cut=False))
                leaving[url].add_done_callback(_retrieve_error)
            for url in [url for url in urls if url not in present]:
                if url in leaving and not leaving[url].done():
                    continue  # this engine is added again once its removal is complete
                try:
                    present[url] = await self.add(url)
                    troubles.pop(url, None)
                except (AprilError, TimeoutError) as error:
                    self._warn(troubles, url, f"discover returned {url}, but it cannot join: {error}")

    @staticmethod
    def _warn(troubles: dict[str, str], of: str, what: str) -> None:
        if troubles.get(of) != what:
            log.warning("%s", what)
            troubles[of] = what


def _retrieve_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()  # keeps asyncio from logging it: the engine is gone already, or the scheduler has stopped


def _call(discover: Callable[[], Any]) -> Any:
    found = discover()
    return list(found) if isinstance(found, Iterator) else found  # a generator runs here, in the thread


async def urls_of(discover: Discover) -> list[str]:
    """Call ``discover`` and return its addresses without duplicates; raises ConfigError if the result is not a list."""
    try:
        found: Any = await discover() if is_async(discover) else await run_in_thread(_call, discover)  # type: ignore[misc]
    except asyncio.CancelledError as error:
        raise own_cancellation(error) from None
    except Exception:
        raise
    except BaseException as error:  # wrapped, as it would end the event loop
        raise RolloutError(f"it raised {describe(error)}") from error
    if isinstance(found, str) or not isinstance(found, Iterable):
        raise ConfigError(f"discover must return a list of addresses, got {type(found).__name__}")
    return list(dict.fromkeys(checked_url(str(url)) for url in found))


async def open_found(config: Config, discover: Discover) -> dict[str, Engine]:
    """Connect to the discovered servers at the start of a run; returns engines by address.

    Servers that do not answer are left out and tried again later.

    Raises:
        ConfigError: there is no server, or a server that can never be used.
        EngineError: no server answers.
    """
    urls = await urls_of(discover)
    if not urls:
        raise ConfigError("discover returned no address, but a run needs at least one engine to begin")
    results = await asyncio.gather(*(open_server(config.engine, url) for url in urls), return_exceptions=True)
    engines = {url: result for url, result in zip(urls, results, strict=True) if not isinstance(result, BaseException)}
    errors = [result for result in results if isinstance(result, BaseException)]
    fatal = [error for error in errors if not isinstance(error, EngineError)]
    if fatal or not engines:
        for engine in engines.values():
            await engine.close()
        raise (fatal or errors)[0]
    for error in errors:
        log.warning("a server that discover returned is left out for now: %s", error)
    return engines
