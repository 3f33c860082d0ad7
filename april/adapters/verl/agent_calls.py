"""Runs agent loops in a worker process and exchanges messages with april's scheduler; imports neither verl nor Ray.

The scheduler's process polls the worker for calls (:meth:`WorkerCalls.messages`, a long poll) and sends the answers
(:meth:`WorkerCalls.answer`). An agent loop gets one complete response per call, even if its requests were interrupted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from april.adapters.common.trainer_servers import ServerResult
from april.core.attachments import NO_EXTRAS, Extras, Placed
from april.core.tape import Float32, Int32
from april.driver.user_code import FailureLog, describe_with_place, kind_of, place_of
from april.engines.http.token_rows import narrow_ids
from april.engines.protocol import ROUTED_EXPERTS
from april.errors import RolloutError

_failures = FailureLog()


def result_of(offset: int, output: Any, sampling: Mapping[str, Any] = MappingProxyType({})) -> ServerResult:
    """Convert a server's TokenOutput to a ServerResult; the label of its weights is the trainer's global step.

    ``offset`` is the number of tokens that were sent, and ``sampling`` the request's sampling parameters.
    """
    label = output.extra_fields.get("global_steps")
    tokens = np.asarray(output.token_ids, np.int32)
    rows = getattr(output, "routed_experts", None)
    return ServerResult(
        tokens=tokens,
        logprobs=np.asarray(output.log_probs if output.log_probs is not None else [], np.float32),
        label=None if label is None else int(label),
        aborted=output.stop_reason in ("abort", "aborted"),
        own_end=bool(sampling.get("stop") or sampling.get("ignore_eos")),
        extras={} if rows is None or not len(tokens) else {ROUTED_EXPERTS: _rows(rows, offset + len(tokens) - 1)},
    )


def _rows(given: Any, count: int) -> Any:
    """Return the routed experts of the first ``count`` tokens, in the smallest integer type that holds them."""
    rows = np.asarray(given)
    return (narrow_ids(rows, None) if rows.dtype.kind in "iu" else rows)[:count]


Span = tuple[int, int, int, int]
"""Tokens [start, end) of a conversation and their PolicyVersion(incarnation, n), as (start, end, incarnation, n)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMResult:
    """Complete response of a call, from all its requests: ``tokens`` int32 [k] and ``logprobs`` float32 [k].

    ``extras`` has one row for each token of the conversation so far except the last.
    """

    tokens: Int32
    logprobs: Float32
    spans: tuple[Span, ...]
    resumes: int
    by_length: bool
    extras: Extras = field(default_factory=lambda: NO_EXTRAS)


