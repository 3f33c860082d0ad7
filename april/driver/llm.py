"""Defines the ``llm`` object with which a rollout function generates: ``llm.generate`` and ``llm.chat``.

When a step ends in the middle of a call, april aborts the engine request and keeps its tokens; the coroutine stays
suspended. In a later step april continues the request under newer weights, and the coroutine gets one complete
response with the policy version of every token. The function notices only that the call took long.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from numbers import Integral, Real
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypedDict, TypeVar, Unpack

import numpy as np
from msgspec.structs import replace

from april.concurrency.model_lock import refuse_while_held
from april.config.mistakes import UNSUPPORTED
from april.core.attachments import NO_EXTRAS, Extras, Placed, before, first_rows
from april.core.sampling import SamplingParams, stop_id_of, wrong_stop_strings
from april.core.tape import Float32, Int32, versions_of
from april.core.types import Chain, FinishReason, Prompt, RecordedCall, Sample, SampleId
from april.driver.user_calls import WorkerThreads
from april.driver.user_code import Outcome, is_async, name_of
from april.errors import RolloutError, UsageError

if TYPE_CHECKING:
    from april.agents.chat import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The result of one ``llm.generate``.

    ``tokens``: int32 [T], EOS included. ``logprobs``: float32 [T] in nats. ``versions``: int32 [T, 2], the policy
    version of each token as (number of restarts, number of weight updates). ``conversation``: int32 [P + ...], the
    prompt and all tokens after it, including ``tokens``.
    """

    tokens: Int32
    logprobs: Float32
    versions: Int32
    finish: FinishReason
    conversation: Int32
    number: int = 0
    """Number of the call within its sample."""
    resumes: int = 0
    """Number of times that the sample was interrupted and continued so far."""
    extras: Extras = field(default=NO_EXTRAS, compare=False)
    """Arrays of extra data by name (``Config.extras``): one row for each token of the conversation except the last."""

    def __repr__(self) -> str:
        return f"<Completion of {len(self.tokens)} tokens, finish={self.finish}>"


RolloutFunction = Callable[[Prompt, "LLM"], Awaitable[Any]]


GenerateFunction = Callable[..., Coroutine[Any, Any, Completion]]
"""Generates one response for a sample: ``generate(sampling, token_ids, *, any_chain, attached, images, overridden)``.

With ``any_chain`` the call may continue or start any conversation, while other calls run. ``attached`` lists the
attachments of ``token_ids``; if it is None, the conversation keeps its earlier attachments, and ``images`` are added,
one for each placeholder among the new tokens. ``overridden`` is True if the client asked for another distribution, in
place of which ``sampling`` is used.
"""


ONE_CALL_AT_A_TIME = (
    "llm.generate was called while another call of the same sample was running; a response is one "
    "conversation: await the first call, or ask for more samples per prompt"
)
AFTER_ITS_END = "llm.generate was called after its rollout function had ended"


class AnsweredCall(NamedTuple):
    """A call that was answered before a restart: the request was ``prompt`` and ``tokens[:start]``, and the answer was
    ``tokens[start:end]``."""

    prompt: Int32
    tokens: Int32
    start: int
    end: int
    attached: tuple[Placed, ...] = ()
    """Attachments of the prompt and the tokens."""

    def answers(self, token_ids: Int32, attached: tuple[Placed, ...] = ()) -> bool:
        """Return whether the request had these token ids and attachments."""
        at = len(self.prompt)
        return (
            len(token_ids) == at + self.start
            and np.array_equal(token_ids[:at], self.prompt)
            and np.array_equal(token_ids[at:], self.tokens[: self.start])
            and attached == before(self.attached, at + self.start)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSample:
    """What an HTTP endpoint or ``llm.chat`` needs to generate for one sample.

    ``generate`` must be awaited on ``loop``; cancelling a call of ``generate`` discards its answer.
    """

    generate: GenerateFunction
    sampling: SamplingParams
    """Default sampling of the calls. A client may set ``max_tokens`` and ``stop``, but not the distribution."""
    loop: asyncio.AbstractEventLoop
    max_context: int
    """Maximum number of tokens of a conversation, prompt included, that every engine can hold."""
    prompt: Prompt
    """Prompt of the sample, as the rollout function gets it."""
    answered: Sequence[AnsweredCall] = ()
    """Calls answered before a restart; clients may have received the answers."""
    evaluated: bool = False
    """True if the sample belongs to an evaluation."""
    note_checked: Callable[[bool], None] = lambda kept: None
    """Counts an answer for which a client demanded a form, such as JSON; the argument is True if the answer has that
    form. Must be called on ``loop``."""


class ClientEndpoint(Protocol):
    """An HTTP endpoint for the clients of one sample, with its address and API key."""

    @property
    def url(self) -> str: ...

    @property
    def key(self) -> str: ...


class Chat(Protocol):
    """Answers the ``llm.chat`` calls of one sample."""

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]
    ) -> Answer:
        """Answer a conversation; ``sampling`` holds the sampling arguments that differ from the sample's default."""
        ...

    def close(self) -> Iterable[int]:
        """Stop answering; returns the numbers of the calls whose answers the rollout function has received."""
        ...


