"""The policy as a rollout function sees it: ``llm.generate``, which looks as if it simply took long.

When a step ends in the middle of a call, april aborts the engine request and keeps its tokens; the coroutine
stays parked. In a later step the request is continued under newer weights, and the coroutine gets one
completed response with the version of every token.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Concatenate, NamedTuple, Never, ParamSpec, Protocol, TypeVar

import numpy as np

from april.config.mistakes import UNSUPPORTED
from april.core.attachments import Placed, before
from april.core.sampling import SamplingParams, stop_id_of, wrong_stop_strings
from april.core.tape import Float32, Int32, versions_of
from april.core.types import Chain, FinishReason, Prompt, RecordedCall, Sample, SampleId
from april.driver.user_calls import WorkerThreads
from april.driver.user_code import Outcome, is_async, name_of
from april.errors import RolloutError, UsageError
from april.model_turns import refuse_while_held


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The result of one ``llm.generate``.

    ``tokens`` int32 [T] (EOS included), ``logprobs`` float32 [T] in nats, ``versions`` int32 [T, 2]
    (incarnation, n), ``conversation`` int32 [P + ...]: everything so far, these tokens included.
    """

    tokens: Int32
    logprobs: Float32
    versions: Int32
    finish: FinishReason
    conversation: Int32
    number: int = 0
    """number of the call"""

    def __repr__(self) -> str:
        return f"<Completion of {len(self.tokens)} tokens, finish={self.finish}>"


RolloutFunction = Callable[[Prompt, "LLM"], Awaitable[Any]]


class GenerateFunction(Protocol):
    """Makes a call for one sample; ``any_chain``: it may be of any conversation, beside others.

    ``attached`` is what is attached to ``token_ids``; None means what is attached to the prompt, and was to what
    followed, with ``images`` for the placeholders among the tokens that are new.
    """

    def __call__(
        self, sampling: SamplingParams, token_ids: Int32 | None, *, any_chain: bool = False,
        attached: tuple[Placed, ...] | None = None, images: Sequence[Any] = (),
    ) -> Coroutine[Any, Any, Completion]: ...  # fmt: skip


ONE_CALL_AT_A_TIME = (
    "llm.generate was called while another call of the same sample was running; a response is one "
    "conversation: await the first call, or ask for more samples per prompt"
)
AFTER_ITS_END = "llm.generate was called after its rollout function had ended"


class Answered(NamedTuple):
    """A call of a function's earlier run: ``tokens`` [start, end) follow ``prompt`` and the tokens before them."""

    prompt: Int32
    tokens: Int32
    start: int
    end: int
    attached: tuple[Placed, ...] = ()
    """What is attached to the prompt and to the tokens."""

    def answers(self, token_ids: Int32, attached: tuple[Placed, ...] = ()) -> bool:
        """Return whether these token ids, with what is attached to them, are what was asked."""
        at = len(self.prompt)
        return (
            len(token_ids) == at + self.start
            and np.array_equal(token_ids[:at], self.prompt)
            and np.array_equal(token_ids[at:], self.tokens[: self.start])
            and attached == before(self.attached, at + self.start)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheltered:
    """What is behind an endpoint: a sample whose calls ``generate`` makes on ``loop``.

    A call that is cancelled is given up: nobody will hear its answer.
    """

    generate: GenerateFunction
    sampling: SamplingParams
    """Holds where a client asks for nothing else."""
    loop: asyncio.AbstractEventLoop
    max_context: int
    """Tokens that the engines have room for."""
    prompt: Prompt
    """The sample's prompt, as its function sees it."""
    answered: Sequence[Answered] = ()
    """The answers of before a restart, which clients may have heard."""


class Door(Protocol):
    """An endpoint for the clients of one sample."""

    @property
    def url(self) -> str: ...

    @property
    def key(self) -> str: ...


class ToolCall(Protocol):
    """A tool call of an answer; ``arguments`` is JSON text as the model wrote it."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> str: ...


class ChatAnswer(Protocol):
    """The result of one ``llm.chat``; arrays as in :class:`Completion`."""

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message, to be appended to the conversation."""
        ...

    @property
    def text(self) -> str:
        """What it says, without reasoning and tool calls."""
        ...

    @property
    def tool_calls(self) -> Sequence[ToolCall]:
        """The tools that it calls, in order."""
        ...

    @property
    def finish(self) -> str:
        """``stop``, ``tool_calls``, or ``length`` for an answer that was cut."""
        ...

    @property
    def tokens(self) -> Int32: ...
    @property
    def logprobs(self) -> Float32: ...


class Chat(Protocol):
    """What ``llm.chat`` of one sample asks."""

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]
    ) -> ChatAnswer:
        """The answer to a conversation; ``sampling`` has the arguments of ``llm.generate`` that differ."""
        ...

    def close(self) -> Iterable[int]:
        """Answer nothing any more; returns the numbers of calls whose answers the function has got."""
        ...


