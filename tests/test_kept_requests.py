"""Requests that a vLLM server keeps over a weight update: what is asked of it, and what their tokens are called."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_servers.base import ControlFault, PlannedControlFault, PlannedFault, RequestFault, uncut
from fake_servers.vllm import FakeVllmServer
from msgspec.structs import replace
from real_schedulers import reward
from server_fixtures import (
    PROMPT,
    Got,
    ServerThread,
    facts_of,
    is_of_its_weights,
    read,
    request,
    saved,
    served,
    settings,
    until,
)

import april
from april.core.versions import PolicyVersion
from april.driver.wire_checks import check_versions
from april.engines.fit import why_unfit
from april.engines.protocol import EngineFinish, OnWeightUpdate, Request
from april.errors import ConfigError, EngineError, WireError

KEEP, RECOMPUTE = OnWeightUpdate.KEEP, OnWeightUpdate.RECOMPUTE
V0, V1, V2 = (PolicyVersion(0, n) for n in range(3))
LONG = 10**6


def kept(in_flight: OnWeightUpdate = KEEP) -> Request:
    """A fresh attempt that is to live through updates."""
    return replace(request(stream=in_flight is KEEP), in_flight=in_flight)


def keeping(**options: Any) -> Any:
    """A server, and the engine before it, whose tokens come by steps."""
    return served("vllm", stepped=True, mean_length=LONG, **options)


class Reading(Got):
    """What comes of one request, read as it comes."""

    def __init__(self, engine: Any, asked: Request) -> None:
        super().__init__()
        self.engine, self.asked = engine, asked
        self.task = asyncio.create_task(read(engine, asked, self))

    async def abort(self) -> None:
        """End the request."""
        await self.engine.abort([self.asked.attempt_id])
        await self.task

    def under(self, *, sure: bool) -> list[PolicyVersion]:
        """The version of each token whose version is, or is not, sure."""
        return [chunk.version for chunk in self.chunks if chunk.sure is sure for _ in chunk.tokens]


async def begun(
    server: FakeVllmServer, engine: Any, tokens: int, in_flight: OnWeightUpdate = KEEP, **changes: Any
) -> Reading:
    """A request with so many tokens, of which april has heard if they are streamed."""
    had, reading = len(server.runs), Reading(engine, replace(kept(in_flight), **changes))
    await until(lambda: len(server.runs) > had)
    server.step(tokens)
    await until(lambda: not reading.asked.stream or len(reading.tokens) == tokens)
    return reading


async def over_an_update(server: FakeVllmServer, engine: Any, path: str) -> Reading:
    """A request with four tokens of the first weights and three of the next."""
    reading = await begun(server, engine, 4)
    await update(engine, KEEP, V1, path)
    server.step(3)
    await until(lambda: len(reading.tokens) == 7)
    return reading


async def update(engine: Any, in_flight: OnWeightUpdate, version: PolicyVersion, path: str) -> None:
    await engine.pause_in_flight(in_flight)
    await engine.update_weights(version, path)
    await engine.resume()


async def test_a_request_goes_on_under_the_new_weights(tmp_path: Path) -> None:
    """No abort, no reset of the cache; its end says which weights made which token, and a new one has another salt."""
    async with keeping() as (server, engine):
        reading = await begun(server, engine, 4)
        for number, version in ((1, V1), (2, V2)):
            await update(engine, KEEP, version, saved(tmp_path, f"w{number}"))
            server.step(3)
            await until(lambda number=number: len(reading.tokens) == 4 + 3 * number)
        later = await begun(server, engine, 1)
        await engine.abort([reading.asked.attempt_id, later.asked.attempt_id])
        await asyncio.gather(reading.task, later.task)
        said = PROMPT
        for weights, count in (("w0", 4), ("w1", 3), ("w2", 4)):
            said = said + uncut(said, weights=weights, max_tokens=count, mean_length=LONG)[0]
        assert reading.tokens == said[len(PROMPT) :]
        assert (reading.under(sure=True), reading.under(sure=False)) == ([V0] * 4, [V1] * 3 + [V2] * 4)
        last = reading.chunks[-1]
        assert (last.finish, last.versions) == (EngineFinish.ABORT, [(V0, 4), (V1, 3), (V2, 4)])
        assert later.chunks[-1].versions is None
        first, second = (run.cache_salt for run in server.runs)
        assert (first[:5], second[:5]) == ("v0.0-", "v0.2-")
        assert len(second) <= 128
        assert not set(second) & set("@/\\\0")
        assert (server.pauses, server.stale_encoder, server.stale_cache) == (["keep", "keep"], False, True)


async def test_a_whole_answer_names_the_versions_of_its_tokens(tmp_path: Path) -> None:
    """A request that is not streamed is kept as well; where its weights changed is known at its end."""
    async with keeping() as (server, engine):
        reading = await begun(server, engine, 4, stream=False)
        await update(engine, KEEP, V1, saved(tmp_path, "w1"))
        server.step(3)
        await reading.abort()
        (last,) = reading.chunks
        assert (len(last.tokens), last.sure, last.versions) == (7, False, [(V0, 4), (V1, 3)])


async def test_with_recompute_the_servers_pause_empties_the_cache(tmp_path: Path) -> None:
    """A request need not be streamed, and one without a token begins under the new weights, though its salt is old."""
    async with keeping(max_running=1) as (server, engine):
        first = await begun(server, engine, 4, RECOMPUTE)
        queued = await begun(server, engine, 0, RECOMPUTE)
        await update(engine, RECOMPUTE, V1, saved(tmp_path, "w1"))
        server.step(2)
        await first.abort()
        server.step(2)
        await queued.abort()
        assert (first.chunks[-1].versions, queued.chunks[-1].versions) == ([(V0, 4), (V1, 2)], [(V1, 2)])
        assert (server.stale_cache, server.stale_encoder) == (False, False)


async def test_the_servers_spans_stand_above_the_place_where_april_saw_the_pause(tmp_path: Path) -> None:
    """Tokens that were made before the pause and came after it are named rightly at the end."""
    async with keeping() as (server, engine):
        reading = await over_an_update(server, engine, saved(tmp_path, "w1"))
        (run,) = server.runs
        (old, _, _), (new, _, end) = run.spans
        run.spans = [(old, 0, 6), (new, 6, end)]
        await reading.abort()
        assert reading.under(sure=False) == [V1] * 3
        assert reading.chunks[-1].versions == [(V0, 6), (V1, 1)]


@pytest.mark.parametrize("label", ["early", "foreign", "unconfirmed"])
async def test_spans_that_cannot_be_true_are_refused(tmp_path: Path, label: str) -> None:
    """Tokens from before the pause are of the old weights; and no name counts that april did not give and confirm."""
    async with keeping() as (server, engine):
        reading = await over_an_update(server, engine, saved(tmp_path, "w1"))
        (run,) = server.runs
        (old, _, _), (new, _, end) = run.spans
        name = {"early": new, "foreign": "default", "unconfirmed": new.replace("v0.1", "v0.2")}[label]
        run.spans = [(old, 0, 3), (name, 3, end)] if label == "early" else [(old, 0, 4), (name, 4, end)]
        await reading.abort()
        assert isinstance(reading.error, WireError)
        assert "tokens of weights" in str(reading.error)


async def test_an_update_that_fails_lets_requests_go_on_under_the_old_weights(tmp_path: Path) -> None:
    """The server is resumed, and nothing that follows is a guess, as no weights have changed."""
    async with keeping() as (server, engine):
        reading = await begun(server, engine, 4)
        await engine.pause_in_flight(KEEP)
        with pytest.raises(EngineError, match="contains no weights"):
            await engine.update_weights(V1, str(tmp_path))
        assert server.pause_mode == "keep"
        assert (await engine.health()).detail == ""
        await engine.resume()
        server.step(2)
        await reading.abort()
        assert (reading.under(sure=True), reading.chunks[-1].versions) == ([V0] * 6, None)
        assert server.pause_mode is None


async def test_a_request_without_a_token_can_be_ended_while_the_server_is_paused(tmp_path: Path) -> None:
    """It would begin over keys of the old weights under the name of the new ones: the server tells when it does."""
    async with keeping() as (server, engine):
        reading = await begun(server, engine, 0)
        await engine.pause_in_flight(KEEP)
        await reading.abort()
        assert (reading.tokens, reading.chunks[-1].finish) == ([], EngineFinish.ABORT)
        await engine.update_weights(V1, saved(tmp_path, "w1"))
        await engine.resume()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ""), ({"developer": False}, "VLLM_SERVER_DEV_MODE=1"), ({"scale_out": False}, "--enable-scale-out"),
        ({"processes": 2}, "--api-server-count 1"), ({"copies": 2}, "one server per copy"),
    ],
    ids=str,
)  # fmt: skip
def test_who_can_keep_requests(options: dict[str, Any], words: str) -> None:
    """A server that cannot is refused by name at the start, with what to do."""
    can = facts_of(FakeVllmServer(**options)).capabilities
    assert can.in_flight_updates == (() if words else (KEEP, RECOMPUTE))
    config = april.Config(
        rollout_batch_size=1, n_samples_per_prompt=1, max_response_len=8, generation="continuous",
        on_weight_update="keep", engine={"kind": "vllm", "urls": ["http://h:1"]},
    )  # fmt: skip
    said = [sentence for sentence in why_unfit(config, {"h:1": can}) if "on_weight_update" in sentence]
    assert len(said) == bool(words)
    assert not words or (said[0].startswith("engine h:1 does not support on_weight_update: keep") and words in said[0])


def test_nothing_is_recomputed_behind_a_connector() -> None:
    """A request keeps its salt over an update, so that a KV connector would answer its second prefill with old keys."""
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    assert facts_of(FakeVllmServer(kv_connector=transfer)).capabilities.in_flight_updates == (KEEP,)


async def test_other_kinds_of_servers_are_refused() -> None:
    """SGLang and OpenAI-compatible servers end requests before weights change."""
    for kind in ("sglang", "openai"):
        async with served(kind) as (_, engine):
            assert engine.capabilities.in_flight_updates == ()


def test_stepwise_generation_keeps_nothing() -> None:
    """Between two steps nothing runs, so the setting contradicts it."""
    with pytest.raises(ConfigError, match=r"on_weight_update=keep.*generation=stepwise.*continuous"):
        april.Config(
            rollout_batch_size=1, n_samples_per_prompt=1, max_response_len=8, on_weight_update="keep",
            engine={"kind": "simulated"},
        )  # fmt: skip


def test_versions_of_an_end_are_looked_at() -> None:
    """They cover all tokens, never decrease, and are between those at submission and now."""
    check_versions([(V0, 2), (V1, 1)], 3, V0, V1)
    for wrong in ([(V0, 2)], [(V1, 2), (V0, 1)], [(V0, 2), (V2, 1)], [(V0, 3), (V1, 0)]):
        with pytest.raises(WireError, match="ended with the versions"):
            check_versions(wrong, 3, V0, V1)
    with pytest.raises(WireError):
        check_versions([(V0, 3)], 3, V1, V1)


@pytest.mark.parametrize(("in_flight", "streams"), [(KEEP, True), (KEEP, False), (RECOMPUTE, False)])
def test_a_scheduler_over_servers_that_keep(tmp_path: Path, in_flight: OnWeightUpdate, streams: bool) -> None:
    """Every segment is what its weights say to what stands before it, a server dies on the way, and nothing is cut.

    Where tokens may be lost with a server, answers come whole. One that the server had queued then begins over keys of
    older weights, and all its tokens are marked as kept.
    """
    servers = [FakeVllmServer(turns=3, max_running=3) for _ in range(2)]
    servers[1].faults.append(PlannedFault(RequestFault.SERVER_DIES, 12, 6))
    prompts = [[3 + i, 7, 9] for i in range(40)]
    batches = []
    with ServerThread(*servers):
        config = april.Config(
            rollout_batch_size=2, n_samples_per_prompt=2, max_in_flight=8, max_response_len=80, generation="continuous",
            on_weight_update=in_flight, max_staleness=6, abort_resend_s=0.05,
            engine=settings("vllm", *servers, eos_token_ids=(2,), max_token_loss=1 if streams else None),
        )  # fmt: skip
        with april.RolloutScheduler(config, prompts=prompts, reward=reward, check=True) as run:
            for step in range(1, 9):
                batches.append(run.next_batch())
                run.weight_update(path=saved(tmp_path, f"w{step}"))  # at once, while requests run
            assert run.ledger()["tokens"].balanced
    for sample in (sample for batch in batches for sample in batch.samples):
        is_of_its_weights(sample)
    shares = [batch.metrics["kept_share"] for batch in batches]
    assert max(shares) > 0 if in_flight is KEEP else shares == [0.0] * 8
    known = () if streams or in_flight is RECOMPUTE else ("begin over keys and values of older weights",)
    assert not [said for server in servers for said in server.violations if not said.endswith(known)]


async def test_a_pause_that_failed_empties_nothing(tmp_path: Path) -> None:
    """Weights that the server gets after an ordinary pause empty its cache, for other clients of it have no salts."""
    async with keeping() as (server, engine):
        first = await begun(server, engine, 4, RECOMPUTE)
        server.control_faults.append(PlannedControlFault(kind=ControlFault.FAILS, route="/pause"))
        with pytest.raises(EngineError):
            await engine.pause_in_flight(RECOMPUTE)
        await first.abort()
        await engine.pause()
        await engine.update_weights(V1, saved(tmp_path, "w1"))
        assert not server.stale_cache
        await engine.resume()
        later = await begun(server, engine, 1, RECOMPUTE)
        await later.abort()
        assert (later.under(sure=True), server.violations, server.pause_mode) == ([V1], [], None)
