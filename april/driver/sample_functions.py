"""The user's functions at work: one rollout function per sample, rewards, the filter; what they say becomes events.

Invariant: a function of a sample that was given up is cancelled, and nothing that it still does is heard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from april.beside import in_thread
from april.core import commands as do
from april.core import events as ev
from april.core.attachments import Placed, before
from april.core.lives import Function
from april.core.sampling import SamplingParams
from april.core.tape import Int32
from april.core.types import FinishReason, Group, Sample, SampleId
from april.driver.detokenizer import Detokenizer
from april.driver.host_view import HostView
from april.driver.llm import (
    AFTER_ITS_END,
    LLM,
    NO_ENDPOINT,
    NO_PROCESSOR,
    Answered,
    BlockingRolloutFunction,
    Chat,
    Completion,
    Door,
    Doors,
    Life,
    RolloutFunction,
    Sheltered,
    check_conversation,
    check_mismatch,
    checked_call,
    completion_of,
    exact_types,
    single_turn,
)
from april.driver.long_waits import WARN_AFTER_S
from april.driver.rewards import Response, checked_reward, checked_rewards, checked_verdict, response_of
from april.driver.user_calls import Call, UserCalls
from april.driver.user_code import FailureLog, describe_with_place, kind_of, place_of
from april.errors import ConfigError, RolloutError, UsageError
from april.images.placing import Images


@dataclass(frozen=True, slots=True)
class UserFunctions:
    """The functions that the user brings, and the tokenizer, without which there is no text."""

    rollout: RolloutFunction | BlockingRolloutFunction
    reward: Callable[..., Any] | None = None
    group_reward: Callable[..., Any] | None = None
    filter: Callable[..., Any] | None = None
    detokenizer: Detokenizer | None = None
    doors: Doors | None = None
    """The endpoints for clients of the rollout function; None means that there are none."""
    images: Images | None = None
    """Reads and places images; None means that no conversation has any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """The settings under which a process runs engines and functions."""

    sampling: SamplingParams
    """The sampling of calls of ``llm.generate`` that do not change it."""
    allow_mismatch: bool = False
    function_timeout_s: float | None = None
    """The longest time of one call of a function; None means no limit."""
    stall_timeout_s: float | None = None
    """The longest time without a token from an engine; None means no limit."""
    warn_after_s: float | None = WARN_AFTER_S
    """The time after which a warning names what takes long; None means never."""
    vocab_size: int = 0
    """The smallest vocabulary of all engines, those of other processes included."""
    any_temperature: bool = True
    """True if the log-probabilities of all engines follow the temperature."""


CAUSES = 8
"""The most failures of functions that are remembered as causes."""
CLEAN_UP_S = 10.0
"""Seconds that cancelled functions of an evaluation have to end."""


class _Failed(NamedTuple):
    """The text of a failure, and its kind (see SampleFailed)."""

    error: str
    kind: str


@dataclass(slots=True)
class _Runner:
    """The function of one sample, and what it waits for."""

    sample: Sample
    function: Call | None = None
    """The rollout function, later the reward function."""
    calls: dict[int, asyncio.Future[Completion]] = field(default_factory=dict)
    """The calls of llm.generate that are not complete yet, by number."""
    made: int = 0
    """Number of calls that were made."""
    door: Door | None = None
    """The endpoint of this sample, once the function has asked for it."""
    chat: Chat | None = None
    """What ``llm.chat`` asks, once it was called."""
    asked: set[int] = field(default_factory=set)
    """The calls of its clients and of llm.chat, by number, except those that were given up."""
    output: Any = None


