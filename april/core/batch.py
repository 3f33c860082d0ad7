"""A delivered batch: N finished groups, or N * n samples, with exact provenance, as ragged and padded arrays.

Rows are samples, group by group (with a group quorum, those of a group that are in this batch); each names its own:
``group_ids[row]``, ``sample_indices[row]``, ``samples[row].id``.
Shapes: B rows, T longest response, P longest prompt.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from april.core.attachments import NO_EXTRAS, Extras, Placed, before, whole_rows
from april.core.tape import Float32, Int32, Segment, SegmentKind, kept_mask, versions_of
from april.core.types import FinishReason, Prompt, Sample, SampleId
from april.core.versions import PolicyVersion, VersionClock
from april.corrections.advantages import BatchShare, Method, first_others_of, group_advantages

UInt8 = NDArray[np.uint8]
SplitBy = Literal["samples", "tokens"]

log = logging.getLogger("april")
_warned_of: set[str] = set()
"""Reasons for advantages of 0 that were warned of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredSample:
    """A finished response: a row of the batch.

    A sample whose rollout function held several conversations has a row for each in which the policy wrote something:
    they have its ``id``, its reward and its cohort in common.
    """

    id: SampleId
    prompt: Prompt
    """of this row; what the first call of a further conversation was given is its prompt"""
    tokens: Int32
    """int32 [T], EOS included"""
    logprobs: Float32
    """float32 [T], behaviour log-probabilities in nats; 0 for environment tokens"""
    loss_mask: UInt8
    """uint8 [T], 1 where the policy wrote the token and it is not too old"""
    segments: tuple[Segment, ...]
    staleness: int
    """weight updates between the oldest generated token and training, one for each batch that is trained before"""
    reward: float
    cohort: tuple[tuple[int, float], ...]
    """(index, reward) of the first k finishers of its group, in the order in which they finished; k = n without a
    quorum"""
    finish: FinishReason
    attempts: int
    """requests to engines"""
    resumes: int
    """of these, continued a call in the middle"""
    chain: int = 0
    """number of its conversation"""
    attached: tuple[Placed, ...] = ()
    """what is attached to its conversation, such as images: to ``prompt``, and to what a tool wrote behind it"""
    extras: Extras = field(default=NO_EXTRAS, compare=False)
    """arrays by name, [P + T - 1, ...], read-only: row i was made when token i of prompt and response was read, by the
    attempt that generated token i + 1; behind the last generated token the last row is repeated"""

    @property
    def versions(self) -> Int32:
        """int32 [T, 2]: (incarnation, n) of each token."""
        return versions_of(self.segments)

    @property
    def kept_mask(self) -> UInt8:
        """uint8 [T], 1 where a token was sampled over keys of older weights than its own (``on_weight_update: keep``):
        its log-probability is not the one that a recomputation gives"""
        return kept_mask(self.segments)

    @property
    def baseline_rewards(self) -> Float32:
        """float32 [k - 1], rewards of the first k - 1 other finishers of its group: of what its baseline is made.

        As many for one of the first k as for one that came later, and its own is not among them, so the baseline
        does not depend on the sample (nor on how long it took).
        """
        (others,) = first_others_of([self.id.index], [self.cohort])
        rewards: Float32 = others[~np.isnan(others)].astype(np.float32)
        return rewards


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The batch that a step delivers; leased until it is committed."""

    id: int
    version: PolicyVersion
    """policy version at delivery"""
    samples: tuple[DeliveredSample, ...]
    """its rows, those of one sample next to each other"""
    group_sizes: tuple[int, ...]
    """rows per group, as far as they are in this batch; sums to len(samples)"""
    metrics: Mapping[str, float]
    logprob_kind: str = "temperature"
    """The distribution of ``logprobs``: ``temperature`` (log_softmax(logits / T)), ``processed`` (the one really
    sampled from; the same with top_p 1, min_tokens 0 and T > 0), ``raw`` (log_softmax(logits)) or ``unknown`` (both
    allowed at T = 1 only, where they are the same too), or ``mixed`` (by engine; see the segments)"""
    bottleneck: str = ""
    """Which side the step waited for, how long and why, and what to change: a sentence for people. Empty if it
    took no time"""
    branches: Mapping[int, int] = field(default_factory=dict)
    """incarnation -> ``n`` of the weights from which the next one began, by a restart"""
    _part: BatchShare | None = None
    """set by :meth:`split`; None means that it is whole"""

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        return (
            f"<Batch {self.id}{f' share {self.share.rank} of {self.share.ranks}' if self._part else ''} "
            f"version={self.version} groups={len(self.group_sizes)} samples={len({s.id for s in self.samples})} "
            f"{'' if self.one_row_each else f'rows={len(self)} '}"
            f"tokens={sum(len(s.tokens) for s in self.samples)} off_policy_share={self.off_policy_share:.3f}"
            f"{f' ({self.bottleneck})' if self.bottleneck else ''}>"
        )

    @property
    def trained_at(self) -> PolicyVersion:
        """Version at which it is trained: one update later for each batch that was out when it was delivered."""
        return self.version._replace(n=self.version.n + int(self.metrics.get("batches_out", 0.0)))

    @cached_property
    def share(self) -> BatchShare:
        """Which share of a batch this is, and what a loss over all shares is divided by; of a whole batch: all of it.

        :func:`april.loss_weights` takes it. Count the loss of your own with ``samples`` or ``loss_tokens``, which are
        those of the whole batch.
        """
        if self._part is not None:
            return self._part
        loss_tokens = sum(int(np.count_nonzero(s.loss_mask)) for s in self.samples)
        return BatchShare(0, 1, len({s.id for s in self.samples}), loss_tokens)

    def split(self, ranks: int, by: SplitBy = "samples") -> list[Batch]:
        """The batch in ``ranks`` shares: each sample is in one of them, in the order that it has here.

        ``by="samples"``: contiguous rows; the numbers of samples differ by one at most. ``by="tokens"``: about equal
        numbers of prompt and response tokens; the numbers of samples differ then. Where there are more ranks than
        samples, some shares are empty: their arrays have B = 0.

        Of each share, ``metrics`` and ``off_policy_share`` are those of the whole batch, and :meth:`advantages` are the
        rows of the whole batch's: the siblings they compare with go with the samples. The same batch is always split
        alike. A share may be split again: its :attr:`share` still counts the whole batch.

        Raises ValueError for ``ranks`` below 1 and for another ``by``.
        """
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            raise ValueError(f"split: ranks must be a whole number and at least 1, got {ranks!r}")
        if by not in get_args(SplitBy):
            raise ValueError(f'split: by must be "samples" or "tokens", got {by!r}')
        numbers = self.sample_numbers
        if by == "samples":
            of_samples = _contiguous(int(numbers[-1]) + 1 if len(numbers) else 0, ranks)
        else:
            lengths = np.bincount(numbers, [len(s.prompt.token_ids) + len(s.tokens) for s in self.samples])
            of_samples = _balanced([int(length) for length in lengths], ranks)
        ends = np.searchsorted(numbers, np.arange(len(self) + 1)).tolist()
        shares = [[row for n in share for row in range(ends[n], ends[n + 1])] for share in of_samples]
        groups = [number for number, size in enumerate(self.group_sizes) for _ in range(size)]
        return [
            replace(
                self,
                samples=tuple(self.samples[row] for row in rows),
                group_sizes=tuple(len(list(run)) for _, run in itertools.groupby(groups[row] for row in rows)),
                _part=replace(self.share, rank=rank, ranks=ranks),
            )
            for rank, rows in enumerate(shares)
        ]

    @cached_property
    def rewards(self) -> Float32:
        """float32 [B]."""
        return np.array([s.reward for s in self.samples], np.float32)

    @cached_property
    def group_ids(self) -> NDArray[np.int64]:
        """int64 [B], number of the group as drawn."""
        return np.array([s.id.group for s in self.samples], np.int64)

    @cached_property
    def sample_numbers(self) -> Int32:
        """int32 [B], the number of each row's sample in this batch: 0 to B - 1, unless samples have several rows."""
        return sample_numbers(self.samples)

    @property
    def one_row_each(self) -> bool:
        """Whether every sample is one row."""
        return len({s.id for s in self.samples}) == len(self.samples)

    @cached_property
    def sample_indices(self) -> Int32:
        """int32 [B], number of the sample in its group."""
        return np.array([s.id.index for s in self.samples], np.int32)

    @property
    def off_policy_share(self) -> float:
        """Share of the generated response tokens that are older than the version at which they are trained."""
        return self.metrics["off_policy_share"]

    @cached_property
    def lengths(self) -> Int32:
        """int32 [B], response tokens."""
        return np.array([len(s.tokens) for s in self.samples], np.int32)

    @cached_property
    def token_ages(self) -> Int32:
        """int32 [sum of T], weight updates between each token and its training; 0 for tokens of the environment.

        Rows as in :meth:`ragged`. After a restart: the way back to where the weights branched off, and the way since.
        """
        clock = VersionClock(self.trained_at, dict(self.branches))
        ages, counts = [], []
        for sample in self.samples:
            for s in sample.segments:
                ages.append(clock.staleness(s.version) if s.kind is SegmentKind.GENERATED else 0)
                counts.append(s.count)
        return np.repeat(np.array(ages, np.int32), np.array(counts, np.int64))

    def advantages(self, method: Method = "grpo", *, epsilon: float = 1e-6, ddof: int = 0) -> Float32:
        """float32 [B]: each response against the first k - 1 other finishers of its group, whatever batch they are in.

        Without a quorum those are all its siblings, and it is the textbook's. ``method``: ``grpo``, ``dr_grpo``,
        ``rloo``, ``dapo`` or ``gspo``; formulas, papers and errors are those of :func:`april.group_advantages`.
        """
        others = first_others_of(self.sample_indices, [s.cohort for s in self.samples])
        found = group_advantages([s.reward for s in self.samples], others, method, epsilon=epsilon, ddof=ddof)
        if len(found) and not found.any():
            self._warn_of_no_signal()
        return found

    def _warn_of_no_signal(self) -> None:
        if not any(len(s.cohort) > 1 for s in self.samples):
            why = "every response is alone in its group, and compares with none; raise n_samples_per_prompt"
        elif not self.rewards.any():
            why = "all rewards are 0; give reward= or group_reward=, or see whether it ever returns something else"
        else:
            why = "the rewards of each group are equal; filter=april.rewards_differ draws other prompts instead"
        if why not in _warned_of:
            _warned_of.add(why)
            log.warning("all advantages of batch %d are 0, so it teaches nothing: %s", self.id, why)

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of the arrays that its rows have with their tokens."""
        return tuple(self.samples[0].extras) if self.samples else ()

    def ragged(self) -> dict[str, NDArray[Any]]:
        """Flat arrays without padding; row i is ``response_ids[response_offsets[i]:response_offsets[i + 1]]``.

        ``prompt_ids`` int32 [sum of P], ``prompt_offsets`` int64 [B + 1]; ``response_ids`` int32, ``logprobs`` float32,
        ``loss_mask`` and ``kept_mask`` uint8, ``version_n`` and ``version_incarnation`` int32, all [sum of T],
        ``response_offsets`` int64 [B + 1]; ``rewards`` float32, ``group_ids`` int64, ``sample_numbers`` and
        ``staleness`` int32, all [B]. With extras, each under its name, [sum of P + T - 1, ...], and ``extras_offsets``
        int64 [B + 1].
        """
        samples = self.samples
        prompts = [s.prompt.token_ids for s in samples]
        arrays = {"prompt_ids": _joined(prompts, np.int32), "prompt_offsets": _offsets(prompts)}
        for name, (rows, dtype, _) in _response_columns(samples, 0).items():
            arrays[name] = _joined(rows, dtype)
        arrays["response_offsets"] = _offsets([s.tokens for s in samples])
        for name in self.extras:
            rows = [s.extras[name] for s in samples]
            arrays |= {name: np.concatenate(rows), "extras_offsets": _offsets(rows)}
        return arrays | _per_row(samples)

    def padded(self, pad_id: int = 0, *, left_pad_prompts: bool = False) -> dict[str, NDArray[Any]]:
        """Rectangular arrays; responses are padded on the right, prompts too unless ``left_pad_prompts``.

        ``prompt_ids`` int32 and ``prompt_mask`` uint8 [B, P]; ``response_ids`` int32, ``response_mask`` uint8,
        ``loss_mask`` and ``kept_mask`` uint8, ``logprobs`` float32, ``version_n`` and ``version_incarnation`` int32 (-1
        in the padding), all [B, T]; ``rewards`` float32, ``group_ids`` int64, ``sample_numbers`` and ``staleness``
        int32, all [B].

        ``input_ids`` int32 and ``attention_mask`` uint8 have each prompt and its response without a gap. With
        ``left_pad_prompts`` they are [B, P + T] and every response begins in column P: the layout of trainers that
        cut the last T columns off the logits. Without, they are [B, longest sum], padded on the right only, and
        response i begins in column ``prompt_mask[i].sum()``. With extras, each is under its name, [B, P + T, ...]: a
        row in the column of the token that was read for it, and 0 elsewhere.

        Raises TypeError for a ``pad_id`` that is no integer.
        """
        if isinstance(pad_id, bool) or not isinstance(pad_id, (int, np.integer)):
            raise TypeError(
                f"padded: pad_id must be a token id, got {pad_id!r}; any id will do where the masks are used, so "
                "leave it out if the tokenizer has none"
            )
        samples, pad_id = self.samples, int(pad_id)
        prompts = [s.prompt.token_ids for s in samples]
        responses = [s.tokens for s in samples]
        arrays = {
            "prompt_ids": pad(prompts, pad_id, np.int32, left=left_pad_prompts),
            "prompt_mask": pad(_ones(prompts), 0, np.uint8, left=left_pad_prompts),
            "response_mask": pad(_ones(responses), 0, np.uint8),
        }
        for name, (rows, dtype, fill) in _response_columns(samples, pad_id).items():
            arrays[name] = pad(rows, fill, dtype)
        if left_pad_prompts:
            arrays["input_ids"] = np.concatenate((arrays["prompt_ids"], arrays["response_ids"]), axis=1)
            arrays["attention_mask"] = np.concatenate((arrays["prompt_mask"], arrays["response_mask"]), axis=1)
        else:
            whole = [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]
            arrays["input_ids"] = pad(whole, pad_id, np.int32)
            arrays["attention_mask"] = pad(_ones(whole), 0, np.uint8)
        for name in self.extras:
            rows, starts = [s.extras[name] for s in samples], (arrays["attention_mask"] != 0).argmax(axis=1)
            out = arrays[name] = np.zeros((*arrays["input_ids"].shape, *rows[0].shape[1:]), np.result_type(*rows))
            for i, (start, row) in enumerate(zip(starts, rows, strict=True)):
                out[i, start : start + len(row)] = row
        return arrays | _per_row(samples)


def with_all_rows(samples: Sequence[DeliveredSample]) -> list[DeliveredSample]:
    """The samples, those in which nothing was generated with rows of zeros, as many and as wide as they would have."""
    first = next((s.extras for s in samples if s.extras), NO_EXTRAS)

    def whole(s: DeliveredSample) -> DeliveredSample:
        count = len(s.prompt.token_ids) + len(s.tokens) - 1
        none = {name: np.zeros((count, *rows.shape[1:]), rows.dtype) for name, rows in first.items()}
        return replace(s, extras=whole_rows(none, count))

    return [s if s.extras or not first else whole(s) for s in samples]


def deliver_sample(
    sample: Sample, staleness_of: Callable[[PolicyVersion], int], max_staleness: int | None
) -> list[DeliveredSample]:
    """Freeze a finished sample as its rows; tokens older than ``max_staleness`` (None: no bound) get loss mask 0.

    The arrays are copies: the trainer may write into them, and what a state delivers again is what was sampled.
    """
    if sample.finish is None:
        raise ValueError(f"{sample.id} is not finished")
    prompt = sample.group.prompt
    rows, chains = [], sample.chains
    for chain in chains if len(chains) == 1 else [c for c in chains if c.tape.generated] or chains[:1]:
        tape, attached = chain.tape, chain.attached
        mask = tape.loss_mask()
        staleness = 0
        for segment in tape.segments:
            if segment.kind is SegmentKind.GENERATED:
                age = staleness_of(segment.version)
                staleness = max(staleness, age)
                if max_staleness is not None and age > max_staleness:
                    mask[segment.start : segment.start + segment.count] = 0
        rows.append(
            DeliveredSample(
                id=sample.id,
                prompt=Prompt(
                    chain.prompt.copy(), prompt.data, prompt.epoch, prompt.position,
                    before(attached, len(chain.prompt)) if attached else (),
                ),
                tokens=tape.tokens.copy(),
                logprobs=tape.logprobs.copy(),
                loss_mask=mask,
                segments=tuple(tape.segments),
                staleness=staleness,
                reward=sample.reward,
                cohort=sample.group.cohort,
                finish=sample.finish,
                attempts=sample.attempts,
                resumes=sample.resumes,
                chain=chain.number,
                attached=attached,
                extras=whole_rows(chain.extras, len(chain.prompt) + len(tape) - 1) if chain.extras else NO_EXTRAS,
            )
        )
    return rows


def batch_metrics(
    groups: int, samples: Sequence[DeliveredSample], staleness_of: Callable[[PolicyVersion], int]
) -> dict[str, float]:
    """Metrics that can be read off the batch itself."""
    generated = stale = trained = kept = 0
    for s in samples:
        for segment in s.segments:
            if segment.kind is SegmentKind.GENERATED:
                generated += segment.count
                stale += segment.count if staleness_of(segment.version) else 0
                kept += segment.count if segment.over is not None else 0
        trained += int(np.count_nonzero(s.loss_mask))
    numbers = sample_numbers(samples)
    lengths = np.bincount(numbers, [len(s.tokens) for s in samples])
    first = np.searchsorted(numbers, np.arange(len(lengths)))  # of the rows of each sample
    ages = np.zeros(len(lengths))
    np.maximum.at(ages, numbers, [s.staleness for s in samples])
    rewards = np.array([samples[i].reward for i in first], np.float64)
    return {
        "groups": float(groups),
        "samples": float(len(lengths)),
        "trained_tokens": float(generated),
        "masked_tokens": float(generated - trained),
        "off_policy_share": stale / generated if generated else 0.0,
        "kept_share": kept / generated if generated else 0.0,
        "staleness_mean": float(ages.mean()) if len(ages) else 0.0,
        "staleness_max": float(ages.max()) if len(ages) else 0.0,
        "resumed_samples": float(sum(1 for i in first if samples[i].resumes)),
        "response_len_mean": float(lengths.mean()) if len(lengths) else 0.0,
        "response_len_median": float(np.median(lengths)) if len(lengths) else 0.0,
        "response_len_max": float(lengths.max()) if len(lengths) else 0.0,
        "reward_mean": float(rewards.mean()) if len(rewards) else 0.0,
    }


def sample_numbers(rows: Sequence[DeliveredSample]) -> Int32:
    """int32 [R]: the number of each row's sample, from 0; the rows of one sample are next to each other."""
    numbers = [int(i > 0 and row.id != rows[i - 1].id) for i, row in enumerate(rows)]
    return np.cumsum(numbers, dtype=np.int32)


