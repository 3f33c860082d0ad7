"""Defines the events, which are the inputs of :meth:`april.core.rollout_core.RolloutCore.handle`.

Only events change a core. Terms: a *call* is one ``llm.generate`` of a rollout function; an *attempt* is one engine
request, and a call may need several; a *chain* is one conversation of a sample; a *tape* is the record of the tokens
that a chain or an attempt has received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from april.core.attachments import Placed
from april.core.row_rewards import RowReward
from april.core.sampling import SamplingParams
from april.core.settings import EngineLimits
from april.core.tape import NO_COUNTS, AttemptCounts, Int32
from april.core.types import Attempt, AttemptFailure, DropReason, EngineFinish, Prompt, Refill, SampleId, Timer
from april.core.types import EvaluationRequested as EvaluationRequested
from april.core.types import Event as Event
from april.core.versions import PolicyVersion


class StepRequested(Event, frozen=True):
    """The trainer asks for a batch."""


class PromptsDrawn(Event, frozen=True):
    """Answers DrawPrompts. ``exhausted`` is True if the source has ended; ``error`` says why a prompt is unusable."""

    prompts: Sequence[Prompt]
    exhausted: bool
    error: str | None = None


class Continued(Event, frozen=True):
    """Answers Continue: the core may start more of the waiting work."""


NEW_CHAIN = -1


class CallMade(Event, frozen=True):
    """A rollout function called ``llm.generate``.

    ``token_ids`` is the conversation to continue; None means that the sample's conversation is continued unchanged.
    """

    sample: SampleId
    sampling: SamplingParams
    token_ids: Int32 | None = None
    number: int = 0
    """Number by which the rollout function knows the call."""
    any_chain: bool = False
    """True if ``token_ids`` may be any conversation: if it extends a chain, that chain is continued; otherwise a new
    chain begins."""
    attached: tuple[Placed, ...] = ()
    """Attachments of ``token_ids``, in order; unused if ``token_ids`` is None."""
    chain: int | None = None
    """Number of the chain to continue, used with ``any_chain``. NEW_CHAIN begins a new chain; None means that april
    finds the chain by its tokens."""
    overridden: bool = False
    """True if a client asked for other sampling parameters and ``sampling`` was used instead."""


class CallUnheard(Event, frozen=True):
    """Nobody will read the answer of the call with this ``number``; its tokens are dropped."""

    sample: SampleId
    number: int


class AnswerChecked(Event, frozen=True):
    """An agent's client demanded an answer in some form, such as JSON; ``kept`` says whether the answer has it."""

    kept: bool


class StopFound(Event, frozen=True):
    """The text of a running attempt contains a stop string; ``counts`` of the attempt's last event says so again."""

    attempt_id: str


class AttemptStalled(Event, frozen=True):
    """The engine has sent no token for an attempt for too long."""

    attempt_id: str
    seconds: float = 0.0


class AttemptEnded(Event, frozen=True):
    """An attempt has ended; ``fenced`` means that april closed its stream, as the engine did not end it in time."""

    attempt_id: str
    finish: EngineFinish
    counts: AttemptCounts = NO_COUNTS
    fenced: bool = False

    @classmethod
    def of(cls, attempt: Attempt, finish: EngineFinish, *, fenced: bool = False) -> Self:
        """Return the event for the end of this attempt, with the counts of its tape.

        If the attempt ends with LENGTH but its text contains a stop string, ``finish`` is STOP.
        """
        if finish is EngineFinish.LENGTH and attempt.tape.stopped:
            finish = EngineFinish.STOP
        return cls(attempt.id, finish, attempt.counts(), fenced)


class AttemptFailed(Event, frozen=True, kw_only=True):
    """An attempt broke off. ``rejected`` counts received tokens that were corrupt or of unknown weights.

    ``counts`` excludes the rejected tokens. ``busy_s`` is the time in seconds that a busy engine asks april to wait; 0
    if the engine names no time.
    """

    attempt_id: str
    error: str
    kind: AttemptFailure = AttemptFailure.BROKE_OFF
    rejected: int = 0
    busy_s: float = 0.0
    counts: AttemptCounts = NO_COUNTS

    @classmethod
    def of(cls, attempt: Attempt, error: str, kind: AttemptFailure = AttemptFailure.BROKE_OFF, **how: Any) -> Self:
        return cls(attempt_id=attempt.id, error=error, kind=kind, **how, counts=attempt.counts())


class SampleReturned(Event, frozen=True):
    """A rollout function returned."""

    sample: SampleId


class TokensUnused(Event, frozen=True):
    """``count`` tokens were received that belong to no attempt's tape; they are dropped for ``reason``."""

    count: int
    reason: DropReason


class SampleFailed(Event, frozen=True):
    """A rollout or reward function raised, or returned something invalid.

    If a retry would probably fail, too, ``kind`` is a text that failures with the same exception and line share;
    otherwise it is empty.
    """

    sample: SampleId
    error: str
    kind: str = ""


class FunctionLost(Event, frozen=True):
    """A rollout function was lost, because the process in which it ran died.

    StartSample starts the function again. In training, the calls that it then repeats get the recorded tokens; in an
    evaluation, the tokens of these calls are generated again.
    """

    sample: SampleId


class Scored(Event, frozen=True):
    """Rewards of some samples of one group have been computed."""

    group: int
    rewards: Sequence[tuple[int, float]]
    """(sample index, reward) pairs; rewards are rounded to float32, as in batches."""
    row_rewards: Sequence[tuple[RowReward, ...]] = ()
    """For each pair, the full rewards (``Sample.row_rewards``); empty if all rewards are plain numbers."""


