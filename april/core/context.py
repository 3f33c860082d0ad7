"""Holds the state that all parts of the core share, with helpers to change states and keep a log of the changes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

from april.core.abort_controller import AbortController
from april.core.attempt_book import AttemptBook
from april.core.commands import Command, StartTimer
from april.core.completion_monitor import CompletionMonitor
from april.core.engine_table import EngineTable
from april.core.events import Event, WorkChanged
from april.core.ledger import Ledger, LengthLedger
from april.core.over_sampler import OverSampler
from april.core.partial_buffer import Leases, PartialBuffer
from april.core.places import Places
from april.core.row_rewards import RewardLayout
from april.core.settings import CoreSettings, EngineLimits
from april.core.types import (
    LEGAL_TRANSITIONS,
    SETTLED,
    WHOLE_GROUP,
    Attempt,
    Evaluation,
    Group,
    GroupState,
    Sample,
    SampleId,
    SampleState,
    State,
    Stateful,
    Timer,
    TimerKind,
    Work,
)
from april.core.versions import VersionClock
from april.errors import InvariantError

HISTORY_EVENTS = 100_000
"""Maximum length of the log: several steps of a large run, which take 16 to 32 MB (measured)."""


class CoreContext:
    """Holds the parts, ledgers and counters of one run; ``out`` collects the commands of the present event."""

    def __init__(self, settings: CoreSettings, engines: Sequence[EngineLimits], clock: VersionClock) -> None:
        self.settings = settings
        self.clock = clock
        self.engines = EngineTable(
            engines, clock.current, settings.on_weight_update, settings.attachments, settings.extras
        )
        self.over_sampler = OverSampler(settings)
        self.monitor = CompletionMonitor(settings.target)
        self.aborts = AbortController(settings.abort_deadline_s, settings.abort_resend_s)
        self.leases = Leases(clock, settings.max_staleness)
        self.buffer = PartialBuffer(settings, self.leases)
        self.attempts = AttemptBook(settings, self.engines)
        self.places = Places(settings.max_in_flight, settings.evaluation_share, self.attempts)
        self.tokens = Ledger()
        self.prompts = Ledger()
        self.lengths = LengthLedger()
        self.batches = 0
        """Number of batches delivered, which is also the id of the next batch."""
        self.groups_drawn = 0
        self.counters: Counter[str] = Counter()
        """Totals over the run, by name; a batch's metrics say by how much they grew in its step."""
        self.event_number = 0
        self.log: deque[tuple[int, int, int, str]] = deque(maxlen=HISTORY_EVENTS)
        """(Event number, group, sample index, what happened); flat tuples, which the garbage collector skips."""
        self.changed: list[set[int]] = []
        """One set for each snapshot that is being collected in parts; the number of a changed group is added to all."""
        self.out: list[Command] = []
        self.last_timer = 0
        self.retries: dict[int, Sample | tuple[Group, int]] = {}
        """By number of the retry timer: the sample to score again, or (group, judgement number) to judge again."""
        self.urgent: dict[int, Group | Sample] = {}
        """Groups and samples that the latest plan made urgent, and later replacements of such samples, by ``id()``."""
        self.failure: str | None = None
        """Reason why the step cannot continue; None if it can."""
        self.reward_layout: RewardLayout = {}
        """Names and shapes that all rewards of the run have; empty before the first reward."""
        self.evaluations: dict[int, Evaluation] = {}
        self.evaluation_groups: dict[int, Group] = {}
        """Groups of running evaluations by number."""

    def change(self, event: WorkChanged) -> None:
        """Change the settings for the amount of work; groups that were drawn before keep their quorum.

        Raises:
            InvariantError: one of these settings is not in ``auto``, so it must not change.
        """
        work = {name: value for name in Work if (value := getattr(event, name)) is not None}
        if fixed := work.keys() - set(self.settings.auto):
            raise InvariantError(f"{', '.join(sorted(fixed))} cannot change while a run goes on")
        changed = {str(name): value for name, value in work.items()}
        self.settings = self.over_sampler.settings = self.buffer.settings = replace(self.settings, **changed)
        self.places.change(self.settings.max_in_flight)

    def note_change(self, event: Event) -> None:
        """Add the group that an event names to :attr:`changed`; :meth:`change_state` adds all other changed groups."""
        attempt = self.attempts.get(getattr(event, "attempt_id", ""))
        sample = getattr(event, "sample", None) if attempt is None else attempt.sample.id
        number = getattr(event, "group", None) if sample is None else sample.group
        if number is not None:
            for numbers in self.changed:
                numbers.add(number)

    def group(self, number: int) -> Group | None:
        """Return a held group of training or of an evaluation; None if there is none with this number."""
        return (self.evaluation_groups if number < 0 else self.buffer.groups).get(number)

    def ledger(self, sample: Sample) -> Ledger:
        """Return the ledger that counts the sample's tokens: that of training, or that of its evaluation."""
        return self.tokens if sample.evaluation is None else sample.evaluation.tokens

    def counts(self, sample: Sample) -> Counter[str]:
        """Return the counters for the sample: those of training, or those of its evaluation."""
        return self.counters if sample.evaluation is None else sample.evaluation.counters

    def sample(self, sample_id: SampleId) -> Sample | None:
        """Return a held sample; if it is settled (delivered or dropped), count a late event and return None.

        Raises InvariantError if no such sample was ever drawn.
        """
        group = self.group(sample_id.group)
        if group is not None and (sample := group.samples[sample_id.index]).state not in SETTLED:
            return sample
        if sample_id.group >= self.groups_drawn:
            raise InvariantError(f"there is no sample {sample_id}")
        self.counters["late_events"] += sample_id.group >= 0
        return None

    def acting_sample(self, sample_id: SampleId, what: str, *, asks: bool = False) -> Sample | None:
        """Return the sample whose rollout function did ``what``; its reserved place (see ``Places``) is released.

        Returns None for a settled sample. Raises InvariantError if the function is not running or, without ``asks``,
        if it waits for tokens and so cannot do anything.
        """
        sample = self.sample(sample_id)
        if sample is None:
            return None
        if sample.state is not SampleState.RUNNING or (sample.has_open_call and not asks):
            raise self.impossible_event(sample.id, f"{what} (it is {sample!r})")
        self.places.release(sample)
        return sample

    def change_state(self, thing: Stateful[State], state: State, why: str) -> None:
        """Change the state of a sample, call, attempt or group, and log why; all changes of state go through here."""
        if state not in LEGAL_TRANSITIONS[thing.state]:
            raise self.impossible_event(thing.owner, f"cannot go from {thing.state} to {state} ({why})")
        thing.state = state
        group, index = thing.owner
        for numbers in self.changed:
            numbers.add(group)
        self.log.append((self.event_number, group, index, why))

    def change_group_state(self, group: Group, state: GroupState, why: str) -> None:
        """Change the state of a group, or enter the same state again, and record the event number."""
        self.change_state(group, state, why)
        group.since = self.event_number

    def note(self, sample: Sample, what: str) -> None:
        self.log.append((self.event_number, *sample.id, what))

    def story(self, sample: SampleId) -> str:
        """Return the logged changes of this sample and its group as text, one per line, oldest first."""
        own, all_of_it = tuple(sample), (sample[0], WHOLE_GROUP)
        lines = [f"  event {n}: {what}" for n, *of, what in self.log if tuple(of) in (own, all_of_it)]
        return "\n".join([f"history of {sample}:", *(lines or ["  nothing remembered"])])

    def impossible_event(self, sample: SampleId, what: str) -> InvariantError:
        return InvariantError(f"{sample} {what}; {self.story(sample)}")

    def start_timer(self, kind: TimerKind, seconds: float, engine: str = "", why: str = "") -> int:
        self.last_timer += 1
        self.out.append(StartTimer(Timer(kind, self.last_timer, engine), seconds, why))
        return self.last_timer

    def engine_failed(self, name: str, *, at_once: bool = True) -> None:
        """Count an engine's failure; if that quarantines the engine, start the timer of its first probe."""
        seconds = self.engines.count_failure(name, at_once=at_once)
        if seconds is not None:
            state = self.engines.states[name]
            state.open_probe = 0  # the answer to an earlier probe no longer counts
            why = f"engine {name} is quarantined until a probe finds it healthy"
            state.probe_timer = self.start_timer(TimerKind.PROBE, seconds, name, why)

    def stop(self, attempts: list[Attempt], *, sweep: bool = False) -> None:
        """Ask engines to end attempts.

        ``sweep`` means that no attempt starts meanwhile, so that one abort may end everything at an engine.
        """
        new = self.aborts.new(attempts)
        of_evaluations = self.attempts.of_evaluations
        evaluating = sum([a.id in of_evaluations for a in new]) if of_evaluations else 0
        self.counters["aborted_attempts"] += len(new) - evaluating
        self.out += self.aborts.stop(new, self.engines.in_flight() if sweep else {})
