"""Lives of a trainer with hosts that join, die, hang, come back and repeat themselves, on virtual time.

Core, roster, desks and mirrors are real, and so are their frames. What hosts do, and the books that everything is
compared with, are kept here: every token with the engine and the weights that made it, every prompt with its end.
"""

from __future__ import annotations

import heapq
import itertools
import random
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from core_machine import EOS

from april.core import commands as do
from april.core import events as ev
from april.core.event_pump import EventPump
from april.core.sampling import SamplingParams
from april.core.settings import CoreSettings, EngineLimits
from april.core.state import RolloutCore
from april.core.tape import SegmentKind
from april.core.types import Attempt, EngineFinish, GenerationMode, Prompt, Refill, Sample, SampleId
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.processes import messages as wire
from april.processes.desk import HostDesk
from april.processes.messages import ProtocolError
from april.processes.mirror import Forgotten, Mirror
from april.processes.remote_hosts import Roster

SAMPLING = SamplingParams(40)
DEADLINE_S = 8.0
"""A host that is silent for so long is lost."""


LIES = [b"\xc1", wire.encode([wire.Ended("x" * 32, "tired")])]


def chance(*what: object) -> float:
    """In [0, 1), the same for the same thing in every process that does it."""
    return zlib.crc32(repr(what).encode()) / 2**32


