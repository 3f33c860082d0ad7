"""Engines with one planted defect each, for the proof that the conformance suite catches it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from april.core.sampling import LogprobKind
from april.core.versions import PolicyVersion
from april.engines.protocol import Capabilities, Chunk, EngineFinish, Request
from april.errors import EngineError
from april.testing import FakeEngine
from april.testing.recording_engine import RecordingEngine
from april.testing.records import AttemptRecord


class Sound(RecordingEngine):
    """Delegates everything; subclasses spoil one thing."""

    @property
    def name(self) -> str:
        return "spoilt"


def without_last(chunk: Chunk) -> Chunk:
    return replace(chunk, tokens=chunk.tokens[:-1], logprobs=chunk.logprobs[:-1])


class OneTokenTooMany(Sound):
    """Counts the budget from zero."""

    def alter_request(self, request: Request) -> Request:
        sampling = request.sampling
        most = sampling.max_tokens + 1
        least = min(most, sampling.min_tokens + 1)
        return replace(request, sampling=replace(sampling, max_tokens=most, min_tokens=least))


class OneTokenTooFew(Sound):
    """Counts the budget from one; says so, as LENGTH."""

    def alter_request(self, request: Request) -> Request:
        return replace(request, sampling=request.sampling.capped(max(1, request.sampling.max_tokens - 1)))


class ForgetsMinTokens(Sound):
    """A stop token ends the response whatever the minimum is."""

    def alter_request(self, request: Request) -> Request:
        if not request.sampling.stop_token_ids:
            return request
        return replace(request, sampling=replace(request.sampling, min_tokens=0))


class CutsStopOff(Sound):
    """The token that ends a response is not among its tokens."""

    def alter(self, request: Request, chunk: Chunk) -> Chunk:
        return without_last(chunk) if chunk.finish is EngineFinish.STOP else chunk


class IgnoresStopIds(Sound):
    """Ends at EOS only."""

    def alter_request(self, request: Request) -> Request:
        return replace(request, sampling=replace(request.sampling, stop_token_ids=()))


class Unseeded(Sound):
    """Every request draws from another stream."""

    draws = 0

    def alter_request(self, request: Request) -> Request:
        if not request.sampling.temperature:
            return request
        self.draws += 1
        return replace(request, sample_key=(10_000 + self.draws, 0))


class OneSeedForAll(Sound):
    """All samples of a prompt are the same."""

    def alter_request(self, request: Request) -> Request:
        return replace(request, sample_key=(0, 0))


class CutsPrompts(Sound):
    """A prompt that is too long loses its beginning, without a word."""

    def alter_request(self, request: Request) -> Request:
        return replace(request, token_ids=request.token_ids[-(self.capabilities.max_context - 4) :])


class WrapsIds(Sound):
    """Token ids are taken modulo the vocabulary."""

    def alter_request(self, request: Request) -> Request:
        return replace(request, token_ids=request.token_ids % np.int32(self.capabilities.vocab_size))


class RenamesIds(Sound):
    """Ids are the engine's own, so that one may be used twice."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.names: dict[str, list[str]] = {}

    def alter_request(self, request: Request) -> Request:
        names = self.names.setdefault(request.attempt_id, [])
        names.append(f"{len(names):04d}{request.attempt_id}")
        return replace(request, attempt_id=names[-1])

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        await self.engine.abort(attempt_ids and [name for i in attempt_ids for name in self.names.get(i, ())])


class ShiftsLogprobs(Sound):
    """Log-probabilities are off by a thousandth."""

    def alter(self, request: Request, chunk: Chunk) -> Chunk:
        return replace(chunk, logprobs=chunk.logprobs - np.float32(1e-3))


class Declares(Sound):
    """Declares another kind of log-probabilities than it has."""

    kind = LogprobKind.RAW

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.engine.capabilities, logprob_kind=self.kind)


class DeclaresProcessed(Declares):
    """The same, and only top-p shows it."""

    kind = LogprobKind.PROCESSED


class LosesATokenAtAborts(Sound):
    """The last token of an aborted request is not handed over."""

    def alter(self, request: Request, chunk: Chunk) -> Chunk:
        return without_last(chunk) if chunk.finish is EngineFinish.ABORT else chunk


class RepeatsATokenAtAborts(Sound):
    """The last token of an aborted request comes twice."""

    def alter(self, request: Request, chunk: Chunk) -> Chunk:
        if chunk.finish is not EngineFinish.ABORT or not len(chunk.tokens):
            return chunk
        tokens, logprobs = (np.append(a, a[-1:]) for a in (chunk.tokens, chunk.logprobs))
        return replace(chunk, tokens=tokens, logprobs=logprobs)


