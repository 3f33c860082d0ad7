"""All promises on one gateway."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from april.testing.conformance.subject import Report, Verdict
from april.testing.gateway import answers, clients, conversations
from april.testing.gateway.bench import Promise
from april.testing.gateway.subject import Subject

PROMISES: tuple[Promise, ...] = (
    answers.aborts_are_no_answers,
    answers.refusals_are_waited_for,
    answers.deaths_lose_nothing,
    answers.tokens_have_versions,
    answers.tokens_are_the_engines,
    answers.logprobs_are_those_of_versions,
    conversations.turns_append,
    conversations.sampled_tokens_stay,
    conversations.cut_calls_are_no_calls,
    conversations.cuts_are_not_continued,
    clients.retries_join,
    clients.answers_are_kept,
    clients.equal_requests_are_two,
    clients.silence_is_bounded,
    clients.failures_are_no_answers,
    conversations.gone_clients_are_named,
    conversations.conversations_are_rows,
    answers.restarts_lose_nothing,
    clients.refusals_have_names,
    clients.shapes_agree,
)
"""Every promise, by number."""


def promise_named(name: str) -> Promise:
    """The promise of that name; KeyError with all names if there is none."""
    for one in PROMISES:
        if one.name == name:
            return one
    raise KeyError(f"no promise is called {name}; there are {', '.join(p.name for p in PROMISES)}")


async def run(
    make: Callable[[], Subject],
    promises: Sequence[Promise] = PROMISES,
    watch: Callable[[Verdict], None] | None = None,
) -> Report:
    """Put a gateway to the test, each promise on a subject of its own that ``make`` makes."""
    wall, cpu = time.perf_counter(), time.process_time()
    verdicts = []
    for one in promises:
        verdicts.append(await one.on(make))
        if watch is not None:
            watch(verdicts[-1])
    subject = make()
    return Report(
        engine=subject.name, version=subject.version, verdicts=tuple(verdicts),
        wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu,
    )  # fmt: skip