class Work:
    """What a host has to do, slowly; ``post`` takes its events, ``names`` are its engines."""

    def __init__(
        self, life: ProtocolLife, names: list[str], post: Callable[[ev.Event], None], host: HostProcess | None = None
    ) -> None:
        self.life, self.post, self.host = life, post, host
        self.weights = dict.fromkeys(names, FIRST_VERSION)
        """What a process has that was just started; then what it has loaded."""
        self.running: dict[str, Attempt] = {}
        self.functions: set[SampleId] = set()
        self.over = False
        self.calls: dict[str, int] = {}

    def execute(self, command: Any) -> None:
        """Carry out a command of the core's."""
        getattr(self, f"on_{type(command).__name__}")(command)

    def later(self, longest: float, action: Callable[[], None]) -> None:
        """Some time from now, unless all is over then."""
        self.life.later(longest, lambda: None if self.over else action())

    # ---------------------------------------------------------------- engines

    def on_Submit(self, command: do.Submit) -> None:
        """Its tokens come in a few portions; where they end, is the response's own."""
        attempt = command.attempt
        assert self.weights[attempt.engine] == (self.life.core.clock if self.host is None else self.host.mirror).current
        self.running[attempt.id] = attempt
        self.later(2.0, lambda: self.portion(attempt))

    def portion(self, attempt: Attempt) -> None:
        """Some tokens, made by the weights that the engine really has."""
        if attempt.id not in self.running:
            return
        call, tape, version = attempt.call, attempt.tape, self.weights[attempt.engine]
        sample, count = call.sample, self.life.rng.randint(1, 5)
        for _ in range(count):
            at = len(sample.tape) + tape.count
            last = at - call.start >= 1 + int(30 * chance(sample.key, call.start, "length") ** 3)
            token = EOS if last else 100 + int(1000 * chance(sample.key, at))
            tape.append(np.array([token], np.int32), np.array([-chance(attempt.id, at)], np.float32), version)
            self.life.made[attempt.id].append((token, version))
            if last or tape.count == attempt.sampling.max_tokens:
                self.end(attempt, EngineFinish.STOP if last else EngineFinish.LENGTH)
                return
        self.later(2.0, lambda: self.portion(attempt))

    def end(self, attempt: Attempt, finish: EngineFinish, *, fenced: bool = False) -> None:
        """An attempt is over, once."""
        if self.running.pop(attempt.id, None) is not None:
            self.post(ev.AttemptEnded.of(attempt, finish, fenced=fenced))

    def on_Abort(self, command: do.Abort) -> None:
        """Soon, or so late that the core will not wait for it."""
        for attempt in [self.running[i] for i in command.attempt_ids if i in self.running]:
            late = 40.0 if self.life.rng.random() < 0.1 else 1.0
            self.later(late, lambda a=attempt: self.end(a, EngineFinish.ABORT))  # type: ignore[misc]

    def on_Fence(self, command: do.Fence) -> None:
        """At once."""
        for attempt in [self.running[i] for i in command.attempt_ids if i in self.running]:
            self.end(attempt, EngineFinish.ABORT, fenced=True)

    def call_ended(self, command: Any) -> None:
        """A call of an engine is done after a while; the next one ends it."""
        self.calls[command.engine] = command.call

        def done() -> None:
            if self.calls[command.engine] == command.call:
                self.post(ev.EngineCallEnded(command.engine, command.call, ev.CallResult.DONE))

        self.later(1.0, done)

    on_PauseEngine = on_ResumeEngine = call_ended

    def on_LoadEngine(self, command: do.LoadEngine) -> None:
        """New weights, while nothing runs."""
        assert not any(a.engine == command.engine for a in self.running.values())
        self.weights[command.engine] = command.version
        self.call_ended(command)

    def on_ProbeEngine(self, command: do.ProbeEngine) -> None:
        """It is well."""
        answer = ev.EngineProbed(engine=command.engine, probe=command.probe, answered=True, ok=True, current=True)
        self.later(1.0, lambda: self.post(answer))

    # ---------------------------------------------------------------- functions

    def on_StartSample(self, command: do.StartSample) -> None:
        """One turn or two."""
        sample = command.sample
        self.functions.add(sample.id)
        self.if_it_runs(sample, lambda: self.post(ev.CallMade(sample.id, SAMPLING)))

    def if_it_runs(self, sample: Sample, action: Callable[[], None]) -> None:
        """Later, unless it was cancelled then."""
        self.later(1.5, lambda: action() if sample.id in self.functions else None)

    def on_CallCompleted(self, command: do.CallCompleted) -> None:
        """The function has what the engines made, and nothing else; then a tool speaks, or it returns."""
        call, sample = command.call, command.call.sample
        self.check_tape(sample)
        if call.start == 0 and chance(sample.key, "turns") < 0.5:
            tool = np.array([7000 + sample.id.index, 7001], np.int32)
            conversation = np.concatenate((sample.group.prompt.token_ids, sample.tape.tokens[: call.end], tool))
            if len(conversation) < len(sample.group.prompt.token_ids) + self.life.settings.max_response_len:
                self.if_it_runs(sample, lambda: self.post(ev.CallMade(sample.id, SAMPLING, conversation)))
                return
        self.if_it_runs(sample, lambda: self.returns(sample))

    def returns(self, sample: Sample) -> None:
        """Or raises."""
        self.functions.discard(sample.id)
        if self.life.rng.random() < self.life.raises:
            self.post(ev.SampleFailed(sample.id, "raised"))
        else:
            self.post(ev.SampleReturned(sample.id))

    def on_CancelSample(self, command: do.CancelSample) -> None:
        """Its function, or its reward's, ends."""
        self.functions.discard(command.sample.id)

    def on_ScoreSample(self, command: do.ScoreSample) -> None:
        """The reward function sees what will be delivered."""
        self.score([command.sample])

    def on_ScoreGroup(self, command: do.ScoreGroup) -> None:
        """The same for a group."""
        self.score(list(command.group.members))

    def score(self, samples: list[Sample]) -> None:
        """After a while, unless the first of them was cancelled."""
        for sample in samples:
            self.check_tape(sample)
        self.functions.add(samples[0].id)
        rewards = [(s.id.index, chance(s.id, "reward")) for s in samples]

        def scored() -> None:
            self.functions.discard(samples[0].id)
            self.post(ev.Scored(samples[0].id.group, rewards))

        self.if_it_runs(samples[0], scored)

    def check_tape(self, sample: Sample) -> None:
        """What a host knows of a response is what engines have made, and all that the core has."""
        self.life.check_segments(sample.id, sample.tape.tokens, sample.tape.segments)
        host = self.host
        if host is not None and host.knows_of(sample.id):
            group = self.life.core.context.group(sample.id.group)
            assert group is not None
            assert group.samples[sample.id.index].tape.tokens.tolist() == sample.tape.tokens.tolist()

    def on_JudgeGroup(self, command: do.JudgeGroup) -> None:
        """The filter sees rewards."""
        group = command.group
        assert [s.reward for s in group.first] == [np.float32(chance(s.id, "reward")) for s in group.first]
        answer = ev.GroupJudged(
            group=group.id, judgement=command.judgement, keep=chance(group.id, "filter") < 0.8
        )
        self.later(1.5, lambda: self.post(answer))


