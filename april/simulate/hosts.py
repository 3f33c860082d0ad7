"""Simulated engines on hosts: what the core asks of them and what they report crosses as frames, and that takes time.

Desks, mirrors and frames are those of real hosts (:mod:`april.processes`); only the network is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from heapq import heappop, heappush
from typing import Any

from april.core import commands as do
from april.core import events as ev
from april.core.sampling import SamplingParams
from april.core.state import RolloutCore
from april.core.types import SampleId
from april.engines.simulated.clockwork import SimulatedDecoder
from april.errors import InvariantError
from april.processes.desk import HostDesk
from april.processes.messages import Message, Welcome
from april.processes.mirror import Forgotten, Mirror
from april.simulate.engines import SimulatedEngines


class SimulatedHosts:
    """All hosts of a simulation; the same face as :class:`SimulatedEngines`.

    Args:
        core: of which the desks are.
        decoders: by ``host/engine``.
        sampling: of all requests.
        latency_s: of a frame, either way.
        turn: carries out one turn of the core's process.
        length, now, post: as for :class:`SimulatedEngines`.
    """

    def __init__(
        self,
        core: RolloutCore,
        decoders: dict[str, SimulatedDecoder],
        sampling: SamplingParams,
        *,
        latency_s: float,
        turn: Callable[[Callable[[], None]], None],
        length: Callable[[SampleId], int],
        now: Callable[[], float],
        post: Callable[[ev.Event], None],
    ) -> None:
        self._latency_s, self._now, self._post, self._turn = latency_s, now, post, turn
        self._mail: list[tuple[float, int, Callable[[bytes], None], bytes]] = []
        """Heap of the frames on their way: when they arrive, in which order they were sent, where."""
        self._sent = 0
        self._hosts: dict[str, _Host] = {}
        for host in dict.fromkeys(name.partition("/")[0] for name in decoders):
            its = {n.partition("/")[2]: d for n, d in decoders.items() if n.startswith(f"{host}/")}
            self._hosts[host] = _Host(core, host, its, sampling, length, now)
        self._spoken_to: dict[str, _Host] = {}
        """Those for which the next frame has something."""
        commands = (do.Submit, do.Abort, do.PauseEngine, do.LoadEngine, do.ResumeEngine)
        self.executors: dict[type[do.Command], Callable[[Any], None]] = {
            **dict.fromkeys(commands, self._for_engine),
            do.Submit: self._submit,
        }

    @property
    def desks(self) -> list[HostDesk]:
        """They count frames, messages and bytes."""
        return [host.desk for host in self._hosts.values()]

    # ---------------------------------------------------------------- in the core's process

    def _submit(self, command: do.Submit) -> None:
        self._to(command.attempt.engine, command)

    def _for_engine(self, command: Any) -> None:
        self._to(command.engine, command)

    def _to(self, engine: str, command: do.HostCommand) -> None:
        name = engine.partition("/")[0]
        host = self._spoken_to[name] = self._hosts[name]
        host.desk.execute(command)

    def delivered(self, samples: Iterable[SampleId]) -> None:
        """These are in a batch: their hosts forget them, with the next frame."""
        ids = list(samples)
        for name, host in self._hosts.items():
            host.desk.forget(ids)
            self._spoken_to[name] = host

    def flush(self) -> None:
        """The core's turn is over: what hosts are told goes out."""
        for host in self._spoken_to.values():
            if (frame := host.desk.take()) is not None:
                self._send(partial(self._arrived, host), frame)
        self._spoken_to.clear()

    def _reported(self, host: _Host, frame: bytes) -> None:
        for event in host.desk.receive(frame):
            self._post(event)

    # ---------------------------------------------------------------- on the hosts, and between them and the core

    @property
    def next_s(self) -> float:
        """When an engine has its next event, or a frame arrives; inf: neither will."""
        at = min(host.engines.next_s for host in self._hosts.values())
        return min(at, self._mail[0][0]) if self._mail else at

    def go_on(self) -> None:
        """It is that time; frames come before engines."""
        now = self._now()
        if self._mail and self._mail[0][0] <= now:
            _, _, arrived, frame = heappop(self._mail)
            arrived(frame)
            return
        for host in self._hosts.values():
            if host.engines.next_s <= now:
                host.engines.go_on()
                self._report(host)
                return

    def catch_up(self) -> None:
        """All clocks to now."""
        for host in self._hosts.values():
            host.engines.catch_up()
            self._report(host)

    def tokens_in_flight(self) -> list[tuple[SampleId, int]]:
        """What running requests have that no tape of the core has yet."""
        return [entry for host in self._hosts.values() for entry in host.engines.tokens_in_flight()]

    def _send(self, arrived: Callable[[bytes], None], frame: bytes) -> None:
        self._sent += 1
        heappush(self._mail, (self._now() + self._latency_s, self._sent, arrived, frame))

    def _arrived(self, host: _Host, frame: bytes) -> None:
        for command in host.mirror.receive(frame):
            if not isinstance(command, (Forgotten, Message)):  # nobody asks, and nothing is kept
                host.engines.executors[type(command)](command)
        self._report(host)

    def _report(self, host: _Host) -> None:
        if (frame := host.mirror.take()) is not None:
            self._send(lambda frame: self._turn(lambda: self._reported(host, frame)), frame)


class _Host:
    """Both ends of one host, and its engines."""

    def __init__(
        self,
        core: RolloutCore,
        name: str,
        decoders: dict[str, SimulatedDecoder],
        sampling: SamplingParams,
        length: Callable[[SampleId], int],
        now: Callable[[], float],
    ) -> None:
        table, settings = core.engines, core.settings
        limits = [table.states[f"{name}/{engine}"].limits for engine in decoders]
        self.desk = HostDesk(core, name, limits, functions=False, failed=_failed)
        self.mirror = Mirror(
            Welcome(
                name=name, version=core.clock.current, eos_token_ids=tuple(table.eos_token_ids),
                vocab_size=table.vocab_size, max_context=table.max_context,
                max_response_len=settings.max_response_len, abort_resend_s=settings.abort_resend_s,
                abort_deadline_s=settings.abort_deadline_s, heartbeat_s=math.inf, deadline_s=math.inf,
                sampling=sampling,
                any_temperature=False, allow_mismatch=False, function_timeout_s=None, stall_timeout_s=None,
            )
        )  # fmt: skip
        self.engines = SimulatedEngines(
            decoders, length=length, longest=settings.max_response_len, now=now,
            version=lambda: self.mirror.current, post=self.mirror.post,
        )  # fmt: skip


def _failed(call: int, error: BaseException) -> None:
    raise InvariantError(f"a simulated engine refused call {call}: {error}")