def rows_by_sample(rows: Sequence[DeliveredSample]) -> list[list[DeliveredSample]]:
    """The rows of each sample, in their order; those of one sample are next to each other."""
    return [list(several) for _, several in itertools.groupby(rows, key=lambda row: row.id)]


Array = NDArray[Any]
Columns = dict[str, tuple[list[Array], type[np.generic], int]]
"""Per-token values: the rows, their type, what the padding is."""


def pad(rows: Sequence[Array], fill: float, dtype: type[np.generic], *, left: bool = False) -> Array:
    """Rows of different length as one array [len(rows), longest], padded on the right (or on the left)."""
    longest = max((len(r) for r in rows), default=0)
    out = np.full((len(rows), longest), fill, dtype)
    for i, row in enumerate(rows):
        start = longest - len(row) if left else 0
        out[i, start : start + len(row)] = row
    return out


def _response_columns(samples: Sequence[DeliveredSample], pad_id: int) -> Columns:
    versions = [s.versions for s in samples]
    return {
        "response_ids": ([s.tokens for s in samples], np.int32, pad_id),
        "loss_mask": ([s.loss_mask for s in samples], np.uint8, 0),
        "kept_mask": ([s.kept_mask for s in samples], np.uint8, 0),
        "logprobs": ([s.logprobs for s in samples], np.float32, 0),
        "version_n": ([v[:, 1] for v in versions], np.int32, -1),
        "version_incarnation": ([v[:, 0] for v in versions], np.int32, -1),
    }