class HostProcess:
    """One life of a host: its mirror, its work, and a link that keeps the order and takes its time."""

    def __init__(self, life: ProtocolLife, name: str, engines: list[str], *, functions: bool) -> None:
        self.life, self.name, self.engines = life, name, engines
        limits = [EngineLimits(f"{name}/{e}", 200, life.rng.choice([None, 3]), (EOS,)) for e in engines]
        self.desk = HostDesk(life.core, name, limits, functions=functions, failed=life.call_failed)
        self.mirror = Mirror(life.welcome(name))
        self.work = Work(life, [e.name for e in limits], self.posted, self)
        self.hung = False
        self.missed: list[bytes] = []
        self.down_s = self.up_s = 0.0

    def knows_of(self, sample: SampleId) -> bool:
        """The core still waits for this run of the sample's function."""
        run, known = self.mirror._runs.get(sample), self.desk._known.get(sample)
        return self.desk in self.life.roster.desks and run is not None and known is not None and known.run == run

    def posted(self, event: ev.Event) -> None:
        """An event of its work."""
        self.mirror.post(event)
        self.send()

    def send(self) -> None:
        """What it has to say is on its way, perhaps twice."""
        if self.hung or (frame := self.mirror.take()) is None:
            return
        for _ in range(2 if self.life.rng.random() < self.life.repeats else 1):
            self.up_s = self.life.at(self.up_s, lambda: self.life.heard(self, frame))

    def told(self, frame: bytes) -> None:
        """Something of the core's process is on its way."""
        self.down_s = self.life.at(self.down_s, lambda: self.hear(frame))

    def hear(self, frame: bytes) -> None:
        """It has come."""
        if self.work.over:
            return
        if self.hung:
            self.missed.append(frame)
            return
        for item in self.mirror.receive(frame):
            if isinstance(item, Forgotten):
                self.work.functions.difference_update(item)
            elif not isinstance(item, (wire.AskTapes, wire.AskQuiet, wire.Goodbye)):
                self.work.execute(item)
        self.send()

    def beat(self) -> None:
        """It lives."""
        if not self.work.over:
            if not self.hung:
                self.mirror.say(wire.Heartbeat())
                self.send()
            self.life.later(DEADLINE_S / 3, self.beat)

    def wakes_up(self) -> None:
        """What it had to say while it hung goes out; whether anybody still listens, it does not know."""
        self.hung = False
        missed, self.missed = self.missed, []
        for frame in missed:
            self.hear(frame)
        self.send()


