"""Functions that start a program, run a tool or wait for a client: they keep nobody from generating."""

from __future__ import annotations

import asyncio

from chain_machine import ChainMachine, P
from core_machine import settings
from virtual_rollouts import Rollouts, on_virtual_time, table

from april.core import events as ev
from april.core.types import Prompt, SampleId
from april.driver.llm import LLM


def started(samples: int, **changes: int) -> ChainMachine:
    """Functions of a group with so many samples, which have asked for nothing."""
    m = ChainMachine(settings(n=1, samples=samples, **changes))
    m.ask()
    return m


def test_parallel_calls_go_before_functions_that_have_asked_for_nothing() -> None:
    """Four functions were started for four places; the one that asks has all of them, until others ask."""
    m = started(4)
    assert len(m.alive) == 4
    calls = [m.call([*P, 20 + i]) for i in range(4)]
    assert len(m.in_flight) == 4
    m.call(P, of=(0, 1))
    assert len(m.in_flight) == 4  # and never more than there are places
    m.complete(calls[0])
    assert {tuple(a.sample.id) for a in m.in_flight.values()} == {(0, 0), (0, 1)}


def test_functions_that_have_asked_for_nothing_are_no_more_than_the_places() -> None:
    """Whatever is generated meanwhile: no more are started than can generate."""
    m = started(6, max_in_flight=3)
    assert len(m.alive) == 3
    m.complete(m.call(P))  # it runs a tool now, and the next function may start
    assert len(m.alive) == 4
    for i in range(3):
        m.call([*P, 20 + i])
    assert (len(m.in_flight), len(m.alive)) == (3, 4)


def test_a_call_is_not_behind_a_function_that_may_not_start() -> None:
    """A function of an older group is first in the queue, and has no place to start; the call goes."""
    m = started(3, max_in_flight=2)
    number = m.call(P)
    m.call(P, of=(0, 1))
    m.complete(number)  # the third one starts
    m.gone((0, 0))
    m.post(ev.SampleFailed(SampleId(0, 0), "boom"))
    assert m.alive == {(0, 1), (0, 2)}
    m.call([*P, 20], of=(0, 1))
    assert len(m.in_flight) == 2


def test_evaluations_start_before_functions_that_have_asked_for_nothing() -> None:
    """Functions of training wait for their clients in all places: those of an evaluation start all the same."""
    m = started(2)
    m.evaluate(prompts=3)
    evaluated = {key for key in m.alive if key[0] < 0}
    assert len(evaluated) == 2
    m.post(ev.SampleFailed(SampleId(*min(evaluated)), "boom"))
    assert m.core.context.places.startable(evaluation=True) == 2


@on_virtual_time
async def test_an_orchestrator_with_few_agents_at_a_time_is_never_waited_for() -> None:
    """It takes the next sample only when one is over; meanwhile the others hold no place that its agent needs."""
    agents = asyncio.Semaphore(1)

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        async with agents:
            for _ in range(3):
                await llm.generate(max_tokens=2)
                await asyncio.sleep(5)  # a tool

    rollouts = Rollouts(table({}), n=1, samples=4, rollout=rollout, max_in_flight=2)
    assert len(await rollouts.driver.next_batch()) == 4
