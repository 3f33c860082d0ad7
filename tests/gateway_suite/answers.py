"""Promises about trouble behind the gateway: aborts, refusals, deaths, new weights, restarts."""

from __future__ import annotations

import asyncio

from april.testing.conformance.subject import Broken, Figures
from tests.gateway_suite.bench import Bench, equal, promise, recomputed, settle, traced, versions_of, whole
from tests.gateway_suite.client import Said, Talk
from tests.gateway_suite.script import TOKENIZER, says
from tests.gateway_suite.subject import Door

LONG_TALK = Talk(("please #long",))


@promise(1, "An abort by a weight update never reaches a client as the end of its answer.")
async def aborts_are_no_answers(bench: Bench) -> Figures:
    door = await bench.subject.open()
    await bench.subject.hold()
    tasks = [await bench.begin(door, dialect, LONG_TALK) for dialect in bench.dialects]
    await bench.subject.update()
    await bench.caught(len(tasks), *tasks)
    await bench.subject.release()
    for said in await bench.answered(*tasks):
        whole(said)
    return {"answers cut": len(tasks)}


@promise(2, "While the engine refuses everything (503, paused), a client only waits.")
async def refusals_are_waited_for(bench: Bench) -> Figures:
    subject = bench.subject
    door = await subject.open()
    before = await subject.refused()
    await subject.unavailable()
    tasks = [bench.start(bench.ask(door, dialect, LONG_TALK)) for dialect in bench.dialects]

    async def refused() -> bool:
        if ended := [task for task in tasks if task.done()]:
            raise Broken(f"a client was answered while the engine refused everything: {ended[0].result()}")
        return await subject.refused() > before

    await bench.until(refused, "a refusal of the engine")
    loop = asyncio.get_running_loop()
    until = loop.time() + subject.outage_s
    while loop.time() < until:
        await asyncio.sleep(subject.outage_s / 100)
        await refused()
    await settle()  # what would be told to a client has arrived then
    await refused()
    await subject.available()
    for said in await bench.answered(*tasks):
        whole(said)
    return {"refusals": await subject.refused() - before}


async def _held(bench: Bench) -> tuple[Door, asyncio.Task[Said]]:
    """A long call, of which the engine has begun to answer and goes no further."""
    door = await bench.subject.open()
    await bench.subject.hold()
    task = await bench.begin(door, bench.dialects[0], LONG_TALK)
    return door, task


@promise(3, "After the death of an engine in the middle of a call the answer goes on: no token is lost or doubled.")
async def deaths_lose_nothing(bench: Bench) -> Figures:
    _, task = await _held(bench)
    await bench.subject.kill()
    await bench.caught(1, task)
    await bench.subject.release()
    (said,) = await bench.answered(task)
    whole(said)
    equal(said.completion_tokens, len(TOKENIZER.encode(says("long"))) + 1, "the number of its tokens")
    return {"tokens": said.completion_tokens}


@promise(4, "A weight update in mid-call leaves one answer, and every token has the version of its weights.")
async def tokens_have_versions(bench: Bench) -> Figures:
    door, task = await _held(bench)
    await bench.subject.update()
    await bench.caught(1, task)
    await bench.subject.release()
    (said,) = await bench.answered(task)
    whole(said)
    (row,) = (await bench.subject.end(door)).rows
    versions = versions_of(row)
    different = len({str(v) for v, trained in zip(versions, row.mask, strict=True) if trained})
    if different < 2:
        raise Broken("all tokens have one version, and weights were updated between them")
    made = [v for a in await bench.subject.record(door) for v in a.versions]
    equal([str(v) for v, t in zip(versions, row.mask, strict=True) if t], [str(v) for v in made], "the versions")
    return {"versions": different}


@promise(5, "The tokens that are trained are those in the engine's own record, with its log-probabilities.")
async def tokens_are_the_engines(bench: Bench) -> Figures:
    door, task = await _held(bench)
    await bench.subject.update()
    await bench.subject.release()
    await bench.answered(task)
    ended, attempts = await bench.subject.end(door), await bench.subject.record(door)
    count = traced(ended.rows, attempts)
    equal(count + sum(ended.dropped.values()), sum(len(a.tokens) for a in attempts), "tokens trained and dropped")
    return {"tokens": count, "attempts": len(attempts)}


@promise(6, "The log-probability of every trained token is that under the weights of its version.")
async def logprobs_are_those_of_versions(bench: Bench) -> Figures:
    door, task = await _held(bench)
    await bench.subject.update()
    await bench.subject.release()
    await bench.answered(task)
    return recomputed(bench.subject, (await bench.subject.end(door)).rows)


@promise(18, "After a restart the same requests are answered from their tokens, what was under way goes on, and what "
             "nobody asks for again is dropped by name.")  # fmt: skip
async def restarts_lose_nothing(bench: Bench) -> Figures:
    subject, dialect = bench.subject, bench.chats[0]
    door = await subject.open()
    talk = Talk(("#add",), tools=True)
    first = await bench.ask(door, dialect, talk)
    unclaimed = await bench.ask(door, dialect, Talk(("something else #split",)))
    await subject.hold()
    task = await bench.begin(door, dialect, LONG_TALK)
    before = sum(len(a.tokens) for a in await subject.record(door))
    door = await subject.restart(door)
    await asyncio.wait([task])
    again = await bench.ask(door, dialect, talk)
    equal(again, first, "the answer after the restart, its ids included,")
    task = await bench.begin(door, dialect, LONG_TALK)
    await subject.release()
    (said,) = await bench.answered(task)
    whole(said)
    ended, attempts = await subject.end(door), await subject.record(door)
    count = traced(ended.rows, attempts)
    equal(count, first.completion_tokens + said.completion_tokens, "the trained tokens")
    if not any(ended.dropped.values()):
        raise Broken(f"{unclaimed.completion_tokens} tokens that nobody asked for again are not named as dropped")
    equal(count + sum(ended.dropped.values()), sum(len(a.tokens) for a in attempts), "tokens trained and dropped")
    return {"tokens before": before, "dropped": sum(ended.dropped.values())}