class ProtocolLife:
    """One life of a trainer, chosen by a seed; ``run`` is all of it."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.now, self.heap, self.tick = 0.0, [], itertools.count()  # type: ignore[var-annotated]
        self.raises, self.repeats = rng.choice([0.0, 0.05]), rng.choice([0.0, 0.1, 0.5])
        self.functions_run = rng.random() < 0.5
        n, samples = rng.randint(1, 3), rng.choice([1, 2, 4])
        self.settings = CoreSettings(
            rollout_batch_size=n, n_samples_per_prompt=samples, over_sampling_batch_size=n * rng.choice([1, 2]),
            max_response_len=rng.choice([30, 80]), max_in_flight=rng.choice([2, 8, 24]),
            refill=rng.choice(list(Refill)), generation=rng.choice(list(GenerationMode)),
            max_staleness=rng.choice([1, 3]), has_filter=rng.random() < 0.3, max_attempt_failures=99,
            group_quorum=rng.choice([1.0, 0.75]) if samples == 4 else 1.0,
            max_failed_groups=99, max_filtered_groups=99, outage_deadline_s=1e9,
        )  # fmt: skip
        local = [EngineLimits("e", 200, 4, (EOS,))]
        self.core = RolloutCore(self.settings, local, check=True)
        self.here = Work(self, ["e"], lambda e: self.post(e))
        self.made: defaultdict[str, list[tuple[int, PolicyVersion]]] = defaultdict(list)
        self.hosts: dict[str, HostProcess] = {}
        self.to_send: dict[HostDesk, None] = {}
        self.names: dict[HostDesk, HostProcess] = {}
        self.settled: Counter[int] = Counter()
        """Samples per prompt that were delivered or dropped."""
        self.dropped: Counter[str] = Counter()
        self.batches: list[Any] = []
        self.updates = self.prompts_drawn = self.lost_hosts = self.joined = self.evaluations = 0
        self.prompts = 24
        self.ended = self.updating = self.evaluates = False
        work = dict.fromkeys(WORK, self.here.execute)
        if not self.functions_run:
            work[do.StartSample] = lambda c: self.post(ev.CallMade(c.sample.id, SAMPLING))
            work[do.CallCompleted] = lambda c: self.post(ev.SampleReturned(c.call.sample.id))
        self.roster = Roster(
            self.core, work, functions_run=self.functions_run, post=lambda e: self.post(e),
            failed=self.call_failed, collected=lambda desk: self.to_send.update({desk: None}),
            deadline_s=DEADLINE_S,
        )  # fmt: skip
        nothing = dict.fromkeys([do.Warn, do.Paused, do.HandOver, do.Restore], lambda c: None)
        self.pump = EventPump(self.core, {
            **nothing, **self.roster.executors,
            do.DrawPrompts: self.draw, do.Deliver: self.deliver, do.ReportDrop: self.report_drop,
            do.StartTimer: lambda c: self.at(self.now + c.seconds, lambda: self.post(ev.TimerFired(c.timer)), 0.0),
            do.UpdateEnded: self.update_ended, do.EndOfData: self.end_of_data, do.Fail: self.fail,
            do.EvaluationDone: self.evaluation_done, do.EvaluationFailed: self.evaluation_failed,
        })  # fmt: skip

    # ---------------------------------------------------------------- time and the network

    def at(self, earliest: float, action: Callable[[], None], longest: float = 1.0) -> float:
        """Not before ``earliest``, nor before now; returns when."""
        when = max(self.now, earliest) + self.rng.random() * longest
        heapq.heappush(self.heap, (when, next(self.tick), action))
        return when

    def later(self, longest: float, action: Callable[[], None]) -> None:
        """Some time from now."""
        self.at(self.now, action, longest)

    def post(self, event: ev.Event) -> None:
        """An event for the core."""
        self.pump.post(event)

    def post_all(self, events: Iterator[ev.Event]) -> None:
        """The same for those of the roster, one after the other."""
        for event in events:
            self.post(event)

    def heard(self, host: HostProcess, frame: bytes) -> None:
        """A frame of a host is here; one of a connection that is over is nobody's."""
        if host.desk not in self.roster.desks:
            return
        self.roster.heard(host.desk, self.now)
        try:
            self.post_all(host.desk.receive(frame))
        except ProtocolError:
            if frame not in LIES:
                raise  # an honest host was not believed
            self.lose(host.desk, "it lies")

    def lose(self, desk: HostDesk, why: str, *, for_good: bool = False) -> None:
        """A connection is over, as far as the core's process knows."""
        if desk in self.roster.desks:
            self.lost_hosts += 1
            self.post_all(self.roster.lost(desk, why, for_good=for_good))

    def call_failed(self, call: int, error: BaseException) -> None:
        """What a weight update would raise."""

    def welcome(self, name: str) -> wire.Welcome:
        """What a host is told first."""
        s, table = self.settings, self.core.engines
        return wire.Welcome(
            name=name, version=self.core.clock.current, eos_token_ids=tuple(table.eos_token_ids),
            vocab_size=table.vocab_size, max_context=table.max_context, max_response_len=s.max_response_len,
            abort_resend_s=s.abort_resend_s, abort_deadline_s=s.abort_deadline_s, deadline_s=9.0,
            sampling=SAMPLING, any_temperature=True, allow_mismatch=False, function_timeout_s=None,
            stall_timeout_s=None,
        )  # fmt: skip

    # ---------------------------------------------------------------- what happens to hosts

    def joins(self, name: str) -> None:
        """A process of this name is there, for the first time or anew."""
        old = self.hosts.get(name)
        if old is not None:
            old.work.over = True
        engines = [f"e{i}" for i in range(int(chance(name, "engines") * 3))]
        host = HostProcess(self, name, engines, functions=chance(name, "functions") < 0.7)
        self.hosts[name], self.names[host.desk] = host, host
        self.joined += 1
        self.post_all(self.roster.join(host.desk, self.now))
        host.beat()

    def trouble(self) -> None:
        """Something happens to a host, again and again until the end."""
        if self.ended:
            return
        self.later(12.0, self.trouble)
        name = f"h{self.rng.randint(0, 3)}"
        host = self.hosts.get(name)
        if host is None or host.work.over:
            self.joins(name)
            return
        what = self.rng.choice(["dies", "hangs", "leaves", "lies", "nothing", "nothing"])
        if what == "dies":
            host.work.over = True
            self.later(DEADLINE_S, lambda: self.lose(host.desk, "killed"))
        elif what == "hangs":
            host.hung = True
            self.later(3 * DEADLINE_S, host.wakes_up)
        elif what == "leaves":
            host.work.over = True
            self.lose(host.desk, "it leaves", for_good=True)
        elif what == "lies":
            lie = self.rng.choice(LIES)
            self.later(1.0, lambda: self.heard(host, lie))

    def look_around(self) -> None:
        """Hosts that are silent are lost; those that have been, come back when they notice."""
        for desk in self.roster.overdue(self.now):
            self.lose(desk, "silent")
        for host in list(self.hosts.values()):
            if not host.work.over and not host.hung and host.desk not in self.roster.desks:
                host.work.over = True
                self.later(5.0, lambda name=host.name: self.joins(name))  # type: ignore[misc]
        if not self.ended:
            self.later(2.0, self.look_around)

    # ---------------------------------------------------------------- the trainer

    def draw(self, command: do.DrawPrompts) -> None:
        """As many as there are."""
        count = min(command.count, self.prompts - self.prompts_drawn)
        first, self.prompts_drawn = self.prompts_drawn, self.prompts_drawn + count
        prompts = [Prompt(np.array([1, 2, i], np.int32), {"i": i}, 0, i) for i in range(first, first + count)]
        self.post(ev.PromptsDrawn(prompts, exhausted=count < command.count))

    def report_drop(self, command: do.ReportDrop) -> None:
        """A prompt is given up."""
        self.dropped[str(command.reason)] += 1
        self.settled[command.group.prompt.position] += len(command.group.samples) - command.group.delivered
        self.roster.settled(command.group)

    def deliver(self, command: do.Deliver) -> None:
        """Each token against the books; then the trainer trains for a while."""
        batch = command.batch
        self.batches.append(batch)
        self.roster.delivered([s.id for s in batch.samples])
        for sample in batch.samples:
            self.settled[sample.prompt.position] += 1
            assert sample.prompt.data == {"i": sample.prompt.position}
            assert sample.staleness <= self.settings.max_staleness
            self.check_segments(sample.id, sample.tokens, sample.segments)
            assert sample.reward == np.float32(chance(sample.id, "reward"))
        self.later(6.0, self.update)

    def check_segments(self, sample: SampleId, tokens: Any, segments: Any) -> None:
        """Each token was made by the attempt, and under the weights, that its segment names."""
        used: Counter[str] = Counter()
        at = 0
        for segment in segments:
            assert segment.start == at
            at += segment.count
            part = tokens[segment.start : at].tolist()
            if segment.kind is SegmentKind.ENVIRONMENT:
                assert part[0] >= 7000
                continue
            first = used[segment.attempt_id]
            used[segment.attempt_id] += segment.count
            made = self.made[segment.attempt_id][first : first + segment.count]
            assert made == [(token, segment.version) for token in part], (sample, segment)
        assert at == len(tokens)

    def update(self) -> None:
        """New weights, made of the batches so far; again until they are in force."""
        if self.updating:
            self.later(3.0, self.update)
            return
        self.updating = True
        self.updates += 1
        self.post(ev.UpdateRequested(update=self.updates, path="weights", trained=self.batches[-1].id))

    def update_ended(self, command: do.UpdateEnded) -> None:
        """The next batch, or an evaluation before it."""
        self.updating = False
        if command.failed is not None:
            self.later(3.0, self.update)
        elif self.rng.random() < 0.1:
            self.evaluations += 1
            prompts = [Prompt(np.array([1, 2, 90 + i], np.int32), {"i": 90 + i}, 0, i) for i in range(2)]
            self.post(
                ev.EvaluationRequested(
                    evaluation=self.evaluations, prompts=prompts, n_samples=2, sampling=SAMPLING, seed=self.evaluations
                )
            )
            self.evaluates = True
        else:
            self.post(ev.StepRequested())

    def evaluation_done(self, command: do.EvaluationDone) -> None:
        """It has what it asked for; training goes on."""
        for group in command.groups:
            for sample in group.samples:
                self.check_segments(sample.id, sample.tape.tokens, sample.tape.segments)
        self.roster.evaluated(command.evaluation)
        self.post(ev.StepRequested())

    def evaluation_failed(self, command: do.EvaluationFailed) -> None:
        """By a function that raises, and by nothing that happens to hosts."""
        assert self.raises, command.error
        self.roster.evaluated(command.evaluation)
        self.post(ev.StepRequested())

    def end_of_data(self, command: do.EndOfData) -> None:
        """All is delivered."""
        assert command.kept == 0
        self.ended = True

    def fail(self, command: do.Fail) -> None:
        """Nothing in these lives may end a step."""
        raise AssertionError(command.error)

    # ---------------------------------------------------------------- all of it

    def run(self, most: int = 60_000) -> None:
        """Until every prompt is settled; the books agree then."""
        self.post(ev.StepRequested())
        self.trouble()
        self.look_around()
        handled = 0
        while self.heap and not self.ended:
            self.now, _, action = heapq.heappop(self.heap)
            action()
            while self.to_send:
                desk, _ = self.to_send.popitem()
                if (frame := desk.take()) is not None and desk in self.roster.desks:
                    self.names[desk].told(frame)
            handled += 1
            assert handled < most, f"it does not end: {self.core!r}"
        self.check_end()

    def check_end(self) -> None:
        """Every prompt once, every token accounted for."""
        core, n = self.core, self.settings.n_samples_per_prompt
        core.validate()
        assert self.ended
        assert not core.attempts
        assert core.tokens.held == 0
        assert core.tokens.observed == core.tokens.delivered + sum(core.tokens.dropped.values())
        assert core.tokens.observed <= sum(len(tokens) for tokens in self.made.values())
        assert self.settled == Counter(dict.fromkeys(range(self.prompts), n))
        assert core.prompts.delivered + sum(core.prompts.dropped.values()) == self.prompts
        segments = [s for b in self.batches for x in b.samples for s in x.segments]
        assert core.tokens.delivered == sum(s.count for s in segments if s.kind is SegmentKind.GENERATED)
        # nobody remembers what is settled
        for desk in self.roster.desks:
            desk.take()
            assert not desk._known
            assert not desk.attempts


WORK = (
    do.StartSample, do.Submit, do.Abort, do.Fence, do.CallCompleted, do.ScoreSample, do.ScoreGroup, do.JudgeGroup,
    do.CancelSample, do.ProbeEngine, do.PauseEngine, do.LoadEngine, do.ResumeEngine,
)  # fmt: skip