class Doors(Protocol):
    """The server of those endpoints, which is above the driver."""

    def open(self, behind: Sheltered, place: Any = None) -> Door:
        """Serve one more sample; ``place``: where, if not at an address of this process's own choice."""
        ...

    def chat(self, behind: Sheltered) -> Chat:
        """What ``llm.chat`` of one more sample asks, on the running loop."""
        ...

    def shut(self, door: Door) -> Iterable[int]:
        """Answer nothing of it any more; returns the numbers of calls whose answers a client has heard."""
        ...


class Life(NamedTuple):
    """What tells a sample from others of the same id, and from itself before it began again."""

    restarts: int = 0
    """How often it has begun again from nothing."""
    evaluation: int | None = None
    """The number of its evaluation; None in training."""
    resumed: bool = False
    """Its function has run before, and clients may go on with what they have heard of it."""


NO_ENDPOINT = (
    "llm.base_url, llm.chat: this process serves no agents; give the scheduler tokenizer=..., and install "
    "april-rl[agents]"
)


NO_PROCESSOR = (
    "llm.generate: there is no processor here that places images; give the scheduler, and a host that runs functions, "
    "processor=, the model's transformers.AutoProcessor"
)


class LLM:
    """The policy, as one sample sees it."""

    __slots__ = ("_busy", "_clock", "_generate", "_open_chat", "_open_door", "_sampling", "life", "sample_id")

    def __init__(
        self,
        sample_id: SampleId,
        sampling: SamplingParams,
        generate: GenerateFunction,
        open_door: Callable[[Any], Door],
        open_chat: Callable[[], Chat],
        clock: Callable[[bool], None],
        life: Life,
    ) -> None:
        self.sample_id = sample_id
        self.life = life
        self._clock = clock
        self._sampling = sampling
        self._generate = generate
        self._open_door = open_door
        self._open_chat = open_chat
        self._busy = False

    @property
    def base_url(self) -> str:
        """The address for a client of OpenAI's or Anthropic's API: an endpoint on loopback for this sample alone.

        Requests may be of any conversation and run side by side; each sequence of tokens becomes a row of the batch. A
        client sees an answer that takes long, however many steps and weight updates that is. The endpoint is closed
        when the function ends. Raises UsageError without a tokenizer.
        """
        return self.door().url

    @property
    def api_key(self) -> str:
        """The key that ``base_url`` asks for."""
        return self.door().key

    def door(self, place: Any = None) -> Door:
        """The endpoint of :attr:`base_url`; ``place``: where it is, for the first who asks for it."""
        return self._open_door(place)

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """What is waited for inside does not count for ``function_timeout_s``."""
        self._clock(False)
        try:
            yield
        finally:
            self._clock(True)

    async def generate(
        self,
        token_ids: Sequence[int] | Int32 | None = None,
        *,
        max_tokens: int | None = None,
        min_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop: str | Sequence[str] | None = None,
        images: Sequence[Any] = (),
        any_conversation: bool = False,
        **others: Never,
    ) -> Completion:
        """Continue the conversation; returns when the response is complete, however many steps that takes.

        Sampling arguments hold for this call, instead of the configuration.

        Args:
            token_ids: the conversation to continue: the prompt, everything generated so far, and what the
                environment adds (it becomes a segment without loss). None: as it stands.
            max_tokens: most tokens of this call; the budget of the whole response, in which tokens of the
                environment count, holds as well. Where nothing is left of it, what the environment adds is cut to fit
                and the call returns no tokens and FinishReason.LENGTH.
            stop: strings that end the response: the token that completes one is the last that is kept, so the text
                may run on to that token's end. A match lies in this call's tokens; the first ``min_tokens`` cannot
                complete one. Needs the scheduler's ``tokenizer``.
            images: those that the environment adds, one for each placeholder in what is new of ``token_ids``; with
                ``any_conversation`` all behind the prompt. In the forms of a prompt's. See docs/images.md.
            any_conversation: ``token_ids`` may begin with anything: they go on with the longest conversation of this
                sample that they repeat, or begin one, which becomes a row of its own. Coroutines may make such calls
                side by side.
            others: refused by name.

        Raises:
            TypeError: an argument that april does not know; the message says which there are.
            UsageError: an argument out of range, or of the wrong type (a ValueError, too).
            RolloutError: another call of this sample is not complete, or ``token_ids`` rewrite what was said before.
        """
        if others:
            raise TypeError(refused_argument(next(iter(others))))
        refuse_while_held("llm.generate")
        changes = _changed(max_tokens, min_tokens, temperature, top_p, stop_token_ids, stop)
        sampling = replace(self._sampling, **changes) if changes else self._sampling
        ids = None if token_ids is None else as_token_ids(token_ids)
        shown = _shown(images, ids)
        if any_conversation:
            return await self._generate(sampling, ids, any_chain=True, **shown)
        if self._busy:
            raise RolloutError(ONE_CALL_AT_A_TIME)
        self._busy = True
        try:
            return await self._generate(sampling, ids, **shown)
        finally:
            self._busy = False

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        min_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop: str | Sequence[str] | None = None,
        **others: Never,
    ) -> ChatAnswer:
        """Answer a conversation of messages, in OpenAI's shape; returns when the answer is complete.

        Tokens are made and recorded as for a client at ``base_url``: a conversation that goes on keeps what was
        sampled, any other becomes another row, and several calls may run side by side.

        Args:
            messages: dicts of ``role``, ``content``, and by role ``tool_calls`` or ``tool_call_id``. Append
                ``ChatAnswer.message`` and what follows for the next turn.
            tools: OpenAI's tool definitions.
            max_tokens: as for :meth:`generate`, like the other arguments of sampling.
            others: refused by name.

        Raises:
            TypeError: an argument that april does not know.
            UsageError: messages or tools that the chat template does not take, or an argument out of range.
            RolloutError: the rollout function has ended.
        """
        if others:
            raise TypeError(refused_argument(next(iter(others)), "llm.chat", "messages, tools"))
        refuse_while_held("llm.chat")
        changes = _changed(max_tokens, min_tokens, temperature, top_p, stop_token_ids, stop)
        return await self._open_chat().ask(messages, tools, changes)


