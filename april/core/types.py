"""Defines the data types of the core: prompts, groups, samples, calls and attempts, and their states.

A *group* is a prompt with its *samples* (responses). A sample has one or more *chains* (conversations). A *call* is one
``llm.generate`` of the sample's rollout function and extends one chain; it takes one or more *attempts* (engine
requests). A *tape* records the tokens of a chain or an attempt. The *quorum* of a group is the number of finished
samples that make it complete.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from april.core.attachments import NO_EXTRAS, Extras, Placed, before, first_rows
from april.core.ledger import DropReason as DropReason
from april.core.ledger import Ledger
from april.core.row_rewards import RowReward, cohort_values
from april.core.sampling import SamplingParams
from april.core.tape import GENERATED, NO_COUNTS, AttemptCounts, AttemptTape, Int32, Segment, TokenTape
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.core.versions import OnStale as OnStale

NO_DEADLINE = 1 << 30
"""Slack (batches until a group or sample is too old) of a group without a deadline, such as a newly drawn group."""
WHOLE_GROUP = -1
"""Sample index that stands for the whole group."""


class Event(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """Base class of all events; most of them are in :mod:`april.core.events`."""


class SampleId(NamedTuple):
    """Identifies a response: number of its group, in the order of drawing, and index within the group."""

    group: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here

    def __str__(self) -> str:
        return f"g{self.group}.s{self.index}"


class SampleState(StrEnum):
    """States of a sample."""

    NEW = "new"
    """The rollout function waits to be started, for the first time or again."""
    RUNNING = "running"
    """The rollout function runs, or waits for one of its calls."""
    SCORING = "scoring"
    """The rollout function has returned; the sample waits for its reward."""
    FINISHED = "finished"
    """Complete and scored; the sample waits for the other samples of its group or for delivery."""
    LEASED = "leased"
    """Delivered to the trainer in a batch."""
    DROPPED = "dropped"
    """Dropped for a named reason."""


class CallState(StrEnum):
    """States of a call of ``llm.generate``."""

    QUEUED = "queued"
    """The call waits to be sent to an engine; its sample is a partial if it has tokens."""
    IN_FLIGHT = "in_flight"
    """An attempt of the call is at an engine."""
    DONE = "done"
    """The call has its response."""


class AttemptState(StrEnum):
    """States of an attempt, which decide whether its tokens are kept when it ends."""

    WANTED = "wanted"
    """The tokens go to the sample."""
    SILENT = "silent"
    """Like WANTED, but the engine sent nothing for too long: the attempt is being ended, and another one follows."""
    DOUBTFUL = "doubtful"
    """The weights that generated the tokens are unknown: the tokens are dropped and the call is sent again."""
    ABANDONED = "abandoned"
    """The sample continued without the attempt: its tokens are dropped for the reason in ``drop_reason``."""


SETTLED = (SampleState.LEASED, SampleState.DROPPED)
MAX_SAMPLES_FACTOR = 2
"""Maximum number of samples of a group, including replaced samples, as a multiple of ``n_samples_per_prompt``."""


class GroupState(StrEnum):
    """States of a group. The quorum is all samples of the group unless ``group_quorum`` is below 1."""

    OPEN = "open"
    """Fewer samples are finished than the quorum requires."""
    BEING_JUDGED = "being judged"
    """Enough samples are finished, and the group waits for the result of the filter."""
    READY = "ready"
    """The group counts towards a batch: as a whole or, with a quorum below 1, each of its finished samples."""


class FinishReason(StrEnum):
    """Reasons why a response ended."""

    STOP = "stop"
    """EOS, a stop token or a stop string."""
    LENGTH = "length"
    """The budget of the response, or the engine's context, is used up."""


class EngineFinish(StrEnum):
    """Reasons why an engine request ended."""

    STOP = "stop"
    """EOS or a stop token was sampled."""
    LENGTH = "length"
    """``max_tokens`` or the engine's context was used up."""
    ABORT = "abort"
    """april asked the engine to end the request."""


class AttemptFailure(StrEnum):
    """Reasons why an attempt broke off."""

    BROKE_OFF = "broke_off"
    """The request or its engine failed; the tokens received so far are kept."""
    CORRUPT = "corrupt"
    """The engine sent impossible numbers; no token of the attempt is kept."""
    REFUSED = "refused"
    """The engine rejected the request as invalid, so another attempt would fail, too."""
    BUSY = "busy"
    """The engine accepts no requests for now."""
    WEIGHTS_WRITTEN = "weights_written"
    """The weights were written while the engine generated; tokens from before the write are kept."""
    NO_TEXT = "no_text"
    """The tokenizer failed, so the last tokens cannot be searched for a stop string; earlier tokens are kept."""


