"""Checks that responses come from the server process that holds the present weights, and not from a restarted one.

A restarted server has the weights it was started with. A server with weight labels then shows another label; of others,
april compares the start time in their metrics. Without that, april notices a restart only if it found the port closed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.http.http_client import HttpClient
from april.engines.http.weight_labels import is_ours
from april.engines.protocol import EngineLoad
from april.errors import EngineError

log = logging.getLogger("april")


Call = Callable[[], Coroutine[Any, Any, object]]


@asynccontextmanager
async def while_paused(pause: Call, resume: Call) -> AsyncIterator[None]:
    """Run the body between ``pause`` and ``resume``; after a failed or cancelled pause the server is resumed too.

    Neither call is cut off halfway, because a resume that overtakes its pause has no effect. Raises EngineError if the
    server cannot be paused or resumed. If the body raises an error, a failed resume is only logged.
    """
    pausing = asyncio.ensure_future(pause())
    try:
        await asyncio.shield(pausing)
        yield
    except BaseException:
        try:
            await asyncio.shield(_undo(pausing, resume))
        except EngineError as error:
            log.warning("a server that was paused may still be paused now: %s", error)
        raise
    await asyncio.shield(resume())


def require_left_paused(url: str, label: str | None, load: EngineLoad | None, remedy: str) -> None:
    """Raise EngineError unless an april run has left this server paused; log that the server will be resumed.

    The signs of such a run are april's weight label and a server without requests. If the run still lives, resuming its
    server does no harm, because a run sends no requests while it has paused a server.
    """
    if not is_ours(label) or load is None or load.running or load.waiting:
        raise EngineError(f"{url} is paused; {remedy} and start the run again")
    log.warning("%s is paused, it has no requests, and april labelled its weights %s, so april resumes it", url, label)


async def _undo(pausing: asyncio.Future[object], resume: Call) -> None:
    await asyncio.wait([pausing])
    if not pausing.cancelled():
        pausing.exception()  # mark as retrieved: its error is already raised in the caller
    await resume()


_KIND_OF = {
    "process_start_time_seconds": "started",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:external_prefix_cache_queries_total": "connector",
    "trtllm_num_requests_running": "running",
    "trtllm_num_requests_waiting": "waiting",
    "trtllm_kv_cache_utilization": "kv_usage",
}
"""april's names of metrics, indexed by their names in vLLM and TensorRT-LLM."""

MAX_PAGE_BYTES = 8 << 20
"""Maximum bytes of a metrics page; a server with many models sends a few hundred KB."""


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """Values from a server's metrics page. None means that the page does not contain the value."""

    started_s: float | None = None
    """Time when the server's process began, in seconds since 1970; a new value means a new process."""
    load: EngineLoad | None = None
    asks_kv_connector: bool = False
    """True if the server has queried an external KV cache (one of vLLM's KV connectors)."""


async def read_metrics(client: HttpClient, route: str | None = "/metrics") -> ServerMetrics:
    """Read the metrics page; the result is empty if there is none."""
    if route is None:
        return ServerMetrics()
    try:
        reply = await client.call("GET", route, retry=True, limit=MAX_PAGE_BYTES)
    except EngineError:
        return ServerMetrics()
    return parse_metrics(reply.body.decode("utf-8", "replace").splitlines()) if reply.ok else ServerMetrics()


