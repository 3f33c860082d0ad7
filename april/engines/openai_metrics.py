"""What a server's Prometheus page says that april can use: when its process began, and its load."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from april.engines.http_client import HttpClient
from april.engines.protocol import EngineLoad
from april.errors import EngineError

_STARTED = "process_start_time_seconds"
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USAGE = "vllm:kv_cache_usage_perc"
_PREEMPTIONS = "vllm:num_preemptions_total"


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """None: the page does not say it."""

    started_s: float | None = None
    """When the server's process began, seconds since 1970; another value means another process."""
    load: EngineLoad | None = None


async def read_metrics(client: HttpClient) -> ServerMetrics:
    """Of ``GET /metrics``; empty if there is no such page."""
    try:
        reply = await client.call("GET", "/metrics", retry=True)
    except EngineError:
        return ServerMetrics()
    return parse_metrics(reply.body.decode("utf-8", "replace").splitlines()) if reply.ok else ServerMetrics()


def parse_metrics(lines: Iterable[str]) -> ServerMetrics:
    """Values of the same name, one per engine, are added; for the share of memory the largest counts."""
    values: dict[str, list[float]] = {name: [] for name in (_STARTED, _RUNNING, _WAITING, _KV_USAGE, _PREEMPTIONS)}
    for line in lines:
        name = line.split("{", 1)[0].split(" ", 1)[0]
        if name in values:
            try:
                values[name].append(float(line.rsplit(" ", 1)[1]))
            except ValueError:
                continue
    load = None
    if values[_RUNNING] and values[_WAITING]:
        running, waiting, preemptions = (int(sum(values[name])) for name in (_RUNNING, _WAITING, _PREEMPTIONS))
        load = EngineLoad(running, waiting, max(values[_KV_USAGE], default=0.0), preemptions)
    return ServerMetrics(min(values[_STARTED], default=None), load)
