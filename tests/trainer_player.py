"""Servers, functions, rewards and a filter around the core, for a trainer that goes on while they do.

Each command is carried out by servers that have weights of their own, and held to :class:`trainer_books.Books`.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from trainer_books import Books, Key, Token, check_batch, number_of

from april.core import commands as do
from april.core import events as ev
from april.core.event_pump import EventPump
from april.core.ledger import Lengths
from april.core.rollout_core import RolloutCore
from april.core.sampling import SamplingParams
from april.core.settings import CoreSettings, EngineLimits
from april.core.snapshot import Freezer
from april.core.types import (
    MAX_SAMPLES_FACTOR,
    Attempt,
    DropReason,
    EngineFinish,
    GenerationMode,
    Group,
    OnDataEnd,
    OnFailedSample,
    OnStale,
    Prompt,
    SampleId,
    SampleState,
    Timer,
)
from april.core.versions import PolicyVersion

EOS = 1


@dataclass(eq=False)
class Server:
    weights: str = "start"
    open: bool = True
    alive: bool = True
    lost: bool = False
    """It does not have what it was given, and says so when asked."""


@dataclass(eq=False)
class Request:
    """One request at a server; of an evaluation where its group is below 0."""

    attempt: Attempt
    key: Key
    server: Server
    version: tuple[int, int]
    tokens: list[Token] = field(default_factory=list)
    lost: str | None = None
    """Why its sample went on without it."""
    doubtful: bool = False
    """Nobody knows what wrote its tokens."""
    stalled: bool = False
    """Its server was silent for too long."""

    @property
    def ends(self) -> bool:
        """Its last token ends the response."""
        return bool(self.tokens) and self.tokens[-1].id == EOS

    @property
    def complete(self) -> bool:
        """No token can follow."""
        return self.ends or len(self.tokens) >= self.attempt.request.sampling.max_tokens


@dataclass(eq=False)
class Update:
    """A weight update that was asked for and has not ended."""

    weights: str
    trained: int | None
    transfers: bool
    cancelled: bool = False
    """Before any engine loaded for it."""
    loads: int = 0
    adopted: bool = False


def rows_of(attempt: Attempt) -> dict[str, Any]:
    """Rows of an attempt's tokens, and of those before that had none: which token was read, and by which attempt."""
    read = np.concatenate((attempt.request.token_ids, attempt.tape.packed()[0]))[attempt.request.extras_from : -1]
    return {name: np.stack([read, np.full_like(read, number_of(attempt.id))], 1) for name in attempt.request.extras}