class WeightsRoute(StrEnum):
    """Ways in which new weights get from the trainer to the engine servers."""

    AUTO = "auto"
    """COLLECTIVE if all servers support it, otherwise DISK."""
    DISK = "disk"
    """Through a directory that every server can read."""
    COLLECTIVE = "collective"
    """Sent from the trainer's process directly, without a directory."""


class OnFailedSample(StrEnum):
    """Policies for a group with a sample that failed for good."""

    DROP_GROUP = "drop_group"
    """The group is dropped with all its samples, and replaced by another prompt."""
    REPLACE = "replace"
    """A new sample replaces the failed one, up to ``n_samples_per_prompt`` times; after that the group is dropped."""
    SHRINK = "shrink"
    """The group continues with fewer samples, down to ``min_group_size``; below that it is dropped."""


class OnLongPrompt(StrEnum):
    """Policies for prompts that leave no room for a response."""

    ERROR = "error"
    SKIP = "skip"


class OnDataEnd(StrEnum):
    """Policies for the end of the prompts, when fewer groups are left than a batch needs."""

    SHORT = "short"
    """The remaining groups are delivered as a smaller batch."""
    WAIT = "wait"
    """The remaining groups are kept until more prompts are given."""
    WRAP = "wrap"
    """The prompts start over from the beginning, without end."""


class GenerationMode(StrEnum):
    """Modes of generation (setting ``generation``): whether it stops when a batch is delivered."""

    STEPWISE = "stepwise"
    """A delivery interrupts the requests in flight; the next request for a batch continues them (as in the paper)."""
    CONTINUOUS = "continuous"
    """Generation goes on while the trainer trains; only a weight update interrupts requests and continues them."""


class OnWeightUpdate(StrEnum):
    """Policies for requests in flight at a weight update (setting ``on_weight_update``)."""

    RESUBMIT = "resubmit"
    """Requests are interrupted; new requests continue them and prefill the existing tokens under the new weights."""
    KEEP = "keep"
    """Requests continue under the new weights, with the keys and values that the old weights computed."""
    RECOMPUTE = "recompute"
    """Requests continue, and the engine itself prefills their existing tokens again under the new weights."""


class Work(StrEnum):
    """Names of the settings for the amount of work in progress, which april may change between batches."""

    OVER_SAMPLING = "over_sampling_batch_size"
    REFILL = "refill"
    IN_FLIGHT = "max_in_flight"
    QUORUM = "group_quorum"


class Refill(StrEnum):
    """Policies for starting new work inside a step."""

    NONE = "none"
    """New groups start only at the beginning of a step (as in the paper)."""
    GROUP = "group"
    """A new group starts whenever a group finishes."""
    SAMPLE = "sample"
    """New groups start whenever needed to keep the number of samples in flight constant."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: ``token_ids`` int32 [P], and ``data``, which april passes on to reward and rollout functions.

    ``epoch`` and ``position`` (within the epoch) are set when april draws the prompt; together they identify it.
    ``attached`` lists its attachments, such as images, in order; ``token_ids`` contains for each attachment as many
    tokens as the model reads for it.
    """

    token_ids: Int32
    data: Mapping[str, Any] = field(default_factory=dict)
    epoch: int = 0
    position: int = 0
    attached: tuple[Placed, ...] = ()

    def copy(self) -> Prompt:
        """Return a copy with its own token array, which the user may change; ``data`` stays the same object."""
        return replace(self, token_ids=self.token_ids.copy())


class EvaluationRequested(Event, frozen=True, kw_only=True):
    """Requests an evaluation of these prompts under the present weights; EvaluationDone or EvaluationFailed answers.

    ``evaluation`` is the evaluation's number. ``functions_at_once`` is the maximum number of rollout functions that run
    at the same time; None means no limit.
    """

    evaluation: int
    prompts: Sequence[Prompt]
    n_samples: int
    sampling: SamplingParams
    seed: int
    functions_at_once: int | None = None


class RecordedCall(NamedTuple):
    """A completed call of ``llm.generate``, which added tokens [start, end) to the response of its chain."""

    start: int
    end: int
    finish: FinishReason