class ClientEndpoints(Protocol):
    """Opens and closes the endpoints of samples; ``april.agents`` implements it."""

    def open(self, sample: EndpointSample, serve: Any = None) -> ClientEndpoint:
        """Open a sample's endpoint by ``serve``, a function of another server; None means this process's server."""
        ...

    def chat(self, sample: EndpointSample) -> Chat:
        """Return the object that answers ``llm.chat`` for a sample, on the running loop."""
        ...

    def close_endpoint(self, endpoint: ClientEndpoint) -> Iterable[int]:
        """Close an endpoint; returns the numbers of the calls whose answers a client has received."""
        ...


class SampleRun(NamedTuple):
    """Identifies one run of a rollout function, as samples may restart and evaluations use the same sample ids."""

    restarts: int = 0
    """Number of times that the sample was restarted without its tokens."""
    evaluation: int | None = None
    """Number of the evaluation; None in training."""
    resumed: bool = False
    """True if the rollout function ran before, so that clients may continue from answers they received."""


NO_ENDPOINT = (
    "llm.base_url, llm.chat: this process has no endpoint for agents; give the scheduler tokenizer=..., and install "
    "april-rl[agents]"
)


NO_PROCESSOR = (
    "llm.generate: images need a processor; give the scheduler processor=, the model's transformers.AutoProcessor"
)


class SamplingArguments(TypedDict, total=False):
    """Sampling arguments of a call, which override the configuration; None means the value in the configuration."""

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    stop_token_ids: Sequence[int] | None
    stop: str | Sequence[str] | None