def _shown(images: Any, token_ids: Int32 | None) -> dict[str, Any]:
    """The argument ``images``, where some are given."""
    if isinstance(images, (str, bytes, Mapping)) or not hasattr(images, "__len__"):
        raise UsageError(f"llm.generate: images must be a list of images, got {type(images).__name__}")
    if len(images) and token_ids is None:
        raise UsageError("llm.generate: images belong to placeholders in token_ids; give both")
    return {"images": list(images)} if len(images) else {}


def _changed(
    max_tokens: Any, min_tokens: Any, temperature: Any, top_p: Any, stop_token_ids: Any, stop: Any
) -> dict[str, Any]:
    """The arguments of sampling that were given."""
    given = {
        "max_tokens": max_tokens, "min_tokens": min_tokens, "temperature": temperature, "top_p": top_p,
        "stop_token_ids": _tuple_of("stop_token_ids", stop_token_ids),
        "stop": (stop,) if isinstance(stop, str) else _tuple_of("stop", stop),
    }  # fmt: skip
    return {name: value for name, value in given.items() if value is not None}


def _tuple_of(name: str, values: Any) -> tuple[Any, ...] | None:
    if values is None:
        return None
    try:
        return tuple(values)
    except TypeError:
        raise UsageError(f"llm.generate: {name} must be a list, got {values!r}") from None