@dataclass(slots=True)
class Replay:
    """Calls that a restarted rollout function will repeat; they are answered with recorded tokens."""

    calls: deque[RecordedCall]
    open_start: int | None
    """Start of a further call whose answer was incomplete; None if there was no such call."""

    @property
    def next_start(self) -> int | None:
        """Number of response tokens before the next call to replay; None if no call is left."""
        return self.calls[0].start if self.calls else self.open_start


@dataclass(slots=True, eq=False)
class Chain:
    """A token sequence of a sample: the prompt of its first call and all tokens that followed.

    A sample has one chain, unless its function also uses other conversations (``CallMade.any_chain``). Each chain
    becomes a row of the batch; a call continues the chain that its tokens extend.
    """

    sample: Sample
    number: int
    prompt: Int32
    """int32 [P]: the prompt of the group or, in a later chain, the tokens of the chain's first call."""
    attached: tuple[Placed, ...] = ()
    """Attachments of the prompt and of the tokens that followed, in order."""
    tape: TokenTape = field(default_factory=TokenTape)
    extras: Extras = NO_EXTRAS
    """Extras of the conversation: one row per token but the first, up to the last generated one; may be empty."""
    calls: list[GenerateCall] = field(default_factory=list)
    """Calls that the function has made since it was last started, in order; the last one may be open."""
    replay: Replay | None = None
    """Calls to be answered from the tape after a restart; None if there are none. A finished sample may have such calls
    after a restart, since the return values of rollout functions are not saved."""
    cached_on: str = ""
    """Name of the engine whose KV cache has the chain while the engine's ``cache_key`` equals the chain's."""
    cache_key: tuple[PolicyVersion | None, int] | None = None

    @property
    def open_call(self) -> GenerateCall | None:
        """The generate call that is not complete yet, or None."""
        calls = self.calls
        return calls[-1] if calls and calls[-1].state is not DONE else None

    @property
    def repeatable_calls(self) -> Replay | None:
        """The calls that the function would repeat if it were restarted now; None if it has made no calls."""
        repeated = deque(call.result for call in self.calls if call.result is not None)
        open_start = None if self.open_call is None else self.open_call.start
        if self.replay is not None:
            repeated += self.replay.calls
            open_start = self.replay.open_start
        return Replay(repeated, open_start) if repeated or open_start is not None else None

    @property
    def turns(self) -> tuple[tuple[int, int], ...]:
        """(start, end) in the response of each call that generated tokens, in order."""
        asked = self.repeatable_calls
        return () if asked is None else tuple((c.start, c.end) for c in asked.calls if c.start < c.end)

    @property
    def seen_tokens(self) -> int:
        """Number of tokens of the tape that the rollout function has seen (all of them, except in a replay)."""
        if self.replay is None:
            return len(self.tape)
        return self.calls[-1].end if self.calls else 0

    @property
    def rows_due(self) -> int:
        """Number of rows that the extras must have so that every generated token has its row."""
        last = next((s for s in reversed(self.tape.segments) if s.kind is GENERATED), None)
        return 0 if last is None else len(self.prompt) + last.start + last.count - 1

    def cut(self, end: int) -> int:
        """Remove all tokens of the tape but the first ``end``; return how many of the removed ones were generated."""
        self.attached = before(self.attached, len(self.prompt) + end)
        generated = self.tape.cut(end)
        self.sample.group.oldest_known = False
        self.extras = first_rows(self.extras, self.rows_due)
        return generated

    def conversation(self, end: int) -> Int32:
        """Return the prompt followed by the first ``end`` tokens of the tape."""
        return np.concatenate((self.prompt, self.tape.tokens[:end])) if end else self.prompt

    def is_prefix_of(self, token_ids: Int32, end: int, attached: Sequence[Placed] = ()) -> bool:
        """Return True if ``token_ids`` begins with the prompt and the first ``end`` tokens of the tape.

        The attachments within these tokens must be equal, too.
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
    """Number of response tokens before the call."""
    number: int = 0
    """Number by which the rollout function knows the call."""
    state: CallState = CallState.QUEUED
    ticket: int = 0
    """Number of the call's entry in the queue; 0 if it is not queued."""
    attempt: Attempt | None = None
    avoid_engine: str = ""
    """Name of the engine on which the latest attempt broke off, so that others are preferred; empty if none did."""
    failures: int = 0
    """Number of attempts in a row that broke off at the same token."""
    end: int = 0
    """Number of response tokens at the end of the call, once it is done."""
    finish: FinishReason | None = None
    function_lost: bool = False
    """True if the process of the rollout function died; the function is restarted when all attempts have ended."""
    sample: Sample = field(init=False)

    def __post_init__(self) -> None:
        self.sample = self.chain.sample

    @property
    def result(self) -> RecordedCall | None:
        """The range of tokens that the call added, with its finish reason; None until it is done."""
        return None if self.finish is None else RecordedCall(self.start, self.end, self.finish)

    @property
    def owner(self) -> SampleId:
        return self.sample.id


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request to an engine to continue ``token_ids``: the prompt and the tokens that the sample already has."""

    attempt_id: str
    token_ids: Int32
    sampling: SamplingParams
    priority: int = 0
    """Priority for the engine's queue; lower is more urgent. Engines without priorities ignore it."""
    sample_key: tuple[int, int] | None = None
    """(group, index) of the sample. A real engine's output never depends on it; a simulated engine draws the length of
    the response from it."""
    response_offset: int = 0
    """Number of tokens at the end of ``token_ids`` that earlier attempts of this call generated; all tokens before them
    are the prompt."""
    stream: bool = False
    """True if tokens should arrive as they are generated, as april may end the request early. An engine that yields
    tokens only at the end may be used, too; its surplus tokens are dropped."""
    in_flight: OnWeightUpdate = OnWeightUpdate.RESUBMIT
    """What happens to the request at a weight update. With KEEP the engine must have a separate prefix cache per policy
    version: requests of one version never use the keys and values of requests of another."""
    attached: tuple[Placed, ...] = ()
    """Attachments of the conversation, in order; ``token_ids`` contains for each attachment as many tokens as the model
    reads for it. Engines that expand prompts themselves get the tokens of
    :func:`april.core.attachments.collapsed`."""
    extras: tuple[str, ...] = ()
    """Names of the per-token arrays that the engine must return with the tokens."""
    extras_from: int = 0
    """First row of ``extras`` that is wanted; row i is made when the model reads token i. With 5 input tokens, 3 more
    that are generated, and ``extras_from`` 4, the last chunk has the rows 4, 5 and 6: the last token was not read."""

    def rows_wanted(self, generated: int) -> int:
        """Return the number of rows that the last chunk must have after ``generated`` tokens."""
        return len(self.token_ids) + generated - 1 - self.extras_from


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt:
    """A request that was sent to an engine for a call; the driver appends chunks to ``tape`` while it runs."""

    request: Request
    call: GenerateCall
    engine: str
    tape: AttemptTape
    id: str = field(init=False)
    """Id of the attempt, equal to ``request.attempt_id``."""
    end_ids: frozenset[int] = frozenset()
    """Ids of the tokens that end the response: EOS and the request's stop tokens."""
    oldest: PolicyVersion | None = None
    """Version that the engine had confirmed when the request was sent; the tokens are of this or a later version."""
    state: AttemptState = AttemptState.WANTED
    silent_s: float = 0.0
    """Seconds of silence when the attempt was found to be silent."""
    drop_reason: DropReason | None = None
    """Reason for dropping the tokens; None if the sample gets them."""

    def __post_init__(self) -> None:
        self.id = self.request.attempt_id

    def counts(self) -> AttemptCounts:
        """Return the counts of the tokens so far, for the event that ends the attempt."""
        tape = self.tape
        if not tape.parsed:
            return NO_COUNTS
        ids = self.end_ids
        long_enough = tape.count > self.request.sampling.min_tokens
        ends = tape.stopped or (bool(ids) and long_enough and tape.last_token in ids)
        return AttemptCounts(tuple(tape.spans), ends, tape.after_stop, tape.unknown, tape.bare, tape.cached)

    @property
    def over(self) -> PolicyVersion | None:
        """Version of the request's oldest keys and values, if they are kept through weight updates; else None."""
        return self.oldest if self.request.in_flight is OnWeightUpdate.KEEP else None

    @property
    def constrained(self) -> bool:
        return bool(self.request.sampling.grammar)

    @property
    def begins_again(self) -> DropReason | None:
        """Reason for dropping the tokens if the request is interrupted; None if a later attempt continues them."""
        if self.sample.evaluation is not None:
            return DropReason.FAILED  # the call of an evaluation is repeated with the same seed
        return DropReason.CUT_GRAMMAR if self.constrained else None

    @property
    def sample(self) -> Sample:
        return self.call.sample

    @property
    def owner(self) -> SampleId:
        return self.call.sample.id