class IgnoresAborts(Sound):
    """An abort by id does nothing."""

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        if attempt_ids is None:
            await self.engine.abort()


class IgnoresSweeps(Sound):
    """An abort of everything does nothing."""

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        if attempt_ids is not None:
            await self.engine.abort(attempt_ids)


class AbortsEverything(Sound):
    """An abort by id ends all there is."""

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        await self.engine.abort()


class NoEndAtAborts(Sound):
    """An aborted stream simply ends."""

    def alter(self, request: Request, chunk: Chunk) -> Chunk:
        return replace(chunk, finish=None) if chunk.finish is EngineFinish.ABORT else chunk


class RemembersAborts(Sound):
    """An id that was aborted once is ended whenever it comes."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.remembered: set[str] = set()

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        if request.attempt_id in self.remembered:
            yield Chunk(np.empty(0, np.int32), np.empty(0, np.float32), PolicyVersion(0, 0), EngineFinish.ABORT)
            return
        async for chunk in super().generate(request):
            yield chunk

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        self.remembered |= set(attempt_ids or ())
        await self.engine.abort(attempt_ids)


class FailsWithoutTokens(Sound):
    """An aborted request that has no token is an error."""

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        count = 0
        async for chunk in super().generate(request):
            count += len(chunk.tokens)
            if chunk.finish is EngineFinish.ABORT and not count:
                raise EngineError("the request was aborted in the queue")
            yield chunk


class AbortsByPrefix(Sound):
    """An abort hits every id that begins like the one it names, as SGLang's does."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.seen: list[str] = []

    def alter_request(self, request: Request) -> Request:
        self.seen.append(request.attempt_id)
        return request

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        await self.engine.abort(attempt_ids and [s for s in self.seen if any(s.startswith(i) for i in attempt_ids)])


class ForgetsTheResponse(Sound):
    """A resumed request begins from its prompt again."""

    def alter_request(self, request: Request) -> Request:
        prompt = request.token_ids[: len(request.token_ids) - request.response_offset]
        return replace(request, token_ids=prompt, response_offset=0)


class KeepsTheOldLabel(Sound):
    """Loads weights, and stamps the version of before on what they generate."""

    def alter(self, request: Request, chunk: Chunk) -> Chunk:
        return replace(chunk, version=PolicyVersion(0, 0))


class LoadsNothing(Sound):
    """Takes the new version, and keeps the weights."""

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        await self.engine.update_weights(version)


class VersionsGoBack(Sound):
    """Every other chunk has the first version."""

    chunks = 0

    def alter(self, request: Request, chunk: Chunk) -> Chunk:
        self.chunks += 1
        return replace(chunk, version=PolicyVersion(0, 0)) if self.chunks % 2 else chunk


class PausesNothing(Sound):
    """Generates on while it is paused."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...


class KeepsOrphans(Sound):
    """A request runs on when its reader has left."""

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        inbox: asyncio.Queue[Chunk] = asyncio.Queue()

        async def read() -> None:
            async for chunk in self.engine.generate(request):
                inbox.put_nowait(chunk)

        self.readers = [*getattr(self, "readers", []), asyncio.create_task(read())]
        while True:
            chunk = await inbox.get()
            yield chunk
            if chunk.finish is not None:
                return


class DiesQuietly(Sound):
    """A stream that its server's death has cut ends like an aborted one."""

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        try:
            async for chunk in super().generate(request):
                yield chunk
        except EngineError:
            yield Chunk(np.empty(0, np.int32), np.empty(0, np.float32), PolicyVersion(0, 0), EngineFinish.ABORT)


class Hangs(Sound):
    """Serves nothing and says nothing."""

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        await asyncio.Event().wait()
        yield  # type: ignore[misc]


class RecordOf:
    """The record of a fake engine as an answer on a wire."""

    def __init__(self, record: AttemptRecord) -> None:
        self.tokens = record.tokens.tolist()
        self.closed_early = record.end == "the caller left"


class FakeWitness:
    """What left a fake engine, by its own records."""

    def __init__(self) -> None:
        self.engine: FakeEngine | None = None
        self._answers: dict[str, RecordOf] = {}

    def answers(self, request: Request) -> list[RecordOf]:
        assert self.engine is not None
        record = self.engine.attempts.get(request.attempt_id)
        return [] if record is None else [self._answers.setdefault(request.attempt_id, RecordOf(record))]
