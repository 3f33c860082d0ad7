"""What a server returned, as the core's books have it; and what a rollout is told when its call is complete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from april.core import events as ev
from april.core.batch import Batch
from april.core.tape import SegmentKind
from april.core.types import Attempt, AttemptFailure, EngineFinish, FinishReason, GenerateCall
from april.core.versions import PolicyVersion
from april.corrections.advantages import first_others_of
from april.driver.wire_checks import AnswerChecks
from april.engines.protocol import Chunk
from april.errors import EngineError, WireError
from april.processes.coordinator.messages import Delivery, Done, Result, Rollout, Span

ANY_TOKEN = 2**31 - 1


def take(attempt: Attempt, result: Result, current: PolicyVersion) -> ev.Event:
    """A server's result becomes the attempt's, if it can be true; what happened, for the core.

    Without a label, the ``current`` weights wrote it.
    """
    incarnation = current.incarnation if result.incarnation is None else result.incarnation
    version = current if result.label is None else PolicyVersion(incarnation, result.label)
    full = len(result.tokens) >= attempt.sampling.max_tokens
    whole = EngineFinish.LENGTH if full else EngineFinish.STOP
    finish = EngineFinish.ABORT if result.aborted else whole
    checks = AnswerChecks(
        attempt, vocab_size=ANY_TOKEN, max_context=ANY_TOKEN, oldest=attempt.sample.tape.newest_version,
        eos_token_ids=() if result.ends_anywhere else attempt.end_ids.union(result.stop_token_ids),
    )  # fmt: skip
    checks.aborted = result.aborted
    try:
        if result.offset != len(attempt.token_ids):
            raise WireError(f"an answer to {result.offset} tokens came where {len(attempt.token_ids)} were sent")
        chunk = Chunk(result.tokens, result.logprobs, version, finish)
        checks.piece(chunk, current)
        checks.end(chunk)
    except EngineError as error:
        return ev.AttemptFailed(
            attempt_id=attempt.id, error=str(error), kind=AttemptFailure.CORRUPT, rejected=len(result.tokens)
        )
    attempt.tape.append(result.tokens, result.logprobs, version)
    return ev.AttemptEnded.of(attempt, finish)


def done(complete: GenerateCall) -> Done:
    """What a complete call brought."""
    sample, call = complete.sample, complete.result
    assert call is not None
    tape = sample.tape
    spans: list[Span] = []
    for s in tape.segments:
        if s.kind is not SegmentKind.GENERATED or s.start >= call.end:
            continue
        end = min(s.start + s.count, call.end)
        if spans and spans[-1][1] == s.start and spans[-1][2:] == tuple(s.version):
            spans[-1] = (spans[-1][0], end, *s.version)
        else:
            spans.append((s.start, end, *s.version))
    part = slice(call.start, call.end)
    by_length = call.finish is FinishReason.LENGTH
    return Done(
        tokens=tape.tokens[part],
        logprobs=tape.logprobs[part],
        spans=tuple(spans),
        resumes=sample.resumes,
        by_length=by_length,
    )


def delivery(batch: Batch, rollouts: Sequence[Rollout], settled: Iterable[str]) -> Delivery:
    """A batch as the trainer is told of it; it has the trajectories itself.

    ``rollouts``: that made its samples. ``settled``: prompts that it ends.
    """
    masked: dict[Rollout, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}
    for sample, rollout in zip(batch.samples, rollouts, strict=True):
        written = sum(s.count for s in sample.segments if s.kind is SegmentKind.GENERATED)
        if int(np.count_nonzero(sample.loss_mask)) < written:
            masked[rollout] = sample.loss_mask
    metrics = {k: v for k, v in batch.metrics.items() if not k.startswith(("response_len", "reward_"))}
    return Delivery(
        batch=batch.id,
        rollouts=tuple(rollouts),
        settled=tuple(settled),
        metrics=metrics,
        masked=masked,
        rewards=batch.rewards,
        baseline_rewards=first_others_of(batch.sample_indices, [s.cohort for s in batch.samples]),
    )
