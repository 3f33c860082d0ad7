"""Shares of a batch: every sample in exactly one, and each share says of its samples what the whole batch says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import april
from april.core.batch import Batch, DeliveredSample
from april.core.tape import Segment, SegmentKind
from april.core.types import FinishReason, Prompt, SampleId
from april.core.versions import PolicyVersion
from april.corrections.advantages import BatchShare


def sample_of(group: int, index: int, spans: list[int], cohort: tuple[tuple[int, float], ...]) -> DeliveredSample:
    """One response; ``spans``: tokens of each of the versions 0, 1, 2, of which those of version 0 have no loss."""
    segments, start = [], 0
    for n, count in enumerate(spans):
        kind = SegmentKind.GENERATED if (index + n) % 3 else SegmentKind.ENVIRONMENT
        segments.append(Segment(start, count, PolicyVersion(0, n), kind, f"a{group}.{index}.{n}", "e", 1.0))
        start += count
    first = 1000 * group + 50 * index
    return DeliveredSample(
        id=SampleId(group, index), prompt=Prompt(np.arange(first, first + 1 + group % 4, dtype=np.int32)),
        tokens=np.arange(first, first + start, dtype=np.int32),
        logprobs=-np.arange(1, start + 1, dtype=np.float32),
        loss_mask=np.array([n > 0 for n, count in enumerate(spans) for _ in range(count)], np.uint8),
        segments=tuple(segments), staleness=2, reward=float(index % 3) + group / 8, cohort=cohort,
        finish=FinishReason.STOP, attempts=1, resumes=0,
    )  # fmt: skip


@st.composite
def batches(draw: Any) -> Batch:
    """Groups of any sizes; of some, only a part of the cohort is in the batch."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=5))
    spans = st.lists(st.integers(0, 6), min_size=3, max_size=3)
    samples = []
    for group, size in enumerate(sizes):
        cohort = tuple((i, float(i % 3) + group / 8) for i in range(size + draw(st.integers(1, 2))))
        samples += [sample_of(group, index, draw(spans), cohort) for index in range(size)]
    return Batch(
        id=3, version=PolicyVersion(0, 2), samples=tuple(samples), group_sizes=tuple(sizes),
        metrics={"off_policy_share": 0.25, "batches_out": 1.0},
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(batches(), st.integers(1, 9), st.sampled_from(["samples", "tokens"]))
def test_each_sample_is_in_one_share_with_what_the_batch_says_of_it(batch: Batch, ranks: int, by: Any) -> None:
    """Nothing is lost or there twice, in any order; advantages, ages and arrays are the rows of the whole batch's."""
    shares = batch.split(ranks, by=by)
    assert len(shares) == ranks
    row_of = {sample.id: row for row, sample in enumerate(batch.samples)}
    rows = [[row_of[s.id] for s in share.samples] for share in shares]
    assert sorted(row for own in rows for row in own) == list(range(len(batch)))
    assert all(own == sorted(own) for own in rows)
    whole, ends = batch.ragged(), np.cumsum(batch.lengths)
    for rank, (share, own) in enumerate(zip(shares, rows, strict=True)):
        assert share.share == replace(batch.share, rank=rank, ranks=ranks)
        assert (share.metrics, share.id, share.trained_at) == (batch.metrics, 3, PolicyVersion(0, 3))
        assert sum(share.group_sizes) == len(share) == len(own)
        assert len(share.group_sizes) == len(set(share.group_ids.tolist()))
        for method in ("grpo", "dr_grpo", "rloo"):
            assert share.advantages(method).tolist() == batch.advantages(method)[own].tolist()
        tokens = np.concatenate([np.arange(ends[r] - batch.lengths[r], ends[r]) for r in own] or [np.empty(0, int)])
        assert share.token_ages.tolist() == batch.token_ages[tokens].tolist()
        assert share.ragged()["response_ids"].tolist() == whole["response_ids"][tokens].tolist()
        assert share.padded()["rewards"].tolist() == whole["rewards"][own].tolist()


@settings(max_examples=100, deadline=None)
@given(batches(), st.integers(1, 9))
def test_shares_are_as_equal_as_they_are_asked_to_be(batch: Batch, ranks: int) -> None:
    """By samples: contiguous, sizes one apart at most. By tokens: no share has more than the mean and one row."""
    by_samples = batch.split(ranks)
    assert [s.id for share in by_samples for s in share.samples] == [s.id for s in batch.samples]
    sizes = [len(share) for share in by_samples]
    assert max(sizes) - min(sizes) <= 1

    by_tokens = batch.split(ranks, "tokens")
    tokens = [[len(s.prompt.token_ids) + len(s.tokens) for s in share.samples] for share in by_tokens]
    assert all(tokens) or len(batch) < ranks
    longest = max((t for share in tokens for t in share), default=0)
    assert max(map(sum, tokens)) <= sum(map(sum, tokens)) / ranks + longest


@settings(max_examples=100, deadline=None)
@given(batches(), st.integers(1, 5), st.integers(1, 3))
def test_the_losses_of_all_shares_are_the_loss_of_the_batch(batch: Batch, ranks: int, parts: int) -> None:
    """With ``share``, and with micro-batches that are shares of a share."""

    def loss(part: Batch, **share: Any) -> dict[str, float]:
        mask, logprobs = (part.padded()[name] for name in ("loss_mask", "logprobs"))
        weights = {
            m: april.loss_weights(mask, m, max_response_len=9, **share) for m in ("grpo", "dapo", "dr_grpo", "rloo")
        }  # fmt: skip
        return {m: float((w * logprobs).sum()) for m, w in weights.items()}

    whole = loss(batch)
    micro = [part for share in batch.split(ranks, "tokens") for part in share.split(parts)]
    for method, value in whole.items():
        assert sum(loss(m, share=m.share)[method] for m in micro) == pytest.approx(value, rel=1e-4, abs=1e-6)


def test_seven_samples_of_two_groups_over_three_ranks() -> None:
    """3 + 2 + 2 rows, or about equal tokens; a group that straddles ranks has the advantages of the whole group."""
    cohorts = [tuple((i, float(i % 3) + g / 8) for i in range(n)) for g, n in enumerate((4, 3))]
    lengths = [9, 1, 1, 1, 2, 7, 6]
    samples = [sample_of(g, i, [0, 0], cohorts[g]) for g, n in enumerate((4, 3)) for i in range(n)]
    samples = [sample_of(*s.id, [0, 0, lengths[row]], s.cohort) for row, s in enumerate(samples)]
    batch = Batch(
        id=0, version=PolicyVersion(0, 2), samples=tuple(samples), group_sizes=(4, 3), metrics={"off_policy_share": 0.0}
    )  # fmt: skip

    def rows(shares: list[Batch]) -> list[list[int]]:
        return [[samples.index(s) for s in share.samples] for share in shares]

    assert rows(batch.split(3)) == [[0, 1, 2], [3, 4], [5, 6]]
    assert [share.group_sizes for share in batch.split(3)] == [(3,), (1, 1), (2,)]
    assert rows(batch.split(3, "tokens")) == [[0, 2], [1, 3, 5], [4, 6]]
    assert [share.group_sizes for share in batch.split(3, "tokens")] == [(2,), (2, 1), (2,)]
    joined = [value for share in batch.split(3) for value in share.advantages("rloo").tolist()]
    assert joined == batch.advantages("rloo").tolist()
    assert joined[:2] == [-1.0, pytest.approx(1 / 3)]
    assert batch.split(3)[1].share == BatchShare(rank=1, ranks=3, samples=7, loss_tokens=27)


def test_an_empty_share_works() -> None:
    """Fewer samples than ranks: arrays with no rows, of the same names and types; a whole batch is its own share."""
    batch = Batch(
        id=0, version=PolicyVersion(0, 2), samples=(sample_of(7, 0, [1, 2, 3], ((0, 0.875), (1, 1.875))),),
        group_sizes=(1,), metrics={"off_policy_share": 0.5},
    )  # fmt: skip
    assert batch.share == BatchShare(0, 1, 1, 5)
    first, empty = batch.split(2)
    assert len(first) == 1
    assert repr(empty).startswith("<Batch 0 share 1 of 2 version=0.2 groups=0 samples=0 tokens=0 off_policy_share=0.5")
    for left in (False, True):
        full, none = batch.padded(left_pad_prompts=left), empty.padded(left_pad_prompts=left)
        assert {k: (v.dtype, v.ndim, 0) for k, v in full.items()} == {
            k: (v.dtype, v.ndim, len(v)) for k, v in none.items()
        }
        april.to_torch(none)
    flat = empty.ragged()
    assert flat["prompt_offsets"].tolist() == flat["response_offsets"].tolist() == [0]
    assert {k: v.dtype for k, v in flat.items()} == {k: v.dtype for k, v in batch.ragged().items()}
    assert all(empty.advantages(m).shape == (0,) for m in ("grpo", "dr_grpo", "rloo", "dapo", "gspo"))
    assert (empty.token_ages.shape, empty.token_ages.dtype) == ((0,), np.int32)
    assert (empty.rewards.shape, empty.lengths.shape, empty.group_sizes) == ((0,), (0,), ())
    assert april.loss_weights(empty.padded()["loss_mask"], "dapo", share=empty.share).shape == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((0,), "ranks must be a whole number and at least 1, got 0"),
        ((True,), "ranks must be a whole number"),
        ((2.0,), "ranks must be a whole number and at least 1, got 2.0"),
        ((2, "rows"), 'by must be "samples" or "tokens", got \'rows\''),
    ],
)
def test_splits_that_cannot_be(arguments: Any, sentence: str) -> None:
    """Refused with what is wrong."""
    batch = Batch(id=0, version=PolicyVersion(0, 0), samples=(), group_sizes=(), metrics={"off_policy_share": 0.0})
    with pytest.raises(ValueError, match=sentence):
        batch.split(*arguments)
