"""Checks that no token is lost between an engine and the scheduler, over many aborts and weight updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count

import numpy as np

from april.config.settings import Config
from april.core.batch import Batch
from april.core.types import DropReason, Prompt
from april.core.versions import PolicyVersion
from april.driver.llm import LLM
from april.engines.protocol import Chunk, Engine, EngineFinish, Int32, Request
from april.errors import EngineError
from april.testing.conformance.bench import Bench, check
from april.testing.conformance.subject import Broken, Figures, NotTested
from april.testing.recording_engine import RecordingEngine
from april.testing.same_loop import Rollouts, rollouts

GROUPS, SAMPLES, OVER = 2, 8, 16


class _SharedEngine(RecordingEngine):
    """Records the engine under test. When the scheduler closes this wrapper, the engine itself stays open.

    Args:
        engine: The engine under test.
        shift: Difference between the version numbers of the engine, which has had updates before, and the scheduler.
    """

    def __init__(self, engine: Engine, shift: int) -> None:
        super().__init__(engine)
        self._shift = shift

    @property
    def aborted(self) -> int:
        """Number of attempts that ended with ABORT."""
        return sum(end is EngineFinish.ABORT for end in self.ends.values())

    def got(self, attempt_id: str) -> Int32:
        """Return the tokens that april got for an attempt, int32 [T]."""
        return np.concatenate([np.empty(0, np.int32), *(chunk.tokens for chunk in self.yielded[attempt_id])])

    def alter_chunk(self, request: Request, chunk: Chunk) -> Chunk:
        return replace(chunk, version=PolicyVersion(chunk.version.incarnation, chunk.version.n - self._shift))

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        await super().update_weights(PolicyVersion(version.incarnation, version.n + self._shift), path)

    async def close(self) -> None:
        with suppress(EngineError):
            await self.engine.abort([i for i, end in self.ends.items() if end is None])


def _distinct_prompts(bench: Bench) -> Iterator[list[int]]:
    """Yield prompts for ever; a thousand of them in a row are all different."""
    size = bench.engine.capabilities.vocab_size
    eos = set(bench.engine.capabilities.eos_token_ids)
    known = sorted({t for p in bench.subject.prompts for t in p if 0 <= t < size} - eos)
    for number in count():
        digits = [known[(number // len(known) ** k) % len(known)] for k in range(4)]
        yield [*bench.prompt(number).tolist(), *digits]


def _budget(bench: Bench, group: int, index: int) -> int:
    """Return a token budget that varies widely between groups, so that steps end while most requests run."""
    of_group, of_sample = (group * 40503 % 65536) / 65536, ((group * SAMPLES + index) * 30011 % 65536) / 65536
    return max(4, int(bench.subject.long_tokens * (0.06 + 0.94 * of_group) * (0.8 + 0.2 * of_sample)))


@check("Across a thousand aborted requests, with weight updates between them, no token that was sent is lost.")
async def thousand_aborts(bench: Bench) -> Figures:
    """Check that the engine's client, april's ledger (token counts) and delivered responses have the same tokens."""
    subject = bench.subject
    engine = _SharedEngine(bench.engine, bench.version.n)
    config = Config(
        rollout_batch_size=GROUPS, n_samples_per_prompt=SAMPLES, over_sampling_batch_size=OVER, max_staleness=OVER,
        max_response_len=subject.long_tokens, abort_resend_s=0.25, abort_deadline_s=max(1.0, subject.patience_s),
    )  # fmt: skip

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        await llm.generate(max_tokens=_budget(bench, llm.sample_id.group, llm.sample_id.index))

    both = subject.other is not None and None not in (subject.other.path, subject.now.path)
    from_disk = bench.engine.capabilities.updates_from_disk and both
    given = updates = 0
    async with rollouts(
        config, engines=[engine], prompts=_distinct_prompts(bench), rollout=rollout, check=False
    ) as run:  # fmt: skip
        while engine.aborted < subject.aborts:
            batch = await bench.with_timeout(run.next_batch(), "a step")
            given += _delivered(batch, engine)
            updates += 1
            await _update(bench, run, from_disk)
            if updates > 8 and engine.aborted < 4 * updates:
                raise NotTested(f"only {engine.aborted} requests were aborted in time; raise Subject.long_tokens")
        run.validate()
        ledger = run.ledger()["tokens"]
        handed_over = engine.tokens
        if not ledger.balanced or ledger.observed != handed_over:
            raise Broken(f"the engine returned {handed_over} tokens, but april's ledger has {ledger.as_dict()}")
        corrupt = {str(k): v for k, v in ledger.dropped.items() if v and k is not DropReason.AFTER_STOP}
        if corrupt:
            raise Broken(f"april dropped tokens: {corrupt}")
    figures: Figures = {
        "aborted": engine.aborted, "requests": len(engine.requests), "weight updates": updates,
        "tokens handed over": engine.tokens, "delivered": given,
    }  # fmt: skip
    if subject.compare_with_wire is not None:
        held = [(request, engine.got(i), engine.ends[i]) for i, request in engine.requests.items()]
        figures |= subject.compare_with_wire(held, engine.capabilities.abort_means)
    return figures


async def _update(bench: Bench, run: Rollouts, from_disk: bool) -> None:
    """Make a weight update. ``from_disk`` switches between the subject's two sets of weights, else they stay."""
    now, other = bench.subject.now, bench.subject.other
    weights = other if from_disk and other is not None and bench.weights is now else now
    if from_disk:
        bench.weights = weights
    update = run.weight_update(weights.path) if from_disk else run.weight_update(transfer=lambda: None)
    await bench.with_timeout(update, "a weight update")
    bench.version = PolicyVersion(bench.version.incarnation, bench.version.n + 1)


def _delivered(batch: Batch, engine: _SharedEngine) -> int:
    """Check that each delivered response is its attempts' tokens in order; return the number of delivered tokens."""
    attempts: dict[tuple[int, int] | None, list[tuple[int, Int32]]] = {}
    for attempt_id, request in engine.requests.items():
        attempts.setdefault(request.sample_key, []).append((request.response_offset, engine.got(attempt_id)))
    total = 0
    for sample in batch.samples:
        # an attempt without a token begins at the same position as the next attempt
        parts = sorted(attempts[sample.id], key=lambda part: (part[0], len(part[1])))
        got = np.concatenate([tokens for _, tokens in parts])
        if not np.array_equal(got, sample.tokens):
            raise Broken(
                f"sample {sample.id}: {len(sample.tokens)} tokens were delivered, but its {len(parts)} requests got "
                f"{len(got)}, or others"
            )
        total += len(sample.tokens)
    return total
