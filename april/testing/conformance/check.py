"""A check: one promise, and how it is put to the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from april.errors import AprilError
from april.testing.conformance.bench import Bench
from april.testing.conformance.subject import Broken, Figures, NotOffered, NotTested, Outcome, Subject, Verdict

LONGEST_CHECK = 20
"""A whole check may take so many times the subject's patience."""


@dataclass(frozen=True, slots=True)
class Check:
    """A promise. Call it with a :class:`Subject` for a verdict on a freshly opened engine."""

    name: str
    promise: str
    """The promise, in one sentence."""
    body: Callable[[Bench], Awaitable[Figures]]

    def __str__(self) -> str:
        return self.name

    async def __call__(self, subject: Subject) -> Verdict:
        """Open, check, close."""
        engine = await subject.open()
        try:
            return await self.on(Bench(subject, engine))
        finally:
            await engine.close()

    async def on(self, bench: Bench) -> Verdict:
        """The verdict; never raises for what the engine does."""
        wall, cpu = time.perf_counter(), time.process_time()
        outcome, detail, figures = Outcome.PASSED, "", Figures()
        limit = asyncio.timeout(LONGEST_CHECK * bench.subject.patience_s)
        try:
            if bench.killed:
                raise NotTested("the server was killed by a check before")
            if self.name in bench.subject.gives_up:
                raise NotOffered(bench.subject.gives_up[self.name])
            try:
                async with limit:
                    figures = await self.body(bench)
            finally:
                await bench.tidy()
        except NotOffered as error:
            outcome, detail = Outcome.NOT_OFFERED, str(error)
        except NotTested as error:
            outcome, detail = Outcome.NOT_TESTED, str(error)
        except TimeoutError:
            outcome = Outcome.FAILED
            detail = f"the check had not ended after {LONGEST_CHECK * bench.subject.patience_s:g} s; an engine hangs"
        except Broken as error:
            outcome, detail = Outcome.FAILED, str(error)
        except AprilError as error:
            outcome, detail = Outcome.FAILED, f"{type(error).__name__}: {error}"
        except Exception as error:  # an engine may raise anything, and that is a finding and not the suite's end
            outcome, detail = Outcome.FAILED, f"the engine or the suite raised {type(error).__name__}: {error}"
        return Verdict(
            check=self.name, promise=self.promise, outcome=outcome, detail=detail, figures=figures,
            wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu,
        )  # fmt: skip


def check(promise: str) -> Callable[[Callable[[Bench], Awaitable[Figures]]], Check]:
    """Make a :class:`Check` of a coroutine function; its name is the check's."""

    def made(body: Callable[[Bench], Awaitable[Figures]]) -> Check:
        return Check(body.__name__, promise, body)

    return made
