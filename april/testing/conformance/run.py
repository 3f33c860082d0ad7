"""Lists all checks of the conformance suite, and runs them on one engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from april.testing.conformance import aborts, attachments, extras, scheduler_checks, tokens, weights
from april.testing.conformance.bench import Bench, Check
from april.testing.conformance.subject import Outcome, Report, Subject, Verdict

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
    scheduler_checks.thousand_aborts,
    aborts.disconnect,
    aborts.server_killed,
)
"""All checks in the order in which they run; the last one kills the server."""


def check_named(name: str) -> Check:
    """Return a check by its name; raises KeyError that lists all names if there is no such check."""
    for one in CHECKS:
        if one.name == name:
            return one
    raise KeyError(f"there is no check {name}; choose from {', '.join(c.name for c in CHECKS)}")


async def run(
    subject: Subject, checks: Sequence[Check] = CHECKS, watch: Callable[[Verdict], object] = lambda verdict: None
) -> Report:
    """Run the checks on one engine, on the running event loop; a failed check does not end the run.

    The engine is opened once, and opened anew after a failed check. ``watch`` is called with each verdict at once.
    """
    verdicts: list[Verdict] = []
    bench: Bench | None = None
    try:
        for one in checks:
            if bench is None:
                bench = Bench(subject, await subject.open())
            verdicts.append(await one.on(bench))
            watch(verdicts[-1])
            if verdicts[-1].outcome is Outcome.FAILED:
                await bench.engine.close()
                bench = None
    finally:
        if bench is not None:
            await bench.engine.close()
    return Report(engine=subject.name, version=subject.version, verdicts=tuple(verdicts))
