"""Prometheus: the metrics of the latest batch, for a server that comes and asks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from april.errors import ConfigError
from april.export.texts import SampleText
from april.extras import require

_ENGINE = re.compile(r"engine/(?P<engine>.*)/(?P<name>\w+)", re.DOTALL)


class Prometheus:
    """Answers at ``http://host:port/metrics`` with gauges ``april_NAME``; those of an engine have a label ``engine``.

    Args:
        port: 0: any, see :attr:`port`.
        host: this machine alone can ask, unless you give another address; nobody has to say who they are.

    Raises:
        ConfigError: prometheus_client is not installed, or the port is taken.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        require("april.export.Prometheus", "prometheus_client", extra=None)
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry = CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._of_engines: set[tuple[str, str]] = set()
        """Gauge and engine."""
        self._step = self._gauge("april_step", "number of the latest batch")
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=self._registry)
        except OSError as error:
            raise ConfigError(f"Prometheus cannot listen at {host}:{port}: {error.strerror}") from None
        self.port: int = self._server.server_port
        """Where it listens."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """The gauges say this from now on; an engine that has left says nothing any more."""
        self._step.set(step)
        there = set()
        for name, value in metrics.items():
            if (of := _ENGINE.fullmatch(name)) is not None:
                gauge = f"april_engine_{of['name']}"
                there.add((gauge, of["engine"]))
                self._gauge(gauge, f"{of['name']} of each engine", "engine").labels(of["engine"]).set(value)
            else:
                self._gauge("april_" + re.sub(r"\W", "_", name), f"{name} of the latest batch").set(value)
        for gauge, engine in self._of_engines - there:
            self._gauges[gauge].remove(engine)
        self._of_engines = there

    def log_texts(self, texts: Sequence[SampleText], step: int) -> None:
        """There is no place for text."""

    def close(self) -> None:
        """It does not answer any more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, name: str, what: str, *labels: str) -> Any:
        from prometheus_client import Gauge

        if name not in self._gauges:
            self._gauges[name] = Gauge(name, what, labels, registry=self._registry)
        return self._gauges[name]
