"""Prompts, groups, samples and attempts, and the words for what can become of them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from april.core.attachments import NO_EXTRAS, Extras, Placed, before, first_rows, joined
from april.core.ledger import DropReason as DropReason
from april.core.ledger import Ledger
from april.core.sampling import SamplingParams
from april.core.tape import GENERATED, NOTHING_CAME, AttemptCounts, AttemptTape, Int32, Segment, TokenTape
from april.core.versions import FIRST_VERSION, PolicyVersion

NO_DEADLINE = 1 << 30
"""Slack of a group that was drawn after the latest plan."""
WHOLE_GROUP = -1
"""In place of a sample's index: all of the group."""


class Event(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """The base of all events, which are in ``events``."""


class SampleId(NamedTuple):
    """The id of a response: ``index`` in [0, n_samples_per_prompt) of group ``group`` (numbered as drawn)."""

    group: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here

    def __str__(self) -> str:
        return f"g{self.group}.s{self.index}"


class SampleState(StrEnum):
    """The states of a sample."""

    NEW = "new"
    """The rollout function waits to be started, for the first time or anew."""
    RUNNING = "running"
    """The rollout function runs, or is parked in one of its calls."""
    SCORING = "scoring"
    """The rollout function has returned; the reward is awaited."""
    FINISHED = "finished"
    """Complete; waits for its siblings or for delivery."""
    LEASED = "leased"
    """In a batch that was handed to the trainer."""
    DROPPED = "dropped"
    """Given up for a named reason."""


class CallState(StrEnum):
    """The states of a call of ``llm.generate``."""

    QUEUED = "queued"
    """The call waits for a place; its sample is a partial if it has tokens."""
    IN_FLIGHT = "in_flight"
    """An attempt of it is at an engine."""
    DONE = "done"
    """The call has its response."""


class AttemptState(StrEnum):
    """The states of an attempt, by what becomes of its tokens when it ends."""

    WANTED = "wanted"
    """The tokens go to the sample."""
    SILENT = "silent"
    """As WANTED, but the engine sent nothing for too long: the attempt was asked to end, and another one follows."""
    DOUBTFUL = "doubtful"
    """The weights that wrote the tokens are unknown: they are dropped, and the call goes on from what it had."""
    ABANDONED = "abandoned"
    """The sample went on without the attempt: the tokens are dropped for the same reason."""


SETTLED = (SampleState.LEASED, SampleState.DROPPED)
MOST_SAMPLES = 2
"""Times n samples that a group has at most, those that took the place of others included."""


class GroupState(StrEnum):
    """The states of a group; its quorum is all of its samples, unless the settings say less."""

    OPEN = "open"
    """The quorum is not finished."""
    JUDGED = "judged"
    """The quorum is finished, and the filter's verdict is awaited."""
    READY = "ready"
    """The group counts towards a batch: as a whole, or with a quorum by each of its finished samples."""


class FinishReason(StrEnum):
    """Reasons for which a response ends."""

    STOP = "stop"
    """EOS, a stop token or a stop string."""
    LENGTH = "length"
    """The budget of the response, or the engine's context, is used up."""


class EngineFinish(StrEnum):
    """Reasons for which an engine request ends."""

    STOP = "stop"
    """EOS or a stop token was sampled."""
    LENGTH = "length"
    """``max_tokens`` or the engine's context was used up."""
    ABORT = "abort"
    """april asked for it."""


class AttemptFailure(StrEnum):
    """Reasons for which an attempt breaks off."""

    BROKE_OFF = "broke_off"
    """The request failed, or its engine did: what has come is kept."""
    CORRUPT = "corrupt"
    """The engine sent numbers that cannot be true: nothing of the attempt is kept."""
    REFUSED = "refused"
    """The engine says that the request is wrong: no other attempt would do better."""
    BUSY = "busy"
    """The engine takes no requests for now."""
    WEIGHTS_WRITTEN = "weights_written"
    """The weights were written while the engine generated with them; what it has generated before is kept."""
    NO_TEXT = "no_text"
    """The tokenizer failed, so nobody knows whether a stop string is in what came last; what came before is kept."""


class WeightsRoute(StrEnum):
    """Ways of new weights from a trainer to servers."""

    AUTO = "auto"
    """Sent from the trainer's process where all servers take them so, by a directory elsewhere."""
    DISK = "disk"
    """By a directory that every server can read."""
    COLLECTIVE = "collective"
    """Sent from the trainer's process, without a directory."""


class OnStale(StrEnum):
    """Policies for samples that exceed max_staleness; with all but DROP, steps wait for samples that soon would."""

    FINISH = "finish"
    """The sample goes first and the step waits for it; tokens that are too old all the same carry no loss."""
    RESTART = "restart"
    """The tokens are dropped, and the sample begins again."""
    MASK = "mask"
    """Tokens that are too old carry no loss."""
    DROP = "drop"
    """The group is dropped and replaced."""


class OnFailedSample(StrEnum):
    """Policies for groups of which a sample cannot go on."""

    DROP_GROUP = "drop_group"
    """The group is dropped with all its samples, and replaced by another prompt."""
    REPLACE = "replace"
    """A fresh sample takes its place, up to n times; then the group is dropped."""
    SHRINK = "shrink"
    """The group goes on with fewer samples, down to ``min_group_size``; then it is dropped."""


class OnLongPrompt(StrEnum):
    """Policies for prompts that leave no room for a response."""

    ERROR = "error"
    SKIP = "skip"


class OnDataEnd(StrEnum):
    """Policies for the end of the prompts, when fewer than N groups are left."""

    SHORT = "short"
    """The rest is delivered as a shorter batch."""
    WAIT = "wait"
    """The rest is kept until more prompts are given."""
    WRAP = "wrap"
    """The prompts begin again, for ever."""


class GenerationMode(StrEnum):
    """Modes of generation (setting ``generation``), by what ends with a batch."""

    STEPWISE = "stepwise"
    """Generation: a delivery cuts what is in flight, and the next request for a batch continues it (the paper)."""
    CONTINUOUS = "continuous"
    """Nothing: generation goes on while the trainer trains; only a weight update cuts, and continues, requests."""


class OnWeightUpdate(StrEnum):
    """Policies for requests in flight at a weight update (setting ``on_weight_update``)."""

    RESUBMIT = "resubmit"
    """They are cut, and continued by requests that prefill what there is under the new weights."""
    KEEP = "keep"
    """They go on under the new weights, over the keys and values that the old ones wrote."""
    RECOMPUTE = "recompute"
    """They go on, and the engine prefills what there is under the new weights by itself."""


class Work(StrEnum):
    """Settings that say how much is in work, which may change between two batches; their names in the configuration."""

    OVER_SAMPLING = "over_sampling_batch_size"
    REFILL = "refill"
    IN_FLIGHT = "max_in_flight"
    QUORUM = "group_quorum"


class Refill(StrEnum):
    """Policies for starting new work inside a step."""

    NONE = "none"
    """Once, at the beginning (the paper)."""
    GROUP = "group"
    """A new group whenever one finishes."""
    SAMPLE = "sample"
    """A constant number of samples in flight."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: ``token_ids`` int32 [P], and ``data`` for rewards and rollout functions (never looked into).

    ``epoch`` and ``position`` (within the epoch) are set when april draws it; together they name the prompt.
    ``attached`` is what comes with it, such as images, in order; ``token_ids`` have as many tokens for each as the
    model reads it as.
    """

    token_ids: Int32
    data: Mapping[str, Any] = field(default_factory=dict)
    epoch: int = 0
    position: int = 0
    attached: tuple[Placed, ...] = ()

    def copy(self) -> Prompt:
        """Copy the prompt for a user who may write into its array; ``data`` stays the same object."""
        return replace(self, token_ids=self.token_ids.copy())


class EvaluationRequested(Event, frozen=True, kw_only=True):
    """Answer these prompts under the present weights; EvaluationDone or EvaluationFailed ends it.

    ``evaluation`` is its number; ``functions_at_once`` limits the functions that run at a time (None means no limit).
    """

    evaluation: int
    prompts: Sequence[Prompt]
    n_samples: int
    sampling: SamplingParams
    seed: int
    functions_at_once: int | None = None


class RecordedCall(NamedTuple):
    """A complete ``llm.generate``: it added tokens [start, end) of the tape."""

    start: int
    end: int
    finish: FinishReason


@dataclass(slots=True)
class Replay:
    """Calls that a rollout function will make again after its process died; they are answered from the tape."""

    calls: deque[RecordedCall]
    open_start: int | None
    """The start of the call after those that has no complete answer yet; None means there was none."""

    @property
    def next_start(self) -> int | None:
        """Tokens of the tape before the next call; None means that it stood between two calls."""
        return self.calls[0].start if self.calls else self.open_start


class Chain:
    """A token sequence of a sample: what its first call was given, and all that followed.

    A sample has one, unless its function asks for other conversations too (``CallMade.any_chain``). Each becomes a row
    of the batch; a call continues the one that it extends.
    """

    __slots__ = (
        "attached", "cached_on", "cached_under", "calls", "extras", "number", "prompt", "replay", "sample", "tape",
    )  # fmt: skip

    def __init__(self, sample: Sample, number: int, prompt: Int32, attached: tuple[Placed, ...] = ()) -> None:
        self.sample = sample
        self.number = number
        self.prompt = prompt
        """int32 [P]: the group's prompt; of a later chain, what its first call was given."""
        self.tape = TokenTape()
        self.attached = attached
        """What is attached to the prompt and to what followed, in order."""
        self.extras: Extras = NO_EXTRAS
        """Rows of the conversation's tokens, from its second on, as far as they were made: up to the last one that was
        generated."""
        self.calls: list[GenerateCall] = []
        """Calls of the present run of the function, in order; the last one may be open."""
        self.replay: Replay | None = None
        """Answers that a dead process had. A finished sample with a replay finished there: its returns are lost."""
        self.cached_on = ""
        """Engine that has its keys and values, as long as its life is that of ``cached_under``."""
        self.cached_under: tuple[PolicyVersion | None, int] | None = None

    @property
    def open_call(self) -> GenerateCall | None:
        """The generate call that is not complete yet."""
        calls = self.calls
        return calls[-1] if calls and calls[-1].state is not DONE else None

    @property
    def asked(self) -> Replay | None:
        """The calls that the function would make again if it began anew now; None without any."""
        replay, call = self.replay, self.open_call
        calls = deque(c.result for c in self.calls if c.result is not None)
        start = None if call is None else call.start
        if replay is not None:
            calls += replay.calls
            start = replay.open_start
        return Replay(calls, start) if calls or start is not None else None

    @property
    def seen(self) -> int:
        """Tokens of the tape that the rollout function has seen (all of them, except in a replay)."""
        if self.replay is None:
            return len(self.tape)
        return self.calls[-1].end if self.calls else 0

    def add_extras(self, rows: Extras) -> None:
        """Rows that an attempt brought with its tokens, those of tokens before them that had none included."""
        self.extras = joined(self.extras, rows)

    @property
    def rows_due(self) -> int:
        """Rows of a conversation whose generated tokens have all of theirs."""
        last = next((s for s in reversed(self.tape.segments) if s.kind is GENERATED), None)
        return 0 if last is None else len(self.prompt) + last.start + last.count - 1

    def cut(self, end: int) -> int:
        """Forget what follows the first ``end`` tokens of the tape; returns how many of it were generated."""
        self.attached = before(self.attached, len(self.prompt) + end)
        generated = self.tape.cut(end)
        self.extras = first_rows(self.extras, self.rows_due)
        return generated

    def conversation(self, end: int) -> Int32:
        """The prompt and the first ``end`` tokens of the tape."""
        return np.concatenate((self.prompt, self.tape.tokens[:end])) if end else self.prompt

    def begins(self, token_ids: Int32, end: int, attached: Sequence[Placed] = ()) -> bool:
        """Return whether ``token_ids`` and what is attached to them begin with the prompt, the first ``end`` tokens of
        the tape, and what is attached to those.
        """
        at, prompt = len(self.prompt), self.prompt
        return (
            len(token_ids) >= at + end
            and np.array_equal(token_ids[:at], prompt)
            and np.array_equal(token_ids[at : at + end], self.tape.tokens[:end])
            and (not (attached or self.attached) or before(attached, at + end) == before(self.attached, at + end))
        )


@dataclass(slots=True, eq=False)
class GenerateCall:
    """A call of ``llm.generate`` by a rollout function; it may take several attempts."""

    chain: Chain
    sampling: SamplingParams
    start: int
    """Response tokens that were there before the call."""
    number: int = 0
    """The number by which the function knows the call."""
    state: CallState = CallState.QUEUED
    ticket: int = 0
    """The call's latest place in the queue; 0 means none."""
    attempt: Attempt | None = None
    avoid: str = ""
    """Engine on which the latest attempt broke off: another one goes first."""
    failures: int = 0
    """Attempts in a row that broke off at the same token."""
    end: int = 0
    """Response tokens that there are with its own, once it is done."""
    finish: FinishReason | None = None
    lost: bool = False
    """The function died with its host, and begins again when the attempt has ended."""
    sample: Sample = field(init=False)

    def __post_init__(self) -> None:
        self.sample = self.chain.sample

    @property
    def result(self) -> RecordedCall | None:
        """The tokens that the call added; None until it is done."""
        return None if self.finish is None else RecordedCall(self.start, self.end, self.finish)

    @property
    def owner(self) -> SampleId:
        return self.sample.id


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt:
    """An engine request for a call; the layer above appends chunks to ``tape`` while it runs."""

    id: str
    call: GenerateCall
    engine: str
    token_ids: Int32
    """Prompt plus the response so far."""
    sampling: SamplingParams
    tape: AttemptTape
    extras: tuple[str, ...] = ()
    """Names of the rows that its engine is asked for."""
    extras_from: int = 0
    """The first row that is missing."""
    end_ids: frozenset[int] = frozenset()
    """Tokens that end the response: EOS, and stop tokens of the request."""
    oldest: PolicyVersion | None = None
    """The weights that its engine had confirmed when it was sent: its tokens are of these or of later ones."""
    urgent: bool = False
    in_flight: OnWeightUpdate = OnWeightUpdate.RESUBMIT
    """What becomes of it at a weight update."""
    state: AttemptState = AttemptState.WANTED
    silent_s: float = 0.0
    """Seconds of silence when the attempt was found to be silent."""
    lost_for: DropReason | None = None
    """The reason for which the tokens are dropped; None means that the sample gets them."""

    def counts(self) -> AttemptCounts:
        """Count the tokens so far, for the event that ends the attempt."""
        tape = self.tape
        if not tape.parsed:
            return NOTHING_CAME
        ids = self.end_ids
        long_enough = tape.count > self.sampling.min_tokens
        ends = tape.stopped or (bool(ids) and long_enough and tape.last_token in ids)
        return AttemptCounts(tuple(tape.spans), ends, tape.after_stop, tape.unknown, tape.bare)

    @property
    def over(self) -> PolicyVersion | None:
        """The version of its oldest keys and values, where they live through weight updates."""
        return self.oldest if self.in_flight is OnWeightUpdate.KEEP else None

    @property
    def sample(self) -> Sample:
        return self.call.sample

    @property
    def attached(self) -> tuple[Placed, ...]:
        """What is attached to its conversation."""
        return self.call.chain.attached

    @property
    def missing_rows(self) -> int:
        """Rows of tokens before those that it generates, which its engine gives too."""
        return len(self.token_ids) - 1 - self.extras_from

    @property
    def in_call(self) -> int:
        """Tokens of its call that earlier attempts have brought."""
        return len(self.token_ids) - len(self.call.chain.prompt) - self.call.start

    @property
    def owner(self) -> SampleId:
        return self.call.sample.id


# names of the module: an enum's member costs 60 ns per use on Python 3.11, and these are used at every event
DONE = CallState.DONE


@dataclass(slots=True, eq=False, repr=False)
class Sample:
    """A response of a group."""

    id: SampleId
    group: Group
    state: SampleState = SampleState.NEW
    chains: tuple[Chain, ...] = field(init=False)
    any_chain: bool = False
    """The present run of the function asks for any conversation, not only for the one that its prompt begins."""
    attempts: int = 0
    resumes: int = 0
    """Attempts that continued a call in the middle."""
    failures: int = 0
    """Failures of its rollout and reward functions."""
    deaths: tuple[int, int] = (0, 0)
    """(Deaths in a row of hosts on which its functions ran, tokens that there were each time)."""
    retry: int | None = None
    """Timer after which its reward is asked for again."""
    restarts: int = 0
    finish: FinishReason | None = None
    reward: float = 0.0
    ticket: int = 0
    """The latest place in the queue, to be started; 0 means none."""
    since: int = 0
    """With a quorum: number of the event since which it can be delivered."""
    slack: int = NO_DEADLINE
    """With a quorum: weight updates after which it is too old, as of the latest plan."""
    evaluation: Evaluation | None = None
    urgent: bool = False
    """Goes before all others, because the step owes it or a finished sibling, or waits for its evaluation."""

    def __post_init__(self) -> None:
        group = self.group
        self.chains = (Chain(self, 0, group.prompt.token_ids, group.prompt.attached),)
        self.evaluation = group.evaluation
        self.urgent = self.evaluation is not None

    @property
    def owner(self) -> SampleId:
        return self.id

    @property
    def ready(self) -> bool:
        """With a quorum: whether it counts towards a batch."""
        return self.state is SampleState.FINISHED and self.group.state is GroupState.READY

    @property
    def members(self) -> tuple[Sample]:
        """As of a group: what is delivered with it."""
        return (self,)

    @property
    def key(self) -> SampleId:
        """The id as functions and engines see it: the prompts of each evaluation are numbered from 0."""
        first = 0 if self.evaluation is None else self.evaluation.groups[0].id
        return SampleId(self.id.group - first, self.id.index)

    @property
    def open_calls(self) -> list[GenerateCall]:
        """The generate calls that are not complete yet."""
        return [calls[-1] for chain in self.chains if (calls := chain.calls) and calls[-1].state is not DONE]

    @property
    def asks(self) -> bool:
        """Return whether a generate call is not complete yet."""
        for chain in self.chains:  # at every event: a generator, or a call of open_call, costs more
            calls = chain.calls
            if calls and calls[-1].state is not DONE:
                return True
        return False

    @property
    def generated(self) -> int:
        """Tokens sampled by the policy."""
        chains = self.chains
        return chains[0].tape.generated if len(chains) == 1 else sum([chain.tape.generated for chain in chains])

    @property
    def tokens(self) -> int:
        """Tokens of all responses, those of the environment included."""
        return sum([len(chain.tape) for chain in self.chains])

    @property
    def submitted_under(self) -> PolicyVersion | None:
        """The oldest version under which a request in flight was sent; None without one."""
        attempts = (chain.calls[-1].attempt for chain in self.chains if chain.calls)
        return min((a.oldest for a in attempts if a is not None and a.oldest is not None), default=None)

    @property
    def oldest_version(self) -> PolicyVersion | None:
        """Version of the oldest generated token; None without one."""
        chains = self.chains
        if len(chains) == 1:
            return chains[0].tape.oldest_version
        return min((v for chain in chains if (v := chain.tape.oldest_version) is not None), default=None)

    @property
    def segments(self) -> list[Segment]:
        """The segments of all chains, for what each of them tells by itself."""
        chains = self.chains
        return chains[0].tape.segments if len(chains) == 1 else [s for chain in chains for s in chain.tape.segments]

    @property
    def replayed(self) -> bool:
        """Return whether its function has calls to make again."""
        return any(chain.replay is not None for chain in self.chains)

    def clear(self) -> None:
        """Forget all that was generated, as its function begins anew."""
        self.chains = (Chain(self, 0, self.group.prompt.token_ids, self.group.prompt.attached),)
        self.any_chain, self.finish = False, None

    def replay_all(self) -> None:
        """Its function begins anew: what its calls had is answered from the tapes."""
        for chain in self.chains:
            chain.replay = chain.asked
            chain.calls.clear()
        self.any_chain = False

    def __repr__(self) -> str:
        calls = ", ".join(call.state for call in self.open_calls)
        state = f"{self.state} ({calls})" if calls else self.state
        return f"<Sample {self.id} {state} tokens={self.tokens} attempts={self.attempts}>"


@dataclass(slots=True, eq=False, repr=False)
class Group:
    """A prompt with its samples; those that were given up or replaced are still among them."""

    id: int
    prompt: Prompt
    size: InitVar[int]
    drawn_under: PolicyVersion = FIRST_VERSION
    evaluation: Evaluation | None = None
    quorum: int = 0
    """Finished samples that make it complete; at the beginning 0 means all of them."""
    bound: int = NO_DEADLINE
    """The bound on staleness when the group was drawn, if it was lowered before."""
    state: GroupState = GroupState.OPEN
    since: int = 0
    """Number of the event that made its state what it is."""
    samples: list[Sample] = field(init=False)
    finishers: list[int] = field(default_factory=list)
    """Indices of its finished samples, in the order in which they finished."""
    cohort: tuple[tuple[int, float], ...] = ()
    """Once it counts: (index, reward) of the first ``quorum`` of them, of which the baselines of all are made."""
    unfinished: int = field(init=False)
    """Samples in work."""
    held: int = field(init=False)
    """Samples that are neither delivered nor given up; with the last of them the prompt is settled."""
    delivered: int = 0
    """Samples that are in batches."""
    filter_failures: int = 0
    slack: int = NO_DEADLINE
    """Weight updates after which it is too old, as of the latest plan."""

    def __post_init__(self, size: int) -> None:
        self.samples = [Sample(SampleId(self.id, i), self) for i in range(size)]
        self.unfinished = self.held = size
        self.quorum = self.quorum or size

    @property
    def owner(self) -> SampleId:
        """All its samples' stories tell of it."""
        return SampleId(self.id, WHOLE_GROUP)

    @property
    def complete(self) -> bool:
        return len(self.finishers) >= self.quorum

    @property
    def first(self) -> list[Sample]:
        """The first ``quorum`` finishers, by index: what a filter sees."""
        return [self.samples[i] for i in sorted(self.finishers[: self.quorum])]

    @property
    def rewarded(self) -> tuple[tuple[int, float], ...]:
        """(index, reward) of the first ``quorum`` finishers, in their order: the cohort, once the group counts."""
        return tuple((i, self.samples[i].reward) for i in self.finishers[: self.quorum])

    @property
    def members(self) -> list[Sample]:
        """The samples that are neither delivered nor given up."""
        return [s for s in self.samples if s.state not in SETTLED]

    @property
    def ready(self) -> bool:
        return self.state is GroupState.READY

    def __repr__(self) -> str:
        return f"<Group {self.id} {self.state} unfinished={self.unfinished}/{len(self.samples)} quorum={self.quorum}>"


@dataclass(slots=True, eq=False, kw_only=True)
class Evaluation:
    """An evaluation; its prompts become groups when it begins."""

    request: EvaluationRequested
    behind: int = 0
    """The last weight update that was asked for before and waits; 0 means none. The evaluation begins after it."""
    version: PolicyVersion | None = None
    """The version of its tokens; None until it begins."""
    groups: tuple[Group, ...] = ()
    unfinished: int = 0
    to_start: deque[Sample] = field(default_factory=deque)
    """Samples beyond those whose functions may run at once: in no queue, where they would keep others waiting."""
    functions: int = 0
    """Rollout functions that run, or wait for a place to begin in."""
    in_flight: int = 0
    trouble: tuple[str, AttemptFailure] | None = None
    """The failure of the latest attempt that broke off."""
    failure: tuple[str, AttemptFailure | None] | None = None
    tokens: Ledger = field(default_factory=Ledger)
    counters: Counter[str] = field(default_factory=Counter)

    def fail(self, error: str, kind: AttemptFailure | None = None, sample: Sample | None = None) -> None:
        """End with this error, if it is the first; ``sample`` is the one whose function or prompt is to blame."""
        if self.failure is None:
            where = "" if sample is None else f"evaluation prompt {sample.key.group}: "
            self.failure = f"{where}{error}", kind


State = TypeVar("State", SampleState, CallState, AttemptState, GroupState)


class Stateful(Protocol[State]):
    """A sample, a call, an attempt or a group."""

    state: State

    @property
    def owner(self) -> SampleId:
        """The sample, or group, whose story tells of it."""


LEGAL: Mapping[StrEnum, tuple[StrEnum, ...]] = {
    SampleState.NEW: (
        SampleState.RUNNING,
        SampleState.NEW,  # what it had generated before a restart is dropped
        SampleState.DROPPED,
    ),
    SampleState.RUNNING: (SampleState.SCORING, SampleState.NEW, SampleState.DROPPED),
    SampleState.SCORING: (SampleState.FINISHED, SampleState.NEW, SampleState.DROPPED),
    SampleState.FINISHED: (SampleState.LEASED, SampleState.NEW, SampleState.DROPPED),
    SampleState.LEASED: (),
    SampleState.DROPPED: (),
    CallState.QUEUED: (
        CallState.IN_FLIGHT,
        CallState.DONE,  # saved between its last token and the end of its attempt, or nothing is left of its budget
    ),
    CallState.IN_FLIGHT: (CallState.QUEUED, CallState.DONE),
    CallState.DONE: (),
    AttemptState.WANTED: (AttemptState.SILENT, AttemptState.DOUBTFUL, AttemptState.ABANDONED),
    AttemptState.SILENT: (AttemptState.DOUBTFUL, AttemptState.ABANDONED),
    AttemptState.DOUBTFUL: (AttemptState.ABANDONED,),
    AttemptState.ABANDONED: (),
    GroupState.OPEN: (GroupState.JUDGED, GroupState.READY),
    GroupState.JUDGED: (
        GroupState.READY,
        GroupState.JUDGED,  # the filter failed and is asked again
        GroupState.OPEN,
    ),
    GroupState.READY: (GroupState.OPEN,),
}  # fmt: skip
"""The legal changes of state; only :meth:`april.core.context.CoreContext.to` changes one."""


class TimerKind(StrEnum):
    """Actions that a timer stands for."""

    ABORTS = "aborts"
    """Ask again for the end of attempts, and fence those that are too late."""
    RETRY = "retry"
    """Ask a reward function or filter again."""
    OUTAGE = "outage"
    """Fail the step, if there is still no engine to go on with."""
    REST = "rest"
    """An engine that was busy may take requests again."""
    PROBE = "probe"
    """Ask a quarantined engine whether it is well."""
    CHECK = "check"
    """Ask an engine that works for its load and its weights."""


class Timer(NamedTuple):
    """A timer; it is void once its starter waits for another one, or for none."""

    kind: TimerKind
    number: int
    """Unique among timers of its kind."""
    engine: str = ""
    """The engine of a rest, a probe or a check."""
