"""What a server's Prometheus page says that april can use: when its process began, and its load."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from april.engines.http.http_client import HttpClient
from april.engines.http.server_probe import PROBE_S
from april.engines.protocol import EngineLoad
from april.errors import EngineError

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
"""By the names of vLLM and of TensorRT-LLM."""

MAX_PAGE_BYTES = 8 << 20
"""Largest page that is read; that of a server with many models has some hundred KB."""


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """None: the page does not say it."""

    started_s: float | None = None
    """When the server's process began, seconds since 1970; another value means another process."""
    load: EngineLoad | None = None


async def has_metrics(client: HttpClient, route: str) -> bool:
    """Whether there is such a page."""
    return (await client.call("GET", route, timeout_s=PROBE_S, retry=True, limit=MAX_PAGE_BYTES)).ok


async def read_metrics(client: HttpClient, route: str | None = "/metrics") -> ServerMetrics:
    """Of this page; empty if there is none."""
    if route is None:
        return ServerMetrics()
    try:
        reply = await client.call("GET", route, retry=True, limit=MAX_PAGE_BYTES)
    except EngineError:
        return ServerMetrics()
    return parse_metrics(reply.body.decode("utf-8", "replace").splitlines()) if reply.ok else ServerMetrics()


def parse_metrics(lines: Iterable[str]) -> ServerMetrics:
    """Values of the same name, one per engine, are added; for the share of memory the largest counts.

    What is no finite number >= 0 is passed over.
    """
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
