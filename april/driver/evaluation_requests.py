"""Requests of an evaluation: which engine they go to, and how they end when something fails or nobody waits any more.

Invariant: a stream is closed only after its engine was asked to end the request and had abort_deadline_s to do so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import cast

from april.core import events as ev
from april.core.engine_table import PROBE_INTERVAL_S
from april.core.tape import AttemptTape
from april.driver.rollout_driver import RolloutDriver
from april.driver.stop_strings import StopMatcher
from april.driver.wire_checks import check_chunk, check_end
from april.engines.protocol import Chunk, Engine, EngineFinish, Request
from april.errors import EngineBusy, EngineError, RequestRefused, WeightsInUse, WireError


class EvaluationPool:
    """Engines that are well, have the present weights and room, the least loaded one first.

    Rests and caps are those of the core: what is found out here holds for training as well.
    """

    def __init__(self, driver: RolloutDriver) -> None:
        self._driver = driver
        self._unusable_since: float | None = None
        """Loop time since when no engine can be used."""
        self.vocab_size = min(e.capabilities.vocab_size for e in driver.engines.values())

    async def respond(self, begin: Callable[[], EvaluationRequest]) -> tuple[EvaluationRequest, str, EngineFinish]:
        """A request that ended in order, its engine, and why it ended.

        An engine that is busy is left alone for a while; one that breaks off is quarantined, and the request begins
        again on another one, as it does when its engine was found without its weights meanwhile. It begins again, too,
        where an answer cannot be true.

        Raises:
            EngineError: no engine is left, or the request failed again and again.
        """
        driver, failures = self._driver, 0
        failure: EngineError | None = None
        while True:
            name = await self._pick(failure)
            request = begin()
            state = driver.core.engines.states[name]
            before, busy = state.life, None
            driver.post(ev.EngineUsed(name, state.beside + 1))
            try:
                finish = await request.run(driver.engines[name])
            except EngineBusy as error:
                failure = busy = error
            except WeightsInUse as error:
                driver.post(ev.WeightsWritten(str(error)))
                raise
            except RequestRefused:
                if state.life == before:
                    raise
            except (EngineError, OSError) as error:
                failures += 1
                failure = error if isinstance(error, EngineError) else EngineError(f"engine {name}: {error!r}")
                if not isinstance(error, WireError):  # who sends nonsense now and then is well
                    driver.post(ev.EngineFailed(name))
                if failures >= driver.core.settings.max_attempt_failures:
                    raise failure from error
            else:
                driver.post(ev.EngineServed(name, state.beside - 1))
                if state.life == before:
                    return request, name, finish
            finally:
                driver.post(ev.EngineUsed(name, state.beside - 1))
                driver.engines_changed.set()
            if busy is not None:
                driver.post(ev.EngineBusy(name, str(busy), busy.retry_after_s or 0.0, state.beside))

    async def _pick(self, failure: EngineError | None) -> str:
        """The engine for the next request; waits while all that are well are at rest or full.

        Waits as well, up to outage_deadline_s, for one of which a probe or a request may find that it is well again.
        """
        core, loop, changed = self._driver.core, asyncio.get_running_loop(), self._driver.engines_changed
        states = core.engines.states
        while True:
            version = core.clock.current
            well = [n for n, s in states.items() if not s.quarantined and s.version == version]
            free = [n for n in well if not states[n].resting and states[n].cap.admits(states[n].beside)]
            if core.engines.usable(version):
                self._unusable_since = None
            elif self._unusable_since is None:
                self._unusable_since = loop.time()
            waited_s = 0.0 if self._unusable_since is None else loop.time() - self._unusable_since
            hopeless = not well and not any(s.quarantined for s in states.values())
            if hopeless or waited_s >= core.settings.outage_deadline_s:
                if failure is not None:
                    raise failure
                all_ill = all(s.quarantined for s in states.values())
                what = "quarantined" if all_ill else "quarantined or have other weights"
                raise EngineError(f"all engines are {what}: {', '.join(states)}")
            if free:
                return min(free, key=lambda n: states[n].beside)
            changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(PROBE_INTERVAL_S):
                    await changed.wait()


class EvaluationRequest:
    """One request and what it has brought."""

    def __init__(self, driver: RolloutDriver, request: Request, stops: StopMatcher | None) -> None:
        self._driver = driver
        self.request = request
        self._stops = stops
        self.tape = AttemptTape()
        self._heard = 0.0
        """When tokens came last, in loop time."""
        self._complete = False

    async def run(self, engine: Engine) -> EngineFinish:
        """Why it ended; raises EngineError if it did not end in order, and whatever the engine raises."""
        streams, loop = self._driver.streams, asyncio.get_running_loop()
        patience_s = streams.stall_timeout_s
        await streams.sweeps_over(engine.name)
        self._heard = loop.time()
        # a task of its own: whoever leaves here does not close the stream before its request has ended
        reader = loop.create_task(self._read(engine))
        try:
            while not reader.done():
                left = None
                if patience_s is not None and not self._complete:
                    left = self._heard + patience_s - loop.time()
                    if left <= 0:
                        await streams.ask_abort(engine, (self.request.attempt_id,))
                        reader.cancel()  # who is silent about a request is silent about its end
                        raise EngineError(
                            f"engine {engine.name} was silent for {patience_s:g} s in an evaluation"
                        )
                await asyncio.wait([reader], timeout=left)
            finish = reader.result()
        finally:
            if not reader.done():
                await self._give_up(engine, reader)
        if finish not in (EngineFinish.STOP, EngineFinish.LENGTH):
            raise EngineError(f"engine {engine.name} ended an evaluation request with {finish}")
        return finish

    async def _read(self, engine: Engine) -> EngineFinish | None:
        loop, version = asyncio.get_running_loop(), self._driver.core.clock.current
        vocab_size, budget = engine.capabilities.vocab_size, self.request.sampling.max_tokens
        end: Chunk | None = None
        async with aclosing(cast("AsyncGenerator[Chunk, None]", engine.generate(self.request))) as chunks:
            async for chunk in chunks:
                try:
                    if end is not None and end.finish is not None:
                        raise WireError(f"a chunk came after the one that ended the stream ({end.finish})")
                    check_chunk(chunk, vocab_size, budget - self.tape.count, version, version)
                except WireError as error:
                    await self._end(engine, chunks)
                    raise WireError(f"engine {engine.name}: {error}") from None
                if len(chunk.tokens):
                    self._heard = loop.time()
                kept = None if self._stops is None else self._stops.feed(chunk.tokens)
                self.tape.append(chunk.tokens[:kept], chunk.logprobs[:kept], chunk.version)
                end = chunk
                if kept is not None:
                    if chunk.finish is None:
                        self._complete = True  # whatever the engine does now
                        await self._end(engine, chunks)
                    return EngineFinish.STOP
        if end is None or not self.tape.count:
            raise EngineError(f"engine {engine.name} ended an evaluation request without a token")
        limits, eos = engine.capabilities, self._driver.core.engines.eos_token_ids
        try:
            check_end(end, self.request, self.tape.count, self.tape.last_token, limits.max_context, eos)
        except WireError as error:
            raise WireError(f"engine {engine.name}: {error}") from None
        return end.finish

    async def _end(self, engine: Engine, chunks: AsyncGenerator[Chunk, None]) -> None:
        """Ask for the end of the request, and wait for it."""
        await self._driver.streams.ask_abort(engine, (self.request.attempt_id,))
        with suppress(TimeoutError, EngineError):
            async with asyncio.timeout(self._driver.core.settings.abort_deadline_s):
                async for _ in chunks:
                    pass

    async def _give_up(self, engine: Engine, reader: asyncio.Task[EngineFinish | None]) -> None:
        """Nobody waits any more, or the engine is silent: the request is ended, and only then its stream closed."""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._driver.core.settings.abort_deadline_s):
                    if not reader.cancelling():
                        await self._driver.streams.ask_abort(engine, (self.request.attempt_id,))
                    await asyncio.wait([reader])
        finally:
            reader.cancel()
            reader.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.wait([reader], timeout=self._driver.core.settings.abort_deadline_s)