class SampleFunctions:
    """Runs the functions of all samples.

    Args:
        view: what the core knows.
        functions: the user's.
        rollout: the coroutine function that runs for the user's rollout function.
        calls: calls functions.
        post: takes the events.
    """

    def __init__(
        self,
        view: HostView,
        functions: UserFunctions,
        rollout: RolloutFunction,
        settings: RolloutSettings,
        calls: UserCalls,
        post: Callable[[ev.Event], None],
    ) -> None:
        self._view = view
        self._functions = functions
        self._rollout = rollout
        self._settings = settings
        self._calls = calls
        self._post = post
        self._detokenizer = functions.detokenizer
        self._runners: dict[SampleId, _Runner] = {}
        self._failures = FailureLog()
        self._worked: set[Function] = set()
        self._raised: dict[str, BaseException] = {}
        """The latest errors, by their text."""
        self.raised: dict[int, BaseException] = {}
        """The first error of a function, by evaluation."""
        self.elsewhere: dict[int, dict[SampleId, Any]] = {}
        """The values that rollout functions on other hosts returned, by evaluation."""
        self._leaving: set[asyncio.Task[None]] = set()
        """Cancelled functions of evaluations, which clean up."""

    def forget(self, samples: Iterable[SampleId]) -> None:
        """Forget delivered samples."""
        for sample in samples:
            self._runners.pop(sample, None)

    def output_of(self, sample: SampleId) -> Any:
        """The value that a sample's rollout function has returned here."""
        runner = self._runners.get(sample)
        return None if runner is None else runner.output

    def returned_elsewhere(self, sample: Sample, output: Any) -> None:
        """The rollout function of an evaluation has returned on another host."""
        assert sample.evaluation is not None
        self.elsewhere.setdefault(sample.evaluation.request.evaluation, {})[sample.id] = output

    def shut_doors(self) -> None:
        """Answer the clients of no function any more."""
        for runner in self._runners.values():
            self._shut(runner)

    def clear(self) -> None:
        """Forget all samples."""
        self._runners.clear()

    # ---------------------------------------------------------------- rollout functions

    def start(self, command: do.StartSample) -> None:
        """Run the rollout function of a sample; the default one needs no coroutine for its only call."""
        sample, evaluation = command.sample, command.sample.evaluation
        settings = self._settings
        default = settings.sampling if evaluation is None else evaluation.request.sampling
        if self._rollout is single_turn:
            self._post(ev.CallMade(sample.id, default))
            return
        runner = self._runners[sample.id] = _Runner(sample)
        function: Call

        async def generate(
            sampling: SamplingParams, token_ids: Int32 | None, *, any_chain: bool = False,
            attached: tuple[Placed, ...] | None = None, images: Sequence[Any] = (),
        ) -> Completion:  # fmt: skip
            if function.over:
                raise RolloutError(AFTER_ITS_END)
            if runner.calls and not any_chain:
                raise RolloutError(_ABANDONED)
            if not settings.allow_mismatch and evaluation is None:
                check_mismatch(sampling, settings.sampling, settings.any_temperature)
            if token_ids is not None and attached is None:
                token_ids, attached = await self._attached(sample, token_ids, images, any_chain=any_chain)
            longest = len(sample.group.prompt.token_ids) + self._view.room(sample)
            can_stop = self._detokenizer is not None
            if any_chain:
                check_conversation(token_ids, sampling, settings.vocab_size, self._view.max_context, can_stop)
            else:
                token_ids = checked_call(sample, sampling, token_ids, settings.vocab_size, longest, can_stop)
            runner.made += 1
            number = runner.made
            call: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
            runner.calls[number] = call
            if any_chain:
                runner.asked.add(number)
            function.stop_clock()  # parked time is not the function's
            self._post(ev.CallMade(sample.id, exact_types(sampling), token_ids, number, any_chain, attached or ()))
            try:
                return await call
            except asyncio.CancelledError:
                if any_chain and (runner.door or runner.chat):  # its client has left, and the sample goes on
                    runner.calls.pop(number, None)
                    runner.asked.discard(number)
                    self._post(ev.CallUnheard(sample.id, number))
                raise
            finally:
                clock(True)

        def clock(runs: bool) -> None:
            if not runs:
                function.stop_clock()
            elif not runner.calls:
                function.start_clock()

        def behind() -> Sheltered:
            return Sheltered(
                generate=partial(generate, any_chain=True), sampling=default, loop=asyncio.get_running_loop(),
                max_context=self._view.max_context, prompt=sample.group.prompt, answered=answered_by(sample),
            )  # fmt: skip

        def open_door(place: Any) -> Door:
            if function.over:
                raise RolloutError(AFTER_ITS_END)
            if runner.door is None:
                if self._functions.doors is None:
                    raise UsageError(NO_ENDPOINT)
                runner.door = self._functions.doors.open(behind(), place)
            return runner.door

        def open_chat() -> Chat:
            if function.over:
                raise RolloutError(AFTER_ITS_END)
            if runner.chat is None:
                if self._functions.doors is None:
                    raise UsageError(NO_ENDPOINT)
                runner.chat = self._functions.doors.chat(behind())
            return runner.chat

        def ended(output: Any, error: BaseException | None) -> None:
            runner.output = output
            for number in self._shut(runner):
                self._post(ev.CallUnheard(sample.id, number))
            abandoned = isinstance(error, TimeoutError) and bool(runner.calls)
            if error is None and runner.calls:
                error = RolloutError(f"it returned, but {_ABANDONED}")
            if error is None:
                if evaluation is None:
                    self._worked.add(Function.ROLLOUT)
                self._post(ev.SampleReturned(sample.id))
            elif evaluation is not None:
                self._evaluation_failed(sample, "the rollout function", error)
            else:
                failed = self._failed(Function.ROLLOUT, error, self._functions.rollout, sample.id)
                why = f"{failed.error}; {_ABANDONED}" if abandoned else failed.error
                self._post(ev.SampleFailed(sample.id, why, failed.kind))

        number = None if evaluation is None else evaluation.request.evaluation
        life = Life(sample.restarts, number, any(c.replay and c.replay.next_start is not None for c in sample.chains))
        llm = LLM(sample.key, default, generate, open_door, open_chat, clock, life)
        arguments = (sample.group.prompt.copy(), llm)
        function = runner.function = self._calls.begin_async(self._rollout, arguments, sample.key, ended)

    async def _attached(
        self, sample: Sample, token_ids: Int32, images: Sequence[Any], *, any_chain: bool
    ) -> tuple[Int32, tuple[Placed, ...]]:
        """A conversation as the model reads it, and all that is attached to it; ``images`` belong to what is new."""
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
            return reader.place_behind(token_ids, have, known, pictures, "llm.generate: what is new")

        try:
            return await in_thread(placed) if images else placed()
        except ConfigError as error:
            raise UsageError(str(error)) from error

    def _failed(self, which: Function, error: BaseException, function: Callable[..., Any], where: object) -> _Failed:
        """Log a failure, and keep it as the cause of what may be raised for it."""
        place = place_of(error, function)
        kind = kind_of(error, place)
        told, once = describe_with_place(error, place), bool(kind) and which not in self._worked
        self._failures.warn(error, f"{which} failed for %s", where, told=told, once=once)
        failed = _Failed(f"the {which} failed: {told}", kind)
        self._raised.pop(failed.error, None)
        self._raised[failed.error] = error
        if len(self._raised) > CAUSES:
            del self._raised[next(iter(self._raised))]
        return failed

    def cause_of(self, failure: str) -> BaseException | None:
        """The error of a function here whose text ends ``failure``."""
        return next((error for said, error in reversed(self._raised.items()) if failure.endswith(said)), None)

    def _evaluation_failed(self, sample: Sample, what: str, error: BaseException) -> None:
        """End a sample's evaluation with an error."""
        assert sample.evaluation is not None
        self.raised.setdefault(sample.evaluation.request.evaluation, error)
        told = describe_with_place(error, place_of(error))
        why = told if isinstance(error, RolloutError) else f"{what} raised {told}"
        self._post(ev.SampleFailed(sample.id, why))

    async def cleaned_up(self) -> None:
        """Wait a while for the cancelled functions of evaluations to end."""
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=CLEAN_UP_S)

    def call_completed(self, command: do.CallCompleted) -> None:
        """Wake the rollout function."""
        sample, result = command.call.sample, command.call.result
        runner = self._runners.get(sample.id)
        if runner is None:
            self._post(ev.SampleReturned(sample.id))  # the default function returns now
            return
        call = runner.calls.pop(command.call.number, None)  # None: its function has ended meanwhile
        assert result is not None
        if call is not None and not call.done():
            call.set_result(completion_of(command.call.chain, result, command.call.number))

    def _shut(self, runner: _Runner) -> list[int]:
        """Answer no message of a sample any more; returns the numbers of calls whose answers nobody has heard."""
        doors, door, chat, runner.door, runner.chat = self._functions.doors, runner.door, runner.chat, None, None
        if door is None and chat is None:
            return []
        unheard = {*runner.asked, *runner.calls}
        if door is not None and doors is not None:
            unheard.difference_update(doors.shut(door))
        if chat is not None:
            unheard.difference_update(chat.close())
        for call in runner.calls.values():
            call.cancel()
        runner.calls.clear()
        return sorted(unheard)

    def cancel(self, command: do.CancelSample) -> None:
        """End whatever runs for a sample that was given up."""
        runner = self._runners.pop(command.sample.id, None)
        if runner is None:
            return
        if runner.function is not None:
            runner.function.cancel()
            if runner.sample.evaluation is not None and (task := runner.function.task) is not None:
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)
        self._shut(runner)
        for call in runner.calls.values():
            call.cancel()  # it may be awaited by a task of the user's own

    # ---------------------------------------------------------------- rewards and filter

    def score_sample(self, command: do.ScoreSample) -> None:
        """Ask for the reward of one sample."""
        self._score([command.sample])

    def score_group(self, command: do.ScoreGroup) -> None:
        """Ask for the rewards of a group."""
        self._score(command.group.members)

    def responses(self, samples: Iterable[Sample], *, judged: bool = False) -> list[Response]:
        """Finished samples as reward functions see them, or with their rewards (``judged``), as filters do."""
        return [
            response_of(s, self.output_of(s.id), self._detokenizer, s.reward if judged else None) for s in samples
        ]

    def evaluated(self, evaluation: int, groups: Iterable[Group]) -> tuple[tuple[Response, ...], ...]:
        """The responses of an evaluation, also of functions that ran on other hosts; they are forgotten then."""
        elsewhere, responses = self.elsewhere.get(evaluation, {}), []
        for group in groups:
            own = zip(group.samples, self.responses(group.samples), strict=True)
            responses.append(tuple(replace(r, output=elsewhere.get(s.id, r.output)) for s, r in own))
            self.forget(s.id for s in group.samples)
        return tuple(responses)

    def _score(self, samples: list[Sample]) -> None:
        runners = [self._runners.setdefault(s.id, _Runner(s)) for s in samples]
        first, group, prompt = samples[0].key, samples[0].id.group, samples[0].group.prompt.copy()
        responses = self.responses(samples)
        in_groups = self._functions.group_reward is not None
        function = self._functions.group_reward if in_groups else self._functions.reward
        assert function is not None

        def answered(value: Any, error: BaseException | None) -> None:
            rewards: list[float] = []
            if error is None:
                try:
                    ids = [s.key for s in samples]
                    rewards = checked_rewards(value, ids) if in_groups else [checked_reward(value, first)]
                except (Exception, SystemExit) as raised:
                    error = raised.with_traceback(None)  # it would show april's own lines
            if error is None:
                if samples[0].evaluation is None:
                    self._worked.add(Function.REWARD)
                self._post(ev.Scored(group, [(s.id.index, r) for s, r in zip(samples, rewards, strict=True)]))
            elif samples[0].evaluation is not None:
                self._evaluation_failed(samples[0], "the reward function", error)
            else:
                self._post(ev.SampleFailed(first, *self._failed(Function.REWARD, error, function, first)))

        call = self._calls.begin(function, (prompt, responses if in_groups else responses[0]), first, answered)
        for runner in runners:
            runner.function = call

    def judge_group(self, command: do.JudgeGroup) -> None:
        """Ask the filter about a scored group."""
        group, function = command.group, self._functions.filter
        assert function is not None
        responses = self.responses(group.first, judged=True)

        def answered(value: Any, error: BaseException | None) -> None:
            verdict, failed = False, _Failed("", "")
            if error is None:
                try:
                    verdict = checked_verdict(value, group.id)
                except (Exception, SystemExit) as raised:
                    error = raised.with_traceback(None)
            if error is None:
                self._worked.add(Function.FILTER)
            else:
                failed = self._failed(Function.FILTER, error, function, f"group {group.id}")
            self._post(
                ev.GroupJudged(
                    group=group.id, judgement=command.judgement, keep=verdict, error=failed.error or None,
                    kind=failed.kind,
                )
            )

        self._calls.begin(function, (group.prompt.copy(), responses), f"group {group.id}", answered)


