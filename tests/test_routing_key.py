"""Routers before several servers are told which requests share a prefix, and the share that was cached is counted."""

from __future__ import annotations

from typing import Any

import pytest
from core_machine import CoreMachine, settings
from fake_servers.sglang import FakeSglangServer
from fake_servers.vllm import FakeVllmServer
from msgspec.structs import replace
from real_schedulers import reward
from server_fixtures import KINDS, Got, ServerThread, behind_a_router, connected, listening, read, request, served
from server_fixtures import settings as server_settings

import april
from april.config.engines import AprilEngineConfig
from april.core.batch import Batch
from april.engines.http.routing_key import HEADERS
from april.engines.served.client import connect_april
from april.engines.served.server import serve

KEY = HEADERS[0]


async def keys_sent(kind: str, **engine: Any) -> list[dict[str, str]]:
    """The routing headers of two requests of one sample, one of its sibling, one of another group, one of no sample."""
    async with served(kind, config=engine) as (server, engine_there):
        for key in ((3, 0), (3, 0), (3, 1), (4, 0), None):
            await read(engine_there, replace(request(max_tokens=2), sample_key=key))
        return [{name: run.headers[name] for name in HEADERS if name in run.headers} for run in server.runs]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("by", "shared"), [("sample", [True, False]), ("group", [True, True])])
async def test_requests_of_a_sample_or_a_group_share_a_key(kind: str, by: str, shared: list[bool]) -> None:
    """The same key in every header, short and without a trace of ids or prompt; a request of no sample has none."""
    first, again, sibling, other, alone = await keys_sent(kind, routing_key=by)
    assert set(first) == set(HEADERS)
    (key,) = set(first.values())
    assert len(key) == 16
    assert set(key) <= set("0123456789abcdef")
    assert [first == again, first == sibling] == shared
    assert other != first
    assert not alone


@pytest.mark.parametrize("kind", KINDS)
async def test_off_sends_no_key(kind: str) -> None:
    assert not any(await keys_sent(kind, routing_key="off"))


async def turns(engine: Any, group: int, index: int, count: int = 3) -> list[Got]:
    """A conversation: every turn repeats the ones before, and adds ten tokens of the environment."""
    prompt, answers = [20 + group, 7, *range(100, 130)], []
    for turn in range(count):
        answers.append(await read(engine, replace(request(prompt, 8, seed=index), sample_key=(group, index))))
        prompt = [*prompt, *answers[-1].tokens, *range(200 + 10 * turn, 210 + 10 * turn)]
    return answers


async def cached_by_turn(**engine: Any) -> list[list[int]]:
    """Cached tokens of every turn: of the sample (3, 0), and then of its sibling."""
    async with behind_a_router(FakeSglangServer(), FakeSglangServer(), key=KEY, **engine) as (_, behind):
        return [[got.cached_tokens or 0 for got in await turns(behind, 3, index)] for index in (0, 1)]


async def test_turns_find_their_prefix_behind_a_router_that_gets_a_key() -> None:
    """With a key per sample all turns do; with one per group the sibling finds the prompt, too; without a key, a turn
    finds what the same worker had two turns ago."""
    (first, second, third), _ = await cached_by_turn()
    assert (first, second, third) == (0, 32 + 7, 32 + 8 + 10 + 7)
    one, sibling = await cached_by_turn(routing_key="group")
    assert one == [first, second, third]
    assert sibling[0] == 31
    without, _ = await cached_by_turn(routing_key="off")
    assert without == [0, 0, 32 + 7]


# ---------------------------------------------------------------- the metric


def synchronous(kind: str, servers: list[Any], **engine: Any) -> april.RolloutScheduler:
    """A scheduler whose batch has ended all of its requests."""
    config = april.Config(
        rollout_batch_size=4, n_samples_per_prompt=2, max_response_len=40,
        engine=server_settings(kind, *servers, eos_token_ids=(2,), **engine),
    )  # fmt: skip
    return april.RolloutScheduler(config, prompts=([3 + i, 7, 9] for i in range(40)), reward=reward, check=True)


def share_at(servers: list[Any], batch: Batch) -> float:
    """The share as the servers know it, of the requests that have ended when the batch was delivered: all of them."""
    runs = [run for server in servers for run in server.runs]
    assert len(runs) == batch.metrics["attempts"]
    return sum(run.cached for run in runs) / sum(len(run.prompt) for run in runs)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("sglang", {}), ("vllm", {"says_cached": True}), ("vllm", {"says_cached": True, "developer": False})], ids=str,
)  # fmt: skip
@pytest.mark.parametrize("loss", [None, 1])
def test_the_cached_share_is_what_the_servers_say(kind: str, options: dict[str, Any], loss: int | None) -> None:
    """Whole answers and streams; siblings share their prompt's first tokens."""
    servers = [KINDS[kind][0](**options)]
    with ServerThread(*servers), synchronous(kind, servers, max_token_loss=loss) as scheduler:
        for server in servers:
            server.runs.clear()  # those of the probe
        batch = scheduler.next_batch()
        assert batch.metrics["cached_share"] == pytest.approx(share_at(servers, batch))
        assert batch.metrics["cached_share"] > 0


def test_without_a_word_of_the_server_there_is_no_share() -> None:
    """Not 0, which would say that nothing was cached."""
    server = FakeVllmServer()
    with ServerThread(server), synchronous("vllm", [server]) as scheduler:
        assert "cached_share" not in scheduler.next_batch().metrics


async def test_a_relay_passes_on_what_was_cached() -> None:
    """An engine of another process says as much as its server."""
    async with listening(FakeSglangServer()) as url:
        engine = await connected("sglang", url)
        relay = await serve(engine, key="k")
        (there,) = await connect_april(AprilEngineConfig(urls=(relay.url,), api_key="k"))
        try:
            assert [got.cached_tokens for got in await turns(there, 3, 0, 2)] == [0, 32 + 7]
        finally:
            await there.close()
            await relay.close()
            await engine.close()


def test_the_share_is_of_the_requests_that_say_it_and_at_most_one() -> None:
    """A server that counts more than it was sent, and one that says nothing of a request."""
    m = CoreMachine(settings(n=1, samples=2), 4)
    m.ask()
    loud, quiet = m.attempt(0, 0), m.attempt(0, 1)
    loud.tape.cached = 10**9
    m.finish((0, 0), (0, 1))
    assert quiet.tape.cached is None
    assert m.batches[0].metrics["cached_share"] == 1.0
