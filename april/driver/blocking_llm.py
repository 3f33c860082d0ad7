"""Plain rollout functions: each runs in a thread of its own, where ``llm.generate`` blocks.

The thread and a coroutine on april's loop take turns: the thread says what it wants and waits in its letter box, the
coroutine awaits it as any rollout function would. So a plain function is parked over the ends of steps as a coroutine
is, and for the rest of april it is one.

Invariant: whatever happens to the sample, a thread that waits in ``generate`` is answered: with the completion, with
the error, or with the cancellation. One that calls after that is refused and can do no harm.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any, Concatenate, ParamSpec

from april.core.types import Prompt, SampleId
from april.driver.llm import AFTER_ITS_END, LLM, ONE_CALL_AT_A_TIME, Completion, RolloutFunction
from april.driver.user_code import Outcome, is_async, name_of
from april.driver.worker_threads import WorkerThreads, tell
from april.errors import RolloutError
from april.model_turns import refuse_while_held

P = ParamSpec("P")

_GIVEN_UP = "this sample was given up: its group was dropped, its function took too long, or the scheduler was closed"


def _blocking(
    generate: Callable[Concatenate[LLM, P], Coroutine[Any, Any, Completion]],
) -> Callable[Concatenate[BlockingLLM, P], Completion]:
    """The same method, but it blocks."""

    def blocks(self: BlockingLLM, /, *args: P.args, **kwargs: P.kwargs) -> Completion:
        return self._wait_for(args, kwargs)

    functools.update_wrapper(blocks, generate)
    return blocks


class BlockingLLM:
    """The policy, as one sample of a plain rollout function sees it.

    ``generate`` is that of :class:`LLM`, but it blocks the thread instead of being awaited. It raises
    asyncio.CancelledError, no Exception, when the sample is given up; let it through.
    """

    __slots__ = ("_line", "_llm")

    def __init__(self, llm: LLM, line: _Line) -> None:
        self._llm = llm
        self._line = line

    @property
    def sample_id(self) -> SampleId:
        """Whose response it is."""
        return self._llm.sample_id

    def _wait_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Completion:
        if threading.get_ident() == self._line.loop_thread:
            # a plain function that only made a coroutine, which is awaited where coroutines are
            return self._llm.generate(*args, **kwargs)  # type: ignore[return-value]
        return self._line.ask(args, kwargs)

    generate = _blocking(LLM.generate)  # type: ignore[arg-type]  # a method, with self first


BlockingRolloutFunction = Callable[[Prompt, BlockingLLM], Any]

_Question = tuple[tuple[Any, ...], dict[str, Any]]


class _Line:
    """Between one thread and april's loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.loop_thread = threading.get_ident()
        self._lock = threading.Lock()
        self._box: SimpleQueue[Outcome] | None = None
        """Where somebody waits in generate."""
        self._over = False
        """Nobody may generate any more."""
        self._to_be_cancelled = False
        """Who generates next is told that the sample was given up."""
        self._heard: deque[_Question | Outcome] = deque()
        self._listener: asyncio.Future[None] | None = None

    # in the thread

    def ask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Completion:
        """What generate returns or raises."""
        refuse_while_held("llm.generate")
        box: SimpleQueue[Outcome] = SimpleQueue()
        with self._lock:
            if self._to_be_cancelled:
                self._to_be_cancelled = False
                raise asyncio.CancelledError(_GIVEN_UP)
            if self._over:
                raise RolloutError(AFTER_ITS_END)
            if self._box is not None:
                raise RolloutError(ONE_CALL_AT_A_TIME)
            self._box = box
        tell(self._loop, self.hear, (args, kwargs))
        outcome = box.get()
        if outcome.error is not None:
            raise outcome.error
        completion: Completion = outcome.take()
        return completion

    # on the loop

    def hear(self, said: _Question | Outcome) -> None:
        """The thread wants to generate, or its function has ended."""
        if isinstance(said, Outcome):
            with self._lock:
                self._over = True
        elif self._over:
            self.answer(Outcome(None, RolloutError(AFTER_ITS_END)))
            return
        self._heard.append(said)
        if self._listener is not None and not self._listener.done():
            self._listener.set_result(None)

    async def listen(self) -> _Question | Outcome:
        """The next thing that the thread says."""
        while not self._heard:
            self._listener = self._loop.create_future()
            await self._listener
        return self._heard.popleft()

    def answer(self, outcome: Outcome) -> None:
        """To whoever waits in generate."""
        with self._lock:
            box, self._box = self._box, None
        if box is not None:
            box.put(outcome)

    def cancel(self) -> None:
        """Cancels the function where it next generates, which may be now."""
        with self._lock:
            self._over = True
            self._to_be_cancelled = self._box is None
        self.answer(Outcome(None, asyncio.CancelledError(_GIVEN_UP)))


def as_coroutine(function: Callable[..., Any], threads: WorkerThreads) -> RolloutFunction:
    """An async rollout function as it is; a plain one as a coroutine function that runs it in a thread."""
    if is_async(function):
        return function

    async def rollout(prompt: Prompt, llm: LLM) -> Any:
        line = _Line()
        threads.run(copy_context(), function, (prompt, BlockingLLM(llm, line)), line.hear)
        try:
            while not isinstance(said := await line.listen(), Outcome):
                line.answer(await _generated(llm, *said))
        except asyncio.CancelledError:
            line.cancel()
            # its last words are waited for, as a coroutine's would be; a second cancellation ends that
            while not isinstance(await line.listen(), Outcome):
                pass
            raise
        if said.error is not None:
            raise said.error
        value = said.take()
        return await value if inspect.isawaitable(value) else value

    rollout.__qualname__ = name_of(function)
    return rollout


async def _generated(llm: LLM, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
    try:
        return Outcome(await llm.generate(*args, **kwargs), None)
    except Exception as error:
        return Outcome(None, error)
