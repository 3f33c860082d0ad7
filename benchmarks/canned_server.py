"""A server that speaks as vLLM and SGLang do and costs next to nothing: answers are canned and held until N wait.

    python -m benchmarks.canned_server --release-at 256 --response-tokens 250

prints one JSON line, ``{"port": ...}``, and serves on 127.0.0.1 until SIGTERM or SIGINT. One port serves both kinds.

Invariant: no answer leaves before ``release_at`` requests wait together, unless it is aborted. Streams go in
lock-step, as a decode step gives each running request its next tokens: one event on each stream, then a byte on the
connection that asked for ``/pace``, and nothing more before that byte is answered. A client whose loop answers it
has found every event in its sockets by then, and reads each by itself, however fast or slow it is. With ``--staggered``
streams begin one after the other, the last when the first ends, so that they end one after the other, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from benchmarks.canned_replies import MODEL, SGLANG, VLLM, stream_events, whole_reply

HOST = "127.0.0.1"
TOKEN_ROUTE = "/inference/v1/generate"  # noqa: S105 - a path, not a secret
CONTEXT = 1 << 16
POST_ROUTES = {
    TOKEN_ROUTE, "/generate", "/abort_requests", "/abort_request", "/collective_rpc", "/update_weight_version",
    "/update_weights_from_disk", "/reset_prefix_cache", "/reset_encoder_cache", "/flush_cache", "/pause", "/resume",
    "/pause_generation",
}  # fmt: skip
_CHUNK_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
SPARE = 128
"""Files that the interpreter, the listening sockets and the pipes need besides the requests."""


def require_open_files(sockets: int) -> None:
    """Raise the soft limit to what ``sockets`` need; ends the program with the remedy if the hard limit forbids it."""
    needed = sockets + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SystemExit(
            f"{sockets} requests in flight need {needed} open files per process, but the hard limit is {hard}; "
            f"run `ulimit -Hn {needed}` as root first, or ask for at most {max(0, hard - SPARE)} requests"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class _Sampling(msgspec.Struct):
    max_tokens: int = 0
    max_new_tokens: int = 0


class _Generate(msgspec.Struct):
    """Body of either generate route, as far as it matters here."""

    sampling_params: _Sampling
    request_id: str = ""
    rid: str = ""
    token_ids: list[int] = []
    input_ids: list[int] = []
    stream: bool = False


class Counts(msgspec.Struct):
    """Answer to GET /counts: requests since the start of the server, and most of them at once."""

    requests: int = 0
    peak: int = 0


_GENERATE = msgspec.json.Decoder(_Generate)


@dataclass(slots=True, eq=False)
class _Held:
    """A request that waits for its answer."""

    kind: str
    id: str
    prompt: list[int]
    count: int
    stream: bool
    connection: _Connection


@dataclass(slots=True)
class CannedServer:
    """The requests being held, the label of the weights, and the counts."""

    release_at: int
    response_tokens: int
    incremental: bool = True
    staggered: bool = False
    label: str = "default"
    held: dict[str, _Held] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    pace: asyncio.Transport | None = None
    _steps: list[tuple[asyncio.Transport, int, list[bytes]]] = field(default_factory=list)
    """Streams, with the step at which each begins."""
    _step: int = 0

    def generate(self, kind: str, raw: bytes, connection: _Connection) -> None:
        """Hold a request; the last of ``release_at`` lets all of them go. Probes are answered at once."""
        try:
            body = _GENERATE.decode(raw)
        except msgspec.DecodeError:
            connection.answer(400, b'{"error":{"message":"the body is no request","code":400}}')
            return
        ids = body.token_ids or body.input_ids
        wanted = body.sampling_params.max_tokens or body.sampling_params.max_new_tokens
        count = min(wanted, self.response_tokens)
        held = _Held(kind, body.request_id or body.rid, ids, count, body.stream, connection)
        if wanted == 1:
            connection.answer(200, whole_reply(kind, held.id, held.prompt, 1, self.label, "length"))
            return
        self.held[held.id] = held
        self.counts.requests += 1
        self.counts.peak = max(self.counts.peak, len(self.held))
        if len(self.held) >= self.release_at:
            released, self.held = list(self.held.values()), {}
            self._release(released)

    def _release(self, released: list[_Held]) -> None:
        self._steps, self._step = [], 0
        for i, held in enumerate(released):
            if not held.stream:
                reply = whole_reply(held.kind, held.id, held.prompt, held.count, self.label, "length")
                held.connection.answer(200, reply)
                continue
            transport = held.connection.transport
            assert transport is not None
            transport.write(_CHUNK_HEAD)
            events = stream_events(held.kind, held.id, held.prompt, held.count, self.label)
            first = i * len(events) // len(released) if self.staggered else 0
            self._steps.append((transport, first, [b"%x\r\n%b\r\n" % (len(e), e) for e in events]))
        if self._steps:
            self.next_step()

    def next_step(self) -> None:
        """The next event of every stream; without a pace they all go at once."""
        while self._steps:
            for transport, first, events in self._steps:
                if 0 <= (at := self._step - first) < len(events):
                    transport.write(events[at] + (b"0\r\n\r\n" if at + 1 == len(events) else b""))
            self._step += 1
            if self._step == max(first + len(events) for _, first, events in self._steps):
                self._steps = []
            elif self.pace is not None:
                self.pace.write(b"t")
                return

    def abort(self, ids: list[str]) -> None:
        """End held requests without a token; others are ignored."""
        for name in ids:
            held = self.held.pop(name.removeprefix("generate-tokens-"), None)
            if held is not None:
                reply = whole_reply(held.kind, held.id, held.prompt, 0, self.label, "abort")
                held.connection.answer(200, reply)

    def get(self, path: str) -> tuple[int, Any]:
        """What the probes of april's engines ask."""
        load = {"num_running_reqs": len(self.held), "num_waiting_reqs": 0, "token_usage": 0.1}
        said: dict[str, Any] = {
            "/version": {"version": "0.32.0"},
            "/v1/models": {"data": [{"id": MODEL, "root": None, "max_model_len": CONTEXT}]},
            "/weight_info": {"weight_version": self.label},
            "/is_paused": {"is_paused": False},
            "/server_info": {
                "vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}},
                "version": "0.5.20", "max_req_input_len": CONTEXT, "incremental_streaming_output": self.incremental,
            },
            "/model_info": {"model_path": MODEL, "weight_version": self.label},
            "/v1/loads": {"loads": [load]},
            "/ready": {}, "/health": {},
            "/counts": msgspec.to_builtins(self.counts),
        }  # fmt: skip
        if path in said:
            return 200, said[path]
        return (405 if path in POST_ROUTES else 404), {"detail": "no GET here"}

    def post(self, path: str, body: bytes) -> tuple[int, Any]:
        """Control calls."""
        values = json.loads(body) if body else {}
        if path == "/update_weight_version":
            self.label = values["new_version"]
        elif path in ("/abort_requests", "/abort_request"):
            ids = values["request_ids"] if "request_ids" in values else [values["rid"]]
            self.abort(ids)
            return 200, {"status": "aborted", "aborted": len(ids)}
        elif path in ("/pause", "/resume"):
            return 200, {"status": f"{path[1:]}d"}
        elif path == "/flush_cache":
            return 200, b"Cache flushed."
        elif path == "/collective_rpc":
            return 200, {"results": [None]}
        elif path not in POST_ROUTES:
            return 404, {"detail": "no such route"}
        return 200, {"success": True, "message": ""}


