"""All checks on one engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from april.engines.protocol import Engine
from april.testing.conformance import aborts, failures, logprobs, tokens, weights, with_april
from april.testing.conformance.bench import Bench
from april.testing.conformance.check import Check
from april.testing.conformance.matrix import capabilities_in_words
from april.testing.conformance.subject import Subject
from april.testing.conformance.verdicts import Outcome, Report, Verdict

CHECKS: tuple[Check, ...] = (
    tokens.budgets,
    tokens.eos_in_tokens,
    tokens.stop_token_ids,
    tokens.seeds,
    tokens.over_long_input,
    tokens.out_of_vocabulary,
    tokens.duplicate_id,
    logprobs.logprobs,
    logprobs.logprobs_temperature,
    logprobs.logprobs_top_p,
    aborts.abort_running,
    aborts.abort_queued,
    aborts.abort_prefilling,
    aborts.abort_just_finished,
    aborts.abort_without_tokens,
    aborts.prefix_free_ids,
    aborts.abort_burst,
    aborts.cut_and_resume,
    weights.version_exactness,
    weights.update_under_way,
    weights.pause_and_resume,
    with_april.stop_strings,
    with_april.eos_at_a_cut,
    with_april.thousand_aborts,
    failures.disconnect,
    failures.server_killed,
)
"""Every promise, in the order in which they are put to the test; the last one kills the server."""

Watcher = Callable[[Check, str, Verdict | None], None]
"""(the check that runs, how far it is, its verdict when it is there)"""


def check_named(name: str) -> Check:
    """The check of that name; KeyError with all names if there is none."""
    for one in CHECKS:
        if one.name == name:
            return one
    raise KeyError(f"no check is called {name}; there are {', '.join(c.name for c in CHECKS)}")


async def run(subject: Subject, checks: Sequence[Check] = CHECKS, watch: Watcher | None = None) -> Report:
    """Put one engine to the test, on the running loop; a failed promise does not end the run.

    The engine is opened once, and anew after a failed check.
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
    return Report(
        engine=subject.name or first.name,
        version=subject.version,
        capabilities=capabilities_in_words(first.capabilities),
        notes=first.capabilities.notes,
        verdicts=tuple(verdicts),
        wall_s=time.perf_counter() - wall,
        cpu_s=time.process_time() - cpu,
    )
