"""Audits april from outside: compares the delivered batches with the tokens that fake engines have yielded.

The audit reads the batches and the engines' own records, none of april's internal state. If a ledger (april's own token
counts) is given, the audit also compares the ledger with its own counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs

from april.core.batch import Batch, DeliveredSample
from april.core.ledger import Ledger
from april.core.rollout_core import RolloutCore
from april.core.tape import Segment, SegmentKind
from april.core.types import DropReason, FinishReason, SampleId
from april.core.versions import VersionClock
from april.errors import AprilError
from april.testing.fake_engine import FakeEngine
from april.testing.records import AttemptRecord

_MAX_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Audit:
    """Result of an audit: the number of tokens yielded for training (``handed_over``), split by their fate."""

    handed_over: int
    delivered: int
    """Number of tokens in delivered batches that match the engines' records."""
    waiting: int
    """Number of tokens of samples that are in none of the batches."""
    rejected: int
    """Number of tokens of attempts (requests) with an invalid chunk."""
    lost: int
    """Number of tokens missing from delivered samples: dropped when a sample began again, or lost by mistake."""
    duplicated: int
    """Number of tokens delivered more than once; not part of ``handed_over``."""
    samples: int
    """Number of delivered samples."""
    problems: tuple[str, ...]
    """Descriptions of all errors that were found."""


class LoadedState:
    """Tokens and counts of a run just after it loaded a saved state; the audited engines have no record of them."""

    def __init__(self, core: RolloutCore) -> None:
        self.ledger = deepcopy(core.tokens)
        self.rows = {
            (SampleId(*sample.key), chain.number): replace(chain.tape, segments=list(chain.tape.segments))
            for sample in core.buffer.samples()
            for chain in sample.chains
        }

    def since(self, ledger: Ledger) -> Ledger:
        """Return the counts since the state was loaded."""
        before, dropped = self.ledger, Counter(ledger.dropped)
        dropped.subtract(before.dropped)
        return Ledger(
            ledger.observed - before.observed, ledger.delivered - before.delivered, ledger.held - before.held, dropped
        )


class AuditError(AprilError, AssertionError):
    """Raised if the batches differ from the tokens that the engines yielded; ``audit`` has the counts."""

    def __init__(self, message: str, audit: Audit) -> None:
        super().__init__(message)
        self.audit = audit


def audit(
    batches: Batch | Iterable[Batch],
    engines: FakeEngine | Iterable[FakeEngine],
    ledger: Ledger | Mapping[str, Ledger] | None = None,
    *,
    loaded: LoadedState | None = None,
) -> Audit:
    """Compare every delivered token, log-probability and version with those that the engines yielded.

    Args:
        batches: Every batch delivered so far.
        engines: All engines that served them.
        ledger: Result of the scheduler's ``ledger()`` after the last batch. Without it no token of a delivered sample
            may be missing; with it, as many may be missing as the ledger lists as dropped.
        loaded: State that the run loaded before it delivered the batches; None for a run that began anew.

    Raises:
        AuditError: an error was found; the message names samples, attempts and the engines' fault scripts.
    """
    batches = [batches] if isinstance(batches, Batch) else list(batches)
    engines = [engines] if isinstance(engines, FakeEngine) else list(engines)
    found = _Auditor(batches, engines, loaded).run(ledger["tokens"] if isinstance(ledger, Mapping) else ledger)
    if found.problems:
        shown = "\n  ".join(found.problems[:_MAX_SHOWN])
        more = f"\n  and {len(found.problems) - _MAX_SHOWN} more" if len(found.problems) > _MAX_SHOWN else ""
        scripts = "\n  ".join({repr(e.faults): None for e in engines})
        raise AuditError(f"{len(found.problems)} problems:\n  {shown}{more}\nunder\n  {scripts}\n{found}", found)
    return found


