"""The key-value cache of the embedded engine: a ``transformers.Cache`` with one row for each active request.

There is one store per layer, ``[rows, columns, heads, head size]``: row i belongs to slot i, column p to position p.
The active requests occupy the first rows without gaps, so a decode step reads one plain slice. Weights change only
while no request is active (``TransformersEngine.pause`` and ``update_weights``), so no entry outlives its weights.

Invariant: in active rows, every cell left of the *clean column* holds zeros, or keys and values of the row's present
request (padding of its prefill included). A decode step reads only cells left of the clean column, so it never reads
data of a former request. This matters because a mask would let a former NaN through (0 x NaN is NaN).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

WINDOW_STEP = 32
"""Decode steps attend to a multiple of this number of columns, so that there are few shapes and masks are aligned."""


def window_of(columns: int) -> int:
    """Round ``columns`` up to a multiple of the window step."""
    return -(-columns // WINDOW_STEP) * WINDOW_STEP


class _LayerStore:
    """Keys and values of one layer. Keys may have other heads (number and size) than values, as in latent attention."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        # Views with one row per cell, so that a decode step writes with a single index.
        self.key_cells, self.value_cells = keys.flatten(0, 1), values.flatten(0, 1)


class SlotCache(Cache):
    """A ``transformers.Cache`` over slots; announce each model call with a ``begin_`` method before making it.

    Memory is allocated at the first call and grows by doubling, up to ``slots`` rows and ``max_len`` columns.
    """

    def __init__(self, slots: int, max_len: int) -> None:
        super().__init__(layers=[])
        self._slots, self._max_columns = slots, window_of(max_len)
        self._stores: dict[int, _LayerStore] = {}
        self._rows = self._clean = self._seen = self._first = self._count = self._window = 0
        self.columns = 0
        """Number of allocated columns; cell (row, column) has the number ``row * columns + column``."""
        self._prefilling = False
        self._source: Tensor | None = None
        self._cells: Tensor | None = None

    # ------------------------------------------------------------------ announcing the next model call

    def begin_prefill(self, first: int, count: int, length: int, source: Tensor | None) -> None:
        """Prepare a model call that prefills ``count`` rows, from ``first`` on, with sequences padded to ``length``.

        Args:
            first: Number of rows that are already active.
            count: Number of rows to fill.
            length: Number of tokens of each padded sequence.
            source: int64 [count], batch element for each row; None means that row ``first + i`` gets element i.
        """
        if first == 0:
            self._clean = 0
        self._reserve(first + count, length, first)
        # All rows must be clean up to the same column: zero old rows up to ``length``, and new rows from there on.
        self._zero(0, first, self._clean, length)
        self._zero(first, first + count, length, self._clean)
        self._clean = max(self._clean, length)
        self._prefilling, self._source = True, source
        self._first, self._count, self._window, self._seen = first, count, length, 0

    def begin_decode(self, count: int, columns: int, cells: Tensor) -> int:
        """Prepare a model call that appends a token to the first ``count`` rows; return how many columns it reads.

        Args:
            count: Number of active rows.
            columns: Length of the longest row, the new token included; at most :attr:`columns`.
            cells: int64 [count], number of the cell that each row writes.
        """
        window = min(window_of(columns), self.columns)
        if window > self._clean:
            self._zero(0, count, self._clean, window)
            self._clean = window
        self._prefilling, self._cells = False, cells
        self._count, self._window, self._seen = count, window, columns - 1
        return window

    @contextmanager
    def reporting_length(self, columns: int) -> Iterator[None]:
        """Inside the block, report ``columns`` to a model that asks for the length; nothing else changes."""
        seen, self._seen = self._seen, columns
        try:
            yield
        finally:
            self._seen = seen

    # ------------------------------------------------------------------ methods that the model calls

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store [batch, heads, tokens, size] of one layer; return what the layer attends to, in the same layout."""
        store = self._stores.get(layer_idx)
        if store is None:
            store = self._stores[layer_idx] = self._allocate(key_states, value_states)
        if self._prefilling:
            rows = slice(self._first, self._first + self._count)
            for cells, states in ((store.keys, key_states), (store.values, value_states)):
                tokens_first = states.transpose(1, 2)
                cells[rows, : self._window] = tokens_first if self._source is None else tokens_first[self._source]
            return key_states, value_states
        assert self._cells is not None
        store.key_cells.index_copy_(0, self._cells, key_states[:, :, 0])
        store.value_cells.index_copy_(0, self._cells, value_states[:, :, 0])
        rows, columns = slice(0, self._count), slice(0, self._window)
        return store.keys[rows, columns].transpose(1, 2), store.values[rows, columns].transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0, *args: Any, **kwargs: Any) -> int:
        """Return the length before the next model call: that of the longest row for a decode step, 0 for a prefill."""
        return self._seen

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Return (columns attended to, first column) of the next model call."""
        return self._window, 0

    # ------------------------------------------------------------------ rows

    # not named ``dtype``, because accelerate treats any object with such an attribute as a tensor
    @property
    def key_dtype(self) -> torch.dtype | None:
        """Dtype of the stored keys; None before the first model call."""
        return next((store.keys.dtype for store in self._stores.values()), None)

    @property
    def stored_dtypes(self) -> set[torch.dtype]:
        """The dtypes of all keys and values."""
        return {cells.dtype for store in self._stores.values() for cells in (store.keys, store.values)}

    def move(self, to: Tensor, source: Tensor) -> None:
        """Copy whole rows ``source[i]`` to ``to[i]``; int64 [k] each, no row in both."""
        for store in self._stores.values():
            for cells in (store.keys, store.values):
                cells[to, : self._clean] = cells[source, : self._clean]

    def shrink_clean(self, columns: int) -> None:
        """Move the clean column back to ``columns`` (no active row is longer), so that less is copied and zeroed."""
        self._clean = min(self._clean, window_of(columns))

    def reserve_columns(self, columns: int, active: int) -> None:
        """Allocate at least ``columns`` columns; if there were fewer before, the numbers of the cells change."""
        self._reserve(self._rows, columns, active)

    def release(self) -> None:
        """Free all memory; no request may be active."""
        self._stores.clear()
        self._rows = self.columns = self._clean = 0

    # ------------------------------------------------------------------ memory

    def _reserve(self, rows: int, columns: int, active: int) -> None:
        if rows <= self._rows and columns <= self.columns:
            return
        # Doubling keeps the copied bytes below twice the final size.
        if rows > self._rows:
            self._rows = min(self._slots, max(rows, 2 * self._rows))
        if columns > self.columns:
            self.columns = min(self._max_columns, max(window_of(columns), 2 * self.columns))
        for index, old in self._stores.items():
            grown = []
            for cells in (old.keys, old.values):
                new = cells.new_zeros(self._rows, self.columns, *cells.shape[2:])
                new[:active, : self._clean] = cells[:active, : self._clean]
                grown.append(new)
            self._stores[index] = _LayerStore(*grown)

    def _allocate(self, key_states: Tensor, value_states: Tensor) -> _LayerStore:
        keys, values = (
            states.new_zeros(self._rows, self.columns, states.shape[1], states.shape[3])
            for states in (key_states, value_states)
        )
        return _LayerStore(keys, values)

    def _zero(self, first_row: int, end_row: int, first_column: int, end_column: int) -> None:
        if first_row >= end_row or first_column >= end_column:
            return
        for store in self._stores.values():
            store.keys[first_row:end_row, first_column:end_column] = 0
            store.values[first_row:end_row, first_column:end_column] = 0
