"""Gathers weights that are sharded over the ranks, bucket by bucket, so that rank 0 can send them to engines.

For each bucket, every rank reads its own shards, checks that rank 0 has read the same tensors, and then gathers them.
If a rank fails to read, or has read other tensors, the call fails on all ranks, and none waits in a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from april.driver.user_code import call_user_code
from april.errors import RolloutError
from april.processes.rank_server import RunOnAllRanks
from april.weights.source import Bucket, UngatheredBucket, Weights, WeightSource, weight_source

INSPECT, BEGIN, READ = "inspection of the weights", "preparation of the weights", "reading of the weights"
COMPARE, GATHER = "comparison of the weights", "gathering of a bucket of the weights"
STEPS = frozenset((INSPECT, BEGIN, READ, COMPARE, GATHER))


CopyBucket = Callable[[Bucket], None]
"""Copies a bucket into the models of a rank's own engines."""


class RankWeights:
    """The weights that one rank has given to ``weight_update``.

    Args:
        given: argument of ``weight_update(weights=...)``.
        is_sender: True if this rank sends the weights, so that it keeps the gathered tensors.
        make_copy: function that returns a CopyBucket for this rank's engines, or None if no engine needs a copy.
    """

    def __init__(self, given: Any, *, is_sender: bool, make_copy: Callable[[WeightSource], CopyBucket | None]) -> None:
        self._given, self._is_sender, self._make_copy = given, is_sender, make_copy
        self.source: WeightSource | None = None
        self._portions: Iterator[UngatheredBucket] = iter(())
        self.portion: UngatheredBucket | None = None
        """The next bucket, which was read but not gathered yet."""
        self.bucket: Bucket | None = None
        """The bucket that was gathered last, if this rank sends."""

    def step(self, step: str, content: bytes) -> None:
        """Carry out one of :data:`STEPS`, as all ranks do now; raises any error in reading this rank's weights."""
        if step == INSPECT:
            found = call_user_code(lambda: weight_source(self._given))
            assert isinstance(found, WeightSource)
            self.source = found
        elif step == BEGIN:
            assert self.source is not None
            self._portions = self.source.ungathered_buckets()
        elif step == READ:
            self.portion = call_user_code(lambda: next(self._portions, None))  # the iterable may be the user's code
        elif step == COMPARE:
            if self.portion is None or self.portion.digest() != content:
                raise RolloutError(
                    f"weights: this rank sends {_portion_names(self.portion)} next, but rank 0 sends something else; "
                    "every rank must give the same names, shapes and dtypes in the same order"
                )
        else:
            self._gather()

    def _gather(self) -> None:
        source, portion = self.source, self.portion
        assert source is not None
        assert portion is not None
        self.portion = None
        if self._is_sender:
            self.bucket = source.gather(portion)
        elif (take := self._make_copy(source)) is not None:
            bucket = source.gather(portion)
            take(bucket)
            bucket.tensors.clear()
        else:
            source.gather_for_others(portion)
        portion.items.clear()


class GatheredWeights(Weights):
    """The weights that rank 0 sends; all ranks help to gather each bucket.

    Args:
        rank_weights: weights of rank 0.
        on_all: function that makes all ranks carry out a step.

    Raises:
        RankError: the argument of a rank is not weights.
    """

    def __init__(self, rank_weights: RankWeights, on_all: RunOnAllRanks) -> None:
        self._rank_weights, self._on_all = rank_weights, on_all
        on_all(INSPECT)
        assert rank_weights.source is not None
        self.module, self.repeatable = rank_weights.source.module, rank_weights.source.repeatable
        self.bucket_bytes = rank_weights.source.bucket_bytes

    def buckets(self) -> Iterator[Bucket]:
        """Yield all buckets; the tensors of each are dropped when the next one is requested."""
        self._on_all(BEGIN)
        last = False
        while not last:
            self._on_all(READ)
            portion = self._rank_weights.portion
            assert portion is not None
            self._on_all(COMPARE, portion.digest())
            del portion
            self._on_all(GATHER)
            bucket, self._rank_weights.bucket = self._rank_weights.bucket, None
            assert bucket is not None
            last = bucket.last
            yield bucket
            bucket.tensors.clear()


def _portion_names(portion: UngatheredBucket | None) -> str:
    if portion is None:
        return "nothing"
    names = [item.name for item in portion.items]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
