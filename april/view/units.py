"""Formats numbers, times and costs for people."""

from __future__ import annotations

from april.engines.simulated.decode_cost import DecodeCost

_TIMES = (("s", 1.0), ("ms", 1e-3), ("\N{MICRO SIGN}s", 1e-6), ("ns", 1e-9))


def three_digits(number: float) -> str:
    """Format a number with three significant digits, or with all digits before the point, such as 0.0312 or 1234."""
    return f"{number:.0f}" if number >= 99.95 else f"{number:.3g}"


def short_time(seconds: float) -> str:
    """Format a short time in s, ms, \N{MICRO SIGN}s or ns, depending on its size, such as 342 \N{MICRO SIGN}s."""
    unit, size = next((each for each in _TIMES if seconds >= 0.9995 * each[1]), _TIMES[-1])
    return f"{three_digits(seconds / size)} {unit}"


def cost_of_a_step(cost: DecodeCost) -> str:
    """Describe the cost of a decode step, in words that end a sentence."""
    return (
        f"{short_time(cost.base_s)}, plus {short_time(cost.per_sequence_s)} for each response in flight and "
        f"{short_time(1000 * cost.per_kv_token_s)} for each 1,000 tokens of these in memory"
    )