# module-level names, as an enum member costs 60 ns per use on Python 3.11 and these are used at every event
DONE = CallState.DONE


@dataclass(slots=True, eq=False, repr=False)
class Sample:
    """One response to a group's prompt, with the state of its rollout function and reward."""

    id: SampleId
    group: Group
    state: SampleState = SampleState.NEW
    chains: tuple[Chain, ...] = field(init=False)
    any_chain: bool = False
    """True if the running function may use any conversation, not only the one that begins with its prompt."""
    attempts: int = 0
    resumes: int = 0
    """Number of attempts that continued a call after its first token."""
    failures: int = 0
    """Number of failures of the rollout and reward functions."""
    process_deaths: tuple[int, int] = (0, 0)
    """(Number of processes in a row that died while they ran the function, number of tokens the sample then had)."""
    retry_timer: int | None = None
    """Number of the timer after which the reward function is called again; None if no timer runs."""
    restarts: int = 0
    finish: FinishReason | None = None
    reward: float = 0.0
    row_rewards: tuple[RowReward, ...] = ()
    """Rewards with parts and arrays: one for the response, or one per row. Empty if the reward is only a number."""
    ticket: int = 0
    """Number of the sample's entry in the queue of samples to start; 0 if the sample is not queued."""
    since: int = 0
    """Number of the event that made the sample deliverable; used with a quorum below 1."""
    slack: int = NO_DEADLINE
    """Number of batches after which the sample is too old, when they were last counted; used with a quorum below 1."""
    evaluation: Evaluation | None = None
    urgent: bool = False
    """True if the sample goes first: the step must deliver it or its group, or it belongs to an evaluation."""

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
        """True if the sample counts towards a batch; used with a quorum below 1."""
        return self.state is SampleState.FINISHED and self.group.state is GroupState.READY

    @property
    def members(self) -> tuple[Sample]:
        """The sample itself; groups have the same property, so both can be units of a batch."""
        return (self,)

    @property
    def key(self) -> SampleId:
        """The id that functions and engines see, in which the prompts of each evaluation are numbered from 0."""
        first = 0 if self.evaluation is None else self.evaluation.groups[0].id
        return SampleId(self.id.group - first, self.id.index)

    @property
    def open_calls(self) -> list[GenerateCall]:
        return [calls[-1] for chain in self.chains if (calls := chain.calls) and calls[-1].state is not DONE]

    @property
    def has_open_call(self) -> bool:
        """True if a generate call is not complete yet."""
        for chain in self.chains:  # runs at every event: a generator, or using open_call, would be slower
            calls = chain.calls
            if calls and calls[-1].state is not DONE:
                return True
        return False

    @property
    def generated(self) -> int:
        """Number of tokens sampled by the policy."""
        chains = self.chains
        return chains[0].tape.generated if len(chains) == 1 else sum([chain.tape.generated for chain in chains])

    @property
    def tokens(self) -> int:
        """Number of tokens of all chains' responses, environment tokens included."""
        return sum([len(chain.tape) for chain in self.chains])

    @property
    def submitted_under(self) -> PolicyVersion | None:
        """Oldest version under which a request in flight was sent; None without a request in flight."""
        attempts = (chain.calls[-1].attempt for chain in self.chains if chain.calls)
        return min((a.oldest for a in attempts if a is not None and a.oldest is not None), default=None)

    @property
    def oldest_version(self) -> PolicyVersion | None:
        """Version of the oldest generated token; None without generated tokens."""
        chains = self.chains
        if len(chains) == 1:
            return chains[0].tape.oldest_version
        return min((v for chain in chains if (v := chain.tape.oldest_version) is not None), default=None)

    @property
    def row_chains(self) -> Sequence[Chain]:
        """The chains that become rows of the batch: those with generated tokens, or the first one if there are none."""
        chains = self.chains
        return chains if len(chains) == 1 else [c for c in chains if c.tape.generated] or chains[:1]

    @property
    def segments(self) -> list[Segment]:
        """Segments of all chains, for uses in which it does not matter to which chain a segment belongs."""
        chains = self.chains
        return chains[0].tape.segments if len(chains) == 1 else [s for chain in chains for s in chain.tape.segments]

    @property
    def replayed(self) -> bool:
        """True if the restarted function has calls left to repeat."""
        return any(chain.replay is not None for chain in self.chains)

    def release_tokens(self) -> None:
        """Remove all chains and tokens of a sample that was trained or dropped."""
        for chain in self.chains:
            chain.calls.clear()  # else chain and calls refer to each other, and stay until garbage is collected
        self.chains = ()

    def clear(self) -> None:
        """Remove all chains and tokens before the function is started again."""
        self.release_tokens()
        self.chains = (Chain(self, 0, self.group.prompt.token_ids, self.group.prompt.attached),)
        self.row_rewards = ()
        self.any_chain, self.finish = False, None
        self.group.oldest_known = False

    def replay_all(self) -> None:
        """Set up the replay of all calls from the tapes, before the function is started again."""
        for chain in self.chains:
            chain.replay = chain.repeatable_calls
            chain.calls.clear()
        self.any_chain = False

    def __repr__(self) -> str:
        calls = ", ".join(call.state for call in self.open_calls)
        state = f"{self.state} ({calls})" if calls else self.state
        return f"<Sample {self.id} {state} tokens={self.tokens} attempts={self.attempts}>"


