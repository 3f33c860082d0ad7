"""The SGLang servers behind slime's router, what they call their weights, and whether these are new."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from april.core.versions import PolicyVersion
from april.engines.http.http_client import HttpClient
from april.engines.http.wire import NotJson, read_json
from april.engines.protocol import Engine
from april.engines.sglang.engine import SglangEngine
from april.engines.sglang.router import router_workers
from april.errors import ConfigError, EngineError

UNLABELLED = (None, "default")
"""Labels of weights that nobody has labelled."""
NAMED_VERSIONS = 1000
"""So many are remembered by name."""


class Weights:
    """The weights that the servers have: the trainer labels them at updates, or every rollout has new ones.

    Args:
        router: address of slime's router; None means that there are no servers to ask.
        relabels: april writes labels of its own, over the trainer's.
        rollout_id: that of the first rollout.
    """

    def __init__(self, router: str | None, rollout_id: int, *, relabels: bool) -> None:
        self._router, self._relabels = router, relabels
        self._last_id = rollout_id
        self._given: int | None = None
        """The version that the trainer has said last."""
        self.names: dict[PolicyVersion, tuple[str, int]] = {}
        """Slime's name for the weights of a version, and the rollout that began under it."""
        self.urls, self._seen = self._ask()
        """The servers' addresses, and the labels that they show now."""
        self._said, self._known = self._seen, self._seen
        """The label by which the trainer knows its weights, and those that april knew of after its own update."""
        self.labelled = any(label not in UNLABELLED for label in self._seen)
        """The trainer labels them, so the same label means the same weights."""

    def updated(self, rollout_id: int, given: int | None) -> bool:
        """Return whether the trainer has updated them since the last rollout; ``urls`` are looked up anew.

        ``given``: their version, where the trainer says it; else the servers' labels tell.
        """
        self.look()
        if given is not None:
            self._said = (str(given),)
        last, self._last_id, before, self._given = self._last_id, rollout_id, self._given, given
        if rollout_id == last:
            return False
        if given is not None:
            return given != before
        return not self.labelled or self._seen != self._known

    def look(self) -> None:
        """Ask the servers for their labels, and the router for the servers."""
        self.urls, self._seen = self._ask()
        self._said = self._seen
        self.labelled |= any(label not in (*UNLABELLED, *self._known) for label in self._seen)

    def are_served(self) -> bool:
        """Return whether no server is paused; one that does not answer is."""
        return asyncio.run(_all_ready(self.urls))

    @property
    def next_rollout(self) -> int:
        """That after the last one."""
        return self._last_id + 1

    def name(self, version: PolicyVersion, rollout_id: int) -> None:
        """Call ``version`` what the servers had when they were last asked; april's engines know it."""
        named = [label for label in self._said if label not in UNLABELLED]
        self.names[version] = (str(named[0] if named else rollout_id), rollout_id)
        for old in sorted(self.names)[:-NAMED_VERSIONS]:
            del self.names[old]
        self._known = self._ask()[1] if self._relabels else self._seen

    def _ask(self) -> tuple[tuple[str, ...], tuple[str | None, ...]]:
        return ((), ()) if self._router is None else asyncio.run(servers_behind(self._router))


async def servers_behind(router: str) -> tuple[tuple[str, ...], tuple[str | None, ...]]:
    """Addresses of the router's servers, sorted, and the labels of their weights; raises ConfigError, EngineError."""
    client = HttpClient(router, name="the router")
    try:
        urls = tuple(sorted(await router_workers(client)))
    finally:
        await client.close()
    if not urls:
        raise EngineError(f"the router {router} has no workers yet; slime starts them before it asks for a rollout")
    return urls, tuple(await asyncio.gather(*map(_label, urls)))


async def _all_ready(urls: Sequence[str]) -> bool:
    return all(await asyncio.gather(*map(_ready, urls)))


async def _ready(url: str) -> bool:
    return await _answer(url, "/ready") is not None


async def _label(url: str) -> str | None:
    """The label of a server's weights; None if it does not say it, or is not there."""
    body = await _answer(url, "/model_info", "/get_model_info", retry=True)
    try:
        said = None if body is None else read_json(body)
    except NotJson:
        return None
    label = said.get("weight_version") if isinstance(said, dict) else None
    return None if label is None else str(label)


async def _answer(url: str, *routes: str, retry: bool = False) -> bytes | None:
    """The body of the first route that a server has; None if it has none, or is not there."""
    client = HttpClient(url, name=url)
    try:
        for route in routes:
            reply = await client.call("GET", route, timeout_s=10.0, retry=retry)
            if reply.ok:
                return reply.body
    except EngineError:
        pass
    finally:
        await client.close()
    return None


LOOK_S = 0.1
"""Seconds between two looks at whether slime's update is over."""


class FollowedUpdates:
    """Updates of slime, followed one at a time in a thread, and never while slime asks for a rollout.

    Args:
        engines: of april's scheduler.
        weights: at the servers.
        update: april's update, given what to wait for while its engines are paused; returns the version.
        done: told the version, after the weights were looked at.

    Raises ConfigError for a server that does not say whose weights it has, and an engine that is no server of slime's.
    """

    def __init__(
        self, engines: Sequence[Engine], weights: Weights, update: Callable[[Callable[[], None]], PolicyVersion],
        done: Callable[[PolicyVersion], None],
    ) -> None:  # fmt: skip
        self._weights, self._update, self._done = weights, update, done
        weights.labelled = True
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._held = self._closed = False
        self._engines: list[SglangEngine] = []
        for engine in engines:
            if not isinstance(engine, SglangEngine) or engine.facts.label is None:
                raise ConfigError(
                    "april.generation=continuous needs slime's SGLang servers, of a version that says which weights "
                    f"made a token (/model_info, weight_version), and {engine.name} is none; leave it out"
                )
            engine.on_foreign_pause = self._begin
            self._engines.append(engine)

    @contextmanager
    def caught_up(self) -> Iterator[None]:
        """Enter when april's update is over, as slime's is; what is found new inside is the caller's.

        Raises what april's update has raised.
        """
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
            if any(engine.is_paused_by_others for engine in self._engines):  # and the caller has found nothing new
                self._begin()

    def end(self) -> None:
        """Follow none any more; one that is being followed ends with the scheduler, see :meth:`join`."""
        with self._lock:
            self._closed = True
            self._over.set()

    def join(self) -> None:
        """The thread has ended."""
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
            self._done(self._update(self._until_over))
        except BaseException as error:
            self._error = error

    def _until_over(self) -> None:
        """The servers go on, or slime does, which may be down to a broken server."""
        while not self._weights.are_served() and not self._over.wait(LOOK_S):
            pass
        self._weights.look()