def fields_of(done: LLMResult, spans: tuple[Span, ...]) -> dict[str, Any]:
    """Return the fields of a TokenOutput for a complete response; ``spans`` cover the conversation so far."""
    steps = [n for *_, n in spans]
    return {
        "token_ids": done.tokens.tolist(),
        "log_probs": done.logprobs.tolist(),
        "stop_reason": "length" if done.by_length else "completed",
        # int16, for all tokens of the conversation except the last, like verl's own client
        "routed_experts": None if (rows := done.extras.get(ROUTED_EXPERTS)) is None else rows.astype(np.int16),
        "extra_fields": {
            "global_steps": max(steps, default=None),
            "min_global_steps": min(steps, default=None),
            "max_global_steps": max(steps, default=None),
            "num_cached_tokens": None,
        },
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMCall:
    """An agent loop's call for the response to ``token_ids``.

    ``options`` (verl's sampling parameters) and ``request_id`` (for verl's load balancer) are passed on unread;
    ``sampling`` has the fields of SamplingParams that april needs. ``media`` holds Ray references to further arguments
    of verl's client, and ``attached`` the positions and digests of the media in the conversation.
    """

    token_ids: Sequence[int] | Int32
    sampling: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    request_id: str = ""
    media: Mapping[str, Any] = field(default_factory=dict)
    attached: tuple[Placed, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentLoopResult:
    """Message that an agent loop has ended. verl's queue has its trajectory under ``keys``; filters use ``value``."""

    reward: float | None
    value: float | None
    keys: tuple[str, ...]


class SampleGivenUp(asyncio.CancelledError):
    """Raised in an agent loop that was replaced or dropped, to end it; ``except Exception`` does not catch it."""


GIVEN_UP = "it continued while a call of generate was unfinished"


class AgentLoopSession:
    """One run of a sample's agent loop; ``stored`` are the keys under which earlier runs stored trajectories."""

    def __init__(self, calls: WorkerCalls, number: int, uid: str, index: int, stored: Sequence[str] = ()) -> None:
        self.number, self.uid, self.index, self.stored = number, uid, index, stored
        self.spans: tuple[Span, ...] = ()
        self.resumes = 0
        self.reward: float | None = None
        self.value: float | None = None
        self.keys: list[str] = []
        """Keys under which this run has stored its trajectory."""
        self.given_up = False
        self._calls = calls
        self._answer: asyncio.Future[LLMResult | str] | None = None
        self._left_a_call = False

    def provenance(self, prompt: int, response: int) -> tuple[list[list[Any]], int | None, int | None]:
        """Return spans [start, end, "incarnation.n"] of the response after ``prompt`` tokens, and its min and max n."""
        inside = [(max(s - prompt, 0), min(e - prompt, response), i, n) for s, e, i, n in self.spans]
        kept = [span for span in inside if span[0] < span[1]]
        steps = [n for *_, n in kept]
        return [[s, e, f"{i}.{n}"] for s, e, i, n in kept], min(steps, default=None), max(steps, default=None)

    async def generate(self, asked: LLMCall) -> LLMResult:
        """Send a call to the scheduler and return the complete response, which may take several requests.

        Raises SampleGivenUp if the sample was dropped or continues in another agent loop, and RolloutError if another
        call is unfinished or april rejects the conversation.
        """
        if self._left_a_call:
            raise RolloutError(GIVEN_UP)
        if self._answer is not None:
            raise RolloutError(
                f"the rollout of {self.uid} called generate twice at the same time; april continues one response per "
                "sample, so make the calls one after the other"
            )
        self._raise_if_given_up()
        self._answer = asyncio.get_running_loop().create_future()
        self._calls.post(self.number, asked)
        try:
            answer = await self._answer
        finally:
            self._left_a_call = not self._answer.done() or self._answer.cancelled()
            self._answer = None
        self._raise_if_given_up()
        if isinstance(answer, str):
            raise RolloutError(answer)
        self.spans += answer.spans
        self.resumes = answer.resumes
        return answer

    def _raise_if_given_up(self) -> None:
        if self.given_up:
            raise SampleGivenUp(f"{self.uid} continues without this rollout")

    def require_complete(self) -> None:
        """Raise RolloutError if the agent loop returned while one of its calls was unfinished."""
        if self._left_a_call or self._answer is not None:
            raise RolloutError(GIVEN_UP)

    def receive(self, answer: LLMResult | str | None) -> None:
        """End the pending call with a result or an error's text; None means that this agent loop must give up."""
        self.given_up |= answer is None
        if self._answer is not None and not self._answer.done():
            self._answer.set_result("" if answer is None else answer)


CURRENT_SESSION: ContextVar[AgentLoopSession | None] = ContextVar("april_session", default=None)
"""Session of the running agent loop; None if april did not start it, as in a validation."""

Message = tuple[int, LLMCall | AgentLoopResult | tuple[str, str]]
"""(Session number, message of the agent loop): a call, its result at the end, or a failure as (text, kind)."""


class WorkerCalls:
    """All sessions of one worker, with their outgoing messages and incoming answers."""

    def __init__(self) -> None:
        self._sessions: dict[int, AgentLoopSession] = {}
        self._messages: list[Message] = []
        self._posted = asyncio.Event()

    def begin(self, number: int, uid: str, index: int, stored: Sequence[str]) -> None:
        """Create the session that :meth:`run` needs."""
        self._sessions[number] = AgentLoopSession(self, number, uid, index, stored)

    def post(self, number: int, what: LLMCall | AgentLoopResult | tuple[str, str]) -> None:
        """Queue a message of a session for the scheduler's process."""
        self._messages.append((number, what))
        self._posted.set()

    async def messages(self) -> list[Message]:
        """Wait until there are queued messages and return all of them."""
        await self._posted.wait()
        self._posted.clear()
        messages, self._messages = self._messages, []
        return messages

    def answer(self, answers: Sequence[tuple[int, LLMResult | str | None]]) -> None:
        """Pass answers to their sessions; answers to sessions that have ended are ignored."""
        for number, answer in answers:
            if (session := self._sessions.get(number)) is not None:
                session.receive(answer)

    async def run(
        self,
        number: int,
        agent_loop: Callable[[AgentLoopSession], Awaitable[None]],
        forget: Callable[[Sequence[str]], Awaitable[None]],
    ) -> None:
        """Run a session's agent loop, which stores its trajectory under ``session.keys``, and post its outcome.

        ``forget`` deletes stored trajectories: of earlier runs, and of this run if it fails or is given up.
        """
        session = self._sessions[number]
        CURRENT_SESSION.set(session)
        outcome: AgentLoopResult | tuple[str, str]
        try:
            if session.stored:
                await forget(session.stored)
            await agent_loop(session)
            session.require_complete()
            outcome = AgentLoopResult(session.reward, session.value, tuple(session.keys))
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise  # this task itself was cancelled, not a task that it awaits
            place = place_of(error)
            outcome = describe_with_place(error, place), kind_of(error, place)
            if not session.given_up:
                where = session.index, session.uid
                _failures.warn(error, "rollout %d of %s failed", *where, text=outcome[0], once=bool(outcome[1]))
        finally:
            del self._sessions[number]
        if session.keys and (session.given_up or not isinstance(outcome, AgentLoopResult)):
            await forget(session.keys)
        if not session.given_up:
            self.post(number, outcome)
