"""Distributions of response lengths for simulations without a model.

Invariant: the length of a sample depends only on (distribution, seed, group, index), not on earlier draws, on the
process or on the size of its group. The random bits come from BLAKE2b, so they are the same everywhere; the last bit of
the platform's ``exp`` and ``log`` could change a length by one token about once in 1e11 draws.

With an engine, leave ``cap`` unset and set the token budget in the sampling parameters, because the engine cuts
responses itself. ``cap`` is for lengths without an engine, as in the formulas of ``decode_cost.py``.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

_NORMAL = NormalDist()
_LANES = 8  # 64-bit words in one BLAKE2b digest


class ResponseLengths(ABC):
    """A distribution of response lengths: the number of tokens (>= 1) of each sample's whole response."""

    @abstractmethod
    def group(self, group: int, n_samples: int) -> NDArray[np.int32]:
        """Return the lengths int32[n_samples] of the samples 0..n_samples-1 of one group."""

    def sample(self, group: int, index: int) -> int:
        """Return the length of one sample."""
        return int(self.group(group, index + 1)[index])


@dataclass(frozen=True)
class LognormalLengths(ResponseLengths):
    """Lognormal lengths: the log is N(log median, sigma_between^2) per group, plus N(0, sigma_within^2) per sample.

    Attributes:
        median: Median length in tokens, before the cap.
        sigma_between: Standard deviation of the log length between prompts.
        sigma_within: Standard deviation of the log length between the samples of one prompt.
        cap: Largest length; longer responses are cut to it. None means no cap.
        seed: Seed of the random numbers.
    """

    median: float
    sigma_between: float
    sigma_within: float
    cap: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.median < 1 or self.sigma_between < 0 or self.sigma_within < 0:
            raise ValueError(f"need median >= 1 and sigmas >= 0: {self}")
        if self.cap is not None and self.cap < 1:
            raise ValueError(f"cap must be at least 1 token or None, not {self.cap}")

    def group(self, group: int, n_samples: int) -> NDArray[np.int32]:
        (shared,) = uniforms("lognormal group", self.seed, group, 1)
        centre = math.log(self.median) + self.sigma_between * _NORMAL.inv_cdf(shared)
        draws = uniforms("lognormal sample", self.seed, group, n_samples)
        return _as_lengths([math.exp(centre + self.sigma_within * _NORMAL.inv_cdf(u)) for u in draws], self.cap)


class TraceLengths(ResponseLengths):
    """Lengths drawn with replacement from recorded ones.

    Each of ``rows`` holds the lengths of one prompt's samples. A group draws a row and a start position; its samples
    take successive lengths from there, cyclically. If all rows are single numbers, every sample draws its own.
    """

    def __init__(self, rows: Sequence[int] | Sequence[Sequence[int]], seed: int = 0) -> None:
        self._seed = seed
        self._rows = [tuple(row) if isinstance(row, Sequence) else (row,) for row in rows]
        self._grouped = any(len(row) > 1 for row in self._rows)
        if not self._rows:
            raise ValueError("the trace is empty; give at least one length")
        for number, row in enumerate(self._rows, start=1):
            if not row or any(type(length) is not int or length < 1 for length in row):
                raise ValueError(f"trace entry {number} must be token counts, integers >= 1, not {list(row)[:5]}")

    @classmethod
    def from_jsonl(cls, path: str | Path, seed: int = 0) -> TraceLengths:
        """Read a file with one JSON value per line: a number, or ``{"lengths": [...]}`` for one prompt's samples."""
        rows: list[list[int]] = []
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:  # int() raises ValueError for a number of too many digits
                    raise ValueError(
                        f"{path}, line {number}: neither JSON of lengths nor the first line of a record ({error})"
                    ) from None
                row = value.get("lengths") if isinstance(value, dict) else [value]
                if not isinstance(row, list) or not row or any(type(x) is not int or x < 1 for x in row):
                    raise ValueError(
                        f'{path}, line {number}: expected an integer >= 1 or {{"lengths": [integers >= 1]}}, '
                        f"got {line.strip()[:60]}"
                    )
                rows.append(row)
        try:
            return cls(rows, seed)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def group(self, group: int, n_samples: int) -> NDArray[np.int32]:
        if not self._grouped:
            draws = uniforms("trace sample", self._seed, group, n_samples)
            return _as_lengths([self._rows[int(u * len(self._rows))][0] for u in draws])
        pick, begin = uniforms("trace group", self._seed, group, 2)
        row = self._rows[int(pick * len(self._rows))]
        start = int(begin * len(row))
        return _as_lengths([row[(start + i) % len(row)] for i in range(n_samples)])


def uniforms(what: str, seed: int, group: int, count: int) -> list[float]:
    """Return ``count`` numbers in the open interval (0, 1); the i-th depends on (what, seed, group, i) only."""
    numbers: list[float] = []
    for block in range(-(-count // _LANES)):
        digest = hashlib.blake2b(f"{what}/{seed}/{group}/{block}".encode(), digest_size=8 * _LANES).digest()
        # 52 bits plus a half: exact in a float, never 0 or 1
        numbers += [((int.from_bytes(digest[k : k + 8], "little") >> 12) + 0.5) * 2.0**-52 for k in range(0, 64, 8)]
    return numbers[:count]


def _as_lengths(values: Sequence[float], cap: int | None = None) -> NDArray[np.int32]:
    top = cap if cap is not None else 2**31 - 1
    return np.array([min(top, max(1, round(value))) if value < top else top for value in values], dtype=np.int32)
