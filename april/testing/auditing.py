"""The audit: what april delivered against what fake engines handed over, seen from outside.

It reads delivered batches and the engines' own records and nothing of april's books. Where a ledger is given, its
counts are compared with the recount; they decide nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from april.core.batch import Batch, DeliveredSample
from april.core.ledger import Ledger
from april.core.tape import SegmentKind
from april.core.types import DropReason, FinishReason
from april.errors import AprilError
from april.testing.fake_engine import FakeEngine
from april.testing.records import AttemptRecord

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Audit:
    """Tokens handed over for training, by what became of them: they sum to ``handed_over``."""

    handed_over: int
    delivered: int
    """Tokens in a delivered batch, with the log-probability and the version under which they were handed over."""
    waiting: int
    """Tokens of samples that no batch has brought."""
    rejected: int
    """Tokens of attempts that had a chunk which cannot be true."""
    lost: int
    """Tokens of delivered samples that are not in them: dropped for a named reason (began again), or really lost."""
    duplicated: int
    """Tokens delivered more than once; beyond ``handed_over``."""
    repeated: int
    """Tokens handed over twice by an engine (abort_repeats), which nobody above an engine can see."""
    samples: int
    """Number of delivered samples."""
    problems: tuple[str, ...]
    """Everything that is wrong, in words."""


class AuditError(AprilError, AssertionError):
    """Raised where deliveries are not what the engines handed over; ``audit`` has the counts."""

    def __init__(self, message: str, audit: Audit) -> None:
        super().__init__(message)
        self.audit = audit


def audit(
    batches: Batch | Iterable[Batch],
    engines: FakeEngine | Iterable[FakeEngine],
    ledger: Ledger | Mapping[str, Ledger] | None = None,
) -> Audit:
    """Compare every delivered token, log-probability and version with what the engines handed over.

    Args:
        batches: every batch delivered so far.
        engines: all engines that served them.
        ledger: what the scheduler's ``ledger()`` says, asked after the last batch. Without it no token of a delivered
            sample may be missing; with it as many may be as the ledger names as dropped.

    Raises:
        AuditError: anything is wrong; the message names samples, attempts and the engines' fault scripts.
    """
    batches = [batches] if isinstance(batches, Batch) else list(batches)
    engines = [engines] if isinstance(engines, FakeEngine) else list(engines)
    found = _Auditor(batches, engines).run(ledger["tokens"] if isinstance(ledger, Mapping) else ledger)
    if found.problems:
        shown = "\n  ".join(found.problems[:_SHOWN])
        more = f"\n  and {len(found.problems) - _SHOWN} more" if len(found.problems) > _SHOWN else ""
        scripts = "\n  ".join({repr(e.faults): None for e in engines})
        raise AuditError(f"{len(found.problems)} problems:\n  {shown}{more}\nunder\n  {scripts}\n{found}", found)
    return found


class _Auditor:
    def __init__(self, batches: list[Batch], engines: list[FakeEngine]) -> None:
        self.batches = batches
        self.problems: list[str] = [text for engine in engines for text in engine.violations]
        self.records: dict[str, AttemptRecord] = {}
        for engine in engines:
            for attempt_id, record in engine.attempts.items():
                if attempt_id in self.records:
                    self.problems.append(f"attempt {attempt_id} was sent to {engine.name} and to another engine")
                if not record.evaluation:
                    self.records[attempt_id] = record
        self.used: Counter[str] = Counter()
        """Tokens of each attempt that were delivered."""

    def run(self, ledger: Ledger | None) -> Audit:
        """Check everything."""
        seen: set[tuple[int, int]] = set()
        duplicated = delivered = 0
        for batch in self.batches:
            old = generated = 0
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
                old += sum(s.count for s in sample.segments if self.is_old(s.attempt_id, s.version, batch))
            delivered += generated
            share = old / generated if generated else 0.0
            if abs(share - batch.off_policy_share) > 1e-9:
                self.problems.append(f"batch {batch.id} says off_policy_share {batch.off_policy_share}, it is {share}")
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
            else:
                waiting += missing
        handed_over = sum(record.count for record in self.records.values())
        if ledger is None:
            self.nothing_is_lost(seen)
        else:
            self.compare(ledger, handed_over, delivered, rejected, lost)
        repeated = sum(record.repeated for record in self.records.values())
        return Audit(
            handed_over, delivered, waiting, rejected, lost, duplicated, repeated, len(seen), tuple(self.problems)
        )

    def wrong(self, sample: DeliveredSample, what: str) -> None:
        self.problems.append(f"sample {sample.id} {what}")

    @staticmethod
    def is_old(attempt_id: str, version: tuple[int, int], batch: Batch) -> bool:
        return bool(attempt_id) and version != batch.trained_at

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

    def equal(
        self, sample: DeliveredSample, what: str, start: int, got: object, expected: object, record: AttemptRecord
    ) -> None:
        """Check that an array of a segment is what the engine handed over."""
        got, expected = np.asarray(got), np.asarray(expected)
        if len(got) != len(expected):
            self.wrong(sample, f"has {len(got)} {what}s from {start}; {_name(record)} handed over {len(expected)}")
        elif not np.array_equal(got, expected):
            rows = np.flatnonzero((got != expected).reshape(len(got), -1).any(axis=1))
            i = int(rows[0])
            self.wrong(sample, f"has {what} {got[i]} at {start + i}; {_name(record)} handed over {expected[i]}")

    def rows(self, sample: DeliveredSample, record: AttemptRecord, start: int, taken: slice) -> None:
        """Check that the tokens of a segment have the rows that came with them, and so have those before the attempt's
        first ones that had none."""
        request, prompt = record.request, len(sample.prompt.token_ids)
        before = len(request.token_ids) - 1 - request.extras_from
        first = 0 if taken.start == 0 else before + taken.start
        at = prompt + start - 1 - (before + taken.start - first)
        for name in request.extras:
            expected = record.chunks[-1].extras.get(name, np.empty(0))[first : before + taken.stop]
            self.equal(sample, f"row of {name}", at, sample.extras[name][at : at + len(expected)], expected, record)

    def request(self, sample: DeliveredSample, record: AttemptRecord, start: int) -> None:
        """Check that an attempt continued exactly what the sample had, prompt and response."""
        before = np.concatenate((sample.prompt.token_ids, sample.tokens[:start]))
        if not np.array_equal(record.request.token_ids, before):
            self.wrong(sample, f"{_name(record)} was not asked to continue the {len(before)} tokens before it")

    def masks(self, sample: DeliveredSample, batch: Batch) -> None:
        """Age is the only reason to take the loss off a generated token: never off one that is new, or newer than one
        that has it."""
        kept = batch.version
        for segment in sample.segments:
            if segment.kind is SegmentKind.GENERATED and sample.loss_mask[segment.start]:
                kept = min(kept, segment.version)
        for segment in sample.segments:
            mask = sample.loss_mask[segment.start : segment.start + segment.count]
            if segment.kind is SegmentKind.GENERATED and not mask.all() and (mask.any() or segment.version >= kept):
                self.wrong(sample, f"has no loss on tokens of version {segment.version}, and has some on {kept}")

    def end(self, sample: DeliveredSample, last: AttemptRecord) -> None:
        """Check that a response that stopped ends in the stop token of its last attempt."""
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

    def nothing_is_lost(self, seen: set[tuple[int, int]]) -> None:
        """Check that every good attempt of a delivered sample is in it, to the last token."""
        for record in self.records.values():
            missing = record.count - self.used[record.attempt_id]
            if record.request.sample_key in seen and not record.wrong and missing:
                self.problems.append(
                    f"{_name(record)} handed over {record.count} tokens, {missing} of them are not in the delivered "
                    "sample (pass ledger= if samples may begin again)"
                )

    def compare(self, ledger: Ledger, handed_over: int, delivered: int, rejected: int, lost: int) -> None:
        """Compare april's own counts of the same things."""
        running = sum(r.count for r in self.records.values() if r.ended_s is None)
        dropped = sum(ledger.dropped.values())
        corrupt = ledger.dropped[DropReason.CORRUPT]
        named = dropped - corrupt
        for what, counted, booked in (
            ("observed", handed_over - running, ledger.observed),
            ("delivered", delivered, ledger.delivered),
            ("held or dropped", handed_over - running - delivered, ledger.held + dropped),
            # those of a rejected attempt that were read before the wrong chunk had no rows yet
            ("corrupt", rejected, min(max(rejected, corrupt), corrupt + ledger.dropped[DropReason.NO_EXTRAS])),
        ):
            if counted != booked:
                self.problems.append(f"the ledger has {booked} tokens {what}, the engines' records say {counted}")
        if lost > named:
            self.problems.append(
                f"{lost} tokens of delivered samples are not in them, and the ledger names {named} as dropped"
            )


def _name(record: AttemptRecord) -> str:
    return f"attempt {record.attempt_id} of sample {record.request.sample_key} on {record.engine}"
