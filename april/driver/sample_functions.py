"""Runs the user's rollout, reward and filter functions for samples and groups, and posts their results as events.

Invariant: when a sample is given up, its function is cancelled, and later calls and results of it are ignored.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from april.concurrency.worker_threads import run_in_thread
from april.core import commands as do
from april.core import events as ev
from april.core.attachments import Placed, before
from april.core.function_bugs import FunctionKind
from april.core.rollout_core import RolloutCore
from april.core.row_rewards import RowReward
from april.core.sampling import SamplingParams
from april.core.tape import Int32
from april.core.types import FinishReason, Group, Sample, SampleId, SampleState
from april.driver.detokenizer import Detokenizer
from april.driver.llm import (
    AFTER_ITS_END,
    LLM,
    NO_ENDPOINT,
    NO_PROCESSOR,
    AnsweredCall,
    BlockingRolloutFunction,
    Chat,
    ClientEndpoint,
    ClientEndpoints,
    Completion,
    EndpointSample,
    RolloutFunction,
    SampleRun,
    check_conversation,
    check_has_conversation,
    check_mismatch,
    checked_call,
    completion_of,
    exact_types,
    single_turn,
)
from april.driver.long_waits import WARN_AFTER_S
from april.driver.rewards import Response, checked_rewards, checked_verdict, response_of, row_rewards_of
from april.driver.user_calls import UserCall, UserCalls
from april.driver.user_code import FailureLog, FunctionLost, describe_with_place, kind_of, place_of
from april.errors import ConfigError, RolloutError, SchedulerClosed, UsageError
from april.images.image_placer import ImagePlacer


@dataclass(frozen=True, slots=True)
class UserFunctions:
    """The user's functions, and the tokenizer and image reader that april uses for them."""

    rollout: RolloutFunction | BlockingRolloutFunction
    reward: Callable[..., Any] | None = None
    group_reward: Callable[..., Any] | None = None
    filter: Callable[..., Any] | None = None
    detokenizer: Detokenizer | None = None
    endpoints: ClientEndpoints | None = None
    """Object that opens HTTP endpoints at which agents and other programs generate for a sample; None without one."""
    images: ImagePlacer | None = None
    """Reader of images; None means that no conversation has images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """Settings for running engines and user functions."""

    sampling: SamplingParams
    """Default sampling of ``llm.generate``."""
    allow_mismatch: bool = False
    function_timeout_s: float | None = None
    """Maximum seconds for one call of a function; None means no limit."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """Weights by which the parts of a reward are summed; empty if rewards have totals of their own."""
    stall_timeout_s: float | None = None
    """Maximum seconds without a token from an engine; None means no limit."""
    warn_after_s: float | None = WARN_AFTER_S
    """Seconds after which a warning names a slow function; None means never."""
    any_temperature: bool = True
    """True if all engines return log-probabilities at the sampling temperature, so that any temperature is allowed."""


MAX_EMPTY_CALLS = 1000
"""Number of consecutive calls without a token after which a rollout function is stopped as an endless loop."""
MAX_RECENT_ERRORS = 8
"""Maximum number of remembered errors of functions, any of which can be the cause of a later error."""
FORGOTTEN_AT_ONCE = 512
"""Number of samples that are forgotten in one iteration of the event loop; thousands at once would block it."""
CLEAN_UP_S = 10.0
"""Maximum number of seconds that april waits for the end of an evaluation's cancelled functions."""


@dataclass(slots=True)
class _RunningSample:
    """The running function of one sample, and its open calls of ``llm``."""

    sample: Sample
    function: UserCall | None = None
    """Call of the rollout function; later the call of the reward function."""
    calls: dict[int, asyncio.Future[Completion]] = field(default_factory=dict)
    """Calls of llm.generate that are not complete yet, by number."""
    made: int = 0
    """Number of calls of llm.generate so far."""
    empty: int = 0
    """Number of consecutive calls, up to the latest one, that generated no token."""
    endpoint: ClientEndpoint | None = None
    """Endpoint of this sample, once the function has asked for it."""
    chat: Chat | None = None
    """Object that answers ``llm.chat``, once the function has called it."""
    client_calls: set[int] = field(default_factory=set)
    """Numbers of the calls made by clients and llm.chat, except calls that were given up."""