class _Auditor:
    def __init__(self, batches: list[Batch], engines: list[FakeEngine], loaded: LoadedState | None) -> None:
        self.batches, self.loaded = batches, loaded
        self.problems: list[str] = [text for engine in engines for text in engine.violations]
        self.records: dict[str, AttemptRecord] = {}
        for engine in engines:
            for attempt_id, record in engine.attempts.items():
                if attempt_id in self.records:
                    self.problems.append(f"attempt {attempt_id} was sent to {engine.name} and to another engine")
                if not record.evaluation:
                    self.records[attempt_id] = record
        self.used: Counter[str] = Counter()
        """Number of delivered tokens of each attempt."""

    def run(self, ledger: Ledger | None) -> Audit:
        if ledger is not None and self.loaded is not None:
            ledger = self.loaded.since(ledger)
        seen: set[tuple[int, int]] = set()
        duplicated = delivered = 0
        for batch in self.batches:
            old = generated = 0
            clock = VersionClock(batch.trained_at, dict(batch.branches))
            before, rows = frozenset(seen), set()
            for sample in batch.samples:
                tokens = sum(s.count for s in sample.segments if s.kind is SegmentKind.GENERATED)
                if sample.id in before or (sample.id, sample.chain) in rows:
                    self.wrong(sample, f"was delivered again, in batch {batch.id}")
                    duplicated += tokens
                    continue
                seen.add(sample.id)
                rows.add((sample.id, sample.chain))
                self.sample(sample, batch)
                generated += tokens
                old += sum(s.count for s in sample.segments if s.attempt_id and clock.staleness(s.version))
            delivered += generated
            share = old / generated if generated else 0.0
            if abs(share - batch.off_policy_share) > 1e-9:
                self.problems.append(
                    f"batch {batch.id} reports off_policy_share {batch.off_policy_share}, but it is {share}"
                )
        self.seeds()
        waiting = rejected = lost = 0
        for record in self.records.values():
            missing = record.count - self.used[record.attempt_id]
            if record.wrong:
                rejected += missing
                if self.used[record.attempt_id]:
                    self.problems.append(f"{_name(record)} had a wrong chunk ({record.wrong}), and was delivered")
            elif record.request.sample_key in seen:
                lost += missing
                if missing and ledger is None:
                    self.problems.append(
                        f"{_name(record)} handed over {record.count} tokens, but {missing} of them are not in the "
                        "delivered sample (pass ledger= if samples may begin again)"
                    )
            else:
                waiting += missing
        handed_over = sum(record.count for record in self.records.values())
        if ledger is not None:
            self.compare(ledger, handed_over, delivered, rejected, lost)
        return Audit(handed_over, delivered, waiting, rejected, lost, duplicated, len(seen), tuple(self.problems))

    def wrong(self, sample: DeliveredSample, what: str) -> None:
        self.problems.append(f"sample {sample.id} {what}")

    def sample(self, sample: DeliveredSample, batch: Batch) -> None:
        """Compare a delivered sample with the records of its attempts."""
        shapes = {len(sample.tokens), len(sample.logprobs), len(sample.loss_mask), len(sample.versions)}
        if shapes != {sum(s.count for s in sample.segments)}:
            self.wrong(sample, f"has arrays of different lengths: {sorted(shapes)}")
            return
        position = 0
        last: AttemptRecord | None = None
        for segment in sample.segments:
            where = slice(segment.start, segment.start + segment.count)
            if segment.start != position:
                self.wrong(sample, f"has a segment at {segment.start} where {position} was expected")
            position += segment.count
            if segment.kind is SegmentKind.ENVIRONMENT:
                if sample.loss_mask[where].any() or sample.logprobs[where].any():
                    self.wrong(sample, f"has loss or log-probabilities on tokens of the environment at {segment.start}")
                continue
            record = self.records.get(segment.attempt_id)
            if record is None and self.was_loaded(sample, segment):
                continue
            if record is None or record.engine != segment.engine or record.request.sample_key != sample.id:
                self.wrong(sample, f"names attempt {segment.attempt_id} of {segment.engine}, which is not its own")
                continue
            if not self.used[segment.attempt_id]:
                self.request(sample, record, segment.start)
            elif record is not last:
                self.wrong(sample, f"has tokens of {_name(record)} in two places")
            last = record
            first = self.used[segment.attempt_id]
            self.used[segment.attempt_id] += segment.count
            taken = slice(first, first + segment.count)
            for what, got, expected in (
                ("token", sample.tokens[where], record.tokens[taken]),
                ("log-probability", sample.logprobs[where], record.logprobs[taken]),
                ("version", sample.versions[where], record.versions[taken]),
            ):
                self.equal(sample, what, segment.start, got, expected, record)
            self.rows(sample, record, segment.start, taken)
            if tuple(segment.version) > tuple(batch.version):
                self.wrong(sample, f"has tokens of version {segment.version} in a batch of version {batch.version}")
        self.masks(sample, batch)
        if last is not None and sample.segments[-1].kind is SegmentKind.GENERATED:
            self.end(sample, last)

    def was_loaded(self, sample: DeliveredSample, segment: Segment) -> bool:
        """Return True if a segment comes from the loaded state, and check that it has not changed since."""
        row = None if self.loaded is None else self.loaded.rows.get((SampleId(*sample.id), sample.chain))
        before = [] if row is None else [s for s in row.segments if s.start == segment.start]
        if row is None or not before or structs.replace(before[0], count=segment.count) != segment:
            return False
        where = slice(segment.start, segment.start + segment.count)
        for what in ("tokens", "logprobs"):
            if not np.array_equal(getattr(sample, what)[where], getattr(row, what)[where]):
                self.wrong(sample, f"has other {what} from {segment.start} than the loaded state")
        return True

    def equal(
        self, sample: DeliveredSample, what: str, start: int, got: object, expected: object, record: AttemptRecord
    ) -> None:
        """Check that an array of a segment equals the engine's."""
        got, expected = np.asarray(got), np.asarray(expected)
        if len(got) != len(expected):
            self.wrong(sample, f"has {len(got)} {what}s from {start}; {_name(record)} handed over {len(expected)}")
        elif not np.array_equal(got, expected):
            rows = np.flatnonzero((got != expected).reshape(len(got), -1).any(axis=1))
            i = int(rows[0])
            self.wrong(sample, f"has {what} {got[i]} at {start + i}; {_name(record)} handed over {expected[i]}")

    def rows(self, sample: DeliveredSample, record: AttemptRecord, start: int, taken: slice) -> None:
        """Check a segment's extras (one row per token); an attempt's first segment may have rows of earlier tokens."""
        request, prompt = record.request, len(sample.prompt.token_ids)
        before = len(request.token_ids) - 1 - request.extras_from
        first = 0 if taken.start == 0 else before + taken.start
        at = prompt + start - 1 - (before + taken.start - first)
        for name in request.extras:
            expected = record.chunks[-1].extras.get(name, np.empty(0))[first : before + taken.stop]
            self.equal(sample, f"row of {name}", at, sample.extras[name][at : at + len(expected)], expected, record)

    def request(self, sample: DeliveredSample, record: AttemptRecord, start: int) -> None:
        """Check that an attempt's request had exactly the prompt and the response tokens before position ``start``."""
        before = np.concatenate((sample.prompt.token_ids, sample.tokens[:start]))
        if not np.array_equal(record.request.token_ids, before):
            self.wrong(sample, f"{_name(record)} was not asked to continue the {len(before)} tokens before it")

    def masks(self, sample: DeliveredSample, batch: Batch) -> None:
        """Check that generated tokens without loss are older than the batch's version and than all tokens with loss."""
        kept = batch.version
        for segment in sample.segments:
            if segment.kind is SegmentKind.GENERATED and sample.loss_mask[segment.start]:
                kept = min(kept, segment.version)
        for segment in sample.segments:
            mask = sample.loss_mask[segment.start : segment.start + segment.count]
            if segment.kind is SegmentKind.GENERATED and not mask.all() and (mask.any() or segment.version >= kept):
                self.wrong(sample, f"has no loss on tokens of version {segment.version}, but has some on {kept}")

    def end(self, sample: DeliveredSample, last: AttemptRecord) -> None:
        """Check that a stopped response ends in the stop token of its last attempt."""
        if sample.finish is FinishReason.STOP and sample.tokens[-1] != last.tokens[-1]:
            self.wrong(sample, f"is said to have stopped, and does not end where {_name(last)} ended")

    def seeds(self) -> None:
        """Check that attempts of a sample that begin at different tokens have different seeds."""
        starts: dict[tuple[object, int], tuple[int, AttemptRecord]] = {}
        for record in self.records.values():
            seed, start = record.request.sampling.seed, len(record.request.token_ids)
            if seed is None:
                continue
            first, other = starts.setdefault((record.request.sample_key, seed), (start, record))
            if first != start:
                self.problems.append(
                    f"{_name(record)} has the seed of {other.attempt_id}, which began at another token"
                )

    def compare(self, ledger: Ledger, handed_over: int, delivered: int, rejected: int, lost: int) -> None:
        """Compare the recount with april's own ledger."""
        running = sum(r.count for r in self.records.values() if r.ended_s is None)
        dropped = sum(ledger.dropped.values())
        corrupt = ledger.dropped[DropReason.CORRUPT]
        named = dropped - corrupt
        for what, counted, booked in (
            ("observed", handed_over - running, ledger.observed),
            ("delivered", delivered, ledger.delivered),
            ("held or dropped", handed_over - running - delivered, ledger.held + dropped),
            # tokens of a rejected attempt may have been dropped before its wrong chunk came, because they had no extras
            ("corrupt", rejected, min(max(rejected, corrupt), corrupt + ledger.dropped[DropReason.NO_EXTRAS])),
        ):
            if counted != booked:
                self.problems.append(f"the ledger has {booked} tokens {what}, but the engines' records have {counted}")
        if lost > named:
            self.problems.append(
                f"{lost} tokens of delivered samples are missing in them, but the ledger lists {named} as dropped"
            )


def _name(record: AttemptRecord) -> str:
    return f"attempt {record.attempt_id} of sample {record.request.sample_key} on {record.engine}"
