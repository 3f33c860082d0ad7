"""slime's weight updates while april's requests run (``generation: continuous``): noticed at the servers, followed.

slime tells nobody when it updates. It pauses its servers, which ends their requests; april's engine sees that, sends
nothing more, and its core makes an update of it: what was cut is continued under the new weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from april.adapters.slime.servers import Weights
from april.core.versions import PolicyVersion
from april.engines.protocol import Engine
from april.engines.sglang.engine import SglangEngine
from april.errors import ConfigError

LOOK_S = 0.1
"""Between two looks at whether slime's update is over."""


class FollowedUpdates:
    """At most one at a time, in a thread of its own, and none while slime asks for a rollout: it has updated by then.

    Args:
        engines: of april's scheduler.
        weights: at the servers.
        update: april's update, given what to wait for while its engines are paused; returns the version.
        done: told the version, after the weights were looked at.

    Raises:
        ConfigError: a server does not say whose weights it has, or an engine is no server of slime's.
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
        """slime goes on, so its update is over: enter when april's is; what is found new inside is the caller's.

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
