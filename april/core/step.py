"""The figures of one step. Whether it ends is decided in ``completion_monitor`` and ``state`` (``_advance``)."""

from __future__ import annotations

from collections import Counter

STEP_METRICS = (
    "attempts",
    "resumed_attempts",
    "reprefill_tokens",
    "aborted_attempts",
    "empty_partials",
    "failed_attempts",
    "failed_samples",
    "fenced_attempts",
    "stalled_attempts",
    "late_events",
    "after_stop_tokens",
    "prompts_drawn",
    "prompts_too_long",
    "groups_dropped_failed",
    "groups_dropped_filtered",
    "groups_dropped_stale",
    "samples_dropped_failed",
    "samples_dropped_stale",
    "replaced_samples",
    "replays_diverged",
    "lost_functions",
    "busy_refusals",
    "stale_engines",
    "lowered_caps",
)


class Step:
    """The phase of the running step, and the counters at its beginning."""

    __slots__ = ("_before", "_observed", "filled", "in_flight_at_stop", "stopping")

    def __init__(self, before: Counter[str], observed: int) -> None:
        self._before = before
        self._observed = observed
        self.filled = False
        """The beginning is over: all that it wanted was drawn, prompts in place of skipped ones included."""
        self.stopping = False
        """The target is reached; nothing starts any more."""
        self.in_flight_at_stop: dict[str, int] = {}
        """By engine."""

    def __repr__(self) -> str:
        return "stopping" if self.stopping else "running"

    def metrics(self, now: Counter[str], observed: int) -> dict[str, float]:
        """What happened in this step, from the run's totals; ``observed``: tokens."""
        out = {name: float(now[name] - self._before[name]) for name in STEP_METRICS}
        generated, again = float(observed - self._observed), out["reprefill_tokens"]
        out["generated_tokens"] = generated
        out["reprefill_share"] = again / (again + generated) if again else 0.0
        out["in_flight_at_stop"] = float(sum(self.in_flight_at_stop.values()))
        return out
