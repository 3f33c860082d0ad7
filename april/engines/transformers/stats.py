"""Counters of an engine that april runs itself: what was computed, and what it was computed for.

Invariant: once every stream has ended, ``generated_tokens`` = tokens yielded + ``discarded_tokens``. The first is
counted where tokens are sampled, the others where they leave, so a token that is lost between them shows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine was made; plain numbers, cheap enough to be always on."""

    requests: int = 0
    """Requests accepted."""
    aborts: int = 0
    """Requests that ended by an abort, or because their consumer went away."""
    failures: int = 0
    """Requests that ended with an error."""
    prefill_tokens: int = 0
    """Tokens run through the model by prefills, padding left out; equal sequences prefilled together count once."""
    prefill_batches: int = 0
    """Model calls made for prefills."""
    decode_steps: int = 0
    """Model calls that gave every active request one token."""
    busy_slot_steps: int = 0
    """Active requests, summed over decode steps."""
    slot_steps: int = 0
    """Slots, summed over decode steps: what ``busy_slot_steps`` would be if every slot were always busy."""
    generated_tokens: int = 0
    """Tokens sampled, first tokens from prefills included."""
    discarded_tokens: int = 0
    """Tokens sampled that no consumer was there to take."""
    trace: list[tuple[int, int]] | None = None
    """(decode step, active requests) of each step; None means not recorded: set it to ``[]`` to record."""

    def count_decode_step(self, busy: int, slots: int) -> None:
        """Count one decode step with ``busy`` of ``slots`` slots active."""
        self.decode_steps += 1
        self.busy_slot_steps += busy
        self.slot_steps += slots
        if self.trace is not None:
            self.trace.append((self.decode_steps, busy))

    @property
    def occupancy(self) -> float:
        """Share of slot-steps that were busy, in [0, 1]; 0 before the first decode step."""
        return self.busy_slot_steps / self.slot_steps if self.slot_steps else 0.0

    def counters(self) -> dict[str, float]:
        """All totals as one flat mapping, occupancy included, the trace left out."""
        totals = {f.name: float(getattr(self, f.name)) for f in fields(self) if f.name != "trace"}
        return totals | {"occupancy": self.occupancy}
