"""The calls of a rollout: what is sent to a server, again if it is cut off, until the coordinator says that it is done.

A rollout sees one completed response per call, as if nothing had been cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import numpy as np

from april.core.attachments import Placed
from april.core.sampling import SamplingParams
from april.core.tape import Int32
from april.driver.user_code import FailureLog, describe_with_place, kind_of, place_of
from april.errors import RolloutError
from april.processes.coordinator.messages import Done, GivenUp, Go, Result, Settled, Span, Start

_failures = FailureLog()

FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 1.0
"""The pauses between requests that a server cuts off before it has begun."""


class SampleGivenUp(asyncio.CancelledError):
    """Ends a rollout whose sample goes on without it; ``except Exception`` lets it through."""


class Session:
    """A run of one of a prompt's rollouts."""

    def __init__(self, coordinator: Any, uid: str, index: int, life: int) -> None:
        self.coordinator = coordinator
        self.uid, self.index, self.life = uid, index, life
        self.spans: tuple[Span, ...] = ()
        """Spans of the conversation so far."""
        self.resumes = 0
        self.reward: float | None = None
        self.value: float | None = None
        self.keys: list[str] = []
        """Keys under which its trajectory is stored."""
        self.calling = False

    def provenance(self, prompt: int, response: int) -> tuple[list[list[Any]], int | None, int | None]:
        """Spans [start, end, "incarnation.n"] of a response behind ``prompt`` tokens, and its oldest and newest n."""
        inside = [(max(s - prompt, 0), min(e - prompt, response), i, n) for s, e, i, n in self.spans]
        kept = [span for span in inside if span[0] < span[1]]
        steps = [n for *_, n in kept]
        return [[s, e, f"{i}.{n}"] for s, e, i, n in kept], min(steps, default=None), max(steps, default=None)


CURRENT: ContextVar[Session | None] = ContextVar("april_session", default=None)
"""The session that the running rollout belongs to; None: it is none of the coordinator's, as in a validation."""

Send = Callable[[Int32, int], Awaitable[Result]]
"""Sends (token ids int32 [T], most tokens) to a server."""


async def generate(
    session: Session, send: Send, prompt_ids: list[int], max_tokens: int, temperature: float, *,
    attached: tuple[Placed, ...] = (), banned_ids: tuple[int, ...] = (),
) -> Done:  # fmt: skip
    """The response to ``prompt_ids``, however many requests it takes.

    Args:
        attached: what ``send`` sends along with them.
        banned_ids: ids that stand for such; what has generated one is dropped, and generated again.

    Raises:
        SampleGivenUp: the sample goes on without this rollout.
        RolloutError: the rollout made two calls at the same time.
    """
    if session.calling:
        raise RolloutError(
            f"the rollout of {session.uid} called generate twice at the same time; april continues one response per "
            "sample, so make the calls one after the other"
        )
    session.calling = True
    try:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, banned_ids=banned_ids)
        return await _generate(session, send, prompt_ids, sampling, attached)
    finally:
        session.calling = False


async def _generate(
    session: Session, send: Send, prompt_ids: list[int], sampling: SamplingParams, attached: tuple[Placed, ...]
) -> Done:
    coordinator, me = session.coordinator, (session.uid, session.index, session.life)
    answer = await coordinator.call(*me, np.asarray(prompt_ids, np.int32), sampling, attached)
    loop, wait_s = asyncio.get_running_loop(), FIRST_WAIT_S
    while isinstance(answer, Go):
        try:
            result = (await send(answer.token_ids, answer.max_tokens)).rows_from(answer.extras_from)
        except Exception as error:  # a server that died, or refuses; the coordinator decides whether to try again
            answer = await coordinator.broke(*me, f"{type(error).__name__}: {error}".partition("\n")[0])
            continue
        told_s = loop.time()
        answer = await coordinator.ended(*me, result)  # at once: a step may end with it
        if not result.aborted or len(result.tokens):
            wait_s = FIRST_WAIT_S
        elif isinstance(answer, Go):
            await asyncio.sleep(max(0.0, told_s + wait_s - loop.time()))
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
    if isinstance(answer, GivenUp):
        raise SampleGivenUp(f"{session.uid} goes on without this rollout")
    assert isinstance(answer, Done)
    session.spans, session.resumes = answer.spans, answer.resumes
    return answer


async def run_sample(
    coordinator: Any,
    uid: str,
    index: int,
    rollout: Callable[[Session], Awaitable[None]],
    forget: Callable[[list[str]], Awaitable[None]],
) -> list[str]:
    """Run one of a prompt's n rollouts whenever the coordinator says so, until what it runs is settled.

    Args:
        coordinator: its methods return something to be awaited.
        uid: of the prompt; ``index`` of the rollout.
        rollout: runs it once, and stores its trajectory under ``session.keys``.
        forget: removes stored trajectories.

    Returns:
        The keys under which a trajectory is stored now.
    """
    stored: list[str] = []
    while isinstance(answer := await coordinator.start(uid, index), Start):
        session = Session(coordinator, uid, index, answer.life)
        CURRENT.set(session)
        try:
            if stored:
                await forget(stored)
            stored = session.keys
            await rollout(session)
        except SampleGivenUp:
            continue
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise  # it was this task that was cancelled, and nothing within the rollout
            place = place_of(error)
            kind, told = kind_of(error, place), describe_with_place(error, place)
            _failures.warn(error, "rollout %d of %s failed", index, uid, told=told, once=bool(kind))
            await coordinator.failed(uid, index, session.life, told, kind)
        else:
            await coordinator.returned(uid, index, session.life, session.reward, session.value)
    if isinstance(answer, Settled) and answer.dropped and stored:
        await forget(stored)
        return []
    return stored
