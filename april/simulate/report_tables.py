"""Formats the report of ``april simulate`` for a terminal, as tables and sentences (rich)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from april.simulate.workload import with_quorum
from april.view.progress import short
from april.view.units import three_digits

ROWS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("groups in work, samples in flight", lambda m: f"{_groups(m)}, {m['in_flight']}"),
    ("trained tokens per second", lambda m: f"{m['trained_tokens_per_s']:,.0f}"),
    ("speed-up over sync", lambda m: f"{m['speed_up']:.2f}x"),
    ("limit with as many in flight, tokens/s", lambda m: f"{m['limit_tokens_per_s']:,.0f}"),
    ("fraction of that limit", lambda m: f"{m['fraction_of_limit']:.1%}"),
    ("bubble (empty slots)", lambda m: f"{m['bubble']:.1%}"),
    ("off-policy share of trained tokens", lambda m: f"{m['off_policy_share']:.1%}"),
    ("staleness, mean / max updates", lambda m: f"{m['staleness_mean']:.2f} / {m['staleness_max']}"),
    ("re-prefilled per generated token", lambda m: f"{m['reprefill_per_generated_token']:.2f}"),
    ("time spent on it", lambda m: f"{m['reprefill_time_share']:.1%}"),
    ("tokens held over a step's end", lambda m: short(m["held_tokens_mean"])),
    ("seconds per step", lambda m: three_digits(m["step_s_mean"])),
)

WORTH_MORE_STALENESS = 0.01
"""A larger max_staleness is recommended only if it raises the fraction of the limit by more than this."""


def headline(report: dict[str, Any]) -> list[str]:
    """Return lines that describe the simulated workload and its response lengths."""
    w, lengths = report["workload"], report["lengths"]
    source = w["lengths_file"] or (
        f"lognormal, median {w['median_len']:g}, sigma {w['sigma_between']:g} between and {w['sigma_within']:g} within "
        "prompts"
    )
    p = lengths["percentiles"]
    engines = f"{w['engines']} {'engine' if w['engines'] == 1 else 'engines'}"
    return [
        f"{w['model']} on {engines} of {w['tensor_parallel']} x {w['gpu']} (roofline estimate); batches of "
        f"{w['groups']} x {w['samples']}, at most {w['max_response_len']:,} tokens; {w['steps']} steps, the first "
        f"{w['ramp']} left out",
        f"lengths ({source}): mean {lengths['mean']:,.0f}, median {lengths['median']:,.0f}, p90 {p['p90']:,.0f}, "
        f"p99 {p['p99']:,.0f}, longest {lengths['longest']:,}; {lengths['share_at_the_cap']:.1%} at the cap; the "
        f"longest of a step is {lengths['longest_of_a_step_over_median']:.1f} times the median",
    ]


def mode_table(report: dict[str, Any]) -> Table:
    """Return a table with a column for each mode."""
    ways = ("three", "four", "five", "six")[len(report["modes"]) - 3]
    out = Table(title=f"One workload, scheduled {ways} ways", box=SIMPLE_HEAD)
    out.add_column("")
    for name in report["modes"]:
        out.add_column(name, justify="right")
    for label, show in ROWS:
        out.add_row(label, *(show(m) for m in report["modes"].values()))
    return out


def loop_table(report: dict[str, Any]) -> Table:
    """Return a table of figures of generation and training together, with a row for each mode."""
    loop = report["loop"]
    out = Table(
        title=f"Generation and training, {loop['placement']}: {loop['train_s']:.3g} s per batch, "
        f"{loop['train_time_in_batch_times']:.2f} batch times", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False,
    )  # fmt: skip
    for column in ("", "tokens\nper s", "speed-\nup", "of the\nlimit", "trainer\nidle", "slots\nidle", "off-\npolicy",
                   "stale-\nness", "re-\nprefill"):  # fmt: skip
        out.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, m in report["modes"].items():
        out.add_row(
            name, f"{m['trained_tokens_per_s']:,.0f}", f"{m['speed_up']:.2f}x", f"{m['fraction_of_limit']:.1%}",
            f"{m['trainer_idle_share']:.1%}", f"{m['bubble']:.1%}", f"{m['off_policy_share']:.1%}",
            f"{m['staleness_mean']:.2f}/{m['staleness_max']}", f"{m['reprefill_per_generated_token']:.2f}",
        )  # fmt: skip
    return out


def verdict(report: dict[str, Any]) -> list[str]:
    """Return sentences that sum up the figures."""
    m = report["modes"]["refill"]
    gains = ", ".join(f"{name} {gain:.2f}x" for name, gain in report["speculative_gains"].items())
    end = [f"speculative decoding brings: {gains}"] * bool(gains) + [f"note: {note}" for note in report["notes"]]
    if report["loop"] is not None:
        return [*_loop_verdict(report), *end]
    return [
        f"refill reaches {m['fraction_of_limit']:.1%} of its limit, which is the speed for the same tokens on the same "
        f"engines with {m['in_flight']} samples always in flight; {m['reprefill_time_share']:.1%} of the time is spent "
        f"to prefill again what the ends of steps cut, {m['bubble']:.1%} of the slots are empty",
        f"refill: {m['bottleneck']}",
        *_quorum_verdict(report),
        *end,
    ]


def _quorum_verdict(report: dict[str, Any]) -> list[str]:
    """Return sentences that compare a group quorum with whole groups; empty if the quorum is 1."""
    quorum, modes = report["workload"]["group_quorum"], report["modes"]
    if quorum == 1.0:
        return []
    pairs = [(name, modes[name], modes[with_quorum(name, quorum)]) for name in ("april", "refill")]
    return [
        f"a group quorum of {quorum:g} takes {name} from {one['speed_up']:.2f}x to {other['speed_up']:.2f}x, from "
        f"{one['off_policy_share']:.0%} to {other['off_policy_share']:.0%} off-policy, from "
        f"{one['staleness_mean']:.2f} to {other['staleness_mean']:.2f} mean staleness"
        for name, one, other in pairs
    ]


def _loop_verdict(report: dict[str, Any]) -> list[str]:
    loop, modes = report["loop"], report["modes"]
    if loop["placement"] == "colocated":
        limit = "the limit is the two one after the other, as they share the GPUs"
    else:
        limit = f"the slower of the two is the limit: the {loop['slower']}"
    lines = [
        f"a batch takes the engines {loop['batch_s']:.3g} s at their limit and the trainer {loop['train_s']:.3g} s; "
        f"{limit}"
    ]
    candidates = {name: m for name, m in modes.items() if m["generation"] == "continuous"} or modes
    most = max(m["fraction_of_limit"] for m in candidates.values())
    name, enough = next(
        (name, m) for name, m in candidates.items() if m["fraction_of_limit"] >= most - WORTH_MORE_STALENESS
    )
    if candidates is not modes:
        lines.append(
            f"generation: continuous with max_staleness: {enough['max_staleness']} reaches "
            f"{enough['fraction_of_limit']:.1%} of it (sync {modes['sync']['fraction_of_limit']:.1%}, refill "
            f"{modes['refill']['fraction_of_limit']:.1%}); of the bounds here none reaches more than {most:.1%}"
        )
    return [*lines, f"{name}: {enough['bottleneck']}", *_quorum_verdict(report)]


def _groups(m: dict[str, Any]) -> str:
    return "refilled" if m["refill"] == "sample" else f"{m['over_sampling_batch_size']}"