def as_token_ids(token_ids: Sequence[int] | Int32) -> Int32:
    """A conversation as int32 [T], a copy; raises UsageError for anything but a flat list of integers."""
    try:
        array = np.asarray(token_ids)
    except ValueError:
        array = np.empty(0)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise UsageError(
            f"llm.generate: token_ids must be a flat list of integers, got {type(token_ids).__name__} of "
            f"{array.dtype}; give prompt.token_ids or Completion.conversation, and what your tokenizer makes of text"
        )
    if array.size and not 0 <= array.min() <= array.max() < 2**31:
        raise UsageError("llm.generate: token_ids must be in [0, 2**31)")
    return np.array(array, np.int32)


def refused_argument(name: str, where: str = "llm.generate", takes: str = "token_ids, images, any_conversation") -> str:
    """The message that refuses an argument which ``llm.generate`` does not have."""
    known = f"{takes}, max_tokens, min_tokens, temperature, top_p, stop_token_ids, stop"
    return f"{where}: {name}: {UNSUPPORTED.get(name, 'unknown argument')}; april supports {known}"


def wrong_sampling(sampling: SamplingParams, vocab_size: int) -> str | None:
    """The reason why no engine can be asked for this, or None."""
    for name, kind in (("max_tokens", Integral), ("min_tokens", Integral), ("temperature", Real), ("top_p", Real)):
        value = getattr(sampling, name)
        if isinstance(value, bool) or not isinstance(value, kind):
            return f"{name} must be {'an integer' if kind is Integral else 'a number'}, got {value!r}"
    if not all(isinstance(i, Integral) for i in sampling.stop_token_ids):
        texts: list[Any] = [i for i in sampling.stop_token_ids if isinstance(i, str)]
        why = f"; {stop_id_of(texts[0])}" if texts else ""
        return f"stop_token_ids must be integers, got {sampling.stop_token_ids}{why}"
    return _out_of_range(sampling, vocab_size)


def _out_of_range(sampling: SamplingParams, vocab_size: int) -> str | None:
    if not 1 <= sampling.max_tokens < 2**31:
        return f"max_tokens must be in [1, 2**31), got {sampling.max_tokens}"
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        return f"min_tokens must be in [0, max_tokens={sampling.max_tokens}], got {sampling.min_tokens}"
    if not 0 <= sampling.temperature < np.inf:
        return f"temperature must be a finite number >= 0, got {sampling.temperature}"
    if not 0 < sampling.top_p <= 1:
        return f"top_p must be in (0, 1], got {sampling.top_p}"
    if not all(0 <= i < vocab_size for i in sampling.stop_token_ids):
        return f"stop_token_ids must be in the vocabulary of {vocab_size}, got {sampling.stop_token_ids}"
    return wrong_stop_strings(sampling.stop)


def exact_types(sampling: SamplingParams) -> SamplingParams:
    """Turn the numbers into Python's own int and float, so that a record writes what its replay reads."""
    return replace(
        sampling,
        max_tokens=int(sampling.max_tokens),
        min_tokens=int(sampling.min_tokens),
        temperature=float(sampling.temperature),
        top_p=float(sampling.top_p),
        stop_token_ids=tuple(map(int, sampling.stop_token_ids)),
    )


