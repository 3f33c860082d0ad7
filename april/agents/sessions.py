"""Hands samples to an external orchestrator over HTTP, which runs an agent on each one and reports the reward.

The trainer uses a normal RolloutScheduler, with :attr:`Sessions.rollout` and :attr:`Sessions.reward`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import os
import secrets
import stat
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from aiohttp import web

from april.agents.chat import ALIVE_S, COMMIT_S, RequestError
from april.agents.endpoint import Endpoint, Place, body_of, check_key
from april.core.types import Prompt
from april.driver.llm import LLM
from april.driver.rewards import Response
from april.errors import RolloutError, UsageError

RETRY_AFTER_S = 1
"""Seconds that an orchestrator is told to wait (Retry-After) when no sample is wanted."""
REMEMBERED = 4096
"""Number of ended sessions whose outcome is remembered, to answer repeated requests."""
LARGEST_BODY = 1 << 20


@dataclass(slots=True, eq=False)
class _Waiting:
    """A sample whose rollout function waits for the orchestrator to end its session."""

    id: str
    key: str
    shown: Mapping[str, Any]
    resumed: bool
    """True if the sample ran before a restart: its old agent may come back, so no second agent is given the session."""
    loop: asyncio.AbstractEventLoop
    given: asyncio.Future[None]
    """Resolved once an agent works on the sample."""
    outcome: asyncio.Future[dict[str, Any]]
    taken: bool = False
    """True once an agent has the session: it was handed out, or its agent has the key from before a restart."""
    asked: bool = False
    """True once the agent has made a request."""

    def take(self, *, asks: bool = False) -> None:
        """Mark the session as taken by an agent, whose time counts from now on; ``asks``: it made a request."""
        self.asked |= asks
        if not self.taken:
            self.taken = True
            self.loop.call_soon_threadsafe(_done, self.given, None)

    def end(self, outcome: dict[str, Any] | Exception) -> None:
        """Pass the outcome, or the error, to the waiting rollout function."""
        self.loop.call_soon_threadsafe(_done, self.outcome, outcome)


def _done(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_exception(value) if isinstance(value, Exception) else future.set_result(value)


@dataclass(slots=True, eq=False)
class Sessions:
    """Hands a scheduler's samples to an orchestrator over HTTP.

    ``POST /sessions`` opens a session for the next sample: ``{"id", "base_url", "api_key", "group", "index", "data"}``,
    or 429 with Retry-After while no sample is wanted. ``POST /sessions/ID/end`` with ``{"reward": number, "output":
    anything}`` ends a session, ``POST /sessions/ID/cancel`` with ``{"why": text}`` makes its sample fail; both may be
    repeated. ``GET /sessions`` lists the open sessions.

    If the trainer restarts with the same key and port, sessions keep their ids, addresses and keys: agents that are
    still running continue with the answers they have, and no other agent is given their sessions. A session without any
    request for ``function_timeout_s`` fails; its sample begins again in a new session.

    Args:
        key: bearer token that every request of the orchestrator must carry; agents' keys are derived from it. If it is
            empty, the key in ``key_file`` is used, or a random one.
        key_file: file that holds the key, readable by its owner only; it is created if it is missing.
        host: address to listen on, for agents too; base URLs use the host of the orchestrator's request.
        port: port to listen on; 0 means any free one. Give a number if clients are to find it again after a restart.
        commit_s, alive_s: timings of slow answers, as for the scheduler.
    """

    key: str = field(default="", repr=False)
    key_file: str | os.PathLike[str] | None = None
    host: str = "127.0.0.1"
    port: int = 0
    commit_s: float = COMMIT_S
    alive_s: float = ALIVE_S
    url: str = ""
    _waiting: dict[str, _Waiting] = field(default_factory=dict, repr=False)
    _free: deque[_Waiting] = field(default_factory=deque, repr=False)
    _ended: OrderedDict[str, str] = field(default_factory=OrderedDict, repr=False)
    _endpoint: Endpoint | None = field(default=None, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)

    def __post_init__(self) -> None:
        if not self.key:
            self.key = secrets.token_urlsafe(24) if self.key_file is None else _kept(Path(self.key_file))

    # ---------------------------------------------------------------- the trainer's side

    async def rollout(self, prompt: Prompt, llm: LLM) -> dict[str, Any]:
        """Run a sample: wait until the orchestrator ends its session, and return the reward and output that it sent."""
        endpoint = self.start()
        loop = asyncio.get_running_loop()
        name, key = self._names(prompt, llm)
        shown = {
            "group": llm.sample_id.group, "index": llm.sample_id.index, "evaluation": llm.sample_run.evaluation,
            "data": dict(prompt.data),
        }  # fmt: skip
        waiting = _Waiting(name, key, shown, llm.sample_run.resumed, loop, loop.create_future(), loop.create_future())
        llm.endpoint(Place(endpoint, name, key, partial(waiting.take, asks=True)))
        self._waiting[name] = waiting
        if waiting.resumed:
            waiting.take()
        else:
            self._free.append(waiting)
        try:
            with llm.untimed():
                await asyncio.wait((waiting.given, waiting.outcome), return_when=asyncio.FIRST_COMPLETED)
            return await waiting.outcome
        finally:
            if self._waiting.get(name) is waiting:
                del self._waiting[name]

    @staticmethod
    def reward(prompt: Prompt, response: Response) -> float:
        """Return the reward that the orchestrator sent."""
        return float(response.output["reward"])

    def start(self) -> Endpoint:
        """Start the server in its own thread; the first sample does this if nobody has.

        Raises RolloutError if the address is taken.
        """
        with self._lock:
            if self._endpoint is None:
                endpoint = Endpoint(self.host, self.port, self.commit_s, self.alive_s, more=self._routes)
                try:
                    endpoint.start()
                except OSError as error:
                    where = f"{self.host}:{self.port}"
                    raise RolloutError(f"sessions cannot listen on {where}: {error.strerror}") from error
                self._endpoint, self.url = endpoint, endpoint.url
            return self._endpoint

    def close(self) -> None:
        """Stop the server."""
        with self._lock:
            endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.stop()

    def _names(self, prompt: Prompt, llm: LLM) -> tuple[str, str]:
        """Return the session's id and its agent's key, which are derived from ``key``: a restart does not change them.

        A sample that begins again gets a new session. So does a different prompt that gets the same group number after
        a restart. Sessions of evaluations get random ids, since they do not outlive the process.
        """
        sample, life = llm.sample_id, llm.sample_run
        of = f"{prompt.epoch}/{prompt.position}/{sample}/{life.restarts}"
        if life.evaluation is not None:
            of = f"evaluation {secrets.token_hex(8)}"
        marks = [hmac.new(self.key.encode(), f"{what} {of}".encode(), hashlib.sha256) for what in ("session", "agent")]
        return f"{sample.group}-{sample.index}-{marks[0].hexdigest()[:16]}", marks[1].hexdigest()[:32]

    # ---------------------------------------------------------------- the orchestrator's

    def _routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/sessions", self._open)
        router.add_get("/sessions", self._list)
        router.add_post("/sessions/{id}/end", self._end)
        router.add_post("/sessions/{id}/cancel", self._cancel)

    def _check(self, request: web.Request) -> None:
        check_key(request, self.key, "the key does not belong to these sessions")

    @staticmethod
    def _shown(request: web.Request, waiting: _Waiting) -> dict[str, Any]:
        url = f"{request.scheme}://{request.host}/{waiting.id}/v1"
        return {"id": waiting.id, "base_url": url, "api_key": waiting.key, **waiting.shown, "taken": waiting.taken}

    async def _open(self, request: web.Request) -> web.Response:
        self._check(request)
        while self._free:
            waiting = self._free.popleft()
            if self._waiting.get(waiting.id) is waiting and not waiting.taken:
                waiting.take()
                return web.json_response(self._shown(request, waiting))
        raise RequestError("no sample is needed now", 429, "no_sample", retry=True, retry_s=RETRY_AFTER_S)

    async def _list(self, request: web.Request) -> web.Response:
        self._check(request)
        return web.json_response({"sessions": [self._shown(request, w) for w in list(self._waiting.values())]})

    async def _end(self, request: web.Request) -> web.Response:
        self._check(request)
        body = await self._body(request)
        reward = body.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise RequestError(f"reward must be a finite number, got {reward!r:.100}")
        return self._over(request, "ended", {"reward": float(reward), "output": body.get("output")})

    async def _cancel(self, request: web.Request) -> web.Response:
        self._check(request)
        why = str((await self._body(request)).get("why", "no reason was given"))[:1000]
        return self._over(request, "cancelled", RolloutError(f"the orchestrator cancelled the session: {why}"))

    @staticmethod
    async def _body(request: web.Request) -> Mapping[str, Any]:
        body = await body_of(request, LARGEST_BODY)
        if not isinstance(body, dict):
            raise RequestError("the body must be a JSON object")
        return body

    def _over(self, request: web.Request, how: str, outcome: dict[str, Any] | Exception) -> web.Response:
        """Pass the outcome to the rollout function; a repeated request changes nothing."""
        name = request.match_info["id"]
        waiting = self._waiting.get(name)
        if name not in self._ended:
            if waiting is None:
                raise RequestError("there is no such session, or no longer: its sample was given up", 410, "gone")
            if waiting.resumed and not waiting.asked and isinstance(outcome, dict):
                outcome = RolloutError("the session was ended because its agent has sent no request since a restart")
            waiting.end(outcome)
            self._ended[name] = how
            while len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)
        return web.json_response({"id": name, "state": self._ended[name]})


def _kept(path: Path) -> str:
    """Return the key in a file that only its owner can read; create the file if it is missing.

    Raises UsageError if others can read the file, or if it is empty.
    """
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            key = secrets.token_urlsafe(24)
            file.write(key)
        return key
    except FileExistsError:
        pass
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise UsageError(f"key_file: others can read {path}; chmod 600 it")
    key = path.read_text("utf-8").strip()
    if not key:
        raise UsageError(f"key_file: {path} is empty; delete it, and april creates a key")
    return key
