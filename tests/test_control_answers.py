"""Control calls are done when the server says so in its own words, and weights are named when they were seen to change.

A status of 200 comes with a proxy's page, with ``null``, with nothing and with errors too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_servers.base import SAYS_NOTHING, ControlFault, PlannedControlFault
from server_fixtures import BOTH, begun, beside, read, request, saved, served, update

from april.core.versions import PolicyVersion
from april.engines.protocol import EngineFinish
from april.engines.vllm import engine as vllm_engine
from april.errors import EngineError

FIRST, SECOND = PolicyVersion(0, 0), PolicyVersion(0, 1)
LONG = 10**6
LOADS = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "RESET_WAIT_S", 0.0)


@pytest.mark.parametrize("fault", [*SAYS_NOTHING, ControlFault.ECHOED, ControlFault.FAILS])
@pytest.mark.parametrize("kind", BOTH)
async def test_a_load_without_a_word_of_success_is_none(kind: str, fault: ControlFault, tmp_path: Path) -> None:
    """The update is refused with the server's words, the weights are not named, and no token is of the new version."""
    async with served(kind) as (server, engine):
        server.control_faults.append(PlannedControlFault(kind=fault, route=LOADS[kind]))
        with pytest.raises(EngineError, match="could not load"):
            await update(engine, SECOND, saved(tmp_path, "w1_flush"))
        assert server.weights == "w0"
        assert not server.label.startswith("v0.1-")
        got = await read(engine, request())
        assert set(got.versions) <= {FIRST}
        assert (got.error is None) == (kind == "sglang" and fault is ControlFault.ECHOED)
        await update(engine, SECOND, saved(tmp_path, "w1"))
        assert set((await read(engine, request())).versions) == {SECOND}


@pytest.mark.parametrize("fault", SAYS_NOTHING)
@pytest.mark.parametrize(
    ("kind", "route"),
    [("vllm", "/reset_prefix_cache"), ("vllm", "/update_weight_version"), ("vllm", "/weight_info"),
     ("sglang", "/flush_cache"), ("sglang", "/update_weight_version"), ("sglang", "/model_info")],
)  # fmt: skip
async def test_what_follows_a_transfer_counts_when_it_is_said(kind: str, route: str, fault: ControlFault) -> None:
    """Cache and label: without them the weights are those of no version, and no request goes there."""
    async with served(kind) as (server, engine):
        server.weights, server.stale_cache = "w1", True
        server.control_faults.append(PlannedControlFault(kind=fault, route=route, times=100))
        with pytest.raises(EngineError):
            await update(engine, SECOND)
        assert (await read(engine, request())).error is not None
        server.control_faults.clear()
        await update(engine, SECOND)
        assert set((await read(engine, request())).versions) == {SECOND}


@pytest.mark.parametrize("path", [True, False], ids=["from disk", "handed over"])
@pytest.mark.parametrize("fault", [ControlFault.RESTARTS_BEFORE, ControlFault.RESTARTS_AFTER])
@pytest.mark.parametrize("later", [0, 1, 2])
@pytest.mark.parametrize(
    ("kind", "route"),
    [("vllm", "/collective_rpc"), ("vllm", "/reset_prefix_cache"), ("vllm", "/update_weight_version"),
     ("vllm", "/weight_info"), ("sglang", "/update_weights_from_disk"), ("sglang", "/flush_cache"),
     ("sglang", "/update_weight_version"), ("sglang", "/model_info")],
)  # fmt: skip
async def test_a_restart_in_the_middle_of_an_update(
    kind: str, route: str, later: int, fault: ControlFault, path: bool, tmp_path: Path
) -> None:
    """Wherever it comes between pause and end, weights of the start are never taken for the new ones."""
    async with served(kind) as (server, engine):
        await engine.pause()
        if not path:
            server.weights = "w1"
        server.control_faults.append(PlannedControlFault(kind=fault, route=route, later=later))
        starts = server.starts
        try:
            await engine.update_weights(SECOND, saved(tmp_path, "w1") if path else None)
        except EngineError:
            assert server.starts > starts or server.control_faults[0].times
        await engine.resume()
        for _ in range(3):
            health = await engine.health()
        got = await read(engine, request())
        if health.current or got.versions:
            assert server.weights == "w1"
        # and the next update is a whole one
        server.control_faults.clear()
        await update(engine, SECOND, saved(tmp_path, "w1"))
        assert server.weights == "w1"
        assert set((await read(engine, request())).versions) == {SECOND}