@dataclass(slots=True, eq=False, repr=False)
class SampleFunctions:
    """Runs the user's functions for all samples; ``_post`` passes events to the core."""

    _core: RolloutCore
    _functions: UserFunctions
    _rollout: RolloutFunction
    _settings: RolloutSettings
    _calls: UserCalls
    _post: Callable[[ev.Event], None]
    _runners: dict[SampleId, _RunningSample] = field(default_factory=dict)
    _outputs: dict[SampleId, Any] = field(default_factory=dict)
    """Values other than None that rollout functions returned, by sample."""
    _failures: FailureLog = field(default_factory=FailureLog)
    _succeeded: set[FunctionKind] = field(default_factory=set)
    _recent_errors: dict[str, BaseException] = field(default_factory=dict)
    """Latest errors of functions, by the text that was reported to the core."""
    evaluation_errors: dict[int, BaseException] = field(default_factory=dict)
    """First error of a function in each evaluation, by the evaluation's number."""
    _closed: bool = False
    _cancelled_tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """Cancelled functions of evaluations that have not ended yet."""

    def forget(self, samples: Sequence[SampleId], start: int = 0) -> None:
        """Forget delivered samples from index ``start`` on: some now, the others in later iterations of the loop."""
        end = start + FORGOTTEN_AT_ONCE
        for sample in samples[start:end]:
            self._runners.pop(sample, None)
            self._outputs.pop(sample, None)
        if end < len(samples):
            asyncio.get_running_loop().call_soon(self.forget, samples, end)

    def output_of(self, sample: SampleId) -> Any:
        """Return the value that a sample's rollout function returned; None if there is none."""
        return self._outputs.get(sample)

    def outputs(self, *, of_finished: bool = False) -> dict[SampleId, Any]:
        """Return the values (not None) that rollout functions returned, by sample, or only of finished samples."""
        runners = self._runners
        return {
            name: output
            for name, output in self._outputs.items()
            if not of_finished or runners[name].sample.state is SampleState.FINISHED
        }

    def restore_output(self, sample: Sample, output: Any) -> None:
        """Restore the value that a finished sample's rollout function returned before a restart."""
        self._runners[sample.id], self._outputs[sample.id] = _RunningSample(sample), output

    def close(self) -> None:
        """Refuse all further generation for functions and their clients, and cancel all open calls."""
        self._closed = True
        for runner in self._runners.values():
            self._close_endpoint(runner)
            for call in runner.calls.values():
                call.cancel()

    def _refuse_after_its_end(self, function: UserCall) -> None:
        """Raise an error if the function has ended or the scheduler is closed; tasks that it started may call this."""
        if self._closed:
            raise SchedulerClosed("llm: the scheduler is closed, so nothing is generated any more")
        if function.done:
            raise RolloutError(AFTER_ITS_END)

    def clear(self) -> None:
        """Forget all samples."""
        self._runners.clear()
        self._outputs.clear()

    # ---------------------------------------------------------------- rollout functions

    def start(self, command: do.StartSample) -> None:
        """Start the rollout function of a sample.

        The default function makes only one call, so this call is made here and no coroutine is started.
        """
        sample, evaluation = command.sample, command.sample.evaluation
        settings, engines = self._settings, self._core.engines
        default = settings.sampling if evaluation is None else evaluation.request.sampling
        if self._rollout is single_turn:
            self._post(ev.CallMade(sample.id, default))
            return
        runner = self._runners[sample.id] = _RunningSample(sample)
        self._outputs.pop(sample.id, None)
        function: UserCall

        async def generate(
            sampling: SamplingParams, token_ids: Int32 | None, *, any_chain: bool = False,
            attached: tuple[Placed, ...] | None = None, images: Sequence[Any] = (), overridden: bool = False,
            client: bool = False,
        ) -> Completion:  # fmt: skip
            self._refuse_after_its_end(function)
            if not len(sample.group.prompt.token_ids):
                any_chain = True  # the prompt has no tokens, so the function writes its own conversations
                check_has_conversation(token_ids, sample.group.prompt)
            if runner.calls and not any_chain:
                raise RolloutError(_ABANDONED)
            if not settings.allow_mismatch and evaluation is None:
                check_mismatch(sampling, settings.sampling, settings.any_temperature)
            if token_ids is not None and attached is None:
                token_ids, attached = await self._attached(sample, token_ids, images, any_chain=any_chain)
                self._refuse_after_its_end(function)  # the function may have ended while a thread read the images
            longest = len(sample.group.prompt.token_ids) + self._core.context.attempts.room(sample.chains[0])
            can_stop = self._functions.detokenizer is not None
            if any_chain:
                check_conversation(token_ids, sampling, engines.vocab_size, engines.max_context, can_stop)
            else:
                token_ids = checked_call(sample, sampling, token_ids, engines.vocab_size, longest, can_stop)
            runner.made += 1
            number = runner.made
            call: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
            runner.calls[number] = call
            if client:
                runner.client_calls.add(number)
            function.stop_timeout()  # waiting for generation does not count for function_timeout_s
            asked = sample.id, exact_types(sampling), token_ids, number, any_chain, attached or ()
            self._post(ev.CallMade(*asked, overridden=overridden))
            try:
                done = await call
                await self._refuse_endless_calls(runner, done)
                return done
            except asyncio.CancelledError:
                if any_chain and (runner.endpoint or runner.chat):  # the client has disconnected; the sample goes on
                    runner.calls.pop(number, None)
                    runner.client_calls.discard(number)
                    self._post(ev.CallUnheard(sample.id, number))
                raise
            finally:
                clock(True)

        def clock(runs: bool) -> None:
            if not runs:
                function.stop_timeout()
            elif not runner.calls:
                function.start_timeout()

        def endpoint_sample() -> EndpointSample:
            asks = partial(generate, any_chain=True, client=True)
            return EndpointSample(
                generate=asks, sampling=default, loop=asyncio.get_running_loop(),
                max_context=engines.max_context, prompt=sample.group.prompt, answered=answered_by(sample),
                evaluated=evaluation is not None, note_checked=lambda kept: self._post(ev.AnswerChecked(kept)),
            )  # fmt: skip

        def endpoints() -> ClientEndpoints:
            self._refuse_after_its_end(function)
            if self._functions.endpoints is None:
                raise UsageError(NO_ENDPOINT)
            return self._functions.endpoints

        def open_endpoint(serve: Any) -> ClientEndpoint:
            there = endpoints()
            runner.endpoint = runner.endpoint or there.open(endpoint_sample(), serve)
            return runner.endpoint

        def open_chat() -> Chat:
            there = endpoints()
            runner.chat = runner.chat or there.chat(endpoint_sample())
            return runner.chat

        def ended(output: Any, error: BaseException | None) -> None:
            unread = self._close_endpoint(runner)
            if output is not None and self._runners.get(sample.id) is runner:
                self._outputs[sample.id] = output
            if isinstance(error, FunctionLost):  # it runs again and repeats its calls, so their answers are kept
                self._end_calls(runner)
                self._post(ev.FunctionLost(sample.id))
                return
            for number in unread:
                self._post(ev.CallUnheard(sample.id, number))
            abandoned = isinstance(error, TimeoutError) and bool(runner.calls)
            if error is None and runner.calls:
                error = RolloutError(f"it returned too early: {_ABANDONED}")
            if error is None:
                if evaluation is None:
                    self._succeeded.add(FunctionKind.ROLLOUT)
                self._post(ev.SampleReturned(sample.id))
            elif evaluation is not None:
                self._evaluation_failed(sample, "the rollout function", error)
            else:
                why, kind = self._log_failure(FunctionKind.ROLLOUT, error, self._functions.rollout, sample.id)
                self._post(ev.SampleFailed(sample.id, f"{why}; {_ABANDONED}" if abandoned else why, kind))

        number = None if evaluation is None else evaluation.request.evaluation
        resumed = any(c.replay and c.replay.next_start is not None for c in sample.chains)
        run = SampleRun(sample.restarts, number, resumed)
        llm = LLM(sample.key, default, generate, open_endpoint, open_chat, clock, run)
        arguments = (sample.group.prompt.copy(), llm)
        function = runner.function = self._calls.begin_async(self._rollout, arguments, sample.key, ended)

    @staticmethod
    async def _refuse_endless_calls(runner: _RunningSample, done: Completion) -> None:
        """Raise RolloutError in a function that keeps calling ``llm.generate`` although its budget is used up.

        Such calls are complete at once, so the function would block the event loop for ever.
        """
        runner.empty = 0 if len(done.tokens) else runner.empty + 1
        if runner.empty >= MAX_EMPTY_CALLS:
            await asyncio.sleep(0)  # lets the loop run if the function catches the error and goes on
            raise RolloutError(
                f"the last {MAX_EMPTY_CALLS:,} calls of llm.generate returned no tokens, because nothing is left of "
                "max_response_len or of the engines' context; end the function when Completion.finish is length and "
                "there are no tokens"
            )

    async def _attached(
        self, sample: Sample, token_ids: Int32, images: Sequence[Any], *, any_chain: bool
    ) -> tuple[Int32, tuple[Placed, ...]]:
        """Return a conversation's tokens, with the tokens of images in place of placeholders, and its attachments.

        ``images`` belong to the part of the conversation that is new since the last call.
        """
        have, known = known_attached(sample, token_ids, any_chain=any_chain, new=bool(images))
        reader = self._functions.images
        if reader is None:
            if images:
                raise UsageError(NO_PROCESSOR)
            return token_ids, known
        if len(token_ids) <= have:
            return token_ids, known

        def placed() -> tuple[Int32, tuple[Placed, ...]]:
            pictures = reader.read(images, "llm.generate")
            return reader.place_after(token_ids, have, known, pictures, "llm.generate: the new part")

        try:
            return await run_in_thread(placed) if images else placed()
        except ConfigError as error:
            raise UsageError(str(error)) from error

    def _log_failure(
        self, which: FunctionKind, error: BaseException, function: Callable[..., Any], where: object
    ) -> tuple[str, str]:
        """Log a function's failure, and remember the error as a possible cause of a later error (:meth:`cause_of`).

        Returns the text and the kind of the failure, for SampleFailed. The kind is a hash, as users may share records.
        """
        place = place_of(error, function)
        kind = kind_of(error, place)
        text, once = describe_with_place(error, place), bool(kind) and which not in self._succeeded
        self._failures.warn(error, f"{which} failed for %s", where, text=text, once=once)
        why = f"the {which} failed: {text}"
        self._recent_errors.pop(why, None)
        self._recent_errors[why] = error
        if len(self._recent_errors) > MAX_RECENT_ERRORS:
            del self._recent_errors[next(iter(self._recent_errors))]
        return why, hashlib.sha256(kind.encode()).hexdigest()[:16] if kind else ""

    def cause_of(self, failure: str) -> BaseException | None:
        """Return the remembered error whose text is the end of ``failure``; None if there is none."""
        return next((error for said, error in reversed(self._recent_errors.items()) if failure.endswith(said)), None)

    def _evaluation_failed(self, sample: Sample, what: str, error: BaseException) -> None:
        assert sample.evaluation is not None
        self.evaluation_errors.setdefault(sample.evaluation.request.evaluation, error)
        text = describe_with_place(error, place_of(error))
        why = text if isinstance(error, RolloutError) else f"{what} raised {text}"
        self._post(ev.SampleFailed(sample.id, why))

    async def wait_for_cancelled(self) -> None:
        """Wait until the cancelled functions of evaluations have ended, for CLEAN_UP_S at most."""
        if self._cancelled_tasks:
            await asyncio.wait(self._cancelled_tasks, timeout=CLEAN_UP_S)

    def call_completed(self, command: do.CallCompleted) -> None:
        """Return a completed call's result to the rollout function."""
        sample, result = command.call.sample, command.call.result
        runner = self._runners.get(sample.id)
        if runner is None:
            self._post(ev.SampleReturned(sample.id))  # only the default function has no runner
            return
        call = runner.calls.pop(command.call.number, None)  # None if the function has ended meanwhile
        assert result is not None
        if call is not None and not call.done():
            call.set_result(completion_of(command.call.chain, result, command.call.number))

    def _close_endpoint(self, runner: _RunningSample) -> list[int]:
        """Close a sample's endpoint and chat; returns the numbers of calls whose answers no client received."""
        endpoints, endpoint, chat = self._functions.endpoints, runner.endpoint, runner.chat
        runner.endpoint = runner.chat = None
        if endpoint is None and chat is None:
            return []
        unread = {*runner.client_calls, *runner.calls}
        if endpoint is not None and endpoints is not None:
            unread.difference_update(endpoints.close_endpoint(endpoint))
        if chat is not None:
            unread.difference_update(chat.close())
        self._end_calls(runner)
        return sorted(unread)

    @staticmethod
    def _end_calls(runner: _RunningSample) -> None:
        for call in runner.calls.values():
            call.cancel()  # a task that the user's function started may still await the call
        runner.calls.clear()

    def cancel(self, command: do.CancelSample) -> None:
        """Cancel the function and calls of a sample that was given up."""
        runner = self._runners.pop(command.sample.id, None)
        if runner is None:
            return
        self._outputs.pop(command.sample.id, None)
        if runner.function is not None:
            runner.function.cancel()
            if runner.sample.evaluation is not None and (task := runner.function.task) is not None:
                self._cancelled_tasks.add(task)
                task.add_done_callback(self._cancelled_tasks.discard)
        self._close_endpoint(runner)
        self._end_calls(runner)

    # ---------------------------------------------------------------- rewards and filter

    def responses(self, samples: Iterable[Sample], *, judged: bool = False) -> list[Response]:
        """Return finished samples as responses for reward functions; ``judged`` adds their rewards, for filters."""
        detokenizer = self._functions.detokenizer
        return [response_of(s, self.output_of(s.id), detokenizer, s.reward if judged else None) for s in samples]

    def evaluation_responses(self, groups: Iterable[Group]) -> tuple[tuple[Response, ...], ...]:
        """Return the responses of an evaluation, group by group, and forget its samples."""
        responses = []
        for group in groups:
            responses.append(tuple(self.responses(group.samples)))
            self.forget([s.id for s in group.samples])
        return tuple(responses)

    def score(self, command: do.ScoreSample | do.ScoreGroup) -> None:
        """Call the reward function for one sample, or the group reward function for a group."""
        samples = [command.sample] if isinstance(command, do.ScoreSample) else command.group.members
        runners = [self._runners.setdefault(s.id, _RunningSample(s)) for s in samples]
        first, group, prompt = samples[0].key, samples[0].id.group, samples[0].group.prompt.copy()
        responses = self.responses(samples)
        in_groups = self._functions.group_reward is not None
        function = self._functions.group_reward if in_groups else self._functions.reward
        assert function is not None

        def answered(value: Any, error: BaseException | None) -> None:
            rewards: list[tuple[float, tuple[RowReward, ...]]] = []
            if error is None:
                try:
                    values = checked_rewards(value, [s.key for s in samples]) if in_groups else [value]
                    weights, layout = self._settings.reward_weights, dict(self._core.context.reward_layout)
                    rewards = [
                        row_rewards_of(v, response, weights, layout)
                        for v, response in zip(values, responses, strict=True)
                    ]
                    # only now, so that a group with an invalid reward does not set the layout of the run's rewards
                    self._core.context.reward_layout.update(layout)
                except (Exception, SystemExit) as raised:
                    error = raised.with_traceback(None)  # the traceback has only april's own lines
            if error is None:
                if samples[0].evaluation is None:
                    self._succeeded.add(FunctionKind.REWARD)
                numbers = [(s.id.index, number) for s, (number, _) in zip(samples, rewards, strict=True)]
                with_more = [rows for _, rows in rewards] if rewards[0][1] else ()
                self._post(ev.Scored(group, numbers, with_more))
            elif samples[0].evaluation is not None:
                self._evaluation_failed(samples[0], "the reward function", error)
            else:
                self._post(ev.SampleFailed(first, *self._log_failure(FunctionKind.REWARD, error, function, first)))

        call = self._calls.begin(function, (prompt, responses if in_groups else responses[0]), first, answered)
        for runner in runners:
            runner.function = call

    def judge_group(self, command: do.JudgeGroup) -> None:
        """Call the filter for a scored group."""
        group, function = command.group, self._functions.filter
        assert function is not None
        responses = self.responses(group.first_finishers, judged=True)

        def answered(value: Any, error: BaseException | None) -> None:
            verdict, why, kind = False, "", ""
            if error is None:
                try:
                    verdict = checked_verdict(value, group.id)
                except (Exception, SystemExit) as raised:
                    error = raised.with_traceback(None)
            if error is None:
                self._succeeded.add(FunctionKind.FILTER)
            else:
                why, kind = self._log_failure(FunctionKind.FILTER, error, function, f"group {group.id}")
            self._post(
                ev.GroupJudged(
                    group=group.id, judgement=command.judgement, keep=verdict, error=why or None, kind=kind
                )
            )

        self._calls.begin(function, (group.prompt.copy(), responses), f"group {group.id}", answered)


