"""Plays the cases twice and prints what was seen of each: ``python -m tests.clients`` runs this."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from tests.clients.bench import Case, Run, Seen, Wire
from tests.clients.cases import KINDS
from tests.clients.oracle import Figures, Wrong, figures_of, plain_rows

LEAST_CUTS = 5


def judged(case: Case, quiet: Seen, cut: Seen) -> tuple[Figures, str]:
    """The figures of a case, and what is wrong with it: nothing, if all is well."""
    figures = Figures(0, 0, 0)
    try:
        figures_of(quiet.sample, quiet.attempts)
        figures = figures_of(cut.sample, cut.attempts)
        for run in (quiet, cut):
            for wire in run.wires:
                if wire.status != 200 or wire.retry not in ("", "0"):
                    raise Wrong(f"{wire.route}: status {wire.status}, retry {wire.retry} {wire.said}")
            tells = case.tells(run.output)
            if "calls" in tells and tells["calls"] != tells["requests"]:
                raise Wrong(f"the client made {tells['calls']} calls and sent {tells['requests']} requests")
        _equal("the number of rows of one conversation", 1, len(cut.sample))
        _equal("transcripts", case.seen(quiet.output), case.seen(cut.output))
        for what, of in (("rows", lambda run: plain_rows(run.sample)), ("requests", lambda run: _asked(run.wires))):
            _equal(what, *(sorted(re.sub(case.of_the_moment, "...", one) for one in of(run)) for run in (quiet, cut)))
        if figures.cuts < LEAST_CUTS:
            raise Wrong(f"only {figures.cuts} cuts")
    except (Wrong, AssertionError) as error:
        return figures, str(error)
    return figures, ""


def _asked(wires: list[Wire]) -> list[str]:
    """Requests: the conversation so far as the client has it, and how it wants the answer."""
    names = ("messages", "input", "system", "instructions", "tools", "stream")
    return [json.dumps([w.route, *map(w.body.get, names)], sort_keys=True) for w in wires]


def _equal(what: str, quiet: Any, cut: Any) -> None:
    if quiet != cut:
        a, b = str(quiet), str(cut)
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        near = slice(max(at - 60, 0), at + 60)
        raise Wrong(f"{what} differ at {at}: {a[near]!r} without cuts, {b[near]!r} with")


def main(kinds: list[str]) -> int:
    """Print the table; 1 where something is wrong."""
    count = wrong = 0
    print(f"{'client':34} {'calls':>5} {'rows':>4} {'cuts':>5} {'versions':>8} {'tokens':>6}  versions of packages")
    for kind in kinds or KINDS:
        cases = KINDS[kind]()
        quiet, cut = Run(cases, cuts=False).play(), Run(cases, cuts=True).play()
        for case in cases:
            why = _row(case, quiet[case.name], cut[case.name])
            count, wrong = count + 1, wrong + bool(why)
    print(f"{count - wrong} of {count}: transcripts equal, no error, no retry, each token and version the engine's")
    return int(bool(wrong))


def _row(case: Case, quiet: Seen, cut: Seen) -> str:
    """Print a case's row of the table; what is wrong with it."""
    figures, why = judged(case, quiet, cut)
    versions = {} if why else case.tells(cut.output).get("versions", {})
    counts = f"{len(cut.wires):5} {len(cut.sample):4} {figures.cuts:5} {figures.versions:8} {figures.tokens:6}"
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    print(f"{case.name:34} {counts}  {f'WRONG: {why}' if why else packages}", flush=True)
    return why


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