def checked_call(
    sample: Sample, sampling: SamplingParams, token_ids: Int32 | None, vocab_size: int, longest: int, can_stop: bool
) -> Int32 | None:
    """The conversation to continue, cut to ``longest`` tokens of prompt and response.

    Raises unless an engine can be asked for this: sampling in range, conversation appended to and never rewritten; stop
    strings need a tokenizer (``can_stop``).
    A request that is refused here would otherwise count as a failure of the engine.
    """
    wrong = wrong_sampling(sampling, vocab_size)
    if wrong is not None:
        raise UsageError(f"llm.generate: {wrong}")
    if sampling.stop and not can_stop:
        raise UsageError("llm.generate: stop strings are matched on text; give the scheduler tokenizer=...")
    if token_ids is None:
        return None
    chain = sample.chains[0]
    have = chain.conversation(chain.seen)
    if not np.array_equal(token_ids[: len(have)], have):
        if len(token_ids) == len(have) and (token_ids != have).all():
            raise UsageError(
                "llm.generate was given the conversation with a number added to each of its tokens, as + does with "
                "arrays; append by [*completion.conversation, *new] or np.concatenate((completion.conversation, new))"
            )
        raise RolloutError(
            "llm.generate was given tokens that do not begin with the prompt and everything generated so far; "
            "append to the conversation (Completion.conversation), never rewrite it"
        )
    new = token_ids[len(have) :]
    if len(new) and new.max() >= vocab_size:
        raise UsageError(f"llm.generate: token id {new.max()} is outside the engine's vocabulary of {vocab_size}")
    return token_ids[:longest]


def check_mismatch(sampling: SamplingParams, configured: SamplingParams, any_temperature: bool = True) -> None:
    """Raise UsageError for a call whose log-probabilities a trainer cannot recompute, where the configuration can.

    Without ``any_temperature`` the engines' log-probabilities are right at temperature 1 only.
    """
    if not any_temperature and sampling.temperature != 1:
        raise UsageError(
            f"llm.generate: temperature={sampling.temperature} needs log-probabilities that follow the temperature, "
            "which those of these engines do not; leave it at 1, or set allow_mismatch: true if your trainer accounts "
            "for it"
        )
    for name, neutral in (("top_p", 1.0), ("min_tokens", 0), ("temperature", None)):
        value = getattr(sampling, name)
        if value != getattr(configured, name) and (value == 0 if neutral is None else value != neutral):
            raise UsageError(
                f"llm.generate: {name}={value} gives log-probabilities that a trainer cannot recompute; "
                "leave it out, or set allow_mismatch: true if your trainer accounts for it"
            )


def check_conversation(
    token_ids: Int32 | None, sampling: SamplingParams, vocab_size: int, max_context: int, can_stop: bool
) -> None:
    """Raise UsageError unless an engine can be asked to continue these tokens, whatever the sample has said before."""
    wrong = wrong_sampling(sampling, vocab_size)
    if wrong is None and sampling.stop and not can_stop:
        wrong = "stop strings are matched on text; give the scheduler tokenizer=..."
    if wrong is None and (token_ids is None or not len(token_ids)):
        wrong = "a conversation must have tokens"
    if wrong is None and token_ids is not None and not 0 <= token_ids.min() <= token_ids.max() < vocab_size:
        outside = token_ids[(token_ids < 0) | (token_ids >= vocab_size)][0]
        wrong = f"token id {outside} is outside the engine's vocabulary of {vocab_size}"
    if wrong is None and token_ids is not None and len(token_ids) >= max_context:
        wrong = f"a conversation of {len(token_ids)} tokens leaves no room in the context of {max_context} tokens"
    if wrong is not None:
        raise UsageError(f"llm.generate: {wrong}")


def completion_of(chain: Chain, call: RecordedCall, number: int = 0) -> Completion:
    """The completion of a call: what it added to its conversation."""
    start, end, finish = call
    tape = chain.tape
    return Completion(
        tokens=tape.tokens[start:end].copy(),
        logprobs=tape.logprobs[start:end].copy(),
        versions=versions_of(tape.segments)[start:end],
        finish=finish,
        conversation=np.concatenate((chain.prompt, tape.tokens[:end])),
        number=number,
    )


