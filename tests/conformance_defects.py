"""Engines with one planted defect each, for the proof that the conformance suite catches it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs

from april.core.sampling import LogprobKind
from april.core.versions import PolicyVersion
from april.engines.protocol import AbortMeans, Capabilities, Chunk, EngineFinish, Request
from april.errors import EngineError
from april.testing import FakeEngine
from april.testing.conformance.subject import ClientTokens, Figures
from april.testing.recording_engine import RecordingEngine
from april.testing.records import AttemptRecord, conversation
from tests.real_engines.recording_proxy import compare_with_wire


class Sound(RecordingEngine):
    """Delegates everything; subclasses spoil one thing."""

    @property
    def name(self) -> str:
        return "spoilt"


def without_last(chunk: Chunk) -> Chunk:
    return replace(chunk, tokens=chunk.tokens[:-1], logprobs=chunk.logprobs[:-1])


def with_last_twice(chunk: Chunk) -> Chunk:
    tokens, logprobs = (np.append(a, a[-1:]) for a in (chunk.tokens, chunk.logprobs))
    return replace(chunk, tokens=tokens, logprobs=logprobs)


def at(finish: EngineFinish, change: Callable[[Chunk], Chunk]) -> Callable[[Any, Chunk], Chunk]:
    """Changes chunks that end a response so."""
    return lambda engine, chunk: change(chunk) if chunk.finish is finish else chunk


def sampled(request: Request, **changes: Any) -> Request:
    return structs.replace(request, sampling=structs.replace(request.sampling, **changes))


def altered(
    name: str, *, request: Callable[[Any, Request], Request] | None = None,
    chunk: Callable[[Any, Chunk], Chunk] | None = None, abort: Callable[[Any, Any], Any] | None = None,
    **more: Callable[..., Any],
) -> type[Sound]:  # fmt: skip
    """An engine that asks or hands over something else; ``abort`` gives the ids that are aborted, and may give none."""
    body: dict[str, Any] = dict(more)
    if request is not None:
        body["alter_request"] = request
    if chunk is not None:
        body["alter_chunk"] = lambda self, _, came: chunk(self, came)
    if abort is not None:

        async def aborts(self: Any, attempt_ids: Sequence[str] | None = None) -> None:
            ids = abort(self, attempt_ids)
            if ids != []:
                await self.engine.abort(ids)

        body["abort"] = aborts
    return type(name, (Sound,), body)


def one_token_too_many(_: Any, request: Request) -> Request:
    most = request.sampling.max_tokens + 1
    return sampled(request, max_tokens=most, min_tokens=min(most, request.sampling.min_tokens + 1))


def another_stream(self: Any, request: Request) -> Request:
    self.draws = getattr(self, "draws", 0) + 1
    return structs.replace(request, sample_key=(10_000 + self.draws, 0)) if request.sampling.temperature else request


def every_other_is_first(self: Any, chunk: Chunk) -> Chunk:
    self.came = getattr(self, "came", 0) + 1
    return replace(chunk, version=PolicyVersion(0, 0)) if self.came % 2 else chunk


async def nothing(self: Any, *_: Any) -> None:
    """It takes the call, and does nothing."""


STOP, ABORT = EngineFinish.STOP, EngineFinish.ABORT
OneTokenTooMany = altered("counts the budget from zero", request=one_token_too_many)
OneTokenTooFew = altered(
    "counts the budget from one",
    request=lambda _, r: structs.replace(r, sampling=r.sampling.capped(max(1, r.sampling.max_tokens - 1))),
)
ForgetsMinTokens = altered(
    "a stop token ends the response whatever the minimum is",
    request=lambda _, r: sampled(r, min_tokens=0) if r.sampling.stop_token_ids else r,
)
CutsStopOff = altered("the token that ends a response is not in it", chunk=at(STOP, without_last))
IgnoresStopIds = altered("ends at EOS only", request=lambda _, r: sampled(r, stop_token_ids=()))
Unseeded = altered("every request draws from another stream", request=another_stream)
OneSeedForAll = altered(
    "all samples of a prompt are the same", request=lambda _, r: structs.replace(r, sample_key=(0, 0))
)
CutsPrompts = altered(
    "a prompt that is too long loses its beginning, without a word",
    request=lambda self, r: structs.replace(r, token_ids=r.token_ids[-(self.capabilities.max_context - 4) :]),
)
WrapsIds = altered(
    "token ids are taken modulo the vocabulary",
    request=lambda self, r: structs.replace(r, token_ids=r.token_ids % np.int32(self.capabilities.vocab_size)),
)
ShiftsLogprobs = altered(
    "log-probabilities are off by a thousandth",
    chunk=lambda _, c: replace(c, logprobs=c.logprobs - np.float32(1e-3)),
)
LosesATokenAtAborts = altered("the last token of an aborted request is not handed over", chunk=at(ABORT, without_last))
RepeatsATokenAtAborts = altered("the last token of an aborted request comes twice", chunk=at(ABORT, with_last_twice))
IgnoresAborts = altered("an abort by id does nothing", abort=lambda _, ids: None if ids is None else [])
IgnoresSweeps = altered("an abort of everything does nothing", abort=lambda _, ids: [] if ids is None else ids)
AbortsEverything = altered("an abort by id ends all there is", abort=lambda _, ids: None)
NoEndAtAborts = altered("an aborted stream simply ends", chunk=at(ABORT, lambda c: replace(c, finish=None)))
ForgetsTheResponse = altered(
    "a resumed request begins from its prompt again",
    request=lambda _, r: structs.replace(r, token_ids=conversation(r), response_offset=0),
)
KeepsTheOldLabel = altered(
    "stamps the version of before on what new weights generate",
    chunk=lambda _, c: replace(c, version=PolicyVersion(0, 0)),
)
LoadsNothing = altered(
    "takes the new version, and keeps the weights",
    update_weights=lambda self, version, path=None: self.engine.update_weights(version),
)

LooksAtNothing = altered("images are left out", request=lambda _, r: structs.replace(r, attached=()))
LooksOnce = altered(
    "a resumed request comes without its images",
    request=lambda _, r: structs.replace(r, attached=()) if r.response_offset else r,
)
def with_rows(change: Callable[[Any], Any]) -> Callable[[Any, Chunk], Chunk]:
    """Changes the rows of a request's end so."""
    return lambda _, c: replace(c, extras={name: change(rows) for name, rows in c.extras.items()}) if c.extras else c


