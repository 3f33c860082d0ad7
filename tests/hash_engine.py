"""Engines whose every token is a hash of the weights that made it, and servers that hold those weights.

A token and its log-probability follow from (weights, seed, conversation), so whoever knows the seed of an attempt can
tell with which weights each of its tokens was generated. Weights are texts: ``start``, ``w1``, ...; a directory holds
one of them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from april.core.sampling import LogprobKind
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.protocol import Capabilities, Chunk, EngineFinish, Health, Int32, Request
from april.errors import EngineError

EOS, VOCAB, START = 0, 997, "start"
ENDS = 0.12
"""Share of the tokens that end their response."""


def _hash(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def conversation(ids: Sequence[int] | Int32) -> int:
    """Hash of a whole conversation, to which :func:`longer` adds a token."""
    made = 0
    for token in ids:
        made = longer(made, int(token))
    return made


def longer(made: int, token: int) -> int:
    """Hash of the conversation ``made`` with one more token."""
    return _hash(made, token)


def logprob_of(weights: str, made: int, token: int) -> np.float32:
    """That of ``token`` after the conversation ``made``."""
    return np.float32(-(_hash("logprob", weights, made, token) % 100_000) / 25_000)


def next_token(weights: str, seed: int | None, made: int) -> tuple[int, np.float32]:
    """The token that follows the conversation ``made``, and its log-probability."""
    drawn = _hash("token", weights, seed, made)
    token = EOS if drawn % 10_000 < ENDS * 10_000 else 1 + (drawn >> 20) % (VOCAB - 1)
    return token, logprob_of(weights, made, token)


def save(directory: Path, weights: str) -> str:
    """Write weights as a trainer does: over what is there. Returns the directory's path."""
    directory.mkdir(exist_ok=True)
    (directory / "model.safetensors").write_text(weights)
    return str(directory)


@dataclass(eq=False)
class Server:
    """What holds the weights; it outlives its clients."""

    weights: str = START
    dead_until: float = 0.0
    life: int = 0
    """Grows when it is started anew."""
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def restart(self, seconds: float) -> None:
        """It crashes, and its supervisor starts it again with the weights of its start."""
        self.weights, self.life = START, self.life + 1
        self.dead_until = asyncio.get_running_loop().time() + seconds


Hook = Callable[["HashEngine", str], Awaitable[None]]


class HashEngine:
    """A client of a :class:`Server`; a token takes one second, and the client itself is honest.

    ``on_load`` runs where the server loads; what it raises is the server's answer.
    """

    def __init__(self, name: str, seeds: dict[str, int | None], server: Server, *, slots: int | None = 6) -> None:
        self._name, self._seeds, self.server = name, seeds, server
        self._capabilities = Capabilities(
            logprob_kind=LogprobKind.TEMPERATURE, vocab_size=VOCAB, max_context=4096, eos_token_ids=(EOS,),
            max_in_flight=slots, updates_from_disk=True, remote=True,
        )  # fmt: skip
        self._aborted: set[str] = set()
        self._running: set[str] = set()
        self._paused = self._closed = False
        self._version = FIRST_VERSION
        self._whole = True
        """No load of this client has failed since the last one that succeeded."""
        self._given: int | None = None
        """The server's life in which this client gave it weights, or a name for them."""
        self.on_load: Hook | None = None
        self.violations: list[str] = []

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def _current(self) -> bool:
        return self._whole and self._given in (None, self.server.life)

    def _reach(self) -> None:
        if self._closed or asyncio.get_running_loop().time() < self.server.dead_until:
            raise EngineError(f"{self._name} does not answer")

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        self._reach()
        if not self._current:
            raise EngineError(f"{self._name} has not the weights that it was given")
        if request.attempt_id in self._seeds:
            self.violations.append(f"attempt {request.attempt_id} was asked twice")
        if request.response_offset and request.token_ids[-1] == EOS:
            self.violations.append(f"attempt {request.attempt_id} continues behind its end")
        self._seeds[request.attempt_id] = request.sampling.seed
        made, life = conversation(request.token_ids), self.server.life
        self._running.add(request.attempt_id)
        try:
            for n in range(1, request.sampling.max_tokens + 1):
                while True:
                    await asyncio.sleep(1.0)
                    self._reach()
                    if self.server.life != life:
                        raise EngineError(f"{self._name} broke off")
                    if request.attempt_id in self._aborted:
                        yield Chunk(np.empty(0, np.int32), np.empty(0, np.float32), self._version, EngineFinish.ABORT)
                        return
                    if not self._paused:
                        break
                token, logprob = next_token(self.server.weights, request.sampling.seed, made)
                made = longer(made, token)
                end = EngineFinish.STOP if token == EOS else EngineFinish.LENGTH
                last = token == EOS or n == request.sampling.max_tokens
                yield Chunk(
                    np.array([token], np.int32), np.array([logprob], np.float32), self._version, end if last else None
                )
                if last:
                    return
        finally:
            self._running.discard(request.attempt_id)
            self._aborted.discard(request.attempt_id)

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        self._reach()
        self._aborted.update(self._running if attempt_ids is None else self._running.intersection(attempt_ids))

    async def pause(self) -> None:
        self._reach()
        self._paused = True

    async def resume(self) -> None:
        self._reach()
        self._paused = False

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        """A server goes on loading when nobody waits for it any more; the next load comes after."""
        self._reach()
        if not self._paused or self._running:
            self.violations.append("weights are loaded beside requests")
        if path is None:
            if not self._current:
                raise EngineError(f"{self._name}: a name brings no weights back")
            self._version, self._given = version, self.server.life
            return
        self._whole = False
        life = await asyncio.shield(asyncio.get_running_loop().create_task(self._load(path)))
        self._reach()
        self._whole, self._version, self._given = True, version, life

    async def _load(self, path: str) -> int:
        server = self.server
        life = server.life
        async with server.loading:
            if self.on_load is not None:
                await self.on_load(self, path)
            if server.life != life:
                raise EngineError(f"{self._name} broke off while it loaded")
            server.weights = (Path(path) / "model.safetensors").read_text()
            return life

    async def health(self) -> Health:
        try:
            self._reach()
        except EngineError as error:
            return Health(ok=False, detail=str(error))
        return Health(ok=True, current=self._current)

    async def close(self) -> None:
        self._closed = True