async def single_turn(prompt: Prompt, llm: LLM) -> None:
    """The default rollout function: one response to the prompt."""
    await llm.generate()


P = ParamSpec("P")
T = TypeVar("T")

_GIVEN_UP = "this sample was given up: its group was dropped, its function took too long, or the scheduler was closed"


def _blocking(
    method: Callable[Concatenate[LLM, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingLLM, P], T]:
    """Return the same method, but one that blocks."""

    def blocks(self: BlockingLLM, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._wait_for(method.__name__, lambda: method(self._llm, *args, **kwargs))

    functools.update_wrapper(blocks, method)
    return blocks


class BlockingLLM:
    """The policy, as one sample of a plain rollout function sees it.

    ``generate`` and ``chat`` are those of :class:`LLM`, but block the thread instead of being awaited. They raise
    asyncio.CancelledError, no Exception, when the sample is given up; let it through.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._lock = threading.Lock()
        self._calls: set[Future[Any]] = set()
        """The calls that wait."""
        self._over = False
        """True if no further call may generate."""
        self._cancels_next = False
        """True if the next call is told that the sample was given up."""

    @property
    def sample_id(self) -> SampleId:
        """The sample whose response this is."""
        return self._llm.sample_id

    @property
    def base_url(self) -> str:
        """As :attr:`LLM.base_url`."""
        return self._door().url

    @property
    def api_key(self) -> str:
        """As :attr:`LLM.api_key`."""
        return self._door().key

    def _door(self) -> Door:
        async def opened() -> Door:
            return self._llm.door()

        return asyncio.run_coroutine_threadsafe(opened(), self._loop).result()

    def _wait_for(self, name: str, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if threading.get_ident() == self._loop_thread:
            # a plain function that only made a coroutine, which is awaited where coroutines are
            return ask()  # type: ignore[return-value]
        refuse_while_held(f"llm.{name}")
        with self._lock:
            if self._cancels_next:
                self._cancels_next = False
                raise asyncio.CancelledError(_GIVEN_UP)
            if self._over:
                raise RolloutError(AFTER_ITS_END)
            call = asyncio.run_coroutine_threadsafe(ask(), self._loop)
            self._calls.add(call)
        try:
            return call.result()
        except CancelledError:
            raise asyncio.CancelledError(_GIVEN_UP) from None
        finally:
            with self._lock:
                self._calls.discard(call)

    generate = _blocking(LLM.generate)  # type: ignore[arg-type]  # a method, with self first
    chat = _blocking(LLM.chat)  # type: ignore[arg-type]  # as above

    def _end(self, *, cancelled: bool) -> None:
        """Let no further call generate; a cancellation ends the calls that wait, or else the next one."""
        with self._lock:
            self._over = True
            self._cancels_next = cancelled and not sum([call.cancel() for call in self._calls])


BlockingRolloutFunction = Callable[[Prompt, BlockingLLM], Any]


def as_coroutine(function: Callable[..., Any], threads: WorkerThreads) -> RolloutFunction:
    """Return an async rollout function as it is, and a plain one as a coroutine function that runs it in a thread."""
    if is_async(function):
        return function

    async def rollout(prompt: Prompt, llm: LLM) -> Any:
        blocking = BlockingLLM(llm)
        ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        threads.run(copy_context(), function, (prompt, blocking), ended.set_result)
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError:
            blocking._end(cancelled=True)
            # the function's end is waited for, as a coroutine's would be; a second cancellation ends that
            await asyncio.wait([ended])
            raise
        blocking._end(cancelled=False)
        outcome = ended.result()
        if outcome.error is not None:
            raise outcome.error
        value = outcome.take()
        return await value if inspect.isawaitable(value) else value

    rollout.__qualname__ = name_of(function)
    return rollout