@pytest.mark.parametrize("kind", BOTH)
async def test_a_trainer_may_name_what_it_hands_over(kind: str) -> None:
    """A label that has moved in the transfer is that of a server which lives; april gives it its own."""
    async with served(kind) as (server, engine):
        server.weights, server.label = "w1", "step-7"
        await update(engine, SECOND)
        assert server.label.startswith("v0.1-")
        assert set((await read(engine, request())).versions) == {SECOND}


async def test_a_cache_that_sglang_has_kept_is_emptied() -> None:
    """An update without success, of which the server says that nothing but the cache is old, is completed by april."""
    async with served("sglang") as (server, engine):
        await engine.pause()
        server.kept_caches = 1
        await engine.update_weights(SECOND, "/weights/w1")
        await engine.resume()
        assert not server.stale_cache
        assert (server.weights, server.label[:5]) == ("w1", "v0.1-")
        assert set((await read(engine, request())).versions) == {SECOND}


@pytest.mark.parametrize("fault", SAYS_NOTHING)
@pytest.mark.parametrize(
    ("kind", "route"),
    [("vllm", "/pause"), ("vllm", "/resume"), ("sglang", "/pause_generation"), ("sglang", "/continue_generation")],
)
async def test_a_pause_that_nobody_confirms(kind: str, route: str, fault: ControlFault, tmp_path: Path) -> None:
    """Neither a pause nor its end is believed without a word; the requests of others go on when it is over."""
    async with served(kind, stepped=True, mean_length=LONG) as (server, engine):
        other = await beside(kind, server)
        reading = await begun(server, read(other, request()))
        server.step()
        await engine.pause()
        server.control_faults.append(PlannedControlFault(kind=fault, route=route))
        with pytest.raises(EngineError):
            await engine.update_weights(SECOND, saved(tmp_path, "w1"))
        assert (server.pause_mode is None) == ("pause" in route)
        server.pause_mode = None
        server.go_on()
        await reading
        await other.close()


@pytest.mark.parametrize("fault", SAYS_NOTHING)
@pytest.mark.parametrize(("kind", "route"), [("vllm", "/abort_requests"), ("sglang", "/abort_request")])
async def test_an_abort_that_nobody_confirms_is_asked_again(kind: str, route: str, fault: ControlFault) -> None:
    """The call fails unless an empty answer is the server's own; a pause asks again, and loses nothing."""
    async with served(kind, stepped=True, mean_length=LONG) as (server, engine):
        engine._abort_again_s = 0.01
        reading = await begun(server, read(engine, request()))
        server.step(3)
        server.control_faults.append(PlannedControlFault(kind=fault, route=route, times=2))
        if fault not in (ControlFault.EMPTY, ControlFault.NULL):
            with pytest.raises(EngineError, match="did not confirm success"):
                await engine.abort(None)
        await engine.pause()
        assert (await reading).finish is EngineFinish.ABORT


@pytest.mark.parametrize("fault", SAYS_NOTHING)
@pytest.mark.parametrize(("kind", "route"), [("vllm", "/weight_info"), ("sglang", "/model_info")])
async def test_a_label_that_is_not_said_confirms_nothing(kind: str, route: str, fault: ControlFault) -> None:
    """A probe that does not hear the label does not call the weights current and well."""
    async with served(kind) as (server, engine):
        assert (await engine.health()).ok
        server.control_faults.append(PlannedControlFault(kind=fault, route=route))
        assert not (await engine.health()).ok


@pytest.mark.parametrize("developer", [True, False])
async def test_a_page_is_no_health(developer: bool) -> None:
    """A proxy that answers for a server which is gone."""
    async with served("vllm", developer=developer) as (server, engine):
        assert (await engine.health()).ok
        server.control_faults.append(PlannedControlFault(kind=ControlFault.HTML, route="/health"))
        health = await engine.health()
        assert not health.ok
        assert "answers a page" in health.detail
