"""Messages between the server of an engine and its client, encoded by :mod:`april.serialization.own_values`.

Requests and answers share one WebSocket; values that are queued in one iteration of the event loop are sent as one
message, up to TOGETHER_BYTES. Control calls, attachments and tensors use plain HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from april import errors
from april.core.types import OnWeightUpdate
from april.core.versions import PolicyVersion
from april.engines.protocol import Capabilities, Chunk, Health, Request
from april.engines.weight_transfer import TensorSpec
from april.errors import EngineBusy, EngineError, WeightsInUse, WireError
from april.serialization.own_values import pack, unpack
from april.text.server_text import clean, printable

T = TypeVar("T")

ROUTE = "/april/"
MESSAGE_BYTES = 256 << 20
"""Largest size of a message, a control call or an attachment; either side closes a connection that exceeds it."""
TENSOR_BYTES = 16 << 30
"""Largest number of bytes of the tensors of one call."""
TOGETHER_BYTES = 4 << 20
"""Size at which a message is sent even if more values are queued, because asyncio copies unsent bytes repeatedly."""
PIECE_BYTES = 1 << 20
"""Bytes of tensors that are written at a time, because asyncio copies unsent bytes repeatedly."""
HEARTBEAT_S = 10.0
"""Seconds between two pings. A connection is closed after 1.5 times HEARTBEAT_S of silence, because a suspended process
would never close it."""


class Failure(msgspec.Struct, array_like=True):
    """An error of april, identified by the name of its class."""

    kind: str
    message: str
    retry_after_s: float | None = None
    unsound: int = 0

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an error; an error of another type becomes an EngineError whose message names that type."""
        if isinstance(error, EngineError):
            kind = next(c.__name__ for c in type(error).__mro__ if c.__module__ == errors.__name__)
            said = printable(str(error))
            return cls(kind, said, getattr(error, "retry_after_s", None), getattr(error, "unsound", 0))
        return cls(EngineError.__name__, printable(f"{type(error).__name__}: {error}"))

    def error(self) -> EngineError:
        """Build the exception that this object describes."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, EngineError)):
            return EngineError(self.message)
        if issubclass(kind, EngineBusy):
            return kind(self.message, self.retry_after_s)
        return kind(self.message, self.unsound) if issubclass(kind, WeightsInUse) else kind(self.message)


class Start(msgspec.Struct, array_like=True, tag=True):
    """Begin a request; its attachments contain no bytes, only their digests."""

    request: Request


class Abort(msgspec.Struct, array_like=True, tag=True):
    """End requests; the answer to each request is its tokens so far."""

    attempt_ids: list[str]


class Leave(msgspec.Struct, array_like=True, tag=True):
    """Cancel a request because its consumer has stopped reading."""

    attempt_id: str


class ChunkMessage(msgspec.Struct, array_like=True):
    """Part of the answer to a request."""

    attempt_id: str
    chunks: list[Chunk]
    last: bool = False
    failure: Failure | None = None
    missing: list[str] = []
    """Digests of attachments that the server lacks; if there are any, the request has not begun."""


Ask = Start | Abort | Leave


def unpacked(content: bytes, kind: Any) -> list[Any]:
    """Decode the values of one WebSocket message; raises WireError for invalid bytes."""
    try:
        return [unpack(each, kind) for each in _SEVERAL.decode(content)]
    except (msgspec.DecodeError, errors.LinkError) as error:
        raise WireError(f"another process has sent a message that cannot be decoded: {clean(error)}") from None


_SEVERAL = msgspec.msgpack.Decoder(list[bytes])


class Outbox:
    """Sends values over a WebSocket; values put in one iteration of the event loop become one message."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._waiting: list[bytes] = []
        self._wake = asyncio.Event()

    def put(self, value: Any) -> None:
        """Queue a value for sending; raises TypeError if it cannot be encoded."""
        self._waiting.append(pack(value))
        self._wake.set()

    async def run(self) -> None:
        """Send until cancelled. If the socket raises an error, it is closed, so that its reader ends too."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                waiting, self._waiting = self._waiting, []
                together, size = [], 0
                for packed in waiting:
                    together.append(packed)
                    size += len(packed)
                    if size >= TOGETHER_BYTES:
                        await self._socket.send_bytes(msgspec.msgpack.encode(together))
                        together, size = [], 0
                if together:
                    await self._socket.send_bytes(msgspec.msgpack.encode(together))
        except Exception:
            await self._socket.close()
            raise


def joined(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Merge consecutive chunks of the same version into one; the finish stays on the last one."""
    runs: list[list[Chunk]] = []
    for chunk in chunks:
        if runs and (runs[-1][-1].version, runs[-1][-1].sure) == (chunk.version, chunk.sure):
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return [_as_one(run) if run[1:] else run[0] for run in runs]


def _as_one(run: Sequence[Chunk]) -> Chunk:
    tokens, logprobs = np.concatenate([c.tokens for c in run]), np.concatenate([c.logprobs for c in run])
    return replace(run[-1], tokens=tokens, logprobs=logprobs)


class EngineCall(msgspec.Struct):
    """A control call. ``session`` is the id from the server; it is empty in the call that begins a session."""

    session: str = ""
    client: str = ""
    """Random id of the client, in the call that begins a session; empty in all other calls."""
    present: bool = False
    """True if the present weights count as the first version of a new session, no matter who has loaded them."""
    in_flight: OnWeightUpdate = OnWeightUpdate.RESUBMIT
    version: PolicyVersion | None = None
    path: str | None = None


class Tensors(msgspec.Struct):
    """Header of a tensor upload; the bytes of the tensors follow, one after the other."""

    session: str
    specs: list[TensorSpec]
    sizes: list[int]
    last: bool


class CallReply(msgspec.Struct):
    """The answer to a control call."""

    failure: Failure | None = None
    session: str = ""
    client: str = ""
    """Id of the client that has the session; empty if there is no session."""
    version: PolicyVersion | None = None
    """Policy version of the present weights; None if they match no version."""
    untouched: bool = False
    """True if the server still has the weights that it started with."""
    health: Health | None = None
    capabilities: Capabilities | None = None
    reads_paths: bool = False
    """True if the engine implements :class:`~april.engines.protocol.ReadsPaths`."""
    content: str = ""
