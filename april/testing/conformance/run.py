"""Runs all checks on one engine, and builds the semantics matrix of declared capabilities and tested promises."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from april.engines.abilities import ABILITIES
from april.engines.protocol import Engine
from april.testing.conformance import aborts, attachments, extras, scheduler_checks, tokens, weights
from april.testing.conformance.bench import Bench, Check
from april.testing.conformance.subject import Outcome, Report, Subject, Verdict

SHOWN = {
    Outcome.PASSED: "yes",
    Outcome.FAILED: "**no**",
    Outcome.NOT_OFFERED: "not offered",
    Outcome.NOT_TESTED: "not tested",
}


def semantics_matrix(reports: Sequence[Report]) -> str:
    """Return a Markdown table of engine x promise; below it the reasons for promises not kept or not tested."""
    if not reports:
        raise ValueError("a matrix needs at least one report")
    names = [f"{r.engine} {r.version}".strip() for r in reports]
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(reports)]
    for row in _union(list(r.capabilities) for r in reports):
        lines.append(f"| {row} | " + " | ".join(r.capabilities.get(row, "") for r in reports) + " |")
    lines.append("| **promise** |" + " |" * len(reports))
    numbers: dict[str, int] = {}
    promises: dict[str, str] = {}
    for check in _union([v.check for v in r.verdicts] for r in reports):
        cells = []
        for report in reports:
            found = [v for v in report.verdicts if v.check == check]
            if not found:
                cells.append("")
                continue
            (verdict,) = found
            promises[check] = verdict.promise
            cell = SHOWN[verdict.outcome]
            if verdict.detail:
                cell += f" [{numbers.setdefault(f'{verdict.check}: {verdict.detail}', len(numbers) + 1)}]"
            cells.append(cell)
        lines.append(f"| {check} | " + " | ".join(cells) + " |")
    lines += ["", *(f"{number}. {note}" for note, number in numbers.items())]
    lines += ["", *(f"* `{check}`: {promise}" for check, promise in promises.items())]
    return "\n".join(lines).rstrip() + "\n"


def _union(lists: object) -> list[str]:
    """Merge several lists of words, in order of first occurrence."""
    return list(dict.fromkeys(word for words in lists for word in words))  # type: ignore[attr-defined]


CHECKS: tuple[Check, ...] = (
    tokens.budgets,
    tokens.eos_in_tokens,
    tokens.stop_token_ids,
    tokens.seeds,
    tokens.over_long_input,
    tokens.out_of_vocabulary,
    tokens.duplicate_id,
    tokens.logprobs,
    tokens.logprobs_temperature,
    tokens.logprobs_top_p,
    aborts.abort_running,
    aborts.abort_queued,
    aborts.abort_prefilling,
    aborts.abort_just_finished,
    aborts.abort_without_tokens,
    aborts.prefix_free_ids,
    aborts.abort_burst,
    aborts.cut_and_resume,
    weights.version_exactness,
    weights.sent_weights,
    weights.update_under_way,
    weights.kept_over_an_update,
    weights.adapter_versions,
    attachments.banned_ids,
    attachments.attached,
    attachments.attached_and_resumed,
    attachments.attached_after_an_update,
    extras.extras,
    weights.pause_and_resume,
    scheduler_checks.stop_strings,
    scheduler_checks.eos_at_a_cut,
    scheduler_checks.thousand_aborts,
    aborts.disconnect,
    aborts.server_killed,
)
"""All checks in the order in which they run; the last one kills the server."""

Watcher = Callable[[Check, str, Verdict | None], None]
"""Callback (running check, its progress, its verdict or None while it runs)."""


def check_named(name: str) -> Check:
    """Return the check of that name; KeyError with all names if there is none."""
    for one in CHECKS:
        if one.name == name:
            return one
    raise KeyError(f"there is no check {name}; choose from {', '.join(c.name for c in CHECKS)}")


async def run(subject: Subject, checks: Sequence[Check] = CHECKS, watch: Watcher | None = None) -> Report:
    """Run the checks on one engine, on the running loop; a failed check does not end the run.

    The engine is opened once, and again after a failed check.
    """
    wall, cpu = time.perf_counter(), time.process_time()
    verdicts: list[Verdict] = []
    bench: Bench | None = None
    first: Engine | None = None
    try:
        for one in checks:
            if bench is None:
                bench = Bench(subject, await subject.open())
                first = first or bench.engine
            if watch is not None:
                watch(one, "", None)
            bench.say = lambda text, one=one: watch(one, text, None) if watch is not None else None  # type: ignore[misc]
            verdict = await one.on(bench)
            verdicts.append(verdict)
            if watch is not None:
                watch(one, "", verdict)
            if verdict.outcome is Outcome.FAILED and not bench.killed and one is not checks[-1]:
                await bench.engine.close()
                bench = None
    finally:
        if bench is not None:
            await bench.engine.close()
    assert first is not None
    can = first.capabilities
    return Report(
        engine=subject.name or first.name,
        version=subject.version,
        capabilities={ability.name: _in_words(getattr(can, ability.name)) for ability in ABILITIES},
        notes=can.notes,
        verdicts=tuple(verdicts),
        wall_s=time.perf_counter() - wall,
        cpu_s=time.process_time() - cpu,
    )


def _in_words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
