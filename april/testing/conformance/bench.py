"""What all checks of the conformance suite use: a test bench that drives one engine, and the class :class:`Check`.

Invariant: every response is checked against the engine contract (one end, arrays of equal length, possible values,
the token budget), in addition to the promise that a check is about.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from msgspec import structs

from april.core.sampling import SamplingParams
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.driver.wire_checks import check_chunk, check_end
from april.engines.protocol import Capabilities, Chunk, Engine, EngineFinish, Int32, Request
from april.errors import AprilError, EngineError, WireError
from april.testing.conformance.subject import (
    Broken,
    Figures,
    NotOffered,
    NotTested,
    Outcome,
    Subject,
    Verdict,
    Weights,
)
from april.testing.records import YieldedChunks
from april.weights.sender import WeightSender
from april.weights.source import weight_source

T = TypeVar("T")

ABORT_AGAIN_S = 0.25
"""Seconds between two calls of ``abort`` for the same request, which april's scheduler also repeats."""
SILENCE_S = 0.5
"""Seconds without a token after which a busy engine is assumed to yield tokens only at the end of a response."""
POLL_S = 0.004
"""Seconds between two looks at whether requests have tokens."""


class ReadRequest(YieldedChunks):
    """A request whose response is read to its end in its own task."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.request = request
        self.chunks: list[Chunk] = []
        self.error: BaseException | None = None
        self.task = asyncio.get_running_loop().create_task(self._read(engine), name=f"reading {request.attempt_id}")

    async def _read(self, engine: Engine) -> None:
        try:
            async with aclosing(engine.generate(self.request)) as stream:  # type: ignore[type-var]
                async for chunk in stream:
                    self.chunks.append(chunk)
        except Exception as error:
            self.error = error

    @property
    def id(self) -> str:
        """Id of the attempt."""
        return self.request.attempt_id

    @property
    def versions(self) -> list[PolicyVersion]:
        """Version of each token. If the last chunk lists exact versions, those of earlier chunks were only guesses."""
        if self.chunks and self.chunks[-1].versions is not None:
            return [version for version, count in self.chunks[-1].versions for _ in range(count)]
        return [c.version for c in self.chunks for _ in range(len(c.tokens))]

    @property
    def finish(self) -> EngineFinish | None:
        """The finish reason; None while the request runs and after an error."""
        return self.chunks[-1].finish if self.chunks else None

    def check(self, limits: Capabilities, newest: PolicyVersion) -> None:
        """Raise Broken unless the chunks keep the contract and the response ended where it was allowed to end."""
        oldest, room, finish = None, self.request.sampling.max_tokens, None
        for chunk in self.chunks:
            if finish is not None:
                raise Broken(f"request {self.id}: a chunk came after the last chunk of the stream ({finish})")
            try:
                check_chunk(chunk, limits.vocab_size, room, oldest, newest)
            except WireError as error:
                raise Broken(f"request {self.id}: {error}") from None
            oldest, room, finish = chunk.version, room - len(chunk.tokens), chunk.finish
        if finish is not None and finish not in set(EngineFinish):
            raise Broken(f"request {self.id}: {finish!r} is not a finish reason")
        if self.task.done() and self.error is None and finish is None:
            raise Broken(f"request {self.id}: the stream ended after {self.count} tokens without a finish reason")
        if finish is not None and self.count:
            last, eos = int(self.tokens[-1]), limits.eos_token_ids
            try:
                check_end(self.chunks[-1], self.request, self.count, last, limits.max_context, eos)
            except WireError as error:
                raise Broken(f"request {self.id}: {error}") from None


class Bench:
    """An open engine, with the helper functions that the checks use."""

    def __init__(self, subject: Subject, engine: Engine) -> None:
        self.subject = subject
        self.engine = engine
        self.version = FIRST_VERSION
        self.weights: Weights = subject.now
        self._run = os.urandom(8).hex()
        self._numbers = itertools.count(1)
        self._seeds = itertools.count(10**6)
        self._readings: list[ReadRequest] = []

    # ---------------------------------------------------------------- requests

    def new_id(self) -> str:
        """Return a new id of 32 characters, like april's own: no id is a prefix of another."""
        return f"{self._run}{next(self._numbers):016x}"

    def prompt(self, number: int = 0) -> Int32:
        """Return one of the subject's prompts, int32 [P]."""
        prompts = self.subject.prompts
        return np.array(prompts[number % len(prompts)], np.int32)

    def request(
        self,
        number: int = 0,
        max_tokens: int | None = None,
        *,
        prompt: Sequence[int] | Int32 | None = None,
        response: Sequence[int] | Int32 = (),
        forced: bool = True,
        temperature: float = 0.0,
        attempt_id: str | None = None,
        stream: bool = True,
        **sampling: Any,
    ) -> Request:
        """Make a request, greedy by default, for a response of ``max_tokens`` (None means ``subject.long_tokens``).

        ``number`` selects the prompt and the sample key. ``response`` has the tokens that the sample already has; they
        count towards ``max_tokens``. ``forced`` sets min_tokens so that EOS cannot end the response early. With
        ``stream``, the engine sends tokens as they are made.
        """
        whole = self.subject.long_tokens if max_tokens is None else max_tokens
        # a greedy request needs no seed, but a recording proxy that sees no request ids identifies requests by it
        seed = number + 1 + 1000 * len(response) if temperature else next(self._seeds)
        ids = self.prompt(number) if prompt is None else np.asarray(prompt, np.int32)
        held = np.asarray(response, np.int32)
        params = SamplingParams(
            max_tokens=whole, min_tokens=whole if forced else 0, temperature=temperature, **sampling
        )
        return Request(
            attempt_id=self.new_id() if attempt_id is None else attempt_id,
            token_ids=np.concatenate((ids, held)),
            sampling=params.after(len(held), seed),
            sample_key=(number, 0),
            response_offset=len(held),
            stream=stream,
        )

    def copy_of(self, request: Request, count: int | None = None) -> Request:
        """Copy the request under a new id; if EOS cannot end it within ``count`` tokens, shorten it to ``count``."""
        sampling = request.sampling
        if not sampling.temperature:
            sampling = structs.replace(sampling, seed=next(self._seeds))
        if count is not None and sampling.min_tokens >= count:
            sampling = structs.replace(sampling, max_tokens=count, min_tokens=count)
        return structs.replace(request, attempt_id=self.new_id(), sampling=sampling)

    def start(self, request: Request) -> ReadRequest:
        """Send a request and begin to read its response."""
        reading = ReadRequest(self.engine, request)
        self._readings.append(reading)
        return reading

    async def start_and_wait(self, requests: Iterable[Request]) -> list[ReadRequest]:
        """Start requests, and return them when they have tokens, see :meth:`wait_for_tokens`."""
        readings = [self.start(r) for r in requests]
        await self.wait_for_tokens(readings)
        return readings

    async def run_complete(self, requests: Iterable[Request]) -> list[ReadRequest]:
        """Run requests to their ends, and return them; raises Broken if a request fails."""
        readings = [self.start(r) for r in requests]
        await self.wait_for_success(readings)
        return readings

    # ---------------------------------------------------------------- waits

    async def with_timeout(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        """Return the result of a call; raises Broken if it takes too long or fails."""
        try:
            async with asyncio.timeout(self.subject.patience_s):
                return await coroutine
        except TimeoutError:
            raise Broken(f"{what} did not return in {self.subject.patience_s:g} s") from None
        except EngineError as error:
            raise Broken(f"{what} failed: {error}") from error

    async def wait_for_ends(self, readings: Sequence[ReadRequest]) -> None:
        """Wait until all streams have ended; raises Broken if a stream hangs or breaks the contract."""
        if readings:
            await asyncio.wait([r.task for r in readings], timeout=self.subject.patience_s)
        late = [r for r in readings if not r.task.done()]
        if late:
            raise Broken(
                f"{len(late)} of {len(readings)} requests had not ended after {self.subject.patience_s:g} s, the first "
                f"of them {late[0].id} with {late[0].count} tokens"
            )
        for reading in readings:
            reading.check(self.engine.capabilities, self.version)

    async def wait_for_success(self, readings: Sequence[ReadRequest]) -> None:
        """Wait until all streams have ended, as in :meth:`wait_for_ends`; raises Broken if a request failed."""
        await self.wait_for_ends(readings)
        self.require_no_errors(readings)

    async def abort_until_ended(self, readings: Sequence[ReadRequest], everything: bool = False) -> None:
        """Abort requests, repeating the abort as april does, until all have ended."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.subject.patience_s
        while left := [r for r in readings if not r.task.done()]:
            if loop.time() > deadline:
                break
            ids = None if everything else [r.id for r in left]
            await self.with_timeout(self.engine.abort(ids), "abort")
            await asyncio.wait([r.task for r in left], timeout=ABORT_AGAIN_S)
        await self.wait_for_ends(readings)

    async def wait_for_tokens(self, readings: Sequence[ReadRequest], every: bool = True) -> None:
        """Wait until all requests have tokens or have ended; with ``every=False``, until one request has.

        Gives up after SILENCE_S if the engine seems to yield tokens only at the end, or after a quarter of patience_s.
        """
        loop = asyncio.get_running_loop()
        began, enough = loop.time(), all if every else any
        while not enough(r.count or r.task.done() for r in readings):
            waited = loop.time() - began
            if waited > SILENCE_S and not any(r.count for r in readings) and await self.load() != 0:
                return
            if waited > self.subject.patience_s / 4:
                return
            await asyncio.sleep(POLL_S)

    async def load(self) -> int | None:
        """Return the number of running and waiting requests that the engine reports; None if it reports no numbers."""
        health = await self.with_timeout(self.engine.health(), "health")
        if health.load is not None:
            return health.load.running + health.load.waiting
        counters = [health.counters.get(name) for name in ("running", "active", "waiting")]
        known = [int(c) for c in counters if c is not None]
        return sum(known) if known else None

    async def wait_until_idle(self) -> str:
        """Wait until the engine reports that it has no requests; return "0", or why this is unknown."""
        load = await self.load()
        if load is None:
            return "the engine does not report its load"
        deadline = asyncio.get_running_loop().time() + self.subject.patience_s
        while load:
            if asyncio.get_running_loop().time() > deadline:
                raise Broken(f"after {self.subject.patience_s:g} s the engine still works on {load} requests")
            await asyncio.sleep(ABORT_AGAIN_S)
            load = await self.load() or 0
        return "0"

    async def require_healthy(self) -> None:
        """Check that the engine is healthy and serves a request."""
        health = await self.with_timeout(self.engine.health(), "health")
        if not health.ok:
            raise Broken(f"the engine is not healthy afterwards: {health.detail}")
        await self.run_complete([self.request(0, 4)])

    # ---------------------------------------------------------------- weights

    async def load_weights(self, weights: Weights) -> None:
        """Pause the engine, load other weights as the next version, and resume."""
        await self.with_timeout(self.engine.pause(), "pause")
        await self.next_version(weights)
        await self.with_timeout(self.engine.resume(), "resume")

    async def next_version(self, weights: Weights) -> None:
        """Update a paused engine to the next version."""
        version = PolicyVersion(self.version.incarnation, self.version.n + 1)
        await self.with_timeout(self.engine.update_weights(version, weights.path), "update_weights")
        self.version, self.weights = version, weights

    async def send_weights(self, weights: Weights) -> None:
        """Send the tensors of a directory from this process to the engine, as the next version."""
        tensors = await asyncio.to_thread(_tensors, weights)
        loop, engine = asyncio.get_running_loop(), self.engine

        def ask(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
            return [_EngineCall(asyncio.run_coroutine_threadsafe(call, loop)) for call in calls]

        sender = WeightSender({engine.name: engine}, ask, self.subject.patience_s)
        await self.with_timeout(engine.pause(), "pause")
        await self.with_timeout(asyncio.to_thread(sender.send, weight_source(tensors), [engine.name]), "a transfer")
        await self.next_version(replace(weights, path=None))
        await self.with_timeout(engine.resume(), "resume")

    async def clean_up(self) -> None:
        """Clean up after a check: cancel all requests, restore the first weights."""
        tasks = [r.task for r in self._readings if not r.task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self.subject.patience_s)
        self._readings.clear()
        if self.weights is not self.subject.now:
            await self.load_weights(self.subject.now)

    # ---------------------------------------------------------------- expectations

    def compare_with_wire(self, readings: Iterable[ReadRequest]) -> Figures:
        """Compare the responses with the tokens that left the server, if the subject has a function for this."""
        compare = self.subject.compare_with_wire
        means = self.engine.capabilities.abort_means
        return {} if compare is None else compare([(r.request, r.tokens, r.finish) for r in readings], means)

    def require_no_errors(self, readings: Iterable[ReadRequest]) -> None:
        """Raise Broken if one of the requests failed."""
        for reading in readings:
            if reading.error is not None:
                raise Broken(
                    f"request {reading.id} failed after {reading.count} tokens: {type(reading.error).__name__}: "
                    f"{reading.error}"
                )

    def require_greedy_repeats(self) -> None:
        """Raise NotTested if greedy responses are not reproducible."""
        if not self.subject.greedy_repeats:
            raise NotTested("greedy responses do not repeat exactly on this engine (greedy_repeats=False)")

    def offered(self, ability: str) -> Any:
        """Return the engine's capability ``ability``; raises NotOffered, with the reason, if the engine lacks it."""
        can = self.engine.capabilities
        if not (value := getattr(can, ability)):
            raise NotOffered(can.lack(ability))
        return value


@dataclass
class _EngineCall:
    """A call of the engine on the event loop, for which the thread of the weight sender waits."""

    future: Future[Any]

    def done(self) -> bool:
        return self.future.done()

    def wait(self) -> bool:
        wait([self.future])
        return True

    def result(self) -> Any:
        return self.future.result()


def _tensors(weights: Weights) -> dict[str, Any]:
    """Load the tensors of the weights' directory, by name."""
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise NotTested("the transformers extra is not installed, which reads tensors") from None
    files = sorted(Path(weights.path or "").glob("*.safetensors"))
    if not files:
        raise NotTested("the second set of weights has no safetensors files here")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def require_prefix(got: Int32, wanted: Int32, what: str) -> None:
    """Raise Broken, with the position, unless ``got`` is a prefix of ``wanted``."""
    count = min(len(got), len(wanted))
    differs = np.flatnonzero(got[:count] != wanted[:count])
    if differs.size or len(got) > len(wanted):
        where = int(differs[0]) if differs.size else count
        raise Broken(
            f"{what}: token {where} of {len(got)} is {got[where]}, not "
            + (f"{wanted[where]} as in the uncut response" if where < count else f"the end after {count} tokens")
        )


def require_equal(got: Int32, wanted: Int32, what: str) -> None:
    """Raise Broken unless ``got`` and ``wanted`` are the same tokens."""
    require_prefix(got, wanted, what)
    if len(got) != len(wanted):
        raise Broken(f"{what}: {len(got)} tokens, but the uncut response has {len(wanted)}")


LONGEST_CHECK = 20
"""Multiple of the subject's patience after which a whole check fails."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check of one promise of the engine protocol; call it to check a newly opened engine of a :class:`Subject`."""

    name: str
    promise: str
    """The promise, in one sentence."""
    body: Callable[[Bench], Awaitable[Figures]]

    def __str__(self) -> str:
        return self.name

    async def __call__(self, subject: Subject) -> Verdict:
        """Open an engine, check it, close it, and return the verdict."""
        engine = await subject.open()
        try:
            return await self.on(Bench(subject, engine))
        finally:
            await engine.close()

    async def on(self, bench: Bench) -> Verdict:
        """Run the check and return its verdict; errors of the engine become part of the verdict, and are not raised."""

        async def run() -> Figures:
            if self.name in bench.subject.gives_up:
                raise NotOffered(bench.subject.gives_up[self.name])
            try:
                return await self.body(bench)
            finally:
                await bench.clean_up()

        return await verdict_on(self.name, self.promise, run(), LONGEST_CHECK * bench.subject.patience_s)


async def verdict_on(name: str, promise: str, run: Coroutine[Any, Any, Figures], limit_s: float) -> Verdict:
    """Await ``run`` for at most ``limit_s`` seconds, and return its verdict; errors become part of the verdict."""
    began = time.perf_counter()
    outcome, detail, figures = Outcome.FAILED, "", Figures()
    try:
        async with asyncio.timeout(limit_s):
            figures = await run
        outcome = Outcome.PASSED
    except NotOffered as error:
        outcome, detail = Outcome.NOT_OFFERED, str(error)
    except NotTested as error:
        outcome, detail = Outcome.NOT_TESTED, str(error)
    except TimeoutError:
        detail = f"the check had not ended after {limit_s:g} s; something hangs"
    except Broken as error:
        detail = str(error)
    except AprilError as error:
        detail = f"{type(error).__name__}: {error}"
    except Exception as error:  # any error of the tested code is a failed check, and must not end the suite
        detail = f"the tested code or the suite raised {type(error).__name__}: {error}"
    return Verdict(
        check=name, promise=promise, outcome=outcome, detail=detail, figures=figures,
        wall_s=time.perf_counter() - began,
    )  # fmt: skip


def check(promise: str) -> Callable[[Callable[[Bench], Awaitable[Figures]]], Check]:
    """Decorate a coroutine function to make it a :class:`Check` of the same name."""

    def made(body: Callable[[Bench], Awaitable[Figures]]) -> Check:
        return Check(body.__name__, promise, body)

    return made