@dataclass(slots=True, eq=False, repr=False)
class LLM:
    """Generates from the policy for one sample; a rollout function gets it as its argument ``llm``."""

    sample_id: SampleId
    sampling: SamplingParams
    """Default sampling parameters of this sample's calls."""
    _generate: GenerateFunction
    _open_endpoint: Callable[[Any], ClientEndpoint]
    _open_chat: Callable[[], Chat]
    _clock: Callable[[bool], None]
    sample_run: SampleRun
    _busy: bool = False

    @property
    def base_url(self) -> str:
        """Address of an endpoint on this machine for clients of OpenAI's or Anthropic's API, for this sample alone.

        Requests may belong to any conversation and run concurrently; each sequence of tokens becomes a row of the
        batch. A request may last several steps and weight updates, so clients need long timeouts. The endpoint is
        closed when the function ends. Without the scheduler's ``tokenizer`` its clients can send token ids only.
        """
        return self.endpoint().url

    @property
    def api_key(self) -> str:
        """API key of the endpoint at ``base_url``."""
        return self.endpoint().key

    def endpoint(self, serve: Any = None) -> ClientEndpoint:
        """Return the endpoint of :attr:`base_url`. The first call opens it, as :meth:`ClientEndpoints.open`."""
        return self._open_endpoint(serve)

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Exclude the time spent inside the block from ``function_timeout_s``."""
        self._clock(False)
        try:
            yield
        finally:
            self._clock(True)

    async def generate(
        self,
        token_ids: Sequence[int] | Int32 | None = None,
        *,
        images: Sequence[Any] = (),
        any_conversation: bool = False,
        **sampling: Unpack[SamplingArguments],
    ) -> Completion:
        """Continue the conversation; returns when the response is complete, however many steps that takes.

        Args:
            token_ids: Conversation to continue: the prompt, everything generated so far, and the tokens that the
                environment adds (they become a segment without loss). None means the conversation so far.
            images: Images that the environment adds, one for each placeholder among the new tokens (all images after
                the prompt if ``any_conversation``), in the forms that prompts accept (docs/images.md).
            any_conversation: True if ``token_ids`` may be any conversation. If they begin with a conversation of this
                sample (the longest one counts), they continue it; otherwise they start a new conversation, which
                becomes a row of its own. Such calls may run concurrently.
            sampling: ``max_tokens``, ``min_tokens``, ``temperature``, ``top_p``, ``stop_token_ids`` and ``stop``
                override the configuration for this call. ``max_tokens`` limits the tokens of this call; the budget of
                the whole response, which includes the environment's tokens, applies as well. If the budget is used up,
                the environment's tokens are cut to fit, and the call returns no tokens and FinishReason.LENGTH.
                ``stop`` holds strings that end the response, and needs the scheduler's ``tokenizer``. The last token
                kept is the one that completes a string, so some text may follow the string. A match must lie in the
                tokens of this call, and the first ``min_tokens`` tokens cannot complete it.

        Raises:
            TypeError: an argument is unknown; the message lists the known arguments.
            UsageError: an argument is out of range or of the wrong type (a ValueError, too).
            RolloutError: another call of this sample is not complete, or ``token_ids`` change earlier tokens.
        """
        changes = _changed(sampling, "llm.generate", "token_ids, images, any_conversation")
        refuse_while_held("llm.generate")
        params = replace(self.sampling, **changes) if changes else self.sampling
        ids = None if token_ids is None else as_token_ids(token_ids)
        new_images = _images_argument(images, ids)
        if any_conversation:
            return await self._generate(params, ids, any_chain=True, **new_images)
        return await self._one_at_a_time(params, ids, **new_images)

    async def forward(
        self, token_ids: Sequence[int] | Int32, sampling: Mapping[str, Any], attached: tuple[Placed, ...] = ()
    ) -> Completion:
        """:meth:`generate` for a trainer that sends the requests and their attachments to its servers itself.

        ``sampling`` has fields of :class:`~april.core.sampling.SamplingParams` that differ from the configuration.
        """
        changed = replace(self.sampling, **sampling)
        return await self._one_at_a_time(changed, as_token_ids(token_ids), attached=attached)

    async def _one_at_a_time(self, sampling: SamplingParams, ids: Int32 | None, **images: Any) -> Completion:
        if self._busy:
            raise RolloutError(ONE_CALL_AT_A_TIME)
        self._busy = True
        try:
            return await self._generate(sampling, ids, **images)
        finally:
            self._busy = False

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        **sampling: Unpack[SamplingArguments],
    ) -> Answer:
        """Answer a conversation of messages, in OpenAI's format; returns when the answer is complete.

        Tokens are generated and recorded as for a client at ``base_url``: a continued conversation keeps its sampled
        tokens, any other conversation becomes a row of its own, and several calls may run concurrently.

        Args:
            messages: Dicts with ``role`` and ``content``; depending on the role also ``tool_calls`` or
                ``tool_call_id``. For the next turn append ``Answer.message`` and the messages that follow it.
            tools: Tool definitions in OpenAI's format.
            sampling: Sampling arguments, as for :meth:`generate`.

        Raises:
            TypeError: an argument is unknown.
            UsageError: the chat template does not accept the messages or tools, or an argument is out of range.
            RolloutError: the rollout function has ended.
        """
        changes = _changed(sampling, "llm.chat", "messages, tools")
        refuse_while_held("llm.chat")
        return await self._open_chat().ask(messages, tools, changes)


def _images_argument(images: Any, token_ids: Int32 | None) -> dict[str, Any]:
    """Return ``{"images": [...]}`` for the generate function, or an empty dict without images; raises UsageError."""
    if isinstance(images, (str, bytes, Mapping)) or not hasattr(images, "__len__"):
        raise UsageError(f"llm.generate: images must be a list of images, got {type(images).__name__}")
    if len(images) and token_ids is None:
        raise UsageError("llm.generate: images belong to placeholders in token_ids; give both")
    return {"images": list(images)} if len(images) else {}


def _changed(given: SamplingArguments, call: str, others: str) -> dict[str, Any]:
    """Return the sampling arguments that were given to ``call``, as fields of SamplingParams.

    Raises TypeError for an unknown argument; its message also lists ``others``, the names of the other arguments.
    """
    changes: dict[str, Any] = {}
    known = SamplingArguments.__annotations__
    for name, value in given.items():
        if name not in known:
            why = UNSUPPORTED.get(name, "unknown argument")
            raise TypeError(f"{call}: {name}: {why}; april supports {others}, {', '.join(known)}")
        if value is not None:
            changes[name] = (value,) if name == "stop" and isinstance(value, str) else value
    for name in changes.keys() & {"stop_token_ids", "stop"}:
        try:
            changes[name] = tuple(changes[name])
        except TypeError:
            raise UsageError(f"llm.generate: {name} must be a list, got {changes[name]!r}") from None
    return changes


def as_token_ids(token_ids: Sequence[int] | Int32) -> Int32:
    """Copy token ids into an int32 array [T]; raises UsageError unless they are a flat list of integers."""
    try:
        array = np.asarray(token_ids)
    except ValueError:
        array = np.empty(0)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise UsageError(
            f"llm.generate: token_ids must be a flat list of integers, got {type(token_ids).__name__} of "
            f"{array.dtype}; give prompt.token_ids or Completion.conversation, followed by your tokenizer's ids of new "
            "text"
        )
    if array.size and not 0 <= array.min() <= array.max() < 2**31:
        raise UsageError("llm.generate: token_ids must be in [0, 2**31)")
    return np.array(array, np.int32)


def wrong_sampling(sampling: SamplingParams, vocab_size: int) -> str | None:
    """Return why no engine can sample with these parameters; None if they are valid."""
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
    """Convert numbers, such as numpy's, to Python's int and float, the types that the run's record gives back."""
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
    """Check a call of ``llm.generate``; return the first ``longest`` of its token ids.

    Raises UsageError for sampling out of range, for stop strings without a tokenizer (``can_stop`` False), and for
    unknown token ids; raises RolloutError for a conversation that does not begin with the conversation so far. Without
    this check the engine would refuse the request, and that would count as the engine's failure.
    """
    _check_sampling(sampling, vocab_size, can_stop)
    if token_ids is None:
        return None
    chain = sample.chains[0]
    have = chain.conversation(chain.seen_tokens)
    if not np.array_equal(token_ids[: len(have)], have):
        raise RolloutError(
            "llm.generate was given tokens that do not begin with the prompt and everything generated so far; append "
            "to Completion.conversation ([*completion.conversation, *new]), and never rewrite it"
        )
    _check_ids(token_ids[len(have) :], vocab_size)
    return token_ids[:longest]


