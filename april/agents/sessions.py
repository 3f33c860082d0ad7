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

from april.agents.chat import COMMIT_S, KEEPALIVE_S, RequestError
from april.agents.endpoint import Endpoint, check_key, read_json_body
from april.core.types import Prompt
from april.driver.llm import LLM
from april.driver.rewards import Response
from april.errors import RolloutError, UsageError

RETRY_AFTER_S = 1
"""Seconds that an orchestrator is asked to wait (Retry-After) when no sample is needed."""
MAX_ENDED_SESSIONS = 4096
"""Number of ended sessions whose outcome is remembered, to answer repeated requests."""
MAX_BODY_BYTES = 1 << 20


@dataclass(slots=True, eq=False)
class _OpenSession:
    """A sample whose rollout function waits for the orchestrator to end its session."""

    id: str
    key: str = field(repr=False)
    description: Mapping[str, Any]
    resumed: bool
    """True if the sample ran before a restart. Its old agent may come back, so no other agent gets the session."""
    loop: asyncio.AbstractEventLoop
    agent_started: asyncio.Future[None]
    """Resolved once an agent works on the sample."""
    outcome: asyncio.Future[dict[str, Any]]
    taken: bool = False
    """True once an agent has the session: one that asked for it, or one that has run on since before a restart."""
    has_requested: bool = False
    """True once the agent has made a request."""

    def assign(self, *, by_request: bool = False) -> None:
        """Mark the session as taken by an agent, whose time limit starts now.

        ``by_request`` means that the agent has made a request.
        """
        self.has_requested |= by_request
        if not self.taken:
            self.taken = True
            self.loop.call_soon_threadsafe(_resolve, self.agent_started, None)

    def set_outcome(self, outcome: dict[str, Any] | Exception) -> None:
        self.loop.call_soon_threadsafe(_resolve, self.outcome, outcome)


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_exception(value) if isinstance(value, Exception) else future.set_result(value)