@dataclass(slots=True, eq=False, repr=False)
class Group:
    """A prompt with its samples, including dropped and replaced samples."""

    id: int
    prompt: Prompt
    size: InitVar[int]
    drawn_under: PolicyVersion = FIRST_VERSION
    evaluation: Evaluation | None = None
    quorum: int = 0
    """Number of finished samples that make the group complete; for the constructor, 0 means all samples."""
    bound: int = NO_DEADLINE
    """Limit on the group's staleness if the limit was lowered before the group was drawn; else NO_DEADLINE."""
    state: GroupState = GroupState.OPEN
    since: int = 0
    """Number of the event that set the present state."""
    samples: list[Sample] = field(init=False)
    finishers: list[int] = field(default_factory=list)
    """Indices of the finished samples, in the order in which they finished."""
    cohort: tuple[tuple[int, float], ...] = ()
    """(index, reward) of the first ``quorum`` samples to finish, from which all baselines are computed; empty before
    the group is READY."""
    cohort_values: Extras = NO_EXTRAS
    """Named parts of the cohort's rewards, and their values per turn, float32 [k, rows, values] by name; see
    :func:`april.core.row_rewards.cohort_values`."""
    unfinished: int = field(init=False)
    """Number of held samples that are not finished."""
    held: int = field(init=False)
    """Number of samples that are neither delivered nor dropped; the group is settled when this is 0."""
    delivered: int = 0
    """Number of samples that were delivered in batches."""
    oldest: PolicyVersion | None = None
    """Version of the oldest token of the held samples; None without tokens. Valid while ``oldest_known`` is True."""
    oldest_known: bool = False
    filter_failures: int = 0
    put_aside: bool = False
    """True once a step of tail batching ended without the group, which had begun: a later step, with only such groups,
    generates it again."""
    slack: int = NO_DEADLINE
    """Number of batches after which the group is too old, when they were last counted."""

    def __post_init__(self, size: int) -> None:
        self.samples = [Sample(SampleId(self.id, i), self) for i in range(size)]
        self.unfinished = self.held = size
        self.quorum = self.quorum or size

    @property
    def owner(self) -> SampleId:
        """The id under which the log has changes of the group; ``RolloutCore.story`` shows them for each sample."""
        return SampleId(self.id, WHOLE_GROUP)

    @property
    def complete(self) -> bool:
        return len(self.finishers) >= self.quorum

    @property
    def first_finishers(self) -> list[Sample]:
        """The first ``quorum`` samples to finish, sorted by index; these are passed to the filter."""
        return [self.samples[i] for i in sorted(self.finishers[: self.quorum])]

    def fix_cohort(self) -> None:
        """Set the cohort, from which all baselines are computed, to the first ``quorum`` samples that finished."""
        first = self.finishers[: self.quorum]
        self.cohort = tuple((i, self.samples[i].reward) for i in first)
        self.cohort_values = cohort_values(self.samples[i].row_rewards for i in first)

    @property
    def members(self) -> list[Sample]:
        """The samples that are neither delivered nor dropped."""
        return [s for s in self.samples if s.state not in SETTLED]

    @property
    def ready(self) -> bool:
        return self.state is GroupState.READY

    def __repr__(self) -> str:
        return f"<Group {self.id} {self.state} unfinished={self.unfinished}/{len(self.samples)} quorum={self.quorum}>"