class GroupJudged(Event, frozen=True, kw_only=True):
    """The filter has judged a scored group, or failed with ``error``.

    ``judgement`` is as in JudgeGroup, ``kind`` as in SampleFailed.
    """

    group: int
    judgement: int
    keep: bool
    error: str | None = None
    kind: str = ""


class TimerFired(Event, frozen=True):
    """A timer that StartTimer started has fired."""

    timer: Timer


class PauseRequested(Event, frozen=True):
    """Generation must stop, for example for a change of weights; evaluations that have begun end first."""


class Resumed(Event, frozen=True):
    """Generation may go on."""


class UpdateRequested(Event, frozen=True, kw_only=True):
    """The trainer has new weights for the engines; UpdateEnded reports the result."""

    update: int
    """Number of the update, unique, from 1."""
    version: PolicyVersion | None = None
    """Version of the weights; None means the next version."""
    path: str | None = None
    """Directory to load from; None if the trainer transfers the weights, or if they are in place already."""
    content: str = ""
    """Content hash of the directory; empty if the process that asked for the update cannot read the directory."""
    adapter: bool = False
    """True if the directory holds an adapter (LoRA) for the full weights that the engines have."""
    transfers: bool = False
    """True if the trainer transfers the weights, once HandOver says that the engines are paused."""
    sends: bool = False
    """True if april itself transfers the weights, and so knows for each engine whether that succeeded."""
    restores: bool = False
    """True if the weights belong to a saved state that is loaded during a pause (PauseRequested)."""
    held: bool = False
    """True if the update was requested during a pause and must run before the pause ends."""
    trained: int | None = None
    """Id of the last batch that these weights were trained on; it is committed together with all earlier batches. None
    if there is no batch to commit."""


class UpdateCancelled(Event, frozen=True):
    """An update is cancelled. It still happens if engines are already loading.

    If the trainer's transfer has begun, HandedOver still reports its end.
    """

    update: int


@dataclass(frozen=True, slots=True)
class TransferFailure:
    """Describes an engine that did not get the weights that were sent to it."""

    engine: str
    why: str
    torn: bool
    """True if the engine may have a part of the new weights; False if it still has the old weights."""


class HandedOver(Event, frozen=True):
    """The trainer's transfer of weights has ended, or has broken off with ``error``."""

    update: int
    error: str | None = None
    not_given: tuple[TransferFailure, ...] | None = None
    """Engines that did not get the new weights; None if the state of the engines is unknown. Without ``error``, all
    other engines have the new weights; with ``error``, all other engines have the old weights."""


class Restored(Event, frozen=True):
    """A saved state has been restored into the core."""

    update: int


class CallResult(StrEnum):
    """Results of a pause, load or resume call to an engine."""

    DONE = "done"
    REFUSED = "refused"
    """The engine answered with an error."""
    BUSY = "busy"
    """The engine accepts no calls for now; nothing has changed."""
    OTHER_CONTENT = "other content"
    """The version cannot be loaded any more, as the directory holds other weights or the server was restarted; the
    engine loaded nothing."""
    UNREACHABLE = "unreachable"
    """The engine did not answer in time."""


class EngineCallEnded(Event, frozen=True):
    """Answers PauseEngine, LoadEngine and ResumeEngine, with the same ``call``."""

    engine: str
    call: int
    result: CallResult
    error: str = ""
    content: str = ""
    """Content hash of the directory that was loaded; empty if no directory was loaded or its hash is unknown."""
    silent: tuple[str, ...] = ()
    """Ids of attempts that have no token yet, from a paused engine that keeps its requests."""


class EngineProbed(Event, frozen=True, kw_only=True):
    """Answers ProbeEngine, with the same ``probe``."""

    engine: str
    probe: int
    answered: bool
    ok: bool = False
    current: bool = False
    """True if the engine still has the weights that april gave it last."""
    detail: str = ""
    load: LoadReported | None = None


class WeightsWritten(Event, frozen=True):
    """An engine's weights were overwritten while it generated, outside of any update."""

    error: str


class EnginesAsked(Event, frozen=True):
    """All engines must be probed now for their weights, before an evaluation."""


class EnginesJoined(Event, frozen=True):
    """Engines join, for the first time or again; ``EngineTable.unfit`` must have returned None for each.

    An engine that joins again must have no attempts in flight (they must have failed before); its open calls are void.
    """

    engines: Sequence[EngineLimits]


class EngineLeaving(Event, frozen=True):
    """An engine is about to leave and gets no more requests; with ``cut`` its requests move to other engines now."""

    engine: str
    cut: bool


class EnginesLeft(Event, frozen=True):
    """Engines have left; they have no attempts in flight."""

    names: Sequence[str]


class LoadReported(Event, frozen=True, kw_only=True):
    """An engine reported its load: requests running and waiting, used share of key-value memory, preemptions so far."""

    engine: str
    running: int
    waiting: int
    kv_usage: float
    preemptions: int


class EvaluationCancelled(Event, frozen=True):
    """An evaluation is cancelled; its requests are ended, and EvaluationFailed follows."""

    evaluation: int


class BatchCommitted(Event, frozen=True):
    """The trainer is done with this batch; no weight update follows from it."""

    batch_id: int


class StalenessLowered(Event, frozen=True):
    """Prompts drawn from now on must be trained within ``bound`` weight updates; earlier prompts keep their limit."""

    bound: int


class WorkChanged(Event, frozen=True, kw_only=True):
    """Settings named in ``CoreSettings.auto`` get new values; None leaves a setting as it is."""

    over_sampling_batch_size: int | None = None
    refill: Refill | None = None
    max_in_flight: int | None = None
    group_quorum: float | None = None


class SourceExtended(Event, frozen=True):
    """The prompt source had ended and now has prompts again."""