LosesARow = altered("the last row is missing", chunk=with_rows(lambda rows: rows[:-1]))
GivesRowsUnasked = altered(
    "rows come whether they are wanted or not", request=lambda _, r: structs.replace(r, extras=("routed_experts",))
)


class MixesRows(Sound):
    """Rows of a request that goes on are those of the tokens before."""

    def alter_chunk(self, request: Request, chunk: Chunk) -> Chunk:
        if not request.extras_from:
            return chunk
        return replace(chunk, extras={name: np.roll(rows, 1, 0) for name, rows in chunk.extras.items()})


ForgetsBans = altered("every id may come", request=lambda _, r: sampled(r, banned_ids=()))


class RemembersTokens(Sound):
    """What came first with some tokens is taken for what comes later with them."""

    def alter_request(self, request: Request) -> Request:
        seen: dict[Any, Any] = self.__dict__.setdefault("seen", {})
        return structs.replace(request, attached=seen.setdefault(conversation(request).tobytes(), request.attached))


class DropsTensors(Sound):
    """Says that it has taken tensors, and has not."""

    def reads(self, model: Any) -> bool:
        return False

    async def take(self, specs: Any, tensors: Any, last: bool) -> None:
        del specs, tensors, last


VersionsGoBack = altered("every other chunk has the first version", chunk=every_other_is_first)
PausesNothing = altered("generates on while it is paused", pause=nothing, resume=nothing)


class RenamesIds(Sound):
    """Ids are the engine's own, so that one may be used twice."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.names: dict[str, list[str]] = {}

    def alter_request(self, request: Request) -> Request:
        names = self.names.setdefault(request.attempt_id, [])
        names.append(f"{len(names):04d}{request.attempt_id}")
        return structs.replace(request, attempt_id=names[-1])

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        await self.engine.abort(attempt_ids and [name for i in attempt_ids for name in self.names.get(i, ())])


class Declares(Sound):
    """Declares another kind of log-probabilities than it has."""

    kind = LogprobKind.RAW

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.engine.capabilities, logprob_kind=self.kind)


class DeclaresProcessed(Declares):
    """The same, and only top-p shows it."""

    kind = LogprobKind.PROCESSED


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

    def compare(self, held: Sequence[ClientTokens], means: AbortMeans) -> Figures:
        return compare_with_wire(self.answers, held, means)