def _check_ids(token_ids: Int32, vocab_size: int) -> None:
    if len(token_ids) and (largest := token_ids.max()) >= vocab_size:
        raise UsageError(f"llm.generate: token id {largest} is outside the engine's vocabulary of {vocab_size}")


def _check_sampling(sampling: SamplingParams, vocab_size: int, can_stop: bool) -> None:
    wrong = wrong_sampling(sampling, vocab_size)
    if wrong is None and sampling.stop and not can_stop:
        wrong = "stop strings are matched on text; give the scheduler tokenizer=..."
    if wrong is not None:
        raise UsageError(f"llm.generate: {wrong}")


def check_mismatch(sampling: SamplingParams, configured: SamplingParams, any_temperature: bool = True) -> None:
    """Raise UsageError if the sampling makes log-probabilities that a trainer cannot recompute.

    Sampling parameters that equal those of ``configured`` are always accepted. ``any_temperature`` False means that the
    engines' log-probabilities are right at temperature 1 only.
    """
    if not any_temperature and sampling.temperature != 1:
        raise UsageError(
            f"llm.generate: temperature={sampling.temperature} needs log-probabilities that follow the temperature, "
            "but those of these engines do not; leave it at 1, or set allow_mismatch: true if your trainer accounts "
            "for it"
        )
    for name, neutral in (("top_p", 1.0), ("min_tokens", 0), ("temperature", None)):
        value = getattr(sampling, name)
        if value != getattr(configured, name) and (value == 0 if neutral is None else value != neutral):
            raise UsageError(
                f"llm.generate: {name}={value} gives log-probabilities that a trainer cannot recompute; "
                "leave it out, or set allow_mismatch: true if your trainer accounts for it"
            )


def check_has_conversation(token_ids: Int32 | None, prompt: Prompt) -> None:
    """Raise UsageError for a call without ``token_ids``, for samples whose prompt has no tokens."""
    if token_ids is None:
        keys = sorted(map(str, prompt.data))
        raise UsageError(
            f"llm.generate: the prompt has neither messages nor token_ids (its keys are {keys}), so there is nothing "
            "to continue: give llm.generate(token_ids), or prompts with one of them"
        )


def check_conversation(
    token_ids: Int32 | None, sampling: SamplingParams, vocab_size: int, max_context: int, can_stop: bool
) -> None:
    """Raise UsageError unless an engine can continue these tokens; the sample's other conversations do not matter."""
    _check_sampling(sampling, vocab_size, can_stop)
    if token_ids is None or not len(token_ids):
        raise UsageError("llm.generate: a conversation must have tokens")
    _check_ids(token_ids, vocab_size)
    if len(token_ids) >= max_context:
        raise UsageError(
            f"llm.generate: a conversation of {len(token_ids)} tokens leaves no room in the context of {max_context} "
            "tokens"
        )


