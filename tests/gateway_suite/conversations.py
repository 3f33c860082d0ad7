"""Promises about tokens and messages: what was sampled stays, whatever a client makes of its text."""

from __future__ import annotations

from april.testing.conformance.subject import Broken, Figures
from tests.gateway_suite.answers import LONG_TALK
from tests.gateway_suite.bench import Bench, equal, promise, traced, whole
from tests.gateway_suite.client import Said, Talk
from tests.gateway_suite.script import CALL, TOKENIZER, reply, says
from tests.gateway_suite.subject import Door


async def _continues(bench: Bench, door: Door, what: str) -> int:
    """Raise Broken unless the session's last request begins with the request before it and its answer."""
    attempts = await bench.subject.record(door)
    before = [*attempts[-2].context, *attempts[-2].tokens]
    if list(attempts[-1].context[: len(before)]) != before:
        raise Broken(f"{what}: the next turn does not begin with the tokens of the one before it and its answer")
    return len(before)


TOOL_TALK = Talk(("#add",), tools=True)


def _back(said: Said) -> tuple[Said | tuple[str, str], ...]:
    """What a client sends behind an answer that calls a tool: the answer, and the result."""
    if not said.calls:
        raise Broken(f"the model has called a tool, and the client is told {said.meaning}")
    return said, (said.calls[0][0], "3 #hello")


@promise(7, "The next turn's tokens begin with the prompt and the sampled ones if the client only appended: nulls, "
            "arguments that are formatted anew and \"\" for null are no change.")  # fmt: skip
async def turns_append(bench: Bench) -> Figures:
    kept = 0
    for dialect in bench.chats:
        for rewritten in (False, True):
            door = await bench.subject.open()
            talk = TOOL_TALK
            talk = talk.then(*_back(await bench.ask(door, dialect, talk)))
            await bench.ask(door, dialect, talk, rewritten=rewritten)
            kept += await _continues(bench, door, f"{dialect}{', rewritten' if rewritten else ''}")
    return {"tokens kept": kept}


@promise(8, "Text that would be tokenised otherwise does not change what was sampled.")
async def sampled_tokens_stay(bench: Bench) -> Figures:
    door = await bench.subject.open()
    talk = Talk(("#split",))
    said = await bench.ask(door, bench.chats[0], talk)
    whole(said, says("split"))
    await bench.ask(door, bench.chats[0], talk.then(said, "and #hello"))
    await _continues(bench, door, bench.chats[0])
    written, anew = reply(TOKENIZER.encode("#split"))[:-1], TOKENIZER.encode(says("split"))
    return {"tokens": len(written), "of the same text": len(anew)}


@promise(9, "A budget that ends inside a tool call ends the answer as length: no call, and its raw text is there.")
async def cut_calls_are_no_calls(bench: Bench) -> Figures:
    budget = len(TOKENIZER.encode(says("add"))) - 9
    for dialect in bench.chats:
        door = await bench.subject.open()
        said = await bench.ask(door, dialect, TOOL_TALK, max_tokens=budget)
        equal((said.finish, said.calls), ("length", ()), f"{dialect}: the reason of the end, and the calls")
        if CALL[len("<tool_call>\n") : -40] not in said.text:
            raise Broken(f"{dialect}: of a call that was cut the client sees {said.text!r}")
    return {"budget": budget}


@promise(10, "Nothing is built on an attempt that is not finished: after a cut answer the next turn is written anew.")
async def cuts_are_not_continued(bench: Bench) -> Figures:
    door = await bench.subject.open()
    talk = Talk(("#split",))
    said = await bench.ask(door, bench.chats[0], talk, max_tokens=7)
    equal(said.finish, "length", "the reason of the end")
    await bench.ask(door, bench.chats[0], talk.then(said, "and #hello"))
    attempts = await bench.subject.record(door)
    before = [*attempts[-2].context, *attempts[-2].tokens]
    if list(attempts[-1].context[: len(before)]) == before:
        raise Broken("the next turn goes on behind the tokens of an answer that was cut")
    return {"cut after": said.completion_tokens}


@promise(17, "Rewritten histories, parallel calls and sub-agents are conversations of their own: each generated token "
             "is trained once, its context not at all, and the sample has one reward.")  # fmt: skip
async def conversations_are_rows(bench: Bench) -> Figures:
    subject, dialect = bench.subject, bench.chats[0]
    door = await subject.open()
    talk = Talk(("#add",), system="be brief", tools=True)
    first = await bench.ask(door, dialect, talk)
    helped = await bench.ask(door, dialect, Talk(("look it up #hello",), system="a helper"))
    await subject.hold()
    tasks = [bench.start(bench.ask(door, dialect, talk.then(f"part {i} #long"))) for i in range(3)]
    await bench.caught(3, *tasks)
    await subject.release()
    for said in await bench.answered(*tasks):
        whole(said)
    last = await bench.ask(door, dialect, talk.then(*_back(first)))
    shorter = Talk((f"so far: {last.text} #split",), system="be brief", tools=True)
    edited = await bench.ask(door, dialect, shorter)
    ended, attempts = await subject.end(door, reward=0.5), await subject.record(door)
    count, made = traced(ended.rows, attempts), sum(len(a.tokens) for a in attempts)
    equal(count + sum(ended.dropped.values()), made, "tokens trained and dropped")
    told = [first, helped, *(t.result() for t in tasks), last, edited]
    equal(count, sum(s.completion_tokens for s in told), "trained tokens")
    equal(len(ended.rows), 6, "the number of rows")
    equal({row.reward for row in ended.rows}, {0.5}, "the rewards")
    equal(len({row.sample for row in ended.rows}), 1, "samples that have the reward")
    return {"rows": len(ended.rows), "tokens": count}


@promise(16, "A client that is gone in the middle of its answer is named and costs a bounded number of tokens, others "
             "go on, and nothing half-heard is trained.")  # fmt: skip
async def gone_clients_are_named(bench: Bench) -> Figures:
    subject, dialect = bench.subject, bench.chats[0]
    door, other = await subject.open(), await subject.open()
    await subject.hold()
    gone = await bench.begin(door, dialect, LONG_TALK, stream=True)
    stays = await bench.begin(door, dialect, Talk(("also #long",)))
    neighbour = await bench.begin(other, dialect, LONG_TALK)
    await bench.hang_up(gone)
    await subject.release()
    for said in await bench.answered(stays, neighbour):
        whole(said)
    ended = await subject.end(door)
    attempts = await subject.record(door)
    wanted = stays.result().completion_tokens
    equal(traced(ended.rows, attempts), wanted, "trained tokens")
    made = sum(len(a.tokens) for a in attempts)
    equal(sum(ended.dropped.values()), made - wanted, f"tokens that are named as dropped ({dict(ended.dropped)})")
    if made > 2 * wanted:
        raise Broken(f"{made - wanted} tokens were generated for a client that is gone")
    return {f"dropped: {why}": count for why, count in ended.dropped.items()}
