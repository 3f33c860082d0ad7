"""OpenEnv's capture proxy under the suite: ``pip install openenv aiohttp``, then run this file."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, ClassVar

import aiohttp
from openenv.core.harness.capture import CaptureServer, to_trace_entries
from with_engine import EngineSubject, main

from april.testing.gateway import Door, Ended, Row


def _free() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class OpenEnv(EngineSubject):
    """Each session names an engine of its own, which is the scripted one under another path."""

    name: ClassVar[str] = "OpenEnv capture"
    version: ClassVar[str] = version("openenv")
    dialects: ClassVar[Sequence[str]] = ("chat", "messages", "responses")
    patience_s: ClassVar[float] = 10.0
    outage_s: ClassVar[float] = 8.0

    async def __aenter__(self) -> Any:
        await self.engine.start()
        self.server = CaptureServer(llm_url=self.engine.url, model="tiny", port=_free(), capture_level="tokens")
        await asyncio.to_thread(self.server.start)
        self.base = f"http://127.0.0.1:{self.server.port}"
        self.opened = 0
        self.http = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()
        self.engine.release()
        await asyncio.to_thread(self.server.stop)
        await self.engine.stop()

    async def open(self, max_tokens: int | None = None) -> Door:
        self.opened += 1
        name = f"n{self.opened}"
        asked = {"llm_url": f"{self.engine.url}/s/{name}", "model": "tiny"}
        async with self.http.post(self.base + "/sessions", json=asked) as response:
            session = await response.json()
        self.engine.attempts[name].clear()  # its probes
        return Door(f"{self.base}/v1", session["session_id"], name)

    async def end(self, door: Door, reward: float = 1.0) -> Ended:
        async with self.http.get(f"{self.base}/sessions/{door.api_key}/rollout") as response:
            document = json.loads(await response.read())
        rows = []
        for entry in to_trace_entries(self.server.registry.get(door.api_key).graph, document):
            prompt, tokens = entry["prompt_token_ids"], entry["completion_token_ids"]
            mask = entry["loss_mask"][len(prompt) :]
            rows.append(Row(prompt=prompt, tokens=tokens, logprobs=entry["per_token_logps"], mask=mask))
        dropped: dict[str, int] = {}
        for sequence in document["sequences"]:
            if sequence["role"] != "agent":
                dropped[sequence["role"]] = dropped.get(sequence["role"], 0) + sum(sequence.get("loss_mask") or ())
        return Ended(rows, dropped)


if __name__ == "__main__":
    main(OpenEnv)