@dataclass(slots=True, eq=False)
class Sessions:
    """Hands a scheduler's samples to an orchestrator over HTTP.

    ``POST /sessions`` opens a session for the next sample: ``{"id", "base_url", "api_key", "group", "index", "data"}``,
    or 429 with Retry-After while no sample is wanted. ``POST /sessions/ID/end`` with ``{"reward": number, "output":
    anything}`` ends a session, ``POST /sessions/ID/cancel`` with ``{"why": text}`` makes its sample fail; both may be
    repeated. ``GET /sessions`` lists the open sessions. ``reward`` may also be an object of numbers by name, like the
    return value of a reward function.

    If the trainer restarts with the same key and port, sessions keep their ids, addresses and keys: agents that are
    still running send their next requests as if nothing had happened, and no other agent gets their sessions. A session
    without any request for ``function_timeout_s`` fails; its sample begins again in a new session.

    Args:
        key: bearer token that every request of the orchestrator must carry; agents' keys are derived from it. If it is
            empty, the key in ``key_file`` is used, or a random one.
        key_file: file that holds the key, readable by its owner only; it is created if it is missing.
        host: address to listen on for orchestrator and agents; ``base_url`` has the host that the orchestrator uses.
        port: port to listen on; 0 means any free one. Only with a fixed port can agents continue after a restart.
        commit_s, alive_s: see :class:`april.RolloutScheduler`.
    """

    key: str = field(default="", repr=False)
    key_file: str | os.PathLike[str] | None = None
    host: str = "127.0.0.1"
    port: int = 0
    commit_s: float = COMMIT_S
    alive_s: float = KEEPALIVE_S
    url: str = ""
    _open_sessions: dict[str, _OpenSession] = field(default_factory=dict, repr=False)
    _unassigned: deque[_OpenSession] = field(default_factory=deque, repr=False)
    _ended: OrderedDict[str, str] = field(default_factory=OrderedDict, repr=False)
    _endpoint: Endpoint | None = field(default=None, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)

    def __post_init__(self) -> None:
        if not self.key:
            self.key = secrets.token_urlsafe(24) if self.key_file is None else _read_or_create_key(Path(self.key_file))

    # ---------------------------------------------------------------- for the trainer

    async def rollout(self, prompt: Prompt, llm: LLM) -> dict[str, Any]:
        """Run a sample: wait until the orchestrator ends its session, and return the reward and output that it sent."""
        endpoint = self.start()
        loop = asyncio.get_running_loop()
        name, key = self._id_and_key(prompt, llm)
        description = {
            "group": llm.sample_id.group, "index": llm.sample_id.index, "evaluation": llm.sample_run.evaluation,
            "data": dict(prompt.data),
        }  # fmt: skip
        started, outcome = loop.create_future(), loop.create_future()
        session = _OpenSession(name, key, description, llm.sample_run.resumed, loop, started, outcome)
        on_request = partial(session.assign, by_request=True)
        llm.endpoint(partial(endpoint.serve, path=name, key=key, on_request=on_request))
        self._ended.pop(name, None)  # a scheduler before a restart may have ended a session of this name
        self._open_sessions[name] = session
        if session.resumed:
            session.assign()
        else:
            self._unassigned.append(session)
        try:
            with llm.untimed():
                await asyncio.wait((session.agent_started, session.outcome), return_when=asyncio.FIRST_COMPLETED)
            return await session.outcome
        finally:
            if self._open_sessions.get(name) is session:
                del self._open_sessions[name]

    @staticmethod
    def reward(prompt: Prompt, response: Response) -> float | Mapping[str, float]:
        """Return the reward that the orchestrator sent: a number, or its parts by name."""
        reward: float | Mapping[str, float] = response.output["reward"]
        return reward

    def start(self) -> Endpoint:
        """Start the server in its own thread; if this was not called before, the first sample calls it.

        Raises RolloutError if the address is taken.
        """
        with self._lock:
            if self._endpoint is None:
                endpoint = Endpoint(self.host, self.port, self.commit_s, self.alive_s, add_routes=self._add_routes)
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

    def _id_and_key(self, prompt: Prompt, llm: LLM) -> tuple[str, str]:
        """Return the session's id and its agent's key, which are derived from ``key``: a restart does not change them.

        A sample that begins again gets a new session, and so does another prompt that gets the same group number after
        a restart. Sessions of evaluations get random ids, since evaluations do not outlive the process.
        """
        sample, run = llm.sample_id, llm.sample_run
        run_id = f"{prompt.epoch}/{prompt.position}/{sample}/{run.restarts}"
        if run.evaluation is not None:
            run_id = f"evaluation {secrets.token_hex(8)}"
        key, parts = self.key.encode(), ("session", "agent")
        digests = [hmac.new(key, f"{part} {run_id}".encode(), hashlib.sha256) for part in parts]
        return f"{sample.group}-{sample.index}-{digests[0].hexdigest()[:16]}", digests[1].hexdigest()[:32]

    # ---------------------------------------------------------------- for the orchestrator

    def _add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/sessions", self._open)
        router.add_get("/sessions", self._list)
        router.add_post("/sessions/{id}/end", self._end)
        router.add_post("/sessions/{id}/cancel", self._cancel)

    def _check(self, request: web.Request) -> None:
        check_key(request, self.key, "the key does not belong to these sessions")

    @staticmethod
    def _description(request: web.Request, session: _OpenSession) -> dict[str, Any]:
        url = f"{request.scheme}://{request.host}/{session.id}/v1"
        address = {"id": session.id, "base_url": url, "api_key": session.key}
        return {**address, **session.description, "taken": session.taken}

    async def _open(self, request: web.Request) -> web.Response:
        self._check(request)
        while self._unassigned:
            session = self._unassigned.popleft()
            if self._open_sessions.get(session.id) is session and not session.taken:
                session.assign()
                return web.json_response(self._description(request, session))
        raise RequestError("no sample is needed now", 429, "no_sample", retry=True, retry_s=RETRY_AFTER_S)

    async def _list(self, request: web.Request) -> web.Response:
        self._check(request)
        sessions = [self._description(request, session) for session in list(self._open_sessions.values())]
        return web.json_response({"sessions": sessions})

    async def _end(self, request: web.Request) -> web.Response:
        self._check(request)
        body = await self._body(request)
        reward = body.get("reward")
        numbers = [*reward.values()] if isinstance(reward, dict) and reward else [reward]
        if any(isinstance(n, bool) or not isinstance(n, (int, float)) or not math.isfinite(n) for n in numbers):
            raise RequestError(f"reward must be a finite number, or such numbers by name, got {reward!r:.100}")
        return self._finish(request, "ended", {"reward": reward, "output": body.get("output")})

    async def _cancel(self, request: web.Request) -> web.Response:
        self._check(request)
        why = str((await self._body(request)).get("why", "no reason was given"))[:1000]
        return self._finish(request, "cancelled", RolloutError(f"the orchestrator cancelled the session: {why}"))

    @staticmethod
    async def _body(request: web.Request) -> Mapping[str, Any]:
        body = await read_json_body(request, MAX_BODY_BYTES)
        if not isinstance(body, dict):
            raise RequestError("the body must be a JSON object")
        return body

    def _finish(self, request: web.Request, state: str, outcome: dict[str, Any] | Exception) -> web.Response:
        """Pass the outcome to the rollout function; a repeated request changes nothing."""
        name = request.match_info["id"]
        session = self._open_sessions.get(name)
        if name not in self._ended:
            if session is None:
                raise RequestError("there is no such session, or its sample was given up", 410, "gone")
            if session.resumed and not session.has_requested and isinstance(outcome, dict):
                outcome = RolloutError("the session was ended because its agent has sent no request since a restart")
            session.set_outcome(outcome)
            self._ended[name] = state
            while len(self._ended) > MAX_ENDED_SESSIONS:
                self._ended.popitem(last=False)
        return web.json_response({"id": name, "state": self._ended[name]})


def _read_or_create_key(path: Path) -> str:
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
