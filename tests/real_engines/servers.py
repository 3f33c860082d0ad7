"""Server processes: started together, waited for, shown when they fail, and always stopped.

Invariant: every server is the leader of a process group of its own, and leaving the ``with`` block kills that group: no
process of it survives, whatever happened inside.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from pydantic import TypeAdapter

from april.config.engines import EngineConfig
from april.engines.kinds.factory import open_servers
from april.engines.protocol import Engine
from tests.real_engines.environments import CannotInstall

START_S = 600.0
"""Longest start; a minute or two on two cores."""
STOP_S = 15.0
TOLD_EVERY_S = 15.0
SHOWN_LINES = 30


KEEP_ALIVE = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600", "SGLANG_TIMEOUT_KEEP_ALIVE": "3600"}
"""Seconds, more than any training step takes. Both servers close an idle connection after 5 s, at worst with a request
on its way, which april survives, and the bare requests of a benchmark or of another trainer do not."""


class ServerFailed(Exception):
    """A server did not start; the message has the end of its log."""


class NotKept(Exception):
    """A promise is broken; the message says which."""


@dataclass(slots=True)
class Server:
    """One process that listens on ``port``, once it is :func:`ready`."""

    name: str
    command: Sequence[str]
    port: int
    log: Path
    ready: str
    """Path that answers 200 when the server takes requests."""
    environment: dict[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None
    _started: float = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def group(self) -> int:
        """Number of its process group; raises ServerFailed before it was started."""
        if self._process is None:
            raise ServerFailed(f"{self.name} was not started")
        return self._process.pid

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._started

    def start(self) -> None:
        """Start the process; its output goes to the log."""
        self._started = time.monotonic()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | KEEP_ALIVE | self.environment,
            )  # fmt: skip

    def is_ready(self) -> bool:
        """Whether it takes requests; raises ServerFailed if it has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise ServerFailed(f"{self.name} ended with status {self._process.returncode}:\n{self.last_lines()}")
        try:
            with urllib.request.urlopen(self.url + self.ready, timeout=5.0) as reply:  # noqa: S310 - our own server
                return bool(reply.status == 200)
        except OSError:  # nobody listens yet, or it says that it is not ready
            return False

    def kill(self) -> None:
        """``kill -9`` of all its processes."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def stop(self) -> None:
        """Ask it to end, then kill what is left of its group."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self.kill()

    def join(self, longest_s: float) -> None:
        """Wait for its end; raises subprocess.TimeoutExpired."""
        if self._process is not None:
            self._process.wait(longest_s)

    def metric(self, name: str, label: str = "") -> float:
        """Sum of a Prometheus metric over its series, or over those with this label."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30.0) as page:  # noqa: S310 - our own server
            rows = re.findall(rf"^{re.escape(name)}(?:{{([^}}]*)}})? (\S+)$", page.read().decode(), re.MULTILINE)
        return sum(float(value) for labels, value in rows if label in labels)

    def cpu_s(self, names: Sequence[str] = ("",)) -> float:
        """CPU seconds that its processes have used so far, of those whose command line has one of these names."""
        ticks = 0
        for process in Path("/proc").iterdir():
            try:
                fields = (process / "stat").read_text("utf-8").rpartition(")")[2].split()
                command = (process / "cmdline").read_bytes().decode(errors="replace")
            except OSError:  # no process, or one that has ended
                continue
            if process.name.isdecimal() and int(fields[2]) == self.group and any(name in command for name in names):
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def last_lines(self) -> str:
        with suppress(OSError):
            return "\n".join(self.log.read_text("utf-8", errors="replace").splitlines()[-SHOWN_LINES:])
        return ""


@contextmanager
def running(servers: Iterable[Server]) -> Iterator[None]:
    """Start servers, all at once, and stop them at the end."""
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.start()
        yield


def until_ready(servers: Sequence[Server]) -> None:
    """Wait for servers that were started.

    Raises:
        ServerFailed: one has ended, or was not ready in time.
    """
    began = told = time.monotonic()
    left = list(servers)
    while left:
        now = time.monotonic()
        for server in [s for s in left if s.is_ready()]:
            print(f"  {server.name}: ready after {server.age_s:.0f} s at {server.url}", flush=True)
            left.remove(server)
        if left and now - began > START_S:
            raise ServerFailed(f"{left[0].name} was not ready after {START_S:g} s:\n{left[0].last_lines()}")
        if left and now - told > TOLD_EVERY_S:
            told = now
            print(f"  waiting for {', '.join(s.name for s in left)}, {now - began:.0f} s so far", flush=True)
        time.sleep(0.5)


@contextmanager
def ready(*servers: Server) -> Iterator[None]:
    """Start servers, wait for them, and stop them at the end; raises ServerFailed."""
    with running(servers):
        until_ready(servers)
        yield


def free_port() -> int:
    """A port that nobody has; another one at every call."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    if port in _given:
        return free_port()
    _given.add(port)
    return port


_given: set[int] = set()


async def opened(settings: Mapping[str, Any]) -> Engine:
    """The engine before servers with these settings of ``engine``."""
    config: Any = TypeAdapter(EngineConfig).validate_python(settings)
    (engine,) = await open_servers(config)
    return engine


@contextmanager
def program(*errors: type[Exception]) -> Iterator[None]:
    """A check, which stops its servers at SIGTERM; its failures and ``errors`` are printed and end it with status 1."""
    import typer

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    expected: tuple[type[Exception], ...] = (CannotInstall, ServerFailed, NotKept, *errors)
    try:
        yield
    except expected as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def emptied(directory: Path) -> Path:
    """The directory, made anew."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def end(wrong: Sequence[str]) -> NoReturn:
    """Print what is wrong, and exit with 1 if anything is."""
    import typer

    for line in wrong:
        print(f"BROKEN: {line}", flush=True)
    raise typer.Exit(1 if wrong else 0)
