"""Counters of the embedded engine: how much it computed, and how much of that was used.

Invariant: once every stream has ended, ``generated_tokens`` = tokens yielded + ``discarded_tokens``. The left side is
counted when tokens are sampled and the right side when they leave the engine, so lost tokens are noticed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine was created; plain numbers, cheap enough to be always on."""

    requests: int = 0
    """Number of requests accepted."""
    aborts: int = 0
    """Number of requests that were aborted, or whose consumer stopped reading."""
    failures: int = 0
    """Number of requests that ended with an error."""
    prefill_tokens: int = 0
    """Tokens run through the model by prefills, padding left out; equal sequences prefilled together count once."""
    prefill_batches: int = 0
    """Number of model calls for prefills."""
    decode_steps: int = 0
    """Number of model calls that gave every active request one token."""
    busy_slot_steps: int = 0
    """Number of active requests, summed over decode steps."""
    slot_steps: int = 0
    """Number of slots, summed over decode steps: the value of ``busy_slot_steps`` if all slots were always busy."""
    generated_tokens: int = 0
    """Number of tokens sampled, first tokens from prefills included."""
    discarded_tokens: int = 0
    """Number of sampled tokens that no consumer took."""
    trace: list[tuple[int, int]] | None = None
    """Pairs (decode step, active requests), one per step; None means not recorded, ``[]`` starts recording."""

    def count_decode_step(self, busy: int, slots: int) -> None:
        """Count one decode step with ``busy`` of ``slots`` slots active."""
        self.decode_steps += 1
        self.busy_slot_steps += busy
        self.slot_steps += slots
        if self.trace is not None:
            self.trace.append((self.decode_steps, busy))

    @property
    def occupancy(self) -> float:
        """Fraction of slot-steps that were busy, in [0, 1]; 0 before the first decode step."""
        return self.busy_slot_steps / self.slot_steps if self.slot_steps else 0.0

    def counters(self) -> dict[str, float]:
        """Return all totals as one flat mapping, with the occupancy and without the trace."""
        totals = {f.name: float(getattr(self, f.name)) for f in fields(self) if f.name != "trace"}
        return totals | {"occupancy": self.occupancy}