def completion_of(chain: Chain, call: RecordedCall, number: int = 0) -> Completion:
    """Return the result of a call: the tokens that it added to its conversation."""
    start, end, finish = call
    tape = chain.tape
    # skip the segments (token runs of one attempt and version) of earlier calls; a long conversation has hundreds
    segments = tape.segments[max(0, bisect_right(tape.segments, start, key=attrgetter("start")) - 1) :]
    before = start - segments[0].start if segments else 0
    return Completion(
        tokens=tape.tokens[start:end].copy(),
        logprobs=tape.logprobs[start:end].copy(),
        versions=versions_of(segments)[before : before + end - start],
        finish=finish,
        conversation=np.concatenate((chain.prompt, tape.tokens[:end])),
        number=number,
        resumes=chain.sample.resumes,
        extras=first_rows(chain.extras, len(chain.prompt) + end - 1) if chain.extras else NO_EXTRAS,
    )


async def single_turn(prompt: Prompt, llm: LLM) -> None:
    """Generate one response to the prompt; this is the default rollout function."""
    await llm.generate()


P = ParamSpec("P")
T = TypeVar("T")

_GIVEN_UP = "this sample was given up: its group was dropped, its function took too long, or the scheduler was closed"


def _blocking(
    method: Callable[Concatenate[LLM, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingLLM, P], T]:
    def blocks(self: BlockingLLM, /, *args: P.args, **kwargs: P.kwargs) -> T:
        refuse_while_held(f"llm.{method.__name__}")
        return self._wait_for(lambda: method(self._llm, *args, **kwargs))

    functools.update_wrapper(blocks, method)
    return blocks


class BlockingLLM:
    """The ``llm`` argument of a plain (not async) rollout function, which runs in a thread of its own.

    ``generate`` and ``chat`` are those of :class:`LLM`, but block the thread instead of being awaited. When the sample
    is given up they raise asyncio.CancelledError, a BaseException; do not catch it. So do ``base_url`` and ``api_key``.

    A plain function may return a coroutine, which then runs on the event loop, where nothing may block: there,
    ``generate`` and ``chat`` are awaited, and ``base_url`` and ``api_key`` are read at once.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._lock = threading.Lock()
        self._calls: set[Future[Any]] = set()
        """Calls that block a thread now."""
        self._over = False
        """True once the rollout function has ended or was cancelled; further calls raise."""
        self._cancels_next = False
        """True if the next call must raise CancelledError, because the sample was given up while no call waited."""

    @property
    def sample_id(self) -> SampleId:
        """Id of the sample for which this object generates."""
        return self._llm.sample_id

    @property
    def base_url(self) -> str:
        """See :attr:`LLM.base_url`."""
        return self._endpoint().url

    @property
    def api_key(self) -> str:
        """See :attr:`LLM.api_key`."""
        return self._endpoint().key

    def _endpoint(self) -> ClientEndpoint:
        if self._on_loop:
            return self._llm.endpoint()

        async def opened() -> ClientEndpoint:
            return self._llm.endpoint()

        return self._wait_for(opened)

    @property
    def _on_loop(self) -> bool:
        """True in a coroutine that a plain rollout function has returned."""
        return threading.get_ident() == self._loop_thread

    def _wait_for(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._on_loop:
            return ask()  # type: ignore[return-value]
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

    generate = _blocking(LLM.generate)
    chat = _blocking(LLM.chat)

    def _end(self, *, cancelled: bool) -> None:
        """Refuse further calls. If ``cancelled``, the waiting calls (or the next call, if none waits) are cancelled."""
        with self._lock:
            self._over = True
            self._cancels_next = cancelled and not sum([call.cancel() for call in self._calls])


BlockingRolloutFunction = Callable[[Prompt, BlockingLLM], Any]


def as_coroutine(function: Callable[..., Any], threads: WorkerThreads) -> RolloutFunction:
    """Return a coroutine function: an async rollout function unchanged, a plain one wrapped to run in a thread."""
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
            # wait until the function has ended, as for a coroutine; a second cancellation ends this wait
            await asyncio.wait([ended])
            raise
        try:
            outcome = ended.result()
            if outcome.error is not None:
                raise outcome.error
            value = outcome.take()
            return await value if inspect.isawaitable(value) else value
        finally:
            blocking._end(cancelled=False)

    rollout.__qualname__ = name_of(function)
    return rollout