def _per_row(samples: Sequence[DeliveredSample]) -> dict[str, Array]:
    return {
        "sample_numbers": sample_numbers(samples),
        "rewards": np.array([s.reward for s in samples], np.float32),
        "group_ids": np.array([s.id.group for s in samples], np.int64),
        "staleness": np.array([s.staleness for s in samples], np.int32),
    }


def _ones(rows: Sequence[Array]) -> list[Array]:
    return [np.ones(len(row), np.uint8) for row in rows]


def _joined(rows: Sequence[Array], dtype: type[np.generic]) -> Array:
    return np.concatenate(rows, dtype=dtype) if rows else np.empty(0, dtype)


def _offsets(rows: Sequence[Array]) -> Array:
    """int64 [B + 1]: where each row begins, and the end."""
    return np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)


def _contiguous(rows: int, ranks: int) -> Sequence[Sequence[int]]:
    """The first ``rows % ranks`` shares have one row more."""
    starts = [rank * (rows // ranks) + min(rank, rows % ranks) for rank in range(ranks + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def _balanced(tokens: Sequence[int], ranks: int) -> Sequence[Sequence[int]]:
    """The longest row first, each to the share that has the fewest tokens (then rows) so far; rows in their order."""
    heap = [(0, 0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for row in sorted(range(len(tokens)), key=lambda row: (-tokens[row], row)):
        held, count, rank = heap[0]
        shares[rank].append(row)
        heapq.heapreplace(heap, (held + tokens[row], count + 1, rank))
    return [sorted(rows) for rows in shares]
