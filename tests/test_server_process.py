"""Servers without labels: a process that was started anew is told by its start, and what is not told is not assumed."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

import pytest
from fake_servers.base import ControlFault, PlannedControlFault
from server_fixtures import read, request, served, until, update

from april.core.versions import PolicyVersion
from april.engines.http import server_process
from april.errors import EngineError

FIRST, SECOND, THIRD = (PolicyVersion(0, n) for n in range(3))
SILENT = [ControlFault.HTML, ControlFault.NULL, ControlFault.EMPTY, ControlFault.ERROR, ControlFault.FAILS]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": ("vllm", {"developer": False}), "openai": ("openai", {}),
}


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "AGAIN_S", 0.0)
    monkeypatch.setattr(server_process, "CHECKS_APART_S", 0.0)


def metrics(server: Any, fault: ControlFault | None) -> None:
    """They answer so from now on."""
    server.control_faults = [PlannedControlFault(kind=fault, route="/metrics", times=10**6)] if fault else []


async def hand_over(server: Any, engine: Any, version: PolicyVersion) -> None:
    """A whole update by a transfer."""
    server.weights, server.stale_cache = f"w{version.n}", server.developer
    await update(engine, version)


def world(kind: str) -> Any:
    """A server without labels of any kind, and the engine before it."""
    return served(KINDS[kind][0], **KINDS[kind][1])


@pytest.mark.parametrize(
    ("line", "started_s"),
    [
        ("process_start_time_seconds 1.5e9", 1.5e9),
        ("process_start_time_seconds\t1.5e9 ", 1.5e9),
        ("process_start_time_seconds 1.5e9 1732900000000", 1.5e9),
        ('process_start_time_seconds{host="a b} c"} 1.5e9 1732900000000', 1.5e9),
        ("process_start_time_seconds", None),
        ('process_start_time_seconds{host="a"}', None),
        ("", None),
        *((f"process_start_time_seconds {value}", None) for value in ("NaN", "+Inf", "-1", "many")),
    ],
)
def test_lines_of_metrics(line: str, started_s: float | None) -> None:
    """The value follows the name and its labels, and its time may follow it; a line without a value says nothing."""
    assert server_process.parse_metrics([line]).started_s == started_s


@pytest.mark.parametrize("fault", SILENT)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_restart_whose_metrics_fail(kind: str, fault: ControlFault, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token of the start's weights gets the new version, neither while the metrics fail nor when they are well."""
    monkeypatch.setattr(server_process, "IDENTITY_TIMEOUT_S", 0.01)

    async with world(kind) as (server, engine):
        await hand_over(server, engine, SECOND)
        assert set((await read(engine, request())).versions) == {SECOND}
        server._restart_at_once()
        metrics(server, fault)
        health = await engine.health()
        assert (health.ok, health.current) == (False, True)
        assert "do not show" in health.detail
        got = await read(engine, request())
        assert not got.tokens
        assert "has not reported" in str(got.error)
        metrics(server, None)
        assert not (await engine.health()).current
        got = await read(engine, request())
        assert not got.tokens
        assert "restarted" in str(got.error)
        await hand_over(server, engine, THIRD)
        assert (await engine.health()).current
        assert set((await read(engine, request())).versions) == {THIRD}


@pytest.mark.parametrize("kind", KINDS)
async def test_answers_wait_for_metrics_that_fail_for_a_while(kind: str) -> None:
    """The same process all the time: nothing is lost, and nothing is handed over before it is known."""
    async with world(kind) as (server, engine):
        await hand_over(server, engine, SECOND)
        metrics(server, ControlFault.HTML)
        reading = asyncio.create_task(read(engine, request()))
        looks = 0

        async def look() -> bool | None:
            nonlocal looks
            looks += 1
            return await real()

        real, engine._endpoint.confirmation._check = engine._endpoint.confirmation._check, look
        await until(lambda: looks >= 3)
        assert not reading.done()
        metrics(server, None)
        got = await reading
        assert got.error is None
        assert set(got.versions) == {SECOND}


@pytest.mark.parametrize("fault", [None, ControlFault.HTML])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_restart_during_the_transfer_is_no_update(kind: str, fault: ControlFault | None) -> None:
    """The weights went into a process that is gone; where the metrics do not tell it, nothing is handed over."""
    async with world(kind) as (server, engine):
        await engine.pause()
        server.weights = "w1"
        server._restart_at_once()
        metrics(server, fault)
        if fault is None:
            with pytest.raises(EngineError, match="restarted while weights were handed over"):
                await engine.update_weights(SECOND)
        else:
            await engine.update_weights(SECOND)
        await engine.resume()
        metrics(server, None)
        if fault is None:
            engine._labels.present, engine._process.keeps_weights = SECOND, False
        assert not (await engine.health()).current
        assert not (await read(engine, request())).tokens
        await hand_over(server, engine, THIRD)
        assert set((await read(engine, request())).versions) == {THIRD}


@pytest.mark.parametrize("kind", KINDS)
async def test_before_the_first_update_a_new_process_has_the_right_weights(kind: str) -> None:
    """Those of the start: nothing is held back."""
    async with world(kind) as (server, engine):
        metrics(server, ControlFault.FAILS)
        assert (await engine.health()).ok
        assert set((await read(engine, request())).versions) == {FIRST}


async def test_a_server_that_says_nothing_of_its_process() -> None:
    """Only that its port was found closed tells of another one; after a transfer it waits for the next then."""
    async with served("vllm", developer=False, without=("/metrics",)) as (server, engine):
        server.die()
        assert not (await engine.health()).ok
        await server.restart()
        assert (await engine.health()).current
        await hand_over(server, engine, SECOND)
        assert set((await read(engine, request())).versions) == {SECOND}
        server.die()
        assert not (await engine.health()).ok
        await server.restart()
        assert not (await engine.health()).current
        assert not (await read(engine, request())).tokens
        await hand_over(server, engine, THIRD)
        assert set((await read(engine, request())).versions) == {THIRD}


async def test_a_restart_that_nobody_has_noticed_gives_no_token() -> None:
    """With labels too: what a stream brings is handed over once the label was seen, not when the response has ended."""
    async with served("vllm", config={"max_token_loss": 0}) as (server, engine):
        await hand_over(server, engine, SECOND)
        assert set((await read(engine, request())).versions) == {SECOND}
        server._restart_at_once()
        got = await read(engine, request())
        assert not got.tokens
        assert got.error is not None


@pytest.mark.parametrize("said", [True, False, None])
async def test_one_look_decides_for_all(said: bool | None) -> None:
    """Answers that began before it need none of their own, so a server whose metrics hang costs one look's time; a look
    that was cut off holds up nobody."""
    looks = 0

    async def look() -> bool | None:
        nonlocal looks
        looks += 1
        await asyncio.sleep(0)
        return said

    confirmation = server_process.Confirmation(look, "one")
    now_s = asyncio.get_running_loop().time()
    cut = asyncio.create_task(confirmation.wait_since(now_s))
    await until(lambda: looks == 1)
    cut.cancel()
    waiting = (confirmation.wait_since(now_s, broken=lambda: True) for _ in range(50))
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(end) for end in ends} == {type(None) if said else EngineError}
    assert looks == 2
    # one that begins afterwards has a look of its own
    with nullcontext() if said else pytest.raises(EngineError):
        await confirmation.wait_since(asyncio.get_running_loop().time() + 1e-9, broken=lambda: True)
    assert looks == 3
