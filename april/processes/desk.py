"""The desk of one host: what the core's process knows of it, commands made into frames and frames into events.

No network, no clock, no asyncio: whoever owns the desk carries the frames and tells the time.

Invariants:

* each attempt that was sent gives exactly one AttemptEnded or AttemptFailed: the host's, or the desk's once it is lost;
* what a run of a function says counts only while the core has not given that run up;
* what a host says that cannot be true raises ProtocolError, and never reaches the core.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from april.core import commands as do
from april.core import events as ev
from april.core.attachments import Placed, wrong_places, wrong_rows
from april.core.engine_table import EngineTable
from april.core.numbers import wrong_ids, wrong_reward
from april.core.settings import EngineLimits
from april.core.state import RolloutCore
from april.core.tape import NO_LOGPROBS, NO_TOKENS, Int32, Segment, SegmentKind
from april.core.types import (
    Attempt,
    AttemptFailure,
    Chain,
    EngineFinish,
    FinishReason,
    Group,
    OnWeightUpdate,
    Sample,
    SampleId,
    SampleState,
)
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.driver.detokenizer import Detokenizer, completes_a_stop
from april.driver.llm import wrong_sampling
from april.driver.wire_checks import AnswerChecks
from april.engines.protocol import Chunk
from april.errors import EngineBusy, EngineError, EngineUnreachable, RolloutError, WeightsGone, WireError
from april.processes import messages as wire
from april.processes.brought_along import Attached, RowsCome, places
from april.processes.messages import ProtocolError, ids_of, logprobs_of, packed
from april.processes.plain_values import of_plain_bytes, why_not_plain
from april.server_text import clean

log = logging.getLogger("april")


class AttemptReports:
    """Checks of what a host says of one attempt; what can be true goes onto its tape. All methods raise EngineError for
    what cannot be true, and have changed nothing on the tape then.

    Args:
        table: what the engines have in common.
        max_context: of its engine.
        detokenizer: looks at the stop strings that the host has found; None: it is taken at its word.
    """

    __slots__ = ("_attempt", "_detokenizer", "_rows", "checks")

    def __init__(
        self, attempt: Attempt, table: EngineTable, max_context: int, detokenizer: Detokenizer | None
    ) -> None:
        self._attempt, self._detokenizer = attempt, detokenizer
        self._rows = RowsCome(attempt.extras, attempt.missing_rows + attempt.sampling.max_tokens)
        self.checks = AnswerChecks(
            attempt, vocab_size=table.vocab_size, max_context=max_context, eos_token_ids=table.eos_token_ids,
            oldest=attempt.oldest,
        )  # fmt: skip

    def came(self, m: wire.Came, current: PolicyVersion) -> None:
        """Tokens."""
        tape = self._attempt.tape
        if m.at < tape.count:
            return  # told before
        tokens, logprobs = ids_of(m.tokens), logprobs_of(m.logprobs)
        whole = sum(count for _, count in m.spans) == len(tokens) == len(logprobs)
        if m.at > tape.count or not whole or (tape.stopped and len(tokens)):
            came = f"{len(tokens)} tokens, {len(logprobs)} log-probabilities, versions {m.spans}"
            raise WireError(f"{came}, from token {m.at} on, after {tape.count} tokens")
        at, chunks = 0, []
        for version, count in m.spans:
            if count < 1:
                raise WireError(f"versions {m.spans}")
            chunks.append(Chunk(tokens[at : at + count], logprobs[at : at + count], version))
            self.checks.piece(chunks[-1], current)
            at += count
        self._check_stop(m, tokens)
        for chunk in chunks:
            tape.append(chunk.tokens, chunk.logprobs, chunk.version)
        tape.stopped, tape.after_stop, tape.unknown, tape.bare = m.stopped, m.after_stop, m.unknown, m.bare

    def rows(self, m: wire.Rows) -> None:
        """Rows of its tokens."""
        self._rows.add(m)

    def _take_rows(self) -> None:
        """All tokens have rows, or none counts."""
        attempt, tape = self._attempt, self._attempt.tape
        if not (tape.needs_rows and tape.count):
            return
        extras, missing = self._rows.extras(), attempt.missing_rows
        wrong = wrong_rows(extras, attempt.extras, missing + tape.count, attempt.call.chain.extras)
        if wrong is not None:
            raise WireError(f"{tape.count} tokens came with {wrong}")
        tape.give_rows(extras, missing)

    def _check_stop(self, m: wire.Came, tokens: Int32) -> None:
        """A stop string is found once, where the text has it; what follows it has room."""
        attempt, tape = self._attempt, self._attempt.tape
        most, parsed = attempt.sampling.max_tokens, self.checks.count + m.after_stop + m.unknown + m.bare
        if m.bare and not (tape.needs_rows and m.bare == parsed):
            raise WireError(f"{m.bare} tokens without rows")
        if m.unknown < 0 or (m.unknown and attempt.in_flight is OnWeightUpdate.RESUBMIT):
            raise WireError(f"{m.unknown} tokens of weights that nobody has named")
        if m.after_stop < tape.after_stop or (m.after_stop and not m.stopped) or (tape.stopped and not m.stopped):
            raise WireError(f"{m.after_stop} tokens after a stop string")
        if parsed > most:
            raise WireError(f"{parsed} tokens came where {most} were left of the budget")
        if not m.stopped or tape.stopped:
            return
        came = np.concatenate((tape.packed()[0], tokens))
        try:
            found = completes_a_stop(attempt, came, self._detokenizer)
        except RolloutError as error:  # the tokenizer here fails, and that of the host has not
            log.warning("attempt %s of %s: its stop string is taken for one: %s", attempt.id, attempt.sample.key, error)
            return
        if not found:
            raise WireError(f"the response has stopped at a stop string after {len(came)} tokens, where there is none")

    def ended(self, m: wire.Ended, *, fenced: bool) -> EngineFinish:
        """Check its end; ``fenced``: the host was told to cut it off."""
        self._check_count(m.count)
        if m.fenced and not (fenced and m.finish is EngineFinish.ABORT):
            raise WireError(f"the response has ended ({m.finish}) as if it had been cut off here")
        if self._attempt.tape.bare:
            return EngineFinish(m.finish)
        self._take_rows()
        return self.checks.end(_END[m.finish], matched=self._attempt.tape.stopped)

    def failed(self, m: wire.Failed) -> None:
        """That it broke off."""
        self._check_count(m.count)
        if m.rejected < 0 or not 0 <= m.busy_s < float("inf"):
            raise WireError(f"{m.rejected} tokens were rejected, and it is busy for {m.busy_s} s")
        self._take_rows()

    def _check_count(self, count: int) -> None:
        """All that it has brought was reported before its end."""
        if count != self._attempt.tape.parsed:
            raise WireError(f"the response has ended with {count} tokens, and {self._attempt.tape.parsed} came")


_END = {finish: Chunk(NO_TOKENS, NO_LOGPROBS, FIRST_VERSION, finish) for finish in EngineFinish}
"""The last piece of an answer, of which only the finish is looked at."""


LONGEST_CONTENT = 64
"""Digits that stand for what a directory holds."""
_ERRORS: dict[ev.CallResult, type[EngineError]] = {
    ev.CallResult.BUSY: EngineBusy,
    ev.CallResult.REFUSED: EngineError,
    ev.CallResult.OTHER_CONTENT: WeightsGone,
    ev.CallResult.UNREACHABLE: EngineUnreachable,
}


@dataclass(slots=True)
class _Told:
    """A conversation of a sample as the host knows it."""

    prompt: Int32
    attached: tuple[Placed, ...]
    segments: list[Segment] = field(default_factory=list)
    """The tape's own list, of which the host was told the first ``count``; a tape that was cut has another."""
    count: int = 0
    brought: set[str] = field(default_factory=set)
    """Attempts that ended there since: it has their tokens."""