class TrainerPlayer:
    """One process after the other around a core; what happens next is chosen in ``trainer_lives``."""

    def __init__(self, settings: CoreSettings, engines: int, prompts: int, turns: int, rng: random.Random) -> None:
        self.rng, self.settings, self.prompts, self.turns = rng, settings, prompts, turns
        more: dict[str, Any] = {"remote": True, "extras": settings.extras}
        self.limits = tuple(EngineLimits(f"e{i}", 4096, None, (EOS,), **more) for i in range(engines))
        self.books = Books(settings.n_samples_per_prompt, settings.group_quorum)
        self.seen: Counter[str] = Counter()
        """What has happened, so that a test can say that it did."""
        self.said = 0
        """Numbers tokens, updates and evaluations, over all processes."""
        self.processes = 0
        self.new_process()

    def new_process(self) -> None:
        """What does not survive a crash; servers end all requests, and have some weights or other."""
        self.processes += 1
        self.core = RolloutCore(replace(self.settings, run_id=self.processes), self.limits, check=True)
        self.freezer: Freezer | None = None
        """A state that is collected in parts between the events."""
        self.servers = {e.name: Server() for e in self.limits}
        self.running: dict[str, Request] = {}
        self.to_end: set[str] = set()
        self.functions: dict[Key, str] = {}
        """started, waiting (for tokens), between (two calls), scoring; new and finished samples are not here."""
        self.asked: Counter[Key] = Counter()
        """Calls of the present run of its function."""
        self.runs: Counter[Key] = Counter()
        """Of its function: of what an older one still says nobody hears."""
        self.evaluated: dict[Key, list[Token]] = {}
        self.to_score: list[list[tuple[Key, int]]] = []
        self.to_judge: list[tuple[int, int]] = []
        self.to_draw = 0
        self.causes: Counter[tuple[str, int]] = Counter()
        """(what, group): failures and rejections, for which a group may be dropped."""
        self.calls: dict[str, do.PauseEngine | do.LoadEngine | do.ResumeEngine] = {}
        self.probes: list[do.ProbeEngine] = []
        self.timers: list[Timer] = []
        self.updates: dict[int, Update] = {}
        self.handing: int | None = None
        self.evaluations: dict[int, ev.EvaluationRequested] = {}
        self.under: dict[int, tuple[int, int]] = {}
        """Version under which the first request of an evaluation was sent."""
        self.wanted = self.begun = self.held = self.ended = False
        self.untold = False
        self.wants_weights = False
        """It was told that only a weight update helps."""
        """The source has failed, and the trainer has not heard of it."""
        self.telling = False
        """The trainer is told of trouble at this moment."""
        self.groups: list[Group] = []
        """Those that were held before the present event."""
        self.reported: set[int] = set()
        """Groups that are dropped whole at this moment."""
        self.leaving: set[Key] = set()
        """Samples that begin again or are dropped at this moment."""
        executors = {kind: getattr(self, f"on_{kind.__name__}", self.ignore) for kind in do.Command.__subclasses__()}
        self.pump = EventPump(self, executors)

    def ignore(self, command: do.Command) -> None:
        """Nothing to be done, and nothing to be held to."""

    # ---------------------------------------------------------------- the core

    def post(self, event: ev.Event) -> None:
        self.pump.post(event)

    def handle(self, event: ev.Event) -> list[do.Command]:
        """The core takes an event; a version that moves by it is that of an update that may move it."""
        before, self.groups = self.core.clock.current, list(self.core.buffer)
        commands = self.core.handle(event)
        self.freezer = self.freezer or Freezer(self.core, 3)
        self.freezer.advance()
        if self.core.clock.current != before:
            self._adopted()
        self.telling = any(isinstance(command, do.Fail) for command in commands)
        self.reported = {command.group.id for command in commands if isinstance(command, do.ReportDrop)}
        if not any(isinstance(command, do.Deliver) for command in commands):
            self._given_up()
        self.leaving = {tuple(command.sample.id) for command in commands if isinstance(command, do.CancelSample)}
        if any(isinstance(command, do.Deliver) for command in commands) and self.cuts_nothing:
            cut = [i for command in commands if isinstance(command, do.Abort) for i in command.attempt_ids]
            assert all(self.running[i].key in self.leaving for i in cut), "a delivery cuts"
        return commands

    def _adopted(self) -> None:
        update = self.updates[min(self.updates)]
        assert not update.adopted
        assert not update.cancelled
        update.adopted = True
        assert not self.running, "weights change under requests"
        assert not self.under, "weights change in the middle of an evaluation"
        self.books.update(update.trained, update.weights)
        assert self.core.clock.current == self.books.version

    def _given_up(self) -> None:
        """Samples that have left their groups alone are found, and those that took their places."""
        for group in self.groups:
            if group.id not in self.reported and group.id in self.books.held:
                self._given_up_of(group)

    def _given_up_of(self, group: Group) -> None:
        """They have done so for a reason, as the settings say."""
        books, s, number = self.books, self.settings, group.id
        book = books.groups[number]
        gone = [i for i in sorted(book.members) if group.samples[i].state is SampleState.DROPPED]
        failed = 0
        for index in gone:
            key, counts = (number, index), number in books.accepted
            if s.on_stale is OnStale.DROP and not s.whole_groups and counts and self._too_old(key):
                reason = "stale"
            else:
                assert self.causes["failed", number], f"{key} is given up for no reason"
                reason, failed = "failed", failed + 1
                if s.on_failed_sample is OnFailedSample.REPLACE and book.samples < MAX_SAMPLES_FACTOR * books.samples:
                    self.seen["sample replaced"] += 1
                    assert books.join(number)[1] < len(group.samples), "nothing takes its place"
                else:
                    smaller = s.on_failed_sample is OnFailedSample.SHRINK and len(book.members) > s.min_group_size
                    judged = books.complete(number)  # its quorum is, and goes on without stragglers as one that counts
                    assert counts or judged or smaller, "its group should have been dropped"
                    self.seen["group shrunk"] += not counts
            self.seen["straggler given up"] += bool(book.delivered)
            books.give_up(key, reason)
            self._leave(key, reason)
        assert failed <= 1
        assert len(group.samples) == book.samples, "a sample from nowhere"
        self._counts_now(number)

    def _counts_now(self, group: int) -> None:
        """It does, if it is complete and there is no filter."""
        books = self.books
        if self.settings.has_filter or group not in books.held or group in books.accepted:
            return
        if books.complete(group):
            books.accept(group, self.reward)

    def reward(self, key: Key) -> float:
        return key[0] + key[1] / 8 if self.settings.has_reward else 0.0

    @property
    def continuous(self) -> bool:
        """Nothing is cut by a delivery."""
        return self.settings.generation is GenerationMode.CONTINUOUS

    @property
    def cuts_nothing(self) -> bool:
        """A delivery does not, nor does it make anything too old that would be given up."""
        return self.continuous and self.settings.on_stale in (OnStale.FINISH, OnStale.MASK)

    def check(self) -> None:
        """The core's books against those kept here."""
        books, core = self.books, self.core
        training = [r for r in self.running.values() if r.key[0] >= 0]
        assert core.observed_tokens() == books.sent
        assert core.tokens.delivered == books.delivered
        tokens = sum(length * count for length, count in books.lengths.items())
        assert core.context.lengths.trained == Lengths(books.lengths.total(), tokens)
        assert list(core.leased) == list(books.out)
        assert {group.id: group.cohort for group in core.buffer} == {g: books.groups[g].cohort for g in books.held}
        settled = Counter(books.settled.values())
        assert core.prompts.delivered == settled.pop("delivered", 0)
        assert +core.prompts.dropped == settled
        assert set(core.attempts) == {r.attempt.id for r in training}
        assert core.batch_wanted == self.wanted
        if self.settings.on_stale is not OnStale.RESTART:  # which is noticed when the sample begins again
            assert core.tokens.held == books.tokens_held
            assert +core.tokens.dropped == +books.dropped
        if books.as_promised:
            assert books.oldest <= self.settings.max_staleness

    # ---------------------------------------------------------------- prompts

    def on_Continue(self, command: do.Continue) -> None:
        self.post(ev.Continued())

    def on_DrawPrompts(self, command: do.DrawPrompts) -> None:
        """Never more than can be delivered in time."""
        assert self.begun, "prompts are drawn before the first request"
        assert not self.to_draw
        self.bound_asked = self.books.bound
        held, out, most = self.groups_held, len(self.books.out), self.most_held
        assert held + command.count <= most, f"{held} groups, {out} batches out, {command.count} more: above {most}"
        self.to_draw = command.count

    @property
    def groups_held(self) -> int:
        """Undelivered groups; with a quorum, undelivered samples / n."""
        books = self.books
        return len(books.held) if books.whole else -(-len(books.tapes) // books.samples)

    @property
    def most_held(self) -> int:
        """(B - out + 1) N, where the settings do not want more in work than that."""
        s = self.settings
        bound, n = min(s.max_staleness, s.max_age), s.rollout_batch_size
        lowered = int(min(bound, self.books.bound))
        wanted = s.groups_at_a_time if s.on_stale is OnStale.DROP else s.groups_wanted
        if s.on_stale is not OnStale.FINISH and wanted > (bound + 1) * n:
            return wanted
        return max(lowered - len(self.books.out) + 1, 1) * n

    def draw(self, error: str | None = None) -> None:
        wanted, self.to_draw = self.to_draw, 0
        first = self.books.position
        count = min(wanted if error is None else wanted // 2, self.prompts - first)
        self.books.draw(range(first, first + count), self.bound_asked)
        prompts = [Prompt(np.array([5, 10 + k], np.int32), {"k": k}, 0, k) for k in range(first, first + count)]
        self.untold |= error is not None
        self.post(ev.PromptsDrawn(prompts, error is None and count < wanted, error))

    # ---------------------------------------------------------------- functions, rewards, the filter

    def on_StartSample(self, command: do.StartSample) -> None:
        key = tuple(command.sample.id)
        assert key not in self.functions
        if key[0] >= 0:
            assert self.begun > self.held, "training starts before the first request, or in a pause"
            assert key[0] in self.books.held
            assert key not in self.books.finished or self.settings.on_stale is OnStale.RESTART
            self.books.unfinish(key)
        else:
            asked = command.sample.evaluation.request
            theirs = [k for k, f in self.functions.items() if k[0] < 0 and f in ("started", "waiting", "between")]
            others = sum(e.functions_at_once or 1 << 20 for n, e in self.evaluations.items() if n != asked.evaluation)
            assert len(theirs) < (asked.functions_at_once or 1 << 20) + others, "too many functions at once"
        self.functions[key], self.asked[key] = "started", 0

    def call(self, key: Key) -> None:
        """A function asks for tokens, for all that there may be in its last call."""
        self.asked[key] += 1
        limit = self.settings.max_response_len if self.asked[key] >= self.turns else 2 + key[1]
        self.functions[key] = "waiting"
        self.post(ev.CallMade(SampleId(*key), SamplingParams(max_tokens=limit)))

    def on_CallCompleted(self, command: do.CallCompleted) -> None:
        """It has its answer, perhaps out of a saved state."""
        key = tuple(command.call.sample.id)
        assert self.functions[key] == "waiting"
        self.functions[key] = "between"

    def go_on(self, key: Key) -> None:
        """A function does what comes next."""
        if self.asked[key] < self.turns:
            self.call(key)
            return
        self.functions[key] = "scoring"
        if not self.settings.has_reward:
            self._finished([key])
        self.post(ev.SampleReturned(SampleId(*key)))

    def fail(self, key: Key) -> None:
        self.causes["failed", key[0]] += 1
        self.seen["function failed"] += 1
        self.post(ev.SampleFailed(SampleId(*key), "raised"))

    def on_CancelSample(self, command: do.CancelSample) -> None:
        """Its group was given up a moment ago, or it begins again."""
        key = tuple(command.sample.id)
        self.runs[key] += 1
        self.functions.pop(key, None)
        if command.sample.state is SampleState.DROPPED:
            self._given_up()
        elif key[0] in self.books.held:
            failed = self.causes["failed", key[0]] > 0
            too_old = self.settings.on_stale is OnStale.RESTART and self._too_old(key)
            assert failed or too_old, f"{key} begins again for no reason"
            self._begin_again(key, "stale" if too_old else "failed")

    def _too_old(self, key: Key) -> bool:
        return self.books.age(self.books.tapes[key]) > self.books.bound_of(key[0], self.settings)

    def _begin_again(self, key: Key, reason: str) -> None:
        self.seen[f"began again: {reason}"] += 1
        self.books.begin_again(key, reason)
        self._leave(key, reason)

    def _leave(self, key: Key, reason: str) -> None:
        for request in self.running.values():
            if request.key == key and request.lost is None:
                request.lost = reason

    def on_ReportDrop(self, command: do.ReportDrop) -> None:
        """A group is given up for a reason that there is."""
        group, reason = command.group.id, command.reason
        if not self.books.whole and group in self.books.accepted:  # it counts: its samples have left one by one
            assert not self.books.groups[group].delivered
            self._given_up_of(command.group)
            assert group not in self.books.held, "of a group that counts only samples are dropped"
            return
        if reason is DropReason.STALE:
            assert self.settings.on_stale is OnStale.DROP
            assert any(self._too_old((group, index)) for index in self.books.groups[group].members)
        else:
            assert self.causes[str(reason), group], f"group {group} is dropped as {reason}"
        if reason is DropReason.FAILED and not (self.settings.group_reward or self.causes["filter", group]):
            self._may_fail(group)
        self.seen[f"group dropped: {reason}"] += 1
        self.books.drop(group, str(reason))
        for index in range(self.books.groups[group].samples):
            self._leave((group, index), str(reason))

    def _may_fail(self, group: int) -> None:
        """Its sample that cannot go on costs the group."""
        s, book = self.settings, self.books.groups[group]
        if s.on_failed_sample is OnFailedSample.REPLACE:
            assert book.samples == MAX_SAMPLES_FACTOR * self.books.samples
        elif s.on_failed_sample is OnFailedSample.SHRINK:
            assert len(book.members) <= s.min_group_size

    def on_ScoreSample(self, command: do.ScoreSample) -> None:
        """A reward is wanted."""
        self._want_score([tuple(command.sample.id)])

    def on_ScoreGroup(self, command: do.ScoreGroup) -> None:
        keys = [tuple(sample.id) for sample in command.group.samples if sample.state is not SampleState.DROPPED]
        group = command.group.id
        assert group < 0 or {index for _, index in keys} == self.books.groups[group].members
        self._want_score(keys)

    def _want_score(self, keys: list[Key]) -> None:
        self.to_score.append([(key, self.runs[key]) for key in keys])

    def score(self, request: list[tuple[Key, int]], how: str) -> None:
        """The reward function returns, raises, or gives a number that is none."""
        keys = [key for key, _ in request]
        if any(self.runs[key] != run or key not in self.functions for key, run in request):
            return
        if how == "raises":
            self.fail(keys[0])
            return
        group = keys[0][0]
        rewards = [(index, group + index / 8) for _, index in keys]
        if how == "nan":
            self.causes["failed", group] += 1
            rewards[-1] = rewards[-1][0], float("nan")
        else:
            self._finished(keys)
        self.post(ev.Scored(group, rewards))

    def _finished(self, keys: list[Key]) -> None:
        """They have their rewards; their group counts if it is complete and there is no filter."""
        group = keys[0][0]
        for key in keys:
            self.functions[key] = "finished"
        if group < 0:
            return
        for key in keys:
            if key not in self.books.finished:
                self.books.finish(key)
        self._counts_now(group)

    def on_JudgeGroup(self, command: do.JudgeGroup) -> None:
        """A verdict is wanted, of a complete group."""
        books, group = self.books, command.group.id
        assert books.complete(group)
        assert group not in books.accepted
        first = sorted(books.groups[group].finishers[: books.k(group)])
        assert [sample.id.index for sample in command.group.first_finishers] == first
        self.to_judge.append((command.group.id, command.judgement))

    def judge(self, request: tuple[int, int], how: str) -> None:
        """The filter speaks; of a group that is no longer what it was, nobody listens."""
        group, judgement = request
        held = self.core.buffer.groups.get(group)
        if held is not None and held.since == judgement:
            if how == "keep":
                self.books.accept(group, self.reward)
            else:
                self.causes["filtered" if how == "reject" else "failed", group] += 1
                self.causes["filter", group] += how == "raises"
        error = "raised" if how == "raises" else None
        self.post(ev.GroupJudged(group=group, judgement=judgement, keep=how == "keep", error=error))

    # ---------------------------------------------------------------- requests

    def on_Submit(self, command: do.Submit) -> None:
        """A request asks for exactly what is missing, of a server that really has the present weights."""
        attempt, books = command.attempt, self.books
        key, server = tuple(attempt.sample.id), self.servers[attempt.engine]
        assert attempt.id not in self.running
        assert not any(u.loads or u.adopted for u in self.updates.values()), "sent in the middle of an update"
        assert server.open, "sent to a server that is paused"
        assert (server.weights, server.lost) == (books.weights[books.version], False), "sent to a server without them"
        if key[0] < 0:
            evaluation = attempt.sample.evaluation.request.evaluation
            assert self.under.setdefault(evaluation, books.version) == books.version
        else:
            assert self.begun > self.held, "training goes on before the first request, or in a pause"
            sent = attempt.request.token_ids[2:].tolist()
            if not sent and books.tapes[key]:
                assert self.settings.on_stale is OnStale.RESTART, f"tokens of {key} are forgotten"
                self._begin_again(key, "stale")
            assert sent == [t.id for t in books.tapes[key]]
            assert attempt.request.token_ids[1] == 10 + books.held[key[0]]
        self.running[attempt.id] = Request(attempt, key, server, books.version)
        assert sum(r.lost is None for r in self.running.values() if r.key == key) == 1, "two requests for a sample"
        assert self.places >= 0

    @property
    def places(self) -> int:
        """Places of training that are free; evaluations take some of them with what exceeds their own."""
        of_evaluations = sum(request.key[0] < 0 for request in self.running.values())
        own = math.ceil(self.settings.evaluation_share * self.settings.max_in_flight)
        return self.settings.max_in_flight - (len(self.running) - of_evaluations) - max(of_evaluations - own, 0)

    @property
    def evaluations_lack_room(self) -> bool:
        """True if an evaluation may wait for requests of training, as no engine takes more."""
        evaluates = any(key[0] < 0 for key in self.functions)
        return evaluates and self.core.engines.pick(self.core.clock.current) is None

    def on_Abort(self, command: do.Abort) -> None:
        """A request is asked to end, for a reason that there is."""
        for attempt_id in command.attempt_ids:
            request = self.running[attempt_id]
            fails = self.telling or (self.core.context.failure is not None and (self.untold or self.causes))
            stopped = request.stalled or request.attempt.tape.stopped
            cause = self.updates or self.held or fails or request.doubtful or stopped or self.evaluations_lack_room
            if self.continuous and attempt_id not in self.to_end and request.key[0] >= 0:
                assert cause or request.key in self.leaving, "a request is cut for no reason"
        self.to_end.update(command.attempt_ids)

    def on_Fence(self, command: do.Fence) -> None:
        """Requests that did not end in time are accounted for with what they have."""
        for attempt_id in command.attempt_ids:
            self.seen["fenced"] += 1
            self.end(attempt_id, EngineFinish.ABORT, fenced=True)

    def send(self, attempt_id: str, count: int, ends: float) -> Request:
        """A server generates; each token ends the response with probability ``ends``."""
        request = self.running[attempt_id]
        came = []
        for _ in range(count):
            if request.complete:
                break
            self.said += 1
            token = EOS if self.rng.random() < ends else 1000 + self.said
            logprob = float(np.float32(-0.001 * (self.said % 977)))
            came.append(Token(token, logprob, request.version, request.server.weights))
            request.tokens.append(came[-1])
        ids, logprobs = [t.id for t in came], [t.logprob for t in came]
        version = PolicyVersion(*request.version)
        request.attempt.tape.append(np.array(ids, np.int32), np.array(logprobs, np.float32), version)
        if request.attempt.request.extras:
            request.attempt.tape.set_extras(rows_of(request.attempt), request.attempt.request.rows_wanted(0))
        self.books.sent += len(came) if request.key[0] >= 0 else 0
        return request

    def end(self, attempt_id: str, finish: EngineFinish, *, fenced: bool = False) -> None:
        request = self._over(attempt_id)
        self.post(ev.AttemptEnded.of(request.attempt, finish, fenced=fenced))

    def break_off(self, attempt_id: str, kind: Any, rejected: int = 0) -> None:
        """A request fails; ``rejected`` tokens of it cannot be true."""
        corrupt = kind == "corrupt"
        request = self._over(attempt_id, corrupt=corrupt)
        self.causes["failed", request.key[0]] += 1
        if request.key[0] >= 0:
            self.books.sent += rejected
            self.books.lose(rejected, "corrupt")
        self.seen[f"request: {kind}"] += 1
        self.post(ev.AttemptFailed.of(request.attempt, "broke off", kind, rejected=rejected))

    def _over(self, attempt_id: str, *, corrupt: bool = False) -> Request:
        """What becomes of the tokens of a request that is over."""
        request = self.running.pop(attempt_id)
        self.to_end.discard(attempt_id)
        reason = "corrupt" if corrupt else request.lost or ("unknown_weights" if request.doubtful else None)
        if request.key[0] < 0:
            if request.complete and reason is None:
                self.evaluated.setdefault(request.key, []).extend(request.tokens)
        elif reason is None:
            self.books.tapes[request.key] += request.tokens
        else:
            self.books.lose(len(request.tokens), reason)
        return request

    # ---------------------------------------------------------------- what the trainer gets

    def on_Deliver(self, command: do.Deliver) -> None:
        assert self.wanted, "delivered to nobody"
        assert not self.untold, "a failure is forgotten"
        self.wanted = False
        keys = check_batch(command.batch, self.books, self.settings, self.seen)
        for key in keys:
            assert command.batch.samples[keys.index(key)].reward == self.reward(key)
            self.functions.pop(key, None)
        units = len({group for group, _ in keys}) if self.books.whole else len(keys)
        if units < self.settings.target and self.books.position < self.prompts:
            assert self.groups_held >= self.most_held, "a short batch, although more can be drawn"
            assert not self.books.whole
            self.seen["short batch before the end"] += 1
        self.books.deliver(command.batch.id, keys)
        self._given_up()

    def on_EndOfData(self, command: do.EndOfData) -> None:
        """Every prompt is settled, or what is left is less than a batch, and waits for more prompts."""
        books = self.books
        assert self.wanted
        assert books.position == self.prompts
        assert books.countable == set(books.tapes)
        assert sorted([*books.settled, *books.held.values()]) == list(range(self.prompts))
        left = len(books.held) if books.whole else len(books.tapes)
        assert left < (self.settings.target if self.settings.on_data_end is OnDataEnd.WAIT else 1)
        assert command.kept == left
        self.wanted, self.ended = False, True

    def on_Fail(self, command: do.Fail) -> None:
        """The trainer is told of trouble that there was."""
        assert self.wanted, "nobody waits"
        assert self.untold or self.causes.total()
        self.wanted = self.untold = False
        self.wants_weights = command.weights
        self.seen["failed"] += 1
