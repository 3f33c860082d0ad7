"""Decides how a call of ``llm.generate`` is answered: by an engine, or with tokens that are already stored.

A call continues one of its sample's chains (token sequences) or begins a new chain. It takes one or more attempts
(engine requests), which ``AttemptBook.open`` makes; ``attempt_results`` handles their results. Each chain records its
response in a tape.

If the process of a rollout function dies, the function is started again; after too many deaths its sample fails. The
calls that the function then repeats are answered from the tapes (a replay). Invariant: a function is started again only
when none of its attempts is at an engine. Functions that raise errors are handled in ``function_results``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from april.core import commands as do
from april.core import events as ev
from april.core.attachments import Placed
from april.core.context import CoreContext
from april.core.sample_lifecycle import SampleLifecycle
from april.core.tape import Int32
from april.core.types import (
    CallState,
    Chain,
    DropReason,
    EngineFinish,
    Evaluation,
    FinishReason,
    GenerateCall,
    Sample,
    SampleState,
)

# module-level names, as an enum member costs 60 ns per use on Python 3.11 and these are used at every event
STOP, LENGTH = EngineFinish.STOP, EngineFinish.LENGTH
NEW, RUNNING = SampleState.NEW, SampleState.RUNNING


class SampleCalls:
    """Opens, replays and completes the calls of rollout functions, and restarts functions whose process died."""

    def __init__(self, context: CoreContext, lifecycle: SampleLifecycle) -> None:
        self._context = context
        self._lifecycle = lifecycle

    def call_made(self, event: ev.CallMade) -> None:
        """Handle a call of ``llm.generate``: answer it from the tape, or queue it for an engine."""
        self._context.counters["overridden_requests"] += event.overridden
        what = "called generate twice at the same time"
        sample = self._context.acting_sample(event.sample, what, asks=event.any_chain)
        if sample is None:
            return
        if event.any_chain:
            self._call_in_any_chain(sample, event)
            return
        chain = sample.chains[0]
        if chain.replay is not None:
            self._answer_from_tape(chain, event)
            return
        if event.token_ids is not None:
            error = self._append_environment(chain, event.token_ids, event.attached)
            if error:
                self._lifecycle.replace_or_drop(sample, error)
                return
        self._open(chain, event, len(chain.tape.tokens))

    def _call_in_any_chain(self, sample: Sample, event: ev.CallMade) -> None:
        """Handle a call that contains a whole conversation, which may continue any of the sample's chains or none."""
        ids, attached, sample.any_chain = event.token_ids, event.attached, True
        assert ids is not None
        if event.chain is None:
            chain = self.find_chain(sample, ids, attached)
        else:
            chain = next((c for c in sample.chains if c.number == event.chain), None)
        if chain is not None and chain.replay is not None:
            self._answer_from_tape(chain, event)
            return
        if chain is None:
            if wrong := self._why_no_new_chain(sample, ids):
                self._lifecycle.replace_or_drop(sample, wrong)
                return
            chain = sample.chains[0]
            if chain.calls or chain.replay is not None:
                chain = Chain(sample, 1 + sample.chains[-1].number, np.array(ids, np.int32), attached)
                sample.chains += (chain,)
            elif not np.array_equal(ids, chain.prompt) or attached != chain.attached:
                # no call has used the group's prompt, so this conversation replaces it in the first chain
                chain.prompt, chain.attached = np.array(ids, np.int32), attached
        self._append_environment(chain, ids, attached)
        self._open(chain, event, len(chain.tape))

    def find_chain(self, sample: Sample, token_ids: Int32, attached: Sequence[Placed] = ()) -> Chain | None:
        """Return the chain (token sequence) that a call with these tokens continues; None if it begins a new chain.

        There may be two candidates: a replayed chain that has recorded this call or all calls before it, and the
        longest other chain that has no open call and is a prefix of ``token_ids``. The replayed chain is returned,
        unless ``token_ids`` contains answers of both chains and the other chain is at least as long.
        """
        replayed = [chain for chain in sample.chains if chain.replay is not None]
        claims = [(chain, self._answers_received(chain, token_ids, attached)) for chain in replayed]
        claimed = [(received, chain.number, chain) for chain, received in claims if received is not None]
        free = (c for c in sample.chains if c.replay is None and c.open_call is None and c.calls)
        extended = [
            (len(c.prompt) + len(c.tape), -c.number, c)
            for c in free
            if c.is_prefix_of(token_ids, len(c.tape), attached)
        ]
        longest, _, chain = max(extended, default=(-1, 0, None))
        if claimed:
            received, _, lost = min(claimed)
            assert lost.replay is not None
            # of two equally long chains, prefer the other chain, which calls have used since the restart
            if not received or chain is None or len(lost.prompt) + lost.replay.calls[received - 1].end > longest:
                return lost
        return chain

    def _answers_received(self, chain: Chain, token_ids: Int32, attached: Sequence[Placed]) -> int | None:
        """Return how many recorded answers of the chain these tokens contain; None if they belong to another chain.

        A rollout function that was started again has received no answers. Its client, such as an agent in another
        process, may have survived; then the client's tokens contain the answers that it received before the restart.
        """
        replay = chain.replay
        assert replay is not None
        starts = [call.start for call in replay.calls]
        starts += [] if replay.open_start is None else [replay.open_start]
        asked = token_ids[: self._max_length(chain, attached)]  # as the call was cut when its start was recorded
        for received, start in enumerate(starts):
            if len(asked) == len(chain.prompt) + start and chain.is_prefix_of(asked, start, attached):
                return received
        if replay.open_start is None and replay.calls and chain.is_prefix_of(token_ids, replay.calls[-1].end, attached):
            return len(starts)
        return None

    def _max_length(self, chain: Chain, attached: Sequence[Placed]) -> int:
        """Return the maximum length of the chain, prompt included; no attachment is split at this limit."""
        most = len(chain.prompt) + self._context.attempts.room(chain)
        return next((placed.at for placed in attached if placed.end > most), most) if attached else most

    def _why_no_new_chain(self, sample: Sample, token_ids: Int32) -> str | None:
        """Return the reason why these tokens may not begin another chain; None if they may."""
        settings = self._context.settings
        # chains from before a restart count only once a call has used them again
        if sum(bool(chain.calls) for chain in sample.chains) >= settings.max_chains:
            return f"it starts more than max_chains={settings.max_chains} conversations"
        if len(token_ids) >= self._context.engines.max_context:
            return f"a conversation of {len(token_ids)} tokens does not fit in the engines' context"
        return None

    def _open(self, chain: Chain, event: ev.CallMade, start: int) -> None:
        call = GenerateCall(chain, event.sampling, start, event.number)
        chain.calls.append(call)
        # a state that was saved just before a call's end may hold all of its tokens; the call is complete then
        stopped = self._context.attempts.ends_in_stop(call)
        # if an attachment did not fit, the conversation was truncated, and nothing may be generated
        attached, ids = event.attached, event.token_ids
        cut = bool(attached) and ids is not None and self._max_length(chain, attached) < len(ids)
        if not self.complete_if_ended(call, stopped=stopped, length=cut):
            self._context.note(chain.sample, f"asks for up to {event.sampling.max_tokens} tokens")
            self._context.over_sampler.push(call)

    def _append_environment(self, chain: Chain, token_ids: Int32, attached: Sequence[Placed]) -> str | None:
        """Append the tokens that the function added since its last call, cut to the maximum length.

        Returns an error for tokens that do not continue the chain; otherwise None.
        """
        have = len(chain.prompt) + len(chain.tape)
        if not chain.is_prefix_of(token_ids, len(chain.tape), attached):
            return (
                "llm.generate was given a conversation that does not begin with the prompt and everything generated so "
                "far, including attachments; append to the conversation, and never rewrite it"
            )
        end = self._max_length(chain, attached)
        chain.tape.add_environment(np.array(token_ids[have:end], np.int32), self._context.clock.current)
        chain.attached += tuple(placed for placed in attached if have <= placed.at < end)
        return None

    def _answer_from_tape(self, chain: Chain, event: ev.CallMade) -> None:
        """Answer a repeated call from the tape; if its tokens differ from the recorded call, restart the sample."""
        replay = chain.replay
        assert replay is not None
        ids = event.token_ids
        if ids is not None:
            received = self._answers_received(chain, ids, event.attached)
        else:
            received = 0 if replay.next_start == chain.seen_tokens else None
        if received is None or (received and not event.any_chain):
            self.restart_diverged(chain.sample)
            return
        for _ in range(received):
            call = GenerateCall(chain, event.sampling, replay.next_start or 0, state=CallState.DONE)
            _, call.end, call.finish = replay.calls.popleft()
            chain.calls.append(call)
        start = replay.next_start
        if replay.calls:
            assert start is not None
            call = GenerateCall(chain, event.sampling, start, event.number)
            chain.calls.append(call)
            _, end, finish = replay.calls.popleft()
            if replay.next_start is None:
                chain.replay = None  # no call was open when the function was lost, so all later calls are new
            self._answer(call, end, finish)
            return
        chain.replay = None
        if start is None and ids is not None:
            self._append_environment(chain, ids, event.attached)
        self._open(chain, event, len(chain.tape) if start is None else start)

    def restart_diverged(self, sample: Sample) -> None:
        """Restart a sample without its tokens, because its restarted function does not repeat its earlier calls."""
        self._context.counters["replays_diverged"] += 1
        self._lifecycle.restart(sample, DropReason.REPLAY_DIVERGED)

    def drop_unused_replay(self, sample: Sample) -> None:
        """Drop the recorded tokens that a restarted function did not ask for before it returned."""
        for chain in sample.chains:
            if chain.replay is not None:
                end = chain.calls[-1].end if chain.calls else 0
                self._context.tokens.drop(chain.cut(end), DropReason.REPLAY_DIVERGED)
                self._context.counters["replays_diverged"] += 1
                chain.replay = None
        sample.chains = tuple(chain for chain in sample.chains if chain.number == 0 or chain.calls)

    def answer_checked(self, event: ev.AnswerChecked) -> None:
        """Count an answer for which a client demanded a form (such as a JSON schema), and whether it has that form."""
        self._context.counters["constrained_answers"] += 1
        self._context.counters["broken_constraints"] += not event.kept

    def call_unheard(self, event: ev.CallUnheard) -> None:
        """End a call whose answer nobody will read and drop its tokens, unless its chain has continued since.

        If the chain is replayed, the recorded tokens that followed this answer are dropped, too.
        """
        context = self._context
        sample = context.sample(event.sample)
        if sample is None:
            return
        last = [chain.calls[-1] for chain in sample.chains if chain.calls]
        call = next((c for c in last if c.number == event.number), None)
        # a lost function is started again and repeats its calls, so their tokens are kept
        if sample.state is not RUNNING or call is None or any(c.function_lost for c in last):
            return
        if call.state is not CallState.DONE:
            context.over_sampler.forget(call)
            self._lifecycle.abandon(call, DropReason.UNHEARD)
        chain, tokens = call.chain, context.ledger(sample)
        context.note(sample, f"nobody waits for the result of call {call.number}")
        if chain.replay is not None:
            tokens.drop(chain.cut(call.end), DropReason.REPLAY_DIVERGED)  # these tokens followed the unread answer
            context.counters["replays_diverged"] += 1
            chain.replay = None
        chain.calls.pop()
        tokens.drop(chain.cut(chain.calls[-1].end if chain.calls else 0), DropReason.UNHEARD)
        if not chain.calls and chain.number:
            sample.chains = tuple(c for c in sample.chains if c is not chain)
        sample.any_chain = True
        answered = [(c.calls[-1].number, c.calls[-1].finish) for c in sample.chains if c.calls and c.calls[-1].finish]
        sample.finish = max(answered)[1] if answered else None

    def complete_if_out_of_budget(self, call: GenerateCall) -> bool:
        """Complete a queued call if its sample has used up ``max_sample_tokens``; return whether it is complete."""
        return self._context.settings.max_sample_tokens is not None and self.complete_if_ended(call, stopped=False)

    def complete_if_ended(self, call: GenerateCall, *, stopped: bool, length: bool = False) -> bool:
        """Complete a call that ``stopped``, or used up the context (``length``) or its budget; else return False."""
        if stopped:
            finish = FinishReason.STOP
        elif length or self._context.attempts.budget(call) <= 0:
            finish = FinishReason.LENGTH
        else:
            return False
        self._answer(call, len(call.chain.tape.tokens), finish)
        return True

    def _answer(self, call: GenerateCall, end: int, finish: FinishReason) -> None:
        call.end, call.finish, call.sample.finish = end, finish, finish
        self._context.change_state(call, CallState.DONE, f"call complete ({finish}) at {end} tokens")
        if call.function_lost:
            self._restart_with_replay(call.sample)
        else:
            self._context.out.append(do.CallCompleted(call))

    def queue(self, call: GenerateCall, why: str) -> None:
        self._context.change_state(call, CallState.QUEUED, why)
        if call.function_lost:
            self._restart_with_replay(call.sample)
        else:
            self._context.over_sampler.push(call)

    # ---------------------------------------------------------------- functions whose process died

    def function_lost(self, event: ev.FunctionLost) -> None:
        """Restart a rollout function whose process died; its sample fails if this recurs without progress."""
        sample = self._context.sample(event.sample)
        if sample is None or sample.state is not RUNNING:
            return
        if not sample.has_open_call:  # with an open call it was only waiting, so it cannot have ended its process
            (times, at), now = sample.process_deaths, sample.tokens
            sample.process_deaths = times + 1 if at == now else 1, now
            if sample.process_deaths[0] >= self._context.settings.max_attempt_failures:
                times = sample.process_deaths[0]
                why = f"{times} processes in a row died while they ran its function, which may be the cause"
                self._context.counts(sample)["failed_samples"] += 1
                self._context.note(sample, f"failed: {why}")
                self._lifecycle.replace_or_drop(sample, why)
                return
        if sample.evaluation is None:
            self._restart_when_requests_end(sample)
        else:
            self._restart_in_evaluation(sample, sample.evaluation)

    def _restart_when_requests_end(self, sample: Sample) -> None:
        context, calls = self._context, sample.open_calls
        context.counters["lost_functions"] += 1
        if running := [call.attempt for call in calls if call.attempt is not None]:
            for call in calls:
                call.function_lost = True
                if call.attempt is None:
                    context.over_sampler.forget(call)
            context.note(sample, "its function is lost")
            context.stop(running)
        else:
            self._restart_with_replay(sample)

    def _restart_with_replay(self, sample: Sample) -> None:
        """Start the function of a sample again once none of its attempts is at an engine.

        The calls that it repeats are answered with their stored tokens.
        """
        context, calls = self._context, sample.open_calls
        if any(call.attempt is not None for call in calls):
            return
        context.places.release(sample)
        for call in calls:
            context.over_sampler.forget(call)
        sample.replay_all()
        sample.finish = None
        context.change_state(sample, NEW, "its function runs again, with the recorded tokens")
        context.over_sampler.push(sample)

    def _restart_in_evaluation(self, sample: Sample, evaluation: Evaluation) -> None:
        """Restart a sample of an evaluation without its tokens; with the same seed it gets the same response."""
        evaluation.counters["lost_functions"] += 1
        evaluation.running_functions -= 1
        self._lifecycle.stop(sample, DropReason.FAILED)
        evaluation.tokens.drop(sample.generated, DropReason.FAILED)
        sample.clear()
        self._context.change_state(sample, NEW, "starts again, because its function was lost")
        evaluation.unstarted.appendleft(sample)