@dataclass(slots=True)
class _Known:
    """A sample as the host knows it, and the run of a function of its that the core waits for."""

    chains: dict[int, _Told]
    """By their numbers; the first one is always known, as its prompt is the group's."""
    run: int = 0
    """0: none."""
    turn: int = 0
    """Calls that this run has made."""
    scored: tuple[int, ...] = ()
    """The samples whose rewards this run is to find."""


class HostDesk:
    """The core's half of a connection to a host.

    Args:
        core: read, never changed; tapes of attempts are filled, as whoever drives a core does.
        name: of the host; its engines are known as ``name/engine``.
        engines: what the core must know of each, under those names.
        failed: told what a call of an engine has raised, by the call's number, before its event is given.
        returned: told what the rollout function of an evaluation has returned there.
        detokenizer: looks at the stop strings that the host has found; None: no request has any.
    """

    def __init__(
        self,
        core: RolloutCore,
        name: str,
        engines: Sequence[EngineLimits],
        *,
        functions: bool,
        failed: Callable[[int, BaseException], None],
        returned: Callable[[Sample, Any], None] = lambda sample, output: None,
        detokenizer: Detokenizer | None = None,
    ) -> None:
        self._core = core
        self.name = name
        self.engines = {e.name: e for e in engines}
        self.functions = functions
        self._failed = failed
        self._function_returned = returned
        self._detokenizer = detokenizer
        self._warned = False
        self._out: list[wire.Message] = []
        self._now: PolicyVersion | None = None
        """Version that the host was told last."""
        self._groups: dict[int, Group] = {}
        """That the host has heard of."""
        self._attached = Attached(f"host {name}", paths=False)
        self._known: dict[SampleId, _Known] = {}
        self.attempts: dict[str, Attempt] = {}
        """That run there."""
        self._reports: dict[str, AttemptReports] = {}
        """Checks of the running attempts."""
        self._unbelieved = ""
        """The attempt of which something was said that cannot be true."""
        self._last_run = 0
        self._judged: dict[int, int] = {}
        """The judgement that each group waits for."""
        self._calls: dict[str, int] = {}
        """The call that runs at each engine."""
        self._probes: dict[str, int] = {}
        self.fenced: dict[str, float | None] = {}
        """Attempts that it was told to end now, and has not."""
        self.tapes_sent = self.quieted = 0
        """Number of the last question that was answered."""
        self.leaves: str | None = None
        """The reason for which the host goes, as it says itself."""
        self.frames_out = self.frames_in = self.messages_out = self.messages_in = self.bytes_out = self.bytes_in = 0
        self._executors: dict[type[do.Command], Callable[[Any], None]] = {
            do.StartSample: self._start,
            do.Submit: self._submit,
            do.Abort: self._abort,
            do.Fence: self._fence,
            do.CallCompleted: self._call_completed,
            do.ScoreSample: lambda c: self._score([c.sample], together=False),
            do.ScoreGroup: lambda c: self._score(c.group.members, together=True),
            do.JudgeGroup: self._judge,
            do.CancelSample: self._cancel,
            do.ProbeEngine: self._probe,
            do.PauseEngine: self._call,
            do.LoadEngine: self._call,
            do.ResumeEngine: self._call,
        }
        self._readers: dict[type, Callable[[Any], ev.Event | None]] = {
            wire.Heartbeat: lambda m: None,
            wire.Came: self._came,
            wire.Rows: self._rows,
            wire.Attach: self._attach,
            wire.Ended: self._ended,
            wire.Failed: self._attempt_failed,
            wire.Happened: lambda m: self._readers[type(m.event)](m.event),
            ev.StopFound: self._of_attempt,
            ev.AttemptStalled: self._of_attempt,
            wire.Called: self._called,
            wire.Unheard: self._unheard,
            wire.Returned: self._returned,
            wire.Raised: self._raised,
            wire.Rewards: self._rewards,
            ev.GroupJudged: self._group_judged,
            ev.EngineCallEnded: self._call_ended,
            ev.EngineProbed: self._probed,
            ev.WeightsWritten: self._written,
            wire.TapesSent: self._sent,
            wire.Quieted: self._quiet,
            wire.Goodbye: self._goodbye,
        }

    # ---------------------------------------------------------------- frames

    def say(self, message: wire.Message) -> None:
        """Put one message into the next frame."""
        self._out.append(message)

    def execute(self, command: do.Command) -> None:
        """Put a command of a host's into the next frame."""
        self._executors[type(command)](command)

    def take(self) -> bytes | None:
        """The next frame, of several perhaps; None: there is nothing to say."""
        if not self._out:
            return None
        if (now := self._core.clock.current) != self._now:
            self._now = now
            self._out.insert(0, wire.Now(now))
        frame, count = wire.first_frame(self._out)
        self.frames_out += 1
        self.messages_out += count
        self.bytes_out += len(frame)
        del self._out[:count]
        return frame

    def receive(self, frame: bytes) -> Iterator[ev.Event]:
        """Yield what the host reports; each event must be handled before the next one is asked for.

        Raises:
            ProtocolError: what it says cannot be true; it is to be cut off.
        """
        self.frames_in += 1
        self.bytes_in += len(frame)
        readers = self._readers
        for message in wire.decode_from_host(frame):
            self.messages_in += 1
            reader = readers.get(type(message))
            if reader is None:
                raise ProtocolError(f"host {self.name} says {type(message).__name__} when it has joined already")
            event = reader(message)
            if event is not None:
                yield event

    @property
    def idle(self) -> bool:
        """Nothing runs there, and nothing that it was asked is open."""
        return not (self.attempts or self._calls or self._probes)

    def lost(self, why: str) -> Iterator[ev.Event]:
        """The host is gone: its engines are broken, and so is all that ran there. As in :meth:`receive`."""
        error = f"host {self.name} is gone: {clean(why)}"
        for engine in self.engines:
            yield ev.EngineFailed(engine)
        for engine, call in list(self._calls.items()):
            if self._calls.pop(engine, None) == call:
                self._failed(call, EngineUnreachable(error))
                yield ev.EngineCallEnded(engine, call, ev.CallResult.UNREACHABLE, error)
        probes, self._probes = self._probes, {}
        for engine, probe in probes.items():
            yield ev.EngineProbed(engine=engine, probe=probe, answered=False, detail=error)
        for attempt_id in list(self.attempts):
            attempt = self._over(attempt_id)
            if attempt is not None:
                attempt.tape.cut_unsaid()
                lied = attempt_id == self._unbelieved
                yield ev.AttemptFailed.of(
                    attempt, error, AttemptFailure.CORRUPT if lied else AttemptFailure.BROKE_OFF
                )

    # ---------------------------------------------------------------- what the host must know

    def _know(self, group: Group) -> None:
        """Tell the host of a group."""
        if group.id in self._groups:
            return
        self._groups[group.id] = group
        prompt, e = group.prompt, group.evaluation
        # only functions read the data; where those cannot travel, functions run elsewhere
        data = dict(prompt.data) if self.functions and why_not_plain(prompt.data) is None else {}
        of = None
        if e is not None:
            of = e.request.evaluation, e.groups[0].id, e.request.n_samples, e.request.sampling
        self._attached.keep(group.id, prompt.attached)
        self._out += self._attached.news(group.id, prompt.attached)
        self._out.append(
            wire.NewPrompt(
                group.id, packed(prompt.token_ids), data, prompt.epoch, prompt.position, of, places(prompt.attached),
            )
        )  # fmt: skip

    def _know_response(self, sample: Sample, chains: Iterable[Chain] | None = None) -> _Known:
        """Tell the host a sample's response, or only these of its conversations; tokens that it has brought itself do
        not travel again.
        """
        known = self._known.get(sample.id)
        if known is None:
            self._know(sample.group)
            prompt = sample.group.prompt
            known = self._known[sample.id] = _Known({0: _Told(prompt.token_ids, prompt.attached)})
        if len(known.chains) > 1:
            for number in known.chains.keys() - {chain.number for chain in sample.chains}:
                del known.chains[number]
                self._out.append(wire.NoTape(*sample.id, number))
        for chain in sample.chains if chains is None else chains:
            self._know_chain(chain, known)
        return known

    def _know_chain(self, chain: Chain, known: _Known) -> None:
        sample, tape, told = chain.sample, chain.tape, known.chains.get(chain.number)
        prompt: bytearray | None = None
        if told is None:
            told = known.chains[chain.number] = _Told(chain.prompt, ())
            prompt = packed(chain.prompt)
        elif told.prompt is not chain.prompt:
            told.prompt, prompt = chain.prompt, packed(chain.prompt)
        if told.segments is not tape.segments:
            changed = bool(told.count or tape.segments)
            told.segments, told.count = tape.segments, 0
        else:
            changed = told.count != len(tape.segments)
        attached: tuple[wire.Place, ...] | None = None
        if told.attached is not chain.attached and told.attached != chain.attached:
            self._attached.keep(sample.id.group, chain.attached)
            self._out += self._attached.news(sample.id.group, chain.attached)
            attached = places(chain.attached)
        told.attached = chain.attached
        if not changed and prompt is None and attached is None:
            return
        more: list[wire.OwnPart | wire.Part] = []
        for s in tape.segments[told.count :]:
            if s.attempt_id in told.brought:
                own = wire.OwnPart(s.attempt_id)
                if not more or more[-1] != own:  # one under several versions is whole all the same
                    more.append(own)
                continue
            part = slice(s.start, s.start + s.count)
            more.append(
                wire.Part(
                    s.version, s.kind is SegmentKind.GENERATED, s.attempt_id, s.engine, s.temperature,
                    packed(tape.tokens[part]), packed(tape.logprobs[part]), s.over,
                )
            )  # fmt: skip
        self._out.append(wire.Tape(*sample.id, told.count, tuple(more), chain.number, prompt, attached))
        told.count = len(tape.segments)
        told.brought.clear()

    def forget(self, samples: Iterable[SampleId]) -> None:
        """Forget samples that are delivered or given up; with the last of a group, the group and whatever runs for it.
        """
        by_group: dict[int, list[int]] = {}
        for sample in samples:
            if sample.group in self._groups:
                by_group.setdefault(sample.group, []).append(sample.index)
        for number, indices in by_group.items():
            held = self._core.context.group(number)
            if held is None or not held.held:
                self._judged.pop(number, None)
                for member in self._groups.pop(number).samples:
                    self._known.pop(member.id, None)
                self._attached.forget(number)
                self._out.append(wire.Forget(number))
                continue
            gone = tuple(i for i in indices if self._known.pop(SampleId(number, i), None) is not None)
            if gone:
                self._out.append(wire.Forget(number, gone))

    # ---------------------------------------------------------------- commands

    def _new_run(self, known: _Known, scored: tuple[int, ...] = ()) -> int:
        self._last_run += 1
        known.run, known.turn, known.scored = self._last_run, 0, scored
        return self._last_run

    def _start(self, command: do.StartSample) -> None:
        sample = command.sample
        known = self._know_response(sample, sample.chains[:1])  # of others it hears as its calls are answered
        self._out.append(wire.Start(*sample.id, self._new_run(known), sample.restarts))

    def _submit(self, command: do.Submit) -> None:
        attempt = command.attempt
        chain = attempt.call.chain
        self._know_response(attempt.sample, (chain,))
        self.attempts[attempt.id] = attempt
        table = self._core.engines
        self._reports[attempt.id] = AttemptReports(
            attempt, table, self.engines[attempt.engine].max_context, self._detokenizer
        )
        ends = None if attempt.end_ids == table.eos_token_ids else tuple(sorted(attempt.end_ids))
        self._out.append(
            wire.Run(
                attempt.id, *attempt.sample.id, attempt.engine, attempt.call.start,
                attempt.sampling, ends, attempt.oldest, attempt.urgent, chain.number, attempt.in_flight,
                attempt.extras, attempt.extras_from,
            )
        )  # fmt: skip

    def _abort(self, command: do.Abort) -> None:
        ids = tuple(i for i in command.attempt_ids if i in self.attempts)
        for attempt_id in ids:
            self._reports[attempt_id].checks.aborted = True
        if ids:
            self._out.append(wire.Do(do.Abort(command.engine, ids, command.everything)))

    def _fence(self, command: do.Fence) -> None:
        ids = tuple(i for i in command.attempt_ids if i in self.attempts)
        self.fenced.update(dict.fromkeys(ids))
        for attempt_id in ids:
            self._reports[attempt_id].checks.aborted = True
        if ids:
            self._out.append(wire.Do(do.Fence(command.engine, ids)))

    def _call_completed(self, command: do.CallCompleted) -> None:
        call, result = command.call, command.call.result
        assert result is not None
        start, end, finish = result
        self._know_response(call.sample, (call.chain,))
        self._out.append(wire.Answer(*call.sample.id, start, end, finish, call.number, call.chain.number))

    def _score(self, samples: Sequence[Sample], *, together: bool) -> None:
        known = [self._know_response(sample) for sample in samples]
        run = self._new_run(known[0], tuple(s.id.index for s in samples))
        ends = tuple((s.id.index, _finish_of(s)) for s in samples)
        self._out.append(wire.Score(samples[0].id.group, run, together, ends))

    def _judge(self, command: do.JudgeGroup) -> None:
        group = command.group
        for sample in group.first:
            self._know_response(sample)
        self._judged[group.id] = command.judgement
        ends = tuple((s.id.index, _finish_of(s), s.reward) for s in group.first)
        self._out.append(wire.Judge(group.id, command.judgement, ends))

    def _cancel(self, command: do.CancelSample) -> None:
        sample = command.sample
        known = self._known.get(sample.id)
        if known is not None and known.run:
            known.run = 0
            self._out.append(wire.Cancel(*sample.id))
        if sample.state is SampleState.DROPPED:
            self.forget([sample.id])

    def _probe(self, command: do.ProbeEngine) -> None:
        self._probes[command.engine] = command.probe
        self._out.append(wire.Do(command))

    def _call(self, command: do.PauseEngine | do.LoadEngine | do.ResumeEngine) -> None:
        self._calls[command.engine] = command.call
        self._out.append(wire.Do(command))

    # ---------------------------------------------------------------- reports: attempts

    def _over(self, attempt_id: str) -> Attempt | None:
        """End an attempt, and return it; None means that it does not run there, as far as is known here."""
        self.fenced.pop(attempt_id, None)
        self._reports.pop(attempt_id, None)
        attempt = self.attempts.pop(attempt_id, None)
        if attempt is not None and attempt.tape.count:
            known = self._known.get(attempt.sample.id)
            told = None if known is None else known.chains.get(attempt.call.chain.number)
            if told is not None:
                told.brought.add(attempt_id)
        return attempt

    def _came(self, m: wire.Came) -> None:
        attempt = self.attempts.get(m.attempt_id)
        if attempt is None:
            return  # it has ended already, as far as anybody counts
        try:
            self._reports[m.attempt_id].came(m, self._core.clock.current)
        except (EngineError, ProtocolError) as error:
            raise self._disbelieve(attempt, error) from None

    def _rows(self, m: wire.Rows) -> None:
        attempt = self.attempts.get(m.attempt_id)
        if attempt is None:
            return
        try:
            self._reports[m.attempt_id].rows(m)
        except EngineError as error:
            raise self._disbelieve(attempt, error) from None

    def _ended(self, m: wire.Ended) -> ev.Event | None:
        attempt = self.attempts.get(m.attempt_id)
        if attempt is None:
            return None
        try:
            finish = self._reports[m.attempt_id].ended(m, fenced=m.attempt_id in self.fenced)
        except EngineError as error:
            raise self._disbelieve(attempt, error) from None
        self._over(m.attempt_id)
        return ev.AttemptEnded.of(attempt, finish, fenced=m.fenced)

    def _attempt_failed(self, m: wire.Failed) -> ev.Event | None:
        attempt = self.attempts.get(m.attempt_id)
        if attempt is None:
            return None
        try:
            self._reports[m.attempt_id].failed(m)
        except EngineError as error:
            raise self._disbelieve(attempt, error) from None
        self._over(m.attempt_id)
        return ev.AttemptFailed.of(attempt, clean(m.error), m.kind, rejected=m.rejected, busy_s=m.busy_s)

    def _disbelieve(self, attempt: Attempt, error: Exception) -> ProtocolError:
        """Return what to raise; nothing of that request is believed any more."""
        self._unbelieved, where = attempt.id, f"attempt {attempt.id} of {attempt.sample.key} on engine {attempt.engine}"
        return ProtocolError(f"host {self.name}: {where}: {error}")

    def _of_attempt(self, event: ev.StopFound | ev.AttemptStalled) -> ev.Event | None:
        return event if event.attempt_id in self.attempts else None

    # ---------------------------------------------------------------- reports: functions

    def _running(self, group: int, index: int, run: int) -> tuple[Sample, _Known] | None:
        """The sample whose function it is; None: the core has given that run up."""
        known = self._known.get(SampleId(group, index))
        held = self._core.context.group(group)
        return None if known is None or known.run != run or not run or held is None else (held.samples[index], known)

    def _attach(self, m: wire.Attach) -> None:
        if m.group in self._groups:  # else it is settled, and forgotten there, too
            self._attached.came(m, has=False)

    def _called(self, m: wire.Called) -> ev.Event | None:
        running = self._running(m.group, m.index, m.run)
        if running is None:
            return None
        sample, known = running
        if m.turn <= known.turn:
            return None
        known.turn = m.turn
        wrong = wrong_sampling(m.sampling, self._core.engines.vocab_size)
        chain = next((c for c in sample.chains if c.number == m.chain), None)
        have = 0 if chain is None else len(chain.tape)
        if sample.state is not SampleState.RUNNING or (sample.asks and not m.any_chain):
            wrong = f"it is {sample!r}"
        if not 0 <= m.seen <= have:
            wrong = f"it has seen {m.seen} of {have} tokens"
        if (chain is None) != (m.chain is None) or (m.chain != 0 and not m.any_chain):
            wrong = f"it continues conversation {m.chain}"
        if wrong is not None:
            raise ProtocolError(f"host {self.name}: {sample.id} calls generate: {wrong}")
        token_ids: Int32 | None = None
        if m.added is not None:
            added = ids_of(m.added)
            if (wrong := wrong_ids(added, self._core.engines.vocab_size)) is not None:
                raise ProtocolError(f"host {self.name}: {sample.id} calls generate: {wrong}")
            token_ids = added if chain is None else np.concatenate((chain.conversation(m.seen), added))
        attached = self._attached.placed(m.group, m.attached)
        length, core = 0 if token_ids is None else len(token_ids), self._core
        wrong = wrong_places(attached, length, core.settings.attachments, core.engines.vocab_size)
        if wrong is not None:
            raise ProtocolError(f"host {self.name}: {sample.id} calls generate: {wrong}")
        for placed in attached:  # this run began after it has heard of the group: it has them as long
            self._attached.known(m.group, placed.attachment.digest)
        if m.any_chain and (token_ids is None or not len(token_ids)):
            raise ProtocolError(f"host {self.name}: {sample.id} calls generate: a conversation must have tokens")
        return ev.CallMade(sample.id, m.sampling, token_ids, m.turn, m.any_chain, attached)

    def _unheard(self, m: wire.Unheard) -> ev.Event | None:
        running = self._running(m.group, m.index, m.run)
        return None if running is None else ev.CallUnheard(running[0].id, m.number)

    def _returned(self, m: wire.Returned) -> ev.Event | None:
        running = self._running(m.group, m.index, m.run)
        if running is None:
            return None
        sample, known = running
        known.run = 0
        if sample.state is not SampleState.RUNNING or sample.asks:
            raise ProtocolError(f"host {self.name}: {sample.id} returned, and is {sample!r}")
        if sample.evaluation is not None:
            self._function_returned(sample, None if m.output is None else of_plain_bytes(m.output))
            if m.why_not and not self._warned:
                self._warned = True
                log.warning(
                    "host %s: what rollout functions return cannot travel (%s), so evaluate() has None in its place; "
                    "return numbers, strings, bytes, lists and mappings", self.name, clean(m.why_not),
                )  # fmt: skip
        return ev.SampleReturned(sample.id)

    def _raised(self, m: wire.Raised) -> ev.Event | None:
        running = self._running(m.group, m.index, m.run)
        if running is None:
            return None
        sample, known = running
        known.run = 0
        return ev.SampleFailed(sample.id, clean(m.error), clean(m.kind))

    def _rewards(self, m: wire.Rewards) -> ev.Event | None:
        running = self._running(m.group, m.index, m.run)
        if running is None:
            return None
        _, known = running
        known.run = 0
        if tuple(index for index, _ in m.rewards) != known.scored:
            asked = f"asked for those of {known.scored}"
            raise ProtocolError(f"host {self.name}: rewards {m.rewards} of group {m.group}, {asked}")
        for index, reward in m.rewards:
            if wrong_reward(reward):
                raise ProtocolError(f"host {self.name}: sample {index} of group {m.group} got the reward {reward}")
        return ev.Scored(m.group, list(m.rewards))

    def _group_judged(self, event: ev.GroupJudged) -> ev.Event | None:
        if self._judged.get(event.group) != event.judgement:
            return None
        del self._judged[event.group]
        error = None if event.error is None else clean(event.error)
        return replace(event, error=error, kind=clean(event.kind))

    # ---------------------------------------------------------------- reports: engines

    def _call_ended(self, event: ev.EngineCallEnded) -> ev.Event | None:
        if self._calls.get(event.engine) != event.call:
            return None
        if event.content.strip("0123456789abcdef") or len(event.content) > LONGEST_CONTENT:
            raise ProtocolError(f"host {self.name}: the content of a directory is told as {clean(event.content)}")
        del self._calls[event.engine]
        event = replace(event, error=clean(event.error))
        if event.result is not ev.CallResult.DONE:
            self._failed(event.call, _ERRORS[event.result](event.error))
        return event

    def _written(self, event: ev.WeightsWritten) -> ev.Event:
        if all(limits.remote for limits in self.engines.values()):
            raise ProtocolError(f"host {self.name} says that weights were written which none of its engines reads")
        return ev.WeightsWritten(f"host {self.name}: {clean(event.error)}; call weight_update before the next batch")

    def _probed(self, event: ev.EngineProbed) -> ev.Event | None:
        if self._probes.get(event.engine) != event.probe:
            return None
        if event.load is not None and event.load.engine != event.engine:
            raise ProtocolError(f"host {self.name}: a probe of {event.engine} tells the load of another engine")
        del self._probes[event.engine]
        return replace(event, detail=clean(event.detail))

    def _sent(self, m: wire.TapesSent) -> None:
        self.tapes_sent = m.number

    def _quiet(self, m: wire.Quieted) -> None:
        self.quieted = m.number

    def _goodbye(self, m: wire.Goodbye) -> None:
        self.leaves = clean(m.why)


def _finish_of(sample: Sample) -> FinishReason:
    """Return why a response that is complete has ended."""
    assert sample.finish is not None
    return sample.finish
