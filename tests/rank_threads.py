"""Ranks as threads of one process, over loopback sockets: each has a loop, a line and a scheduler of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import april
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.engine import SimulatedEngine
from april.engines.weight_transfer import TensorSpec
from april.processes.rank_scheduler import RankScheduler
from april.processes.rank_server import RankServer

PATIENCE_S = 60.0
"""Of a test that would hang."""
CONFIG = april.Config(rollout_batch_size=2, n_samples_per_prompt=3, max_response_len=9)


class Store:
    """As torch's: what rank 0 sets, the others wait for."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._there = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._there:
            self._values[key] = value.encode()
            self._there.notify_all()

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self._there:
            if not self._there.wait_for(lambda: all(k in self._values for k in keys), timeout.total_seconds()):
                raise TimeoutError

    def get(self, key: str) -> bytes:
        return self._values[key]


class OnePlace(april.Ranks):
    """Ranks of one process meet under one name: they count their groups together."""

    def rendezvous(self) -> Any:
        point = super().rendezvous()
        point._key = "ranks"
        return point


def engine() -> SimulatedEngine:
    """Responses of 3 to 8 tokens, in no time."""
    cost = DecodeCost(1e-5, 0.0, 0.0)
    return SimulatedEngine("e", cost, lambda r: 3 + sum(r.sample_key or (0, 0)) % 6, max_running=8)


class Taking(SimulatedEngine):
    """An engine that keeps the tensors that it is given."""

    def __init__(self, fails_at: str = "") -> None:
        made = engine()
        vars(self).update(vars(made))
        self._capabilities = replace(made.capabilities, takes_tensors=True, remote=True)
        self.coming: dict[str, Any] = {}
        self.weights: list[dict[str, Any]] = []
        """Those of each update that has come to its end."""
        self.fails_at = fails_at

    def reads(self, model: Any) -> bool:
        return False

    async def take(self, specs: Sequence[TensorSpec], tensors: Sequence[Any], last: bool) -> None:
        if any(spec.name == self.fails_at for spec in specs):
            raise april.EngineError("its memory is full")
        self.coming |= {spec.name: tensor.clone() for spec, tensor in zip(specs, tensors, strict=True)}
        if last:
            self.weights.append(self.coming)
            self.coming = {}


def reward(prompt: april.Prompt, response: april.Response) -> float:
    """Differs inside of groups."""
    return float(response.sample_id.index) + prompt.position / 8


def cut(rollouts: RankScheduler) -> None:
    """What the others see when this rank's process is killed."""
    server, client = rollouts._server, rollouts._client
    if server is None:
        connector: Any = client._http and client._http.connector
        client.thread.call(lambda: [connection.transport.abort() for connection in connector._acquired])
    else:
        cut_server(server)


def cut_server(server: RankServer) -> None:
    """What ranks see when the process of the server is killed."""
    listener: Any = server._listener

    def end() -> None:
        listener._server.close()
        for connection in listener._runner.server.connections:
            connection.transport.abort()

    server.thread.call(end)


def begun(program: Callable[[], Any]) -> Future[Any]:
    """Begin a program in a thread of its own; the future has what it returns or raises."""
    outcome = Future[Any]()

    def run() -> None:
        try:
            outcome.set_result(program())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def beside(*programs: Callable[[], Any]) -> list[Any]:
    """What each returns or raises, all at the same time."""
    outcomes = [begun(program) for program in programs]
    assert not wait(outcomes, PATIENCE_S).not_done, f"one hangs: {outcomes}"
    return [outcome.exception() or outcome.result() for outcome in outcomes]


async def until(there: Callable[[], bool]) -> None:
    """Wait on a loop of april's until something is so."""
    while not there():  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0)


Program = Callable[[RankScheduler, int], Any]


def run_ranks(
    program: Program, world_size: int = 2, *, timeouts: dict[str, float] | None = None,
    data: dict[int, int] | None = None, data_size: int | None = None, prompts: Any = None, configs: Any = None,
    engines: Callable[[int], Any] = lambda rank: None if rank else [engine()],
    given: Callable[[int], dict[str, Any]] = lambda rank: {}, **options: Any,
) -> list[Any]:  # fmt: skip
    """What ``program`` returns or raises on each rank, inside of the ranks' ``with`` blocks.

    ``given``: arguments of one rank; ``options``: of all.
    """
    store = Store()
    drawn = [[1 + i, 2] for i in range(8)] if prompts is None else prompts
    seen: dict[str, Any] = {"reward": reward} | options

    def live(rank: int) -> Any:
        own = {"engines": engines(rank)} | ({} if rank else {"prompts": drawn}) | given(rank)
        config = CONFIG if configs is None else configs[rank]
        place = {} if data is None else {"data_rank": data[rank], "data_size": data_size or len(set(data.values()))}
        ranks = OnePlace(
            rank=rank, world_size=world_size, address="127.0.0.1:0", store=store, **place, **(timeouts or {})
        )
        with RankScheduler(ranks=ranks, **({"config": config} | seen | own)) as rollouts:
            return program(rollouts, rank)

    return beside(*(partial(live, rank) for rank in range(world_size)))


def drain(rollouts: RankScheduler) -> tuple[list[april.Batch], str]:
    """All batches, each trained, and the words of the end."""
    batches = []
    while True:
        try:
            batches.append(rollouts.next_batch())
        except april.DataExhausted as end:
            return batches, str(end)
        rollouts.weight_update(trained=batches[-1].id)


def names_of(batch: april.Batch) -> list[april.SampleId]:
    return [s.id for s in batch.samples]


def raised(outcome: Any) -> april.RankError:
    assert type(outcome) is april.RankError, outcome
    return outcome
