"""Tracks the SGLang servers behind slime's router: their addresses, weight labels, and slime's weight updates."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from april.engines.http.http_client import HttpClient, weight_version
from april.engines.protocol import Engine
from april.engines.sglang.engine import SglangEngine
from april.engines.sglang.router import router_workers
from april.errors import ConfigError, EngineError

UNLABELLED = (None, "default")
"""Values of ``weight_version`` that a server reports if the trainer has not labelled its weights."""

class ServerWeights:
    """Detects new weights on the servers by their labels (``weight_version``), which slime sets at each update.

    Without labels, every rollout counts as having new weights. ``router`` is None if there are no servers, and
    ``relabels`` is True if april's engines replace slime's labels by their own.
    """

    def __init__(self, router: str | None, rollout_id: int, *, relabels: bool) -> None:
        self._router, self._relabels = router, relabels
        self._last_id = rollout_id
        self.urls, self._seen = self._ask()
        """Addresses of the servers, and the labels that they reported last."""
        self._known = self._seen
        """Labels of the weights that april knows about."""
        self.labelled = any(label not in UNLABELLED for label in self._seen)
        """True if slime labels its weights, so that an unchanged label means unchanged weights."""

    def updated(self, rollout_id: int) -> bool:
        """Look up the servers, and return True if slime has updated the weights since the last rollout."""
        self.urls, self._seen = self._ask()
        self.labelled |= any(label not in (*UNLABELLED, *self._known) for label in self._seen)
        last, self._last_id = self._last_id, rollout_id
        return rollout_id != last and (not self.labelled or self._seen != self._known)

    def note_update(self) -> None:
        """Remember the labels of the current weights, because april has been told about these weights."""
        self._known = self._ask()[1] if self._relabels else self._seen

    def are_served(self) -> bool:
        """Return True if all servers answer and none is paused."""

        async def ready() -> bool:
            return all(await asyncio.gather(*map(_is_ready, self.urls)))

        return asyncio.run(ready())

    def _ask(self) -> tuple[tuple[str, ...], tuple[str | None, ...]]:
        return ((), ()) if self._router is None else asyncio.run(servers_behind(self._router))


async def servers_behind(router: str) -> tuple[tuple[str, ...], tuple[str | None, ...]]:
    """Return the sorted addresses of a router's servers, and their labels. Raises ConfigError or EngineError."""
    client = HttpClient(router, name="the router")
    try:
        urls = tuple(sorted(await router_workers(client)))
    finally:
        await client.close()
    if not urls:
        raise EngineError(f"the router {router} has no workers yet; slime starts them before it asks for a rollout")
    return urls, tuple(await asyncio.gather(*map(_label, urls)))


async def _label(url: str) -> str | None:
    client = HttpClient(url, name=url)
    try:
        return await weight_version(client, "/model_info")
    except EngineError:
        return None
    finally:
        await client.close()


async def _is_ready(url: str) -> bool:
    client = HttpClient(url, name=url)
    try:
        return (await client.call("GET", "/ready", timeout_s=10.0)).ok
    except EngineError:
        return False
    finally:
        await client.close()


POLL_S = 0.1
"""Seconds between two checks whether slime's weight update is over."""


class SlimeUpdates:
    """Starts a weight update in april, in a thread, whenever slime pauses its servers to change their weights.

    Updates run one at a time, and none starts while slime asks for a rollout. ``update(wait)`` tells april about the
    new weights; ``wait`` is a function for it to call, which returns once slime has written them.

    Raises ConfigError for an engine that is not one of slime's SGLang servers.
    """

    def __init__(
        self, engines: Sequence[Engine], weights: ServerWeights, update: Callable[[Callable[[], None]], None]
    ) -> None:
        self._weights, self._update = weights, update
        weights.labelled = True
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._held = self._closed = False
        self._engines: list[SglangEngine] = []
        for engine in engines:
            if not isinstance(engine, SglangEngine):
                raise ConfigError(
                    f"april.generation=continuous needs slime's SGLang servers, and {engine.name} is none; leave it out"
                )
            engine.on_foreign_pause = self._begin
            self._engines.append(engine)

    @contextmanager
    def caught_up(self) -> Iterator[None]:
        """Wait for the running update, and start none inside the block. Raises the error if the update failed."""
        with self._lock:
            thread, self._thread, self._held = self._thread, None, True
            self._over.set()
        try:
            if thread is not None:
                thread.join()
            error, self._error = self._error, None
            if error is not None:
                raise error
            yield
        finally:
            with self._lock:
                self._held = False
            if any(engine.is_paused_by_others for engine in self._engines):  # slime has begun an update in the block
                self._begin()

    def end(self) -> None:
        """Start no further updates. A running update ends with the scheduler; :meth:`join` waits for it."""
        with self._lock:
            self._closed = True
            self._over.set()

    def join(self) -> None:
        """Wait until the thread of the last update has ended."""
        if self._thread is not None:
            self._thread.join()

    def _begin(self) -> None:
        with self._lock:
            if not (self._held or self._closed) and (self._thread is None or not self._thread.is_alive()):
                self._over.clear()
                self._thread = threading.Thread(target=self._follow, name="april follows an update", daemon=True)
                self._thread.start()

    def _follow(self) -> None:
        try:
            self._update(self._until_over)
            self._weights.note_update()
        except BaseException as error:
            self._error = error

    def _until_over(self) -> None:
        """Wait until all servers run again, or until slime asks for a rollout although some servers do not run."""
        while not self._weights.are_served() and not self._over.wait(POLL_S):
            pass