def parse_metrics(lines: Iterable[str]) -> ServerMetrics:
    """Parse a metrics page. Values of one name are added up, except KV usage, where the maximum counts.

    A line is a name, labels in braces if there are any, a value, and a timestamp in some pages. Only finite values >= 0
    count.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        name, *numbers = line.partition("{")[0].split() or [""]
        kind = _KIND_OF.get(name)
        if kind is None:
            continue
        if "{" in line:
            numbers = line.rpartition("}")[2].split()
        try:
            value = float(numbers[0])
        except (IndexError, ValueError):
            continue
        if 0 <= value < math.inf:
            values[kind].append(value)
    load = None
    if values["running"] and values["waiting"]:
        running, waiting, preemptions = (int(sum(values[kind])) for kind in ("running", "waiting", "preemptions"))
        load = EngineLoad(running, waiting, max(values["kv_usage"], default=0.0), preemptions)
    return ServerMetrics(min(values["started"], default=None), load, sum(values["connector"]) > 0)


PAUSE_CHECK_S = 5.0
"""Seconds to wait for the metrics of a paused server; a hung server must not hold up an update."""
CHECKS_APART_S = 0.1
"""Minimum seconds between two checks, because a metrics page costs the server some milliseconds."""
IDENTITY_TIMEOUT_S = 10.0
"""Seconds to hold responses back while the server does not say which process it is."""
AGAIN_S = 0.5
"""Seconds between two checks while the server does not say which process it is."""

UNSAID = "its metrics do not show whether it is still the process that got the current weights"

Check = Callable[[], Awaitable[bool | None]]
"""Function that returns whether the server has the present weights, or None if the server does not say."""


class ServerProcess:
    """Detects, by the start time in its metrics, whether a server's process was replaced by a new one.

    Args:
        started_s: Start time of the process when april connected, in seconds since 1970; None if it does not say.
        metrics_route: Route of the metrics; None if the server has none.
    """

    def __init__(self, client: HttpClient, started_s: float | None, metrics_route: str | None) -> None:
        self._client, self._metrics_route = client, metrics_route
        self._present = self._seen = started_s
        self._refusals = client.refusals
        self._paused: tuple[float | None, int] | None = None
        self.keeps_weights = True
        """True if a restarted process has the present weights too, because the server starts with them."""

    async def check(self) -> tuple[bool | None, ServerMetrics]:
        """Return whether the server has the present weights (None if that cannot be told), and its metrics."""
        metrics = await read_metrics(self._client, self._metrics_route)
        if self._present is None:
            return self.keeps_weights or self._client.refusals == self._refusals, metrics
        if metrics.started_s is None:
            return (True if self.keeps_weights else None), metrics
        self._seen = metrics.started_s
        return metrics.started_s == self._present, metrics

    async def pause(self) -> None:
        """Remember which process was paused, so that a restart before the trainer's weights arrive is noticed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PAUSE_CHECK_S):
                metrics = await read_metrics(self._client, self._metrics_route)
                self._seen = metrics.started_s or self._seen
        self._paused = self._seen, self._client.refusals

    def resume(self) -> None:
        """Forget which process was paused; the trainer writes no more weights."""
        self._paused = None

    async def note_weights(self, version: PolicyVersion) -> None:
        """Record that the paused process has the weights ``version``. Raises EngineError if it was replaced."""
        now = (await read_metrics(self._client, self._metrics_route)).started_s
        paused, refusals = self._paused or (now or self._seen, self._client.refusals)
        gone = self._client.refusals != refusals if paused is None else now not in (None, paused)
        if gone:
            raise EngineError(
                f"{self._client.url} was restarted while weights were handed over, and may have the weights of its "
                "start; hand them over again"
            )
        self._present = self._seen = now or paused
        self._refusals = self._client.refusals
        self.keeps_weights = version == FIRST_VERSION


class Confirmation:
    """Holds responses back until a check made after they began shows that the server has the present weights.

    Such a check also shows that the checked process sent the response, so one check decides for all responses that
    began before it, whether it succeeds or fails.
    """

    def __init__(self, check: Check, name: str, needed: Callable[[], bool] = lambda: True) -> None:
        self.needed = needed
        """Function that returns whether responses have to wait at all."""
        self._check = check
        self._name = name
        self._confirmed_s = -math.inf
        """Loop time when the last successful check began."""
        self._checked_s = -math.inf
        """Loop time when the last check began."""
        self._same: bool | None = None
        """Outcome of the last check."""
        self._check_lock = asyncio.Lock()

    async def wait_since(self, began_s: float, *, broken: Callable[[], bool] = lambda: False) -> None:
        """Wait for a successful check that began at ``began_s`` (loop time) or later.

        Raises EngineError if the server has other weights, or if it does not report its weights within
        IDENTITY_TIMEOUT_S. For a response that is already ``broken`` the second error is raised at once.
        """
        loop = asyncio.get_running_loop()
        deadline, heard_s = loop.time() + IDENTITY_TIMEOUT_S, -math.inf
        while True:
            async with self._check_lock:
                if self._confirmed_s >= began_s:
                    return
                if self._checked_s < began_s or self._checked_s <= heard_s:
                    await self._check_once()
                if self._confirmed_s >= began_s:
                    return
                heard_s, same = self._checked_s, self._same
            if same is False:
                raise EngineError(
                    f"engine {self._name} was restarted and does not have the weights that it was given; april drops "
                    "its answers"
                )
            if same is None and (loop.time() >= deadline or broken()):
                raise EngineError(
                    f"engine {self._name} has not reported whether it is still the process that got the current "
                    "weights (its metrics fail); april drops answers of unknown weights"
                )
            if same is None:
                await asyncio.sleep(AGAIN_S)

    async def _check_once(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._checked_s + CHECKS_APART_S - loop.time()))
        checked_s = loop.time()
        self._same = await self._check()
        self._checked_s = checked_s
        if self._same:
            self._confirmed_s = checked_s
