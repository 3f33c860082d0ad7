"""Sessions for an orchestrator outside: it asks for the next sample, runs an agent on it, and says the reward.

The trainer's side is a RolloutScheduler as ever, with :attr:`Sessions.rollout` and :attr:`Sessions.reward`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
import secrets
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from april.core.types import Prompt, SampleId
from april.driver.llm import LLM
from april.driver.rewards import Response
from april.errors import RolloutError

RETRY_AFTER_S = 1
"""What an orchestrator is told to wait, in seconds, when no sample is wanted."""
REMEMBERED = 4096
"""Sessions that have ended of which the outcome is known for those who ask again."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A sample whose rollout function waits for the orchestrator."""

    id: str
    sample: SampleId
    prompt: Prompt
    url: str
    key: str
    loop: asyncio.AbstractEventLoop
    outcome: asyncio.Future[dict[str, Any]]
    given: bool = False


@dataclass(slots=True, eq=False)
class Sessions:
    """Hands a scheduler's samples to an orchestrator over HTTP.

    ``POST /sessions`` opens the next one: ``{"id", "base_url", "api_key", "group", "index", "data"}``, or 429 with
    Retry-After while the plan wants no more. ``POST /sessions/ID/end`` with ``{"reward": number, "output": anything}``
    ends it, ``POST /sessions/ID/cancel`` with ``{"why": text}`` fails it; both may be repeated. ``GET /sessions`` lists
    those that are open, which after a restart of the trainer are the same as before: their ids, and what their agents
    had heard, stay.

    Args:
        key: what every request must bring as a bearer token.
        host: the address to listen on.
        port: 0 means any that is free; give one if clients are to find it again after a restart.
    """

    key: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    host: str = "127.0.0.1"
    port: int = 0
    url: str = ""
    _waiting: dict[str, _Waiting] = field(default_factory=dict)
    _free: deque[str] = field(default_factory=deque)
    _ended: OrderedDict[str, str] = field(default_factory=OrderedDict)
    _runner: web.AppRunner | None = None
    _starting: asyncio.Task[None] | None = None

    # ---------------------------------------------------------------- the trainer's side

    async def rollout(self, prompt: Prompt, llm: LLM) -> dict[str, Any]:
        """The rollout function: wait until the orchestrator has ended the session; returns what it said."""
        await self.start()
        name = self._name(llm.sample_id)
        loop = asyncio.get_running_loop()
        waiting = _Waiting(name, llm.sample_id, prompt, llm.base_url, llm.api_key, loop, loop.create_future())
        self._waiting[name] = waiting
        self._free.append(name)
        try:
            return await waiting.outcome
        finally:
            del self._waiting[name]

    @staticmethod
    def reward(prompt: Prompt, response: Response) -> float:
        """The reward function: what the orchestrator said."""
        return float(response.output["reward"])

    async def start(self) -> None:
        """Listen, on the running loop; done by the first sample unless before."""
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())
        await asyncio.shield(self._starting)

    async def close(self) -> None:
        """Listen no more."""
        if self._runner is not None:
            await self._runner.cleanup()

    # ---------------------------------------------------------------- the orchestrator's

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 20)
        app.router.add_post("/sessions", self._open)
        app.router.add_get("/sessions", self._list)
        app.router.add_post("/sessions/{id}/end", self._end)
        app.router.add_post("/sessions/{id}/cancel", self._cancel)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port).start()
        self.url = f"http://{self.host}:{self._runner.addresses[0][1]}"

    def _name(self, sample: SampleId) -> str:
        """The session's id: that of its sample, and what nobody can guess without the key."""
        mark = hmac.new(self.key.encode(), f"session {sample}".encode(), hashlib.sha256).hexdigest()
        return f"{sample.group}-{sample.index}-{mark[:16]}"

    def _check(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.key.encode()):
            raise web.HTTPUnauthorized(text="the key is not that of these sessions")

    @staticmethod
    def _shown(waiting: _Waiting) -> dict[str, Any]:
        group, index = waiting.sample
        shown = {"id": waiting.id, "base_url": waiting.url, "api_key": waiting.key, "group": group, "index": index}
        return shown | {"data": dict(waiting.prompt.data)}

    async def _open(self, request: web.Request) -> web.Response:
        self._check(request)
        while self._free:
            waiting = self._waiting.get(self._free.popleft())
            if waiting is not None and not waiting.given:
                waiting.given = True
                return web.json_response(self._shown(waiting))
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        return web.json_response({"error": "no sample is wanted now"}, status=429, headers=headers)

    async def _list(self, request: web.Request) -> web.Response:
        self._check(request)
        return web.json_response({"sessions": [self._shown(w) for w in self._waiting.values()]})

    async def _end(self, request: web.Request) -> web.Response:
        self._check(request)
        body = await self._body(request)
        reward = body.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise web.HTTPBadRequest(text=f"reward must be a finite number, got {reward!r:.100}")
        return self._over(request, "ended", {"reward": float(reward), "output": body.get("output")}, None)

    async def _cancel(self, request: web.Request) -> web.Response:
        self._check(request)
        why = str((await self._body(request)).get("why", "no reason was given"))[:1000]
        return self._over(request, "cancelled", None, RolloutError(f"the orchestrator cancelled the session: {why}"))

    @staticmethod
    async def _body(request: web.Request) -> Mapping[str, Any]:
        try:
            body = json.loads(await request.read() or b"{}")
        except ValueError as error:
            raise web.HTTPBadRequest(text=f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise web.HTTPBadRequest(text="the body must be a JSON object")
        return body

    def _over(
        self, request: web.Request, how: str, outcome: dict[str, Any] | None, error: Exception | None
    ) -> web.Response:
        """Tell the rollout function; told again, nothing changes."""
        name = request.match_info["id"]
        waiting = self._waiting.get(name)
        if waiting is not None and not waiting.outcome.done():
            if error is not None:
                waiting.outcome.set_exception(error)
            elif outcome is not None:
                waiting.outcome.set_result(outcome)
            self._ended[name] = how
            while len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)
        elif name not in self._ended:
            raise web.HTTPGone(text="there is no such session, or not any more: its sample was given up")
        return web.json_response({"id": name, "state": self._ended[name]})