class _Connection(asyncio.Protocol):
    """As much of HTTP/1.1 as the clients need: one request after the other, bodies with a length."""

    def __init__(self, server: CannedServer) -> None:
        self._server = server
        self._buffer = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._server.pace is self.transport:
            self._server.pace = None

    def data_received(self, data: bytes) -> None:
        if self._server.pace is self.transport:
            self._server.next_step()
            return
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        method, target, _ = head.split(b" ", 2)
        self._request(method.decode(), target.decode().partition("?")[0], rest[:length])

    def _request(self, method: str, path: str, body: bytes) -> None:
        if path == "/pace":
            self._server.pace = self.transport
        elif method == "GET":
            status, said = self._server.get(path)
            self.answer(status, said if isinstance(said, bytes) else json.dumps(said).encode())
        elif path in (TOKEN_ROUTE, "/generate"):
            self._server.generate(VLLM if path == TOKEN_ROUTE else SGLANG, body, self)
        else:
            status, said = self._server.post(path, body)
            self.answer(status, said if isinstance(said, bytes) else json.dumps(said).encode())

    def answer(self, status: int, body: bytes) -> None:
        """One whole answer."""
        assert self.transport is not None
        head = b"HTTP/1.1 %d Said\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
        self.transport.write(head + body)


async def _serve(server: CannedServer, ready: Callable[[int], None]) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    # nothing is ever written there: it becomes readable when the parent is gone, however it died
    loop.add_reader(sys.stdin.fileno(), stop.set)
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    listening = await loop.create_server(lambda: _Connection(server), HOST, 0, backlog=4096)
    ready(listening.sockets[0].getsockname()[1])
    await stop.wait()


def main(argv: list[str] | None = None) -> int:
    """Command line of the server process."""
    parser = argparse.ArgumentParser(description="Canned answers of vLLM and SGLang; held until N requests wait.")
    parser.add_argument("--release-at", type=int, required=True, help="requests that must wait together")
    parser.add_argument("--response-tokens", type=int, required=True)
    parser.add_argument("--cumulative", action="store_true", help="say that SGLang's streams repeat everything")
    parser.add_argument("--staggered", action="store_true", help="streams begin and end one after the other")
    args = parser.parse_args(argv)
    require_open_files(args.release_at)
    server = CannedServer(args.release_at, args.response_tokens, not args.cumulative, args.staggered)
    asyncio.run(_serve(server, lambda port: print(json.dumps({"port": port}), flush=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