def known_attached(
    sample: Sample, token_ids: Int32, *, any_chain: bool, new: bool = False
) -> tuple[int, tuple[Placed, ...]]:
    """Return how many leading tokens of ``token_ids`` the sample already has, and the attachments of these tokens.

    Without ``any_chain``, these are the tokens of the sample's only conversation. With ``any_chain``, they are the
    longest beginning of ``token_ids`` that is the prompt or a conversation with attachments; if there are ``new``
    images, only the prompt counts.
    """
    if not any_chain:
        chain = sample.chains[0]
        have = len(chain.prompt) + chain.seen_tokens
        return have, before(chain.attached, have)  # a restarted function has not added the later attachments yet
    prompt = sample.group.prompt
    known = [(prompt.token_ids, prompt.attached)]
    if not new:
        known += [(c.conversation(len(c.tape)), c.attached) for c in sample.chains if c.attached]
    begun = [(len(ids), attached) for ids, attached in known if np.array_equal(token_ids[: len(ids)], ids)]
    return max(begun, key=itemgetter(0), default=(0, ()))


def answered_by(sample: Sample) -> list[AnsweredCall]:
    """Return the calls that were answered before the sample's function was lost; incomplete answers are left out."""
    return [
        AnsweredCall(chain.prompt, chain.tape.tokens, call.start, call.end, chain.attached)
        for chain in sample.chains
        if chain.replay is not None
        for call in chain.replay.calls
        if call.finish is not FinishReason.LENGTH
    ]


_ABANDONED = (
    "an earlier llm.generate was given up (cancelled, timed out or not awaited) while its response was still being "
    "generated; await every call to its end, without a timeout, as a call may take several steps"
)