@dataclass(slots=True, eq=False, kw_only=True)
class Evaluation:
    """The state of one evaluation; its prompts become groups when it begins."""

    request: EvaluationRequested
    after_update: int = 0
    """Number of the last weight update that was requested earlier and must run first; 0 if there was none."""
    version: PolicyVersion | None = None
    """Policy version of the tokens; None until the evaluation begins."""
    groups: tuple[Group, ...] = ()
    unfinished: int = 0
    unstarted: deque[Sample] = field(default_factory=deque)
    """Samples beyond ``functions_at_once``; they are not queued yet, because they would block the queue."""
    running_functions: int = 0
    """Number of rollout functions that run or are queued to start."""
    in_flight: int = 0
    last_engine_error: tuple[str, AttemptFailure] | None = None
    """Error and kind of the latest attempt that broke off."""
    failure: tuple[str, AttemptFailure | None] | None = None
    tokens: Ledger = field(default_factory=Ledger)
    counters: Counter[str] = field(default_factory=Counter)

    def fail(self, error: str, kind: AttemptFailure | None = None, sample: Sample | None = None) -> None:
        """Record the error that failed the evaluation; only the first error counts.

        ``sample`` is the sample whose function or prompt failed; None if an engine failed.
        """
        if self.failure is None:
            where = "" if sample is None else f"evaluation prompt {sample.key.group}: "
            self.failure = f"{where}{error}", kind


