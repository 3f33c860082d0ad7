"""Sessions over HTTP: which is given to whom, what its end says, and the keys; the trainer is a RolloutScheduler."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import april
from april.agents import Sessions
from april.errors import UsageError
from april.testing import FakeEngine
from tests.gateway_suite.script import EOS, TOKENIZER, VOCAB

pytest.importorskip("renderers")


class Orchestrator:
    """Asks for sessions as a program outside of april does."""

    def __init__(self, url: str, key: str, http: aiohttp.ClientSession) -> None:
        self.url, self.key, self.http = url, key, http

    async def say(self, path: str, body: Any = None, key: str | None = None, method: str = "POST") -> tuple[int, Any]:
        """Status and body of an answer; one that may come later is asked for again."""
        headers = {"Authorization": f"Bearer {self.key if key is None else key}"}
        async with self.http.request(method, self.url + path, json=body, headers=headers) as response:
            said = await response.json()
            if response.status == 429:
                assert (response.headers["Retry-After"], said["error"]["type"]) == ("1", "no_sample")
            return response.status, said

    async def open(self) -> dict[str, Any]:
        """The next session."""
        while (got := await self.say("/sessions"))[0] == 429:  # noqa: ASYNC110 - the scheduler's thread
            await asyncio.sleep(0.001)
        assert got[0] == 200
        return dict(got[1])

    async def asks(self, session: dict[str, Any], key: str | None = None) -> int:
        """The status of an answer to the agent of a session, which may have another's key."""
        headers = {"Authorization": f"Bearer {key or session['api_key']}"}
        asked = {"prompt": [9, 9], "max_tokens": 5}
        async with self.http.post(f"{session['base_url']}/completions", json=asked, headers=headers) as response:
            await response.read()
            return response.status


@asynccontextmanager
async def outside(sessions: Sessions | None = None) -> AsyncIterator[tuple[Orchestrator, asyncio.Task[Any]]]:
    """An orchestrator, and the batch of two groups of one that it works for."""
    sessions = sessions or Sessions()
    config = april.Config(rollout_batch_size=2, n_samples_per_prompt=1, max_response_len=50)
    engine = FakeEngine("f", lengths=5, seconds_per_token=1e-4, vocab_size=VOCAB, eos_token_id=EOS)
    sessions.start()
    async with april.RolloutScheduler(
        config, prompts=[{"token_ids": [9 + i], "name": i} for i in range(9)], tokenizer=TOKENIZER,
        rollout=sessions.rollout, reward=sessions.reward, engines=[engine], progress=False,
    ) as rollouts, aiohttp.ClientSession() as http:  # fmt: skip
        batch = asyncio.create_task(rollouts.anext_batch())
        try:
            yield Orchestrator(sessions.url, sessions.key, http), batch
        finally:
            batch.cancel()
    sessions.close()


async def test_each_sample_is_given_once_and_ended_by_what_is_said() -> None:
    """No more are given than the plan wants; its end may be told again, and changes nothing then."""
    async with outside() as (o, batch):
        sessions = [await o.open() for _ in range(2)]
        assert sessions[0]["id"] != sessions[1]["id"]
        assert (await o.say("/sessions"))[0] == 429
        for i, session in enumerate(sessions):
            assert await o.asks(session) == 200
            assert await o.asks(session, sessions[not i]["api_key"]) == 401
            for reward in ({"total": float(i), "correct": 1}, 7.0):
                said = await o.say(f"/sessions/{session['id']}/end", {"reward": reward})
                assert said == (200, {"id": session["id"], "state": "ended"})
        delivered = await batch
        assert sorted(delivered.rewards.tolist()) == [0.0, 1.0]
        assert delivered.parts["correct"].tolist() == [1.0, 1.0]


async def test_another_scheduler_has_sessions_of_its_own() -> None:
    """Its sessions may have the ids of an earlier one, whose ends are not taken for theirs."""
    sessions, ids = Sessions(), []
    for reward in (1.0, 2.0):
        async with outside(sessions) as (o, batch):
            for _ in range(2):
                session = await o.open()
                ids.append(session["id"])
                assert await o.asks(session) == 200
                assert (await o.say(f"/sessions/{session['id']}/end", {"reward": reward}))[0] == 200
            assert (await batch).rewards.tolist() == [reward] * 2
    assert sorted(ids[:2]) == sorted(ids[2:])


async def test_a_session_that_is_cancelled_begins_again_as_another() -> None:
    """With an address and a key of its own: who had the first one is told that it is over."""
    async with outside() as (o, _):
        one, _ = await o.open(), await o.open()
        assert (await o.say(f"/sessions/{one['id']}/cancel", {"why": "no"}))[1]["state"] == "cancelled"
        again = await o.open()
        assert (again["group"], again["index"]) == (one["group"], one["index"])
        assert {again["id"], again["api_key"]}.isdisjoint({one["id"], one["api_key"]})
        key = {"Authorization": f"Bearer {one['api_key']}"}
        async with o.http.get(f"{one['base_url']}/models", headers=key) as response:
            assert response.status == 404


async def test_what_is_said_wrongly_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, ids, rewards and bodies."""
    monkeypatch.setattr("april.agents.sessions.MAX_BODY_BYTES", 1000)
    async with outside() as (o, _):
        end = f"/sessions/{(await o.open())['id']}/end"
        for path, body, key, status in (
            ("/sessions", None, "wrong", 401), (end, {"reward": 1.0}, "wrong", 401), (end, {}, None, 400),
            (end, {"reward": True}, None, 400), (end, [1], None, 400), (end, {"reward": "1"}, None, 400),
            (end, {"reward": {"total": 1, "correct": "1"}}, None, 400), (end, {"reward": {}}, None, 400),
            ("/sessions/0-0-0/end", {"reward": 1.0}, None, 410), (end, {"output": "x" * 1000}, None, 413),
        ):  # fmt: skip
            got = await o.say(path, body, key)
            assert (got[0], bool(got[1]["error"]["message"])) == (status, True)


def test_a_key_is_kept_for_its_owner_alone(tmp_path: Path) -> None:
    """It is the same each time; a file that others can read, or that is empty, is refused."""
    path = tmp_path / "key"
    assert Sessions(key_file=path).key == Sessions(key_file=path).key == path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() not in repr(Sessions(key_file=path))
    path.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        Sessions(key_file=path)
    path.write_text("")
    path.chmod(0o600)
    with pytest.raises(UsageError, match="empty"):
        Sessions(key_file=path)
