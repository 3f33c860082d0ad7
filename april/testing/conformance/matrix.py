"""The semantics matrix: what each engine says it can do, and which promises it was seen to keep."""

from __future__ import annotations

from collections.abc import Sequence

from april.engines.protocol import Capabilities
from april.testing.conformance.verdicts import Outcome, Report

SHOWN = {
    Outcome.PASSED: "yes",
    Outcome.FAILED: "**no**",
    Outcome.NOT_OFFERED: "not offered",
    Outcome.NOT_TESTED: "not tested",
}


def capabilities_in_words(can: Capabilities) -> dict[str, str]:
    """The first block of the matrix."""
    return {
        "an abort": str(can.abort_means),
        "partials of aborted requests": "handed over" if can.returns_partials else "lost",
        "versions": "per token" if can.version_spans else "that at submission",
        "tokens come": "while they are made" if can.streams else "at the end of a request",
        "lost if the engine dies": "what was not sent yet" if can.streams else "all tokens of running requests",
        "log-probabilities": str(can.logprob_kind),
        "seeds": "honoured" if can.honours_seeds else "not honoured",
        "weights from disk": "yes" if can.updates_from_disk else "no",
        "weights": "the trainer's own" if can.shares_weights else "its own",
        "context": f"{can.max_context} tokens",
    }


def semantics_matrix(reports: Sequence[Report]) -> str:
    """Engine x promise as a Markdown table; sentences for what is not offered, not tested or broken stand below it."""
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
    """All words of several lists, in order."""
    return list(dict.fromkeys(word for words in lists for word in words))  # type: ignore[attr-defined]
