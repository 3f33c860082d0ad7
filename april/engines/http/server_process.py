"""Finds out whether answers come from the process that was given the present weights, and assumes nothing.

A server that is started anew has the weights of its start. One with labels shows it; another by the time at which its
process began, if its metrics say that; of one that says neither, april knows only that its port was found closed.
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
from april.engines.http.server_probe import PROBE_S
from april.engines.protocol import EngineLoad
from april.errors import EngineError

log = logging.getLogger("april")

class OwnPauses:
    """Pauses by which april ends requests at a server, one at a time: the end of another would end this one."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()
        self.begun = 0
        """So many; a request that was sent before the latest may have been ended, or refused, by it."""

    @property
    def now(self) -> bool:
        """Return whether one is under way."""
        return self._one.locked()

    async def over(self) -> None:
        """Until none is."""
        async with self._one:
            pass

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """The time of one of them."""
        async with self._one:
            self.begun += 1
            yield


Call = Callable[[], Coroutine[Any, Any, object]]


@asynccontextmanager
async def while_paused(pause: Call, resume: Call) -> AsyncIterator[None]:
    """``pause`` before, ``resume`` after, also where the pause fails or is cancelled: the server may have taken it.

    Neither call is cut off in the middle, for a resumption that overtakes its pause resumes nothing. Raises EngineError
    if the server cannot be paused or, where nothing else is raised, not be resumed.
    """
    pausing = asyncio.ensure_future(pause())
    try:
        await asyncio.shield(pausing)
        yield
    except BaseException:
        try:
            await asyncio.shield(_undo(pausing, resume))
        except EngineError as error:
            log.warning("a server that was paused may stand still now: %s", error)
        raise
    await asyncio.shield(resume())


async def _undo(pausing: asyncio.Future[object], resume: Call) -> None:
    await asyncio.wait([pausing])
    if not pausing.cancelled():
        pausing.exception()  # whoever waits has it, or was cancelled
    await resume()


_KIND_OF = {
    "process_start_time_seconds": "started",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:num_preemptions_total": "preemptions",
    "trtllm_num_requests_running": "running",
    "trtllm_num_requests_waiting": "waiting",
    "trtllm_kv_cache_utilization": "kv_usage",
}
"""The metrics by their names in vLLM and in TensorRT-LLM."""

MAX_PAGE_BYTES = 8 << 20
"""Largest page that is read; that of a server with many models has some hundred KB."""


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """None: the page does not say it."""

    started_s: float | None = None
    """The time when the server's process began, seconds since 1970; another value means another process."""
    load: EngineLoad | None = None


async def has_metrics(client: HttpClient, route: str) -> bool:
    """Return whether the server has such a page."""
    return (await client.call("GET", route, timeout_s=PROBE_S, retry=True, limit=MAX_PAGE_BYTES)).ok


async def read_metrics(client: HttpClient, route: str | None = "/metrics") -> ServerMetrics:
    """Read this page; the result is empty if there is none."""
    if route is None:
        return ServerMetrics()
    try:
        reply = await client.call("GET", route, retry=True, limit=MAX_PAGE_BYTES)
    except EngineError:
        return ServerMetrics()
    return parse_metrics(reply.body.decode("utf-8", "replace").splitlines()) if reply.ok else ServerMetrics()


def parse_metrics(lines: Iterable[str]) -> ServerMetrics:
    """Read a page. Values of one name are added, of memory shares the largest counts; only finite ones >= 0 do."""
    values: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        kind = _KIND_OF.get(line.split("{", 1)[0].split(" ", 1)[0])
        if kind is None:
            continue
        try:
            value = float(line.rsplit(" ", 1)[1])
        except ValueError:
            continue
        if 0 <= value < math.inf:
            values[kind].append(value)
    load = None
    if values["running"] and values["waiting"]:
        running, waiting, preemptions = (int(sum(values[kind])) for kind in ("running", "waiting", "preemptions"))
        load = EngineLoad(running, waiting, max(values["kv_usage"], default=0.0), preemptions)
    return ServerMetrics(min(values["started"], default=None), load)


PAUSE_CHECK_S = 5.0
"""Longest wait for a server to say which process it is, while it is paused: a hung one shall not hold up an update."""
CHECKS_APART_S = 0.1
"""Seconds between two looks for the sake of answers: a metrics page costs its server some milliseconds."""
PATIENCE_S = 10.0
"""The time for which answers are held back while the server does not say which process it is."""
AGAIN_S = 0.5
"""Seconds between two such questions."""

