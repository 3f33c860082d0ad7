"""An orchestrator and its agents, with OpenAI's own client, whose trainer is another process that dies."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from test_sessions import Orchestrator

from tests.gateway_suite.script import TOKENIZER, says

pytest.importorskip("renderers")
openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
SESSIONS = 64
HERE = Path(__file__).parent
LONG = says("long")


class Trainer:
    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder = folder
        self.errors = (folder / "errors").open("a")
        command = [sys.executable, str(HERE / "session_trainer.py"), str(folder), str(port)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        )  # fmt: skip
        self.url = self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (self.folder / "errors").read_text()[-4000:]
        return line.strip()

    def ask(self, what: str) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return int(self._line())

    def kill(self) -> None:
        """``kill -9``."""
        self.process.kill()
        self._over()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait() == 0, (self.folder / "errors").read_text()[-4000:]
        self._over()

    def _over(self) -> None:
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            pipe.close()  # type: ignore[union-attr]


class Agents(Orchestrator):
    """Runs an agent on each session; they keep their conversations whatever happens to the trainer."""

    def __init__(self, url: str, key: str, http: aiohttp.ClientSession) -> None:
        super().__init__(url, key, http)
        self.client = openai.AsyncOpenAI(base_url="http://unused", api_key="unused", max_retries=0)
        self.up = asyncio.Event()
        self.up.set()
        self.cut = 0

    async def turn(self, session: dict[str, Any], messages: list[Any], text: str, *, stream: bool) -> None:
        """Ask, and ask again if the connection breaks; the answer is added."""
        messages.append({"role": "user", "content": text})
        client = self.client.with_options(base_url=session["base_url"], api_key=session["api_key"])
        while True:
            await self.up.wait()
            try:
                asked = client.chat.completions.create(model="policy", messages=messages, stream=stream)
                if not stream:
                    messages.append((await asked).choices[0].message.model_dump(exclude_none=True))
                    return
                parts = [chunk.choices[0].delta.content or "" async for chunk in await asked if chunk.choices]
                messages.append({"role": "assistant", "content": "".join(parts)})
                return
            except (openai.APIConnectionError, httpx.HTTPError):
                self.cut += 1
                self.up.clear()


async def life(folder: Path) -> None:
    """Two turns, a death in the second, a third turn; every second agent does not come back."""
    first = Trainer(folder)
    async with aiohttp.ClientSession() as http:
        o = Agents(first.url, (folder / "key").read_text(), http)
        sessions = [await o.open() for _ in range(SESSIONS)]
        talks: list[list[Any]] = [[] for _ in sessions]
        streams = [i % 4 == 0 for i in range(SESSIONS)]
        assert (await o.say("/sessions"))[0] == 429
        await asyncio.gather(*(
            o.turn(s, talk, s["data"]["question"], stream=stream)
            for s, talk, stream in zip(sessions, talks, streams, strict=True)
        ))  # fmt: skip
        turns = [
            asyncio.create_task(o.turn(s, talk, "#long", stream=stream))
            for s, talk, stream in zip(sessions, talks, streams, strict=True)
        ]
        while await asyncio.to_thread(first.ask, "standing") < SESSIONS:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)
        await asyncio.to_thread(first.ask, "save")
        first.kill()
        for gone in turns[1::2]:
            gone.cancel()
        while o.cut < SESSIONS // 2:
            assert not any(t.done() and not t.cancelled() for t in turns), [t.exception() for t in turns if t.done()]
            await asyncio.sleep(0.01)

        second = await asyncio.to_thread(Trainer, folder, int(first.url.rpartition(":")[2]))
        while len((await o.say("/sessions", method="GET"))[1]["sessions"]) < SESSIONS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        there = {s["id"]: s for s in (await o.say("/sessions", method="GET"))[1]["sessions"]}
        assert {i: (s["base_url"], s["api_key"]) for i, s in there.items()} == {
            s["id"]: (s["base_url"], s["api_key"]) for s in sessions
        }
        assert (await o.say("/sessions"))[0] == 429  # nobody else is given them
        o.up.set()
        await asyncio.gather(*turns[::2])
        await asyncio.gather(*(
            o.turn(s, talk, "#split", stream=stream)
            for s, talk, stream in zip(sessions[::2], talks[::2], streams[::2], strict=True)
        ))  # fmt: skip
        for s in sessions[::2]:
            assert await o.say(f"/sessions/{s['id']}/end", {"reward": 1.0}) == (200, {"id": s["id"], "state": "ended"})
        for s in sessions[1::2]:
            for _ in range(2):  # as often as one likes
                ended = await o.say(f"/sessions/{s['id']}/cancel", {"why": "its agent is gone"})
                assert ended == (200, {"id": s["id"], "state": "cancelled"})
        fresh = [await o.open() for _ in range(SESSIONS // 2)]
        assert not {s["id"] for s in fresh} & {s["id"] for s in sessions}
        for s in fresh:
            await o.turn(s, [], s["data"]["question"], stream=False)
            await o.say(f"/sessions/{s['id']}/end", {"reward": 0.0})
        while not (folder / "batch").exists():
            assert second.process.poll() is None, (folder / "errors").read_text()[-4000:]
            await asyncio.sleep(0.01)
        await asyncio.to_thread(second.end)
        await o.client.close()
    check(json.loads((folder / "batch").read_text()), sessions, talks)
    for key in ((folder / "key").read_text(), *(s["api_key"] for s in sessions)):
        assert key not in (folder / "errors").read_text()
    assert stat.S_IMODE((folder / "key").stat().st_mode) == 0o600


def check(batch: dict[str, Any], sessions: list[dict[str, Any]], talks: list[list[Any]]) -> None:
    """Each agent that came back is one row of three answers; what was begun before the death was gone on with."""
    rows = {tuple(row["id"]): row for row in batch["rows"]}
    assert len(rows) == len(batch["rows"]) == SESSIONS
    eos = [TOKENIZER.eos_token_id]
    short = len(TOKENIZER.encode(says("hello")) + eos)
    begun = 8  # tokens of the long answer that the state has
    for i, (session, talk) in enumerate(zip(sessions, talks, strict=True)):
        row = rows[session["group"], session["index"]]
        made = [t for t, m in zip(row["tokens"], row["mask"], strict=True) if m]
        of_first_life = sum(m and v[0] == 0 for m, v in zip(row["mask"], row["versions"], strict=True))
        if i % 2:
            assert (TOKENIZER.decode(made), row["reward"], of_first_life) == (says("hello") + "<|im_end|>", 0.0, 0)
            continue
        answers = [m["content"] for m in talk if m["role"] == "assistant"]
        assert answers == [says("hello"), LONG, says("split")]
        assert TOKENIZER.decode(made) == "".join(a + "<|im_end|>" for a in answers)
        assert (row["reward"], of_first_life) == (1.0, short + begun)
    assert batch["dropped"] == {"failed": SESSIONS // 2 * (short + begun)}


def test_a_trainer_that_is_killed_with_64_sessions_open(tmp_path: Path) -> None:
    """Clients that come back go on from their tokens; the others' samples are settled by name, and begin again."""
    asyncio.run(asyncio.wait_for(life(tmp_path), 600))