def known_attached(
    sample: Sample, token_ids: Int32, *, any_chain: bool, new: bool = False
) -> tuple[int, tuple[Placed, ...]]:
    """Return of a conversation how many tokens are known, and what is attached to them: the beginning that it has in
    common with the sample's only conversation, with the longest of them, or, where it brings images, with the prompt.
    """
    if not any_chain:
        chain = sample.chains[0]
        have = len(chain.prompt) + chain.seen
        return have, before(chain.attached, have)  # a function that begins again has not shown the rest yet
    prompt = sample.group.prompt
    known = [(prompt.token_ids, prompt.attached)]
    if not new:
        known += [(c.conversation(len(c.tape)), c.attached) for c in sample.chains if c.attached]
    begun = [(len(ids), attached) for ids, attached in known if np.array_equal(token_ids[: len(ids)], ids)]
    return max(begun, key=itemgetter(0), default=(0, ()))


def answered_by(sample: Sample) -> list[Answered]:
    """The answers that a sample's function had, whole, when it was lost."""
    return [
        Answered(chain.prompt, chain.tape.tokens, call.start, call.end, chain.attached)
        for chain in sample.chains
        if chain.replay is not None
        for call in chain.replay.calls
        if call.finish is not FinishReason.LENGTH
    ]


_ABANDONED = (
    "an earlier llm.generate was given up (cancelled, timed out or not awaited) while its response is still being "
    "generated; await every call to its end, without a timeout: a parked call takes as long as the steps between"
)