UNSAID = "its metrics do not say whether it is still the process that was given the present weights"

Check = Callable[[], Awaitable[bool | None]]
"""True if the server has the present weights; None: it does not say."""


class ServerProcess:
    """The process behind one address, as its metrics tell it apart from the next one.

    Args:
        route: of the metrics; None means that there are none that may be asked.
        started_s: when it began, at the connection; None means that it does not say.
        start_is_known: a new process has the weights that this one had at the connection.
    """

    def __init__(
        self, client: HttpClient, route: str | None, started_s: float | None, *, start_is_known: bool = True
    ) -> None:
        self._client = client
        self._route = route
        self._present = self._seen = started_s
        self._refusals = client.refusals
        self._paused: tuple[float | None, int] | None = None
        self._start_is_known = self.keeps_weights = start_is_known
        """A process that is started anew has the present weights too: they are those of the start."""

    async def check(self) -> tuple[bool | None, ServerMetrics]:
        """Return whether it is the one that has the present weights (None: it does not say), and its metrics."""
        metrics = await read_metrics(self._client, self._route)
        if self._present is None:
            return self.keeps_weights or self._client.refusals == self._refusals, metrics
        if metrics.started_s is None:
            return (True if self.keeps_weights else None), metrics
        self._seen = metrics.started_s
        return metrics.started_s == self._present, metrics

    async def pause(self) -> None:
        """Remember the process: the trainer may write weights into it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PAUSE_CHECK_S):
                metrics = await read_metrics(self._client, self._route)
                self._seen = metrics.started_s or self._seen
        self._paused = self._seen, self._client.refusals

    def resume(self) -> None:
        """Forget the paused process: nobody writes any more."""
        self._paused = None

    async def take(self, version: PolicyVersion) -> None:
        """Record that the paused process has the weights ``version``; raises EngineError if it is another one now."""
        now = (await read_metrics(self._client, self._route)).started_s
        paused, refusals = self._paused or (now or self._seen, self._client.refusals)
        gone = self._client.refusals != refusals if paused is None else now not in (None, paused)
        if gone:
            raise EngineError(
                f"{self._client.url} was started anew while weights were handed over, and may have those of its start; "
                "hand them over again"
            )
        self._present = self._seen = now or paused
        self._refusals = self._client.refusals
        self.keeps_weights = self._start_is_known and version == FIRST_VERSION


class Confirmation:
    """Answers wait here until the server was seen to have the present weights after they had begun.

    Whoever answers on a port before and after such a check is the process that was seen: one check is enough for all
    streams that had begun by then, whatever it says.
    """

    def __init__(self, check: Check, name: str, needed: Callable[[], bool] = lambda: True) -> None:
        self.needed = needed
        """True if answers have to wait at all."""
        self._check = check
        self._name = name
        self._confirmed_s = -math.inf
        """The time when the last check began that has seen them."""
        self._checked_s = -math.inf
        """The time when the last check of all began."""
        self._same: bool | None = None
        """The outcome of that check."""
        self._one = asyncio.Lock()

    async def since(self, began_s: float, *, broken: Callable[[], bool] = lambda: False) -> None:
        """Wait for a check that began at ``began_s`` (loop time) or later and saw the weights.

        Raises EngineError for other weights, or where the server says none for PATIENCE_S or once the answer is
        ``broken``.
        """
        loop = asyncio.get_running_loop()
        deadline, heard_s = loop.time() + PATIENCE_S, -math.inf
        while True:
            async with self._one:
                if self._confirmed_s >= began_s:
                    return
                if self._checked_s < began_s or self._checked_s <= heard_s:
                    await self._check_once()
                if self._confirmed_s >= began_s:
                    return
                heard_s, same = self._checked_s, self._same
            if same is False:
                raise EngineError(
                    f"engine {self._name} was started anew and has not the weights that it was given; its answers are "
                    "not used"
                )
            if same is None and (loop.time() >= deadline or broken()):
                raise EngineError(
                    f"engine {self._name} has not said whether it is still the process that was "
                    "given the present weights (its metrics fail); answers of unknown weights are not used"
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