State = TypeVar("State", SampleState, CallState, AttemptState, GroupState)


class Stateful(Protocol[State]):
    """Protocol of objects whose changes of state are checked: samples, calls, attempts and groups."""

    state: State

    @property
    def owner(self) -> SampleId:
        """Id of the sample or group under which the log records the changes of state."""


LEGAL_TRANSITIONS: Mapping[StrEnum, tuple[StrEnum, ...]] = {
    SampleState.NEW: (
        SampleState.RUNNING,
        SampleState.NEW,  # the recorded tokens of a restarted sample are dropped
        SampleState.DROPPED,
    ),
    SampleState.RUNNING: (SampleState.SCORING, SampleState.NEW, SampleState.DROPPED),
    SampleState.SCORING: (SampleState.FINISHED, SampleState.NEW, SampleState.DROPPED),
    SampleState.FINISHED: (SampleState.LEASED, SampleState.NEW, SampleState.DROPPED),
    SampleState.LEASED: (),
    SampleState.DROPPED: (),
    CallState.QUEUED: (
        CallState.IN_FLIGHT,
        CallState.DONE,  # a restored call was saved with its last token, or the budget is used up
    ),
    CallState.IN_FLIGHT: (CallState.QUEUED, CallState.DONE),
    CallState.DONE: (),
    AttemptState.WANTED: (AttemptState.SILENT, AttemptState.DOUBTFUL, AttemptState.ABANDONED),
    AttemptState.SILENT: (AttemptState.DOUBTFUL, AttemptState.ABANDONED),
    AttemptState.DOUBTFUL: (AttemptState.ABANDONED,),
    AttemptState.ABANDONED: (),
    GroupState.OPEN: (GroupState.BEING_JUDGED, GroupState.READY),
    GroupState.BEING_JUDGED: (
        GroupState.READY,
        GroupState.BEING_JUDGED,  # the filter failed and is called again
        GroupState.OPEN,
    ),
    GroupState.READY: (GroupState.OPEN,),
}  # fmt: skip
"""Legal changes of state, by the state before; only ``CoreContext.change_state`` changes a state."""


class TimerKind(StrEnum):
    """Actions that a timer triggers when it fires."""

    ABORTS = "aborts"
    """Send aborts again, and fence attempts (end them without the engine) that did not end in time."""
    RETRY = "retry"
    """Ask a reward function or filter again."""
    OUTAGE = "outage"
    """Fail the step if there is still no usable engine."""
    REST = "rest"
    """Send requests again to an engine that was busy."""
    PROBE = "probe"
    """Probe a quarantined engine's health."""
    CHECK = "check"
    """Probe a working engine for its load and its weights."""


class Timer(NamedTuple):
    """Identifies a timer. A timer that fires has no effect unless the code that started it still waits for it."""

    kind: TimerKind
    number: int
    """Number that is unique among timers of its kind."""
    engine: str = ""
    """Name of the engine, for REST, PROBE and CHECK; else empty."""
