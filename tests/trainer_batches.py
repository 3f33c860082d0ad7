"""A delivered batch against the books of ``trainer_books``: whose samples it has, and every token of them."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import numpy as np
from trainer_books import Books, Key

from april.core.batch import Batch, DeliveredSample
from april.core.settings import CoreSettings
from april.core.types import OnStale


def check_batch(batch: Batch, books: Books, settings: CoreSettings, seen: Counter[str]) -> list[Key]:
    """So many groups, or samples, that count, or all there is; returns whose samples they are."""
    assert batch.trained_at == (books.version[0], books.trained_at)
    keys: list[Key] = [tuple(sample.id) for sample in batch.samples]
    parts = [(group, [index for _, index in rows]) for group, rows in groupby(keys, lambda key: key[0])]
    assert len({group for group, _ in parts}) == len(parts), "a group in two places of a batch"
    assert batch.group_sizes == tuple(len(indices) for _, indices in parts)
    if books.whole:
        assert all(indices == sorted(books.groups[group].members) for group, indices in parts)
        assert len(parts) <= settings.rollout_batch_size
        short = len(parts) < settings.rollout_batch_size
    else:
        assert len(keys) <= settings.rollout_batch_size * books.samples
        short = len(keys) < settings.rollout_batch_size * books.samples
    assert not short or set(keys) == set(books.tapes), "a short batch leaves something behind"
    for key, sample in zip(keys, batch.samples, strict=True):
        check_sample(key, sample, books, settings)
        seen["resumed"] += sample.resumes > 0
        seen["of several versions"] += len({token.version for token in books.tapes[key]}) > 1
        seen["straggler"] += key[1] not in [index for index, _ in sample.cohort]
        seen["part of a group"] += bool(books.groups[key[0]].delivered)
    seen["batches"] += 1
    seen["batches beside others"] += bool(books.out)
    return keys


def check_sample(key: Key, sample: DeliveredSample, books: Books, settings: CoreSettings) -> None:
    """Every token as it was sent, nothing masked that is not too old, and the cohort that its group has for ever."""
    tape, cohort, ages = books.tapes[key], books.groups[key[0]].cohort, []
    assert sample.prompt.position == books.held[key[0]]
    assert sample.cohort == cohort
    others = [np.float32(reward) for index, reward in cohort if index != key[1]]
    assert sample.baseline_rewards.tolist() == others[: len(cohort) - 1]
    assert sample.tokens.tolist() == [t.id for t in tape]
    assert sample.logprobs.tolist() == [t.logprob for t in tape]
    for token, version in zip(tape, sample.versions.tolist(), strict=True):
        assert token.version == tuple(version)
        assert token.weights == books.weights[token.version], "its version is not that of its weights"
        ages.append(books.trained_at - token.version[1])
    assert sample.staleness == max(ages)
    masks, bound = settings.on_stale in (OnStale.MASK, OnStale.FINISH), books.bound_of(key[0], settings)
    assert sample.loss_mask.tolist() == [not (masks and age > bound) for age in ages]
    if books.as_promised:
        assert max(ages) <= bound
        assert sample.loss_mask.all()
