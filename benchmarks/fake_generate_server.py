"""A generate server that costs next to nothing: answers are encoded beforehand and held until N requests wait.

    python -m benchmarks.fake_generate_server --port 0 --release-at 16384 --response-tokens 256

prints one JSON line, ``{"port": ...}``, and serves on 127.0.0.1 until it gets SIGTERM or SIGINT.

Invariant: no answer leaves before ``release_at`` requests have been waiting at the same moment, so that the
peak reported by /stats is the number that was really in flight. An abort ends its request at once, with the
first ``abort_tokens`` tokens of the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import msgspec
from aiohttp import web

from april.engines.protocol import EngineFinish
from benchmarks.generate_wire import (
    DISTINCT_ANSWERS,
    LONGEST_ANSWER,
    AbortBody,
    AnswerMeta,
    FinishReason,
    GenerateBody,
    GenerateReply,
    ServerStats,
    answer_index,
    answer_logprobs,
    answer_tokens,
    encode_body,
)
from benchmarks.open_files import require_open_files

HOST = "127.0.0.1"
# The kernel cuts each accept queue at net.core.somaxconn (often 4096). Several sockets on one port
# have a queue each: of 16,384 connects at once, before anything was accepted, 1 socket took 4,097,
# 4 took 16,320 and 8 took all (the kernel spreads them by hash); the rest would wait for retries.
LISTENING_SOCKETS = 8
BACKLOG = 4_096
MAX_BODY = 16 * 2**20
KEEP_ALIVE_S = 3_600.0
"""Longer than a client leaves a connection idle."""

_Body = TypeVar("_Body", GenerateBody, AbortBody)
_body_decoder = msgspec.json.Decoder(GenerateBody)
_abort_decoder = msgspec.json.Decoder(AbortBody)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the server does with a request.

    Attributes:
        release_at: answers wait until so many requests wait together; 1 answers at once.
        response_tokens: length of an answer, cut at the request's ``max_new_tokens``.
        abort_tokens: tokens in the answer to an aborted request.
    """

    release_at: int = 1
    response_tokens: int = 256
    abort_tokens: int = 16

    def __post_init__(self) -> None:
        if self.release_at < 1:
            raise ValueError(f"release_at is {self.release_at}; it counts requests and must be at least 1")
        for name in ("response_tokens", "abort_tokens"):
            value = getattr(self, name)
            if not 0 <= value <= LONGEST_ANSWER:
                raise ValueError(f"{name} is {value}; it must be in 0 to {LONGEST_ANSWER}")


@cache
def encoded_answer(index: int, count: int, finish: EngineFinish) -> bytes:
    """Body of answer ``index`` cut at ``count`` tokens."""
    return encode_body(
        GenerateReply(
            output_ids=answer_tokens(index, count).tolist(),
            output_logprobs=answer_logprobs(index, count).tolist(),
            finish_reason=FinishReason(finish.value),
            meta=AnswerMeta(index, count),
        )
    )


