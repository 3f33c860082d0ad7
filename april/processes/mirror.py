"""The mirror of a core on a host: frames made into commands for what runs here, and its events into frames.

Samples, groups and attempts here are objects of the core's types that only carry what was told. No network, no clock,
no asyncio: whoever owns the mirror carries the frames.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from april.core import commands as do
from april.core import events as ev
from april.core.attachments import NO_EXTRAS, Placed
from april.core.sampling import SamplingParams
from april.core.tape import AttemptTape, Int32, Segment, SegmentKind, TokenTape
from april.core.types import (
    Attempt,
    CallState,
    Chain,
    Evaluation,
    FinishReason,
    GenerateCall,
    Group,
    Prompt,
    Replay,
    Sample,
    SampleId,
    SampleState,
)
from april.core.versions import PolicyVersion
from april.processes import messages as wire
from april.processes.brought_along import Attached, pieces, places
from april.processes.messages import ProtocolError, ids_of, logprobs_of, packed
from april.processes.plain_values import plain_bytes

_BEGUN_ELSEWHERE = Replay(deque(), None)
"""The replay of all samples here, from which nobody takes."""
Question = wire.AskTapes | wire.AskQuiet | wire.Goodbye


class Forgotten(tuple[SampleId, ...]):
    """Samples that are settled."""


class Mirror:
    """The samples, groups and attempts that a host was told of; the view that a host's engines and functions have of
    the core (``HostView``).
    """

    def __init__(self, welcome: wire.Welcome) -> None:
        self.name = welcome.name
        self.current = welcome.version
        self.eos_token_ids = frozenset(welcome.eos_token_ids)
        self.abort_resend_s = welcome.abort_resend_s
        self.abort_deadline_s = welcome.abort_deadline_s
        self._longest, self._context = welcome.max_response_len, welcome.max_context
        self._groups: dict[int, Group] = {}
        self._attached = Attached("the core's process", paths=True)
        self._evaluations: dict[int, Evaluation] = {}
        self._attempts: dict[str, Attempt] = {}
        """That run."""
        self._reported: dict[str, tuple[int, bool, int, int, int]] = {}
        """Tokens of each attempt, whether a stop string was found, tokens after it and left out (for want of a version,
        of rows), as told last."""
        self._brought: dict[SampleId, dict[str, Attempt]] = {}
        """Attempts that have ended, until it is told what became of their tokens."""
        self._runs: dict[SampleId, int] = {}
        self._turns: Counter[SampleId] = Counter()
        self._out: list[wire.Message] = []
        self.output_of: Callable[[SampleId], Any] = lambda sample: None
        """Returns the result of a sample's rollout function here."""
        self._readers: dict[type[wire.Message], Callable[[Any], Iterable[do.Command | Forgotten | Question]]] = {
            wire.Now: self._now,
            wire.Attach: self._attach,
            wire.NewPrompt: self._new_prompt,
            wire.Tape: self._tape,
            wire.NoTape: self._no_tape,
            wire.Run: self._run,
            wire.Start: self._start,
            wire.Answer: self._answer,
            wire.Score: self._score,
            wire.Judge: self._judge,
            wire.Cancel: self._cancel,
            wire.Forget: self._forget,
            wire.Do: lambda m: (m.command,),
            **dict.fromkeys((wire.AskTapes, wire.AskQuiet, wire.Goodbye), lambda m: (m,)),
        }
        self._writers: dict[type[ev.Event], Callable[[Any], None]] = {
            ev.AttemptEnded: self._ended,
            ev.AttemptFailed: self._failed,
            ev.CallMade: self._called,
            ev.CallUnheard: self._unheard,
            ev.SampleReturned: self._returned,
            ev.SampleFailed: lambda e: self._run_over(e.sample, wire.Raised, e.error, e.kind),
            ev.Scored: self._scored,
        }

    # ---------------------------------------------------------------- as the view of a host

    @property
    def max_context(self) -> int:
        """Tokens of prompt and response that all engines have room for."""
        return self._context

    def room(self, sample: Sample) -> int:
        """Tokens that its response may have at most, tokens of the environment included."""
        return min(self._longest, self._context - len(sample.chains[0].prompt))

    # ---------------------------------------------------------------- frames

    def receive(self, frame: bytes) -> Iterator[do.Command | Forgotten | Question]:
        """Yield what is to be done here, each before the next one is asked for.

        Raises:
            ProtocolError: this is no frame of april's.
        """
        readers = self._readers
        for message in wire.decode_to_host(frame):
            reader = readers.get(type(message))
            if reader is None:
                raise ProtocolError(f"the core's process says {type(message).__name__} after its welcome")
            yield from reader(message)

    def post(self, event: ev.Event) -> None:
        """Put what has happened here into the next frame."""
        self._writers.get(type(event), lambda e: self._out.append(wire.Happened(e)))(event)

    def say(self, message: wire.Message) -> None:
        """Put one message into the next frame."""
        self._out.append(message)

    def take(self) -> bytes | None:
        """The next frame, of several perhaps; None: there is nothing to say."""
        if not self._out:
            return None
        frame, count = wire.first_frame(self._out)
        del self._out[:count]
        return frame

    # ---------------------------------------------------------------- what is told

    def _sample(self, group: int, index: int) -> Sample:
        try:
            samples = self._groups[group].samples
        except KeyError:
            raise ProtocolError(f"group {group} is not known here") from None
        while len(samples) <= index:
            samples.append(Sample(SampleId(group, len(samples)), self._groups[group]))
        sample = samples[index]
        # functions see what their calls were answered with, not all of a response that was begun elsewhere
        sample.chains[0].replay = _BEGUN_ELSEWHERE
        return sample

    def _chain(self, sample: Sample, number: int) -> Chain:
        chain = next((c for c in sample.chains if c.number == number), None)
        if chain is None:
            raise ProtocolError(f"conversation {number} of {sample.id} is not known here")
        return chain

    def _now(self, m: wire.Now) -> tuple[()]:
        self.current = m.version
        return ()

    def _attach(self, m: wire.Attach) -> tuple[()]:
        self._attached.came(m)
        return ()

    def _new_prompt(self, m: wire.NewPrompt) -> tuple[()]:
        attached = self._attached.placed(m.group, m.attached)
        prompt = Prompt(ids_of(m.tokens), m.data, m.epoch, m.position, attached)
        evaluation = None
        if m.evaluation is not None:
            number, first, samples, sampling = m.evaluation
            evaluation = self._evaluations.get(number)
            if evaluation is None:
                request = ev.EvaluationRequested(
                    evaluation=number, prompts=(), n_samples=samples, sampling=sampling, seed=0
                )
                evaluation = Evaluation(request=request, groups=(Group(first, prompt, 0),))
                self._evaluations = {number: evaluation}
        self._groups[m.group] = Group(m.group, prompt, 0, evaluation=evaluation)
        return ()

    def _tape(self, m: wire.Tape) -> tuple[()]:
        sample = self._sample(m.group, m.index)
        chain = next((c for c in sample.chains if c.number == m.chain), None)
        if chain is None:
            if m.prompt is None:
                raise ProtocolError(f"conversation {m.chain} of {sample.id} has no prompt")
            chain = Chain(sample, m.chain, ids_of(m.prompt))
            chain.replay = _BEGUN_ELSEWHERE
            sample.chains = tuple(sorted([*sample.chains, chain], key=lambda c: c.number))
        elif m.prompt is not None:
            chain.prompt = ids_of(m.prompt)
        if m.attached is not None:
            chain.attached = self._attached.placed(m.group, m.attached)
        tape, brought = chain.tape, self._take_brought(sample.id, m.chain)
        if m.keep == 0:
            tape = chain.tape = TokenTape()
        if m.keep != len(tape.segments):
            raise ProtocolError(f"{sample.id} has {len(tape.segments)} segments here, and {m.keep} are to be kept")
        for part in m.more:
            if isinstance(part, wire.OwnPart):
                if part.attempt_id not in brought:
                    raise ProtocolError(f"attempt {part.attempt_id} has brought nothing here")
                a = brought[part.attempt_id]
                tape.add_attempt(a.tape, a.id, a.engine, a.sampling.temperature, a.over)
                continue
            tokens, logprobs = ids_of(part.tokens), logprobs_of(part.logprobs)
            kind = SegmentKind.GENERATED if part.generated else SegmentKind.ENVIRONMENT
            tape.segments.append(
                Segment(
                    len(tape.tokens), len(tokens), part.version, kind, part.attempt_id, part.engine, part.temperature,
                    part.over,
                )
            )  # fmt: skip
            tape.tokens = np.concatenate((tape.tokens, tokens))
            tape.logprobs = np.concatenate((tape.logprobs, logprobs))
        return ()

    def _take_brought(self, sample: SampleId, chain: int) -> dict[str, Attempt]:
        """The attempts that have ended here, of one conversation; nobody asks for them again."""
        every = self._brought.pop(sample, {})
        others = {name: attempt for name, attempt in every.items() if attempt.call.chain.number != chain}
        if others:
            self._brought[sample] = others
        return {name: attempt for name, attempt in every.items() if name not in others}

    def _no_tape(self, m: wire.NoTape) -> tuple[()]:
        sample = self._sample(m.group, m.index)
        gone = self._chain(sample, m.chain)
        sample.chains = tuple(chain for chain in sample.chains if chain is not gone)
        if not sample.chains:
            raise ProtocolError(f"{sample.id} is to have no conversation")
        self._take_brought(sample.id, m.chain)
        return ()

    def _run(self, m: wire.Run) -> tuple[do.Command]:
        sample, sampling = self._sample(m.group, m.index), m.sampling
        chain = self._chain(sample, m.chain)
        attempt = Attempt(
            id=m.attempt_id,
            call=GenerateCall(chain, sampling, m.call_start),
            engine=m.engine,
            token_ids=chain.conversation(len(chain.tape)),
            sampling=sampling,
            tape=AttemptTape(needs_rows=bool(m.extras)),
            extras=m.extras,
            extras_from=m.extras_from,
            end_ids=self.eos_token_ids if m.end_ids is None else frozenset(m.end_ids),
            oldest=m.oldest,
            urgent=m.urgent,
            in_flight=m.in_flight,
        )
        self._attempts[attempt.id] = attempt
        return (do.Submit(attempt),)

    def _start(self, m: wire.Start) -> tuple[do.Command]:
        sample = self._sample(m.group, m.index)
        for chain in sample.chains:
            chain.calls.clear()
        sample.finish, sample.restarts = None, m.restarts
        self._runs[sample.id], self._turns[sample.id] = m.run, 0
        return (do.StartSample(sample),)

    def _answer(self, m: wire.Answer) -> tuple[do.Command]:
        chain = self._chain(self._sample(m.group, m.index), m.chain)
        call = GenerateCall(chain, SamplingParams(1), m.start, m.number, state=CallState.DONE)
        call.end, call.finish = m.end, m.finish
        chain.calls.append(call)
        return (do.CallCompleted(call),)

    def _finished(self, group: int, index: int, finish: FinishReason) -> Sample:
        sample = self._sample(group, index)
        sample.finish, sample.state = finish, SampleState.SCORING
        return sample

    def _score(self, m: wire.Score) -> tuple[do.Command]:
        samples = [self._finished(m.group, index, finish) for index, finish in m.samples]
        self._runs[samples[0].id] = m.run
        if not m.together:
            return (do.ScoreSample(samples[0]),)
        group = self._groups[m.group]
        for sample in group.samples:
            if sample not in samples:
                sample.state = SampleState.DROPPED
        return (do.ScoreGroup(group),)

    def _judge(self, m: wire.Judge) -> tuple[do.Command]:
        for index, finish, reward in m.samples:
            self._finished(m.group, index, finish).reward = reward
        group = self._groups[m.group]
        group.finishers, group.quorum = [index for index, *_ in m.samples], len(m.samples)
        return (do.JudgeGroup(group, m.judgement),)

    def _cancel(self, m: wire.Cancel) -> tuple[do.Command]:
        sample = self._sample(m.group, m.index)
        self._runs.pop(sample.id, None)
        return (do.CancelSample(sample),)

    def _forget(self, m: wire.Forget) -> list[do.Command | Forgotten]:
        group = self._groups.get(m.group)
        if group is None:
            return []
        if m.indices is None:
            del self._groups[m.group]
            self._attached.forget(m.group)
            samples = group.samples
        else:
            samples = [self._sample(m.group, index) for index in m.indices]
            for sample in samples:
                group.samples[sample.id.index] = Sample(sample.id, group)
        runs = self._runs
        asked: list[do.Command | Forgotten] = [do.CancelSample(sample) for sample in samples if sample.id in runs]
        for sample in samples:
            for known in (runs, self._turns, self._brought):
                known.pop(sample.id, None)
        asked.append(Forgotten(sample.id for sample in samples))
        return asked

    # ---------------------------------------------------------------- what has happened

    def report(self) -> None:
        """Put what all running attempts have brought into the next frame."""
        for attempt in self._attempts.values():
            self._report(attempt)

    def _report(self, attempt: Attempt, *, over: bool = False) -> None:
        tape = attempt.tape if over else attempt.tape.sure()
        unknown, bare = (tape.unknown, tape.bare) if over else (0, 0)
        stands = tape.count, tape.stopped, tape.after_stop, unknown, bare
        told = self._reported.get(attempt.id, (0, False, 0, 0, 0))
        if stands == told:
            return
        if not over:
            self._reported[attempt.id] = stands
        tokens, logprobs, spans = tape.packed()
        at = told[0]
        if at:
            tokens, logprobs = tokens[at:], logprobs[at:]
            spans = _after(spans, at)
        self._out.append(
            wire.Came(
                attempt.id, at, packed(tokens), packed(logprobs), tuple(spans), tape.stopped, tape.after_stop, unknown,
                bare,
            )
        )  # fmt: skip

    def _over(self, attempt_id: str) -> int | None:
        """Tokens that it has brought, which are reported with that; None: it is over already."""
        attempt = self._attempts.pop(attempt_id, None)
        if attempt is None:
            return None
        attempt.tape.cut_unsaid()
        self._report(attempt, over=True)
        self._reported.pop(attempt_id, None)
        if attempt.tape.count:
            self._out += pieces(attempt_id, attempt.tape.extras)
        attempt.tape.extras = NO_EXTRAS
        if attempt.tape.count and attempt.sample.id.group in self._groups:
            self._brought.setdefault(attempt.sample.id, {})[attempt_id] = attempt
        return attempt.tape.parsed

    def _ended(self, e: ev.AttemptEnded) -> None:
        if (count := self._over(e.attempt_id)) is not None:
            self._out.append(wire.Ended(e.attempt_id, e.finish, e.fenced, count))

    def _failed(self, e: ev.AttemptFailed) -> None:
        if (count := self._over(e.attempt_id)) is not None:
            self._out.append(wire.Failed(e.attempt_id, e.error, e.kind, e.rejected, e.busy_s, count))

    def _run_over(self, sample: SampleId, message: Callable[..., wire.Message], *more: Any) -> None:
        """The last word of a run; what was cancelled has had it."""
        run = self._runs.pop(sample, None)
        if run is not None:
            self._out.append(message(*sample, run, *more))

    def _returned(self, e: ev.SampleReturned) -> None:
        output, why_not, group = None, "", self._groups.get(e.sample.group)
        if group is not None and group.evaluation is not None:  # nobody else asks for it
            try:
                output = plain_bytes(self.output_of(e.sample))
            except TypeError as error:
                why_not = str(error)
        self._run_over(e.sample, wire.Returned, output, why_not)

    def _called(self, e: ev.CallMade) -> None:
        run, seen, added, number = self._runs.get(e.sample), 0, None, None if e.any_chain else 0
        if run is None:
            return  # of a run that was cancelled
        attached: tuple[Placed, ...] = ()
        if e.token_ids is not None:
            chain: Chain | None = self._sample(*e.sample).chains[0]
            if e.any_chain:
                chain = self._longest_begun(e.sample, e.token_ids, e.attached)
            if chain is not None:
                seen, number = chain.seen, chain.number
            added, attached = packed(e.token_ids[0 if chain is None else len(chain.prompt) + seen :]), e.attached
            self._out += self._attached.news(e.sample.group, attached, read=True)
            self._attached.keep(e.sample.group, attached)
        self._turns[e.sample] += 1
        turn = self._turns[e.sample]
        self._out.append(
            wire.Called(*e.sample, run, turn, e.sampling, seen, added, e.any_chain, number, places(attached))
        )

    def _longest_begun(self, sample: SampleId, token_ids: Int32, attached: Sequence[Placed]) -> Chain | None:
        """The conversation of which the function has heard most, and that it goes on with; what of it does not travel
        again. Which conversation the call is of is the core's to say.
        """
        heard = [c for c in self._sample(*sample).chains if c.calls and c.begins(token_ids, c.seen, attached)]
        return max(heard, key=lambda c: len(c.prompt) + c.seen, default=None)

    def _unheard(self, e: ev.CallUnheard) -> None:
        if (run := self._runs.get(e.sample)) is None:
            return
        for chain in self._sample(*e.sample).chains:
            if chain.calls and chain.calls[-1].number == e.number:  # the next one is not of its tokens
                chain.calls.pop()
        self._out.append(wire.Unheard(*e.sample, run, e.number))

    def _scored(self, e: ev.Scored) -> None:
        first = SampleId(e.group, e.rewards[0][0])
        self._run_over(first, wire.Rewards, tuple(e.rewards))


def _after(spans: list[tuple[PolicyVersion, int]], at: int) -> list[tuple[PolicyVersion, int]]:
    """Return what is left of run-length versions without the first ``at`` tokens."""
    left = []
    for version, count in spans:
        if at < count:
            left.append((version, count - at))
        at = max(at - count, 0)
    return left
