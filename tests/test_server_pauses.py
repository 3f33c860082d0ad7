"""Pauses of servers and engines: each ends in time, survives a failing call, and leaves no server paused for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from server_fixtures import begun, beside, read, request, served, until
from virtual_rollouts import on_virtual_time

from april.core.sampling import LogprobKind
from april.core.versions import PolicyVersion
from april.engines.http.server_engine import PAUSE_DEADLINE_S, ServerEngine
from april.engines.protocol import Capabilities, EngineFinish
from april.errors import EngineError, EngineUnreachable

V1 = PolicyVersion(0, 1)
LONG = 10**6


class _Engine(ServerEngine):
    """Requests end at the ``ends_at``-th abort; those of ``fails`` raise."""

    def __init__(self, ends_at: int, fails: Sequence[int] = ()) -> None:
        super().__init__("one", Capabilities(logprob_kind=LogprobKind.RAW, vocab_size=10, max_context=10))
        self._ends_at, self._fails, self.aborts = ends_at, fails, 0
        for name in "ab":
            self._admission.enter(name)

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        self.aborts += 1
        if self.aborts in self._fails:
            raise EngineUnreachable("the call broke")
        if self.aborts == self._ends_at:
            for name in "ab":
                self._admission.leave(name)


@on_virtual_time
async def test_a_pause_asks_again_and_gives_up_before_the_driver_does() -> None:
    """A call that fails is made again; the reason is said before somebody else's patience ends."""
    engine = _Engine(ends_at=3, fails=(1,))
    await engine.pause()
    assert engine.aborts == 3
    never = _Engine(ends_at=-1, fails=range(1000))
    began = asyncio.get_running_loop().time()
    with pytest.raises(EngineError, match="has not ended 2 aborted requests within 25 s") as caught:
        await never.pause()
    assert isinstance(caught.value.__cause__, EngineUnreachable)
    assert asyncio.get_running_loop().time() - began == PAUSE_DEADLINE_S < 30


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "answer lost"])
@pytest.mark.parametrize(("kind", "route"), [("vllm", "/pause"), ("sglang", "/pause_generation")])
async def test_an_update_that_breaks_off_at_its_pause_leaves_no_server_paused(
    tmp_path: Path, kind: str, route: str, cancelled: bool
) -> None:
    """Both kinds of servers stand still for the requests of others; those go on, whatever became of the update."""
    (tmp_path / "model.safetensors").write_bytes(b"")
    async with served(kind, stepped=True, mean_length=LONG) as (server, engine):
        other = await beside(kind, server)
        reading = await begun(server, read(other, request()))
        server.step()
        await engine.pause()
        if cancelled:
            updating = asyncio.create_task(engine.update_weights(V1, str(tmp_path)))
            await until(lambda: server.pause_mode is not None)
            updating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await updating
        else:
            server.unanswered = {route: 2}
            with pytest.raises(EngineUnreachable):
                await engine.update_weights(V1, str(tmp_path))
        assert (server.pause_mode, server.weights) == (None, "w0")
        server.go_on()
        assert (await reading).finish is EngineFinish.LENGTH
        await other.close()


async def test_a_server_that_somebody_has_paused_says_so() -> None:
    """Its health tells why nothing comes, and what to do."""
    async with served("vllm") as (server, engine):
        assert not (await engine.health()).detail
        server.pause_mode = "keep"
        health = await engine.health()
        assert health.ok
        assert "POST /resume" in health.detail