class FakeGenerateServer:
    """The requests being held, and the counters of /stats."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        # rid -> resolves to True when aborted, False when released
        self.held: dict[str, asyncio.Future[bool]] = {}
        self.in_flight = self.peak_in_flight = 0
        self.requests = self.answers = self.aborts = self.releases = self.tokens = 0
        for index in range(DISTINCT_ANSWERS):
            for finish in (EngineFinish.STOP, EngineFinish.LENGTH):
                encoded_answer(index, config.response_tokens, finish)

    def app(self) -> web.Application:
        """The four routes."""
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort_request)
        app.router.add_get("/health", self.health)
        app.router.add_get("/stats", self.stats)
        return app

    async def generate(self, http: web.Request) -> web.Response:
        """Hold the request until the release or its abort, then send an answer encoded beforehand."""
        body = _decode(_body_decoder, await http.read())
        if body.rid in self.held:
            raise web.HTTPBadRequest(text=f"rid {body.rid!r} is in flight already; ids must be unique")
        if not body.input_ids:
            raise web.HTTPBadRequest(text=f"rid {body.rid!r} has no input_ids; send at least one token")
        index = answer_index(body.input_ids[0])
        limit = body.sampling_params.max_new_tokens
        self.requests += 1
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            aborted = await self._hold(body.rid)
        finally:
            self.in_flight -= 1
            self.held.pop(body.rid, None)
        count, finish = self.config.response_tokens, EngineFinish.STOP
        if aborted:
            count, finish = self.config.abort_tokens, EngineFinish.ABORT
        if count >= limit:
            count, finish = limit, EngineFinish.LENGTH
        self.answers += 1
        self.tokens += count
        return web.Response(body=encoded_answer(index, count, finish), content_type="application/json")

    async def _hold(self, rid: str) -> bool:
        waiting: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.held[rid] = waiting
        if len(self.held) >= self.config.release_at:
            self.releases += 1
            for held in self.held.values():
                _end(held, aborted=False)
            self.held.clear()
        return await waiting

    async def abort_request(self, http: web.Request) -> web.Response:
        """End one held request, or all; unknown ids are ignored."""
        body = _decode(_abort_decoder, await http.read())
        rids = list(self.held) if body.abort_all else [body.rid]
        ended = [held for rid in rids if (held := self.held.pop(rid, None)) is not None]
        for held in ended:
            _end(held, aborted=True)
        self.aborts += len(ended)
        return web.json_response({"aborted": len(ended)})

    async def health(self, http: web.Request) -> web.Response:
        """Always well."""
        return web.json_response({"status": "ok"})

    async def stats(self, http: web.Request) -> web.Response:
        """The counters."""
        counters = {name: getattr(self, name) for name in ServerStats.__struct_fields__}
        return web.Response(body=encode_body(ServerStats(**counters)), content_type="application/json")


def _decode(decoder: msgspec.json.Decoder[_Body], raw: bytes) -> _Body:
    try:
        return decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise web.HTTPBadRequest(text=f"the body is not what the route expects: {error}") from error


def _end(held: asyncio.Future[bool], *, aborted: bool) -> None:
    if not held.done():  # a client that went away has cancelled it
        held.set_result(aborted)


def _bind(port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((HOST, port))
    except OSError:
        sock.close()
        raise
    return sock


@contextlib.asynccontextmanager
async def serving(server: FakeGenerateServer, port: int = 0) -> AsyncIterator[int]:
    """Serve inside the running loop; yields the port, 0 meaning any free one."""
    # handler_cancellation: a client that hangs up is no longer in flight
    runner = web.AppRunner(
        server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=1.0,
        keepalive_timeout=KEEP_ALIVE_S,
    )
    await runner.setup()
    sockets: list[socket.socket] = []
    try:
        for _ in range(LISTENING_SOCKETS):
            sockets.append(_bind(sockets[0].getsockname()[1] if sockets else port))
        for sock in sockets:
            await web.SockSite(runner, sock, backlog=BACKLOG).start()
        yield sockets[0].getsockname()[1]
    finally:
        await runner.cleanup()
        for sock in sockets:
            sock.close()


async def _serve(config: ServerConfig, port: int, with_parent: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    if with_parent:
        # nothing is ever written there: it becomes readable when the other end is gone, however it died
        loop.add_reader(sys.stdin.fileno(), stop.set)
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    async with serving(FakeGenerateServer(config), port) as bound:
        print(json.dumps({"port": bound}), flush=True)
        await stop.wait()


def main(argv: list[str] | None = None) -> int:
    """Command line of the server process."""
    parser = argparse.ArgumentParser(description="Fake generate server; answers are held until N requests wait.")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--release-at", type=int, default=1, help="requests that must wait together; 1: answer at once")
    parser.add_argument("--response-tokens", type=int, default=256)
    parser.add_argument("--abort-tokens", type=int, default=16)
    parser.add_argument("--with-parent", action="store_true", help="end when standard input is closed")
    args = parser.parse_args(argv)
    try:
        config = ServerConfig(args.release_at, args.response_tokens, args.abort_tokens)
    except ValueError as error:
        parser.error(str(error))
    require_open_files(config.release_at)
    asyncio.run(_serve(config, args.port, args.with_parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
