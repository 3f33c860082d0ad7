"""A bench for a gateway: clients that ask, hang up and ask again, waits that end, and a promise that is put to it."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from april.testing.conformance.bench import verdict_on
from april.testing.conformance.subject import Broken, Figures, Verdict
from tests.gateway_suite.client import DIALECTS, Reply, Said, Talk
from tests.gateway_suite.script import LONG
from tests.gateway_suite.subject import Attempt, Door, Row, Subject

LOOK_S = 0.002
"""Time between two looks at something that tells nobody when it changes."""
LONGEST = 3
"""A whole promise may take so many times the subject's patience."""
RETRY = {"x-stainless-retry-count": "1"}
USAGE = ("chat", "text")
"""Dialects whose streams count tokens only if they are asked to."""


@dataclass(slots=True)
class Bench:
    """An open gateway with what the promises need around it."""

    subject: Subject
    http: aiohttp.ClientSession
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    @property
    def dialects(self) -> Sequence[str]:
        """Those that the subject speaks."""
        return self.subject.dialects

    @property
    def chats(self) -> Sequence[str]:
        """Those of them that have messages."""
        return [dialect for dialect in self.dialects if dialect != "text"]

    # ---------------------------------------------------------------- requests

    def body(
        self, dialect: str, talk: Talk, *, max_tokens: int | None = None, stream: bool = False, rewritten: bool = False
    ) -> bytes:
        """The bytes of a request, equal for equal arguments."""
        body = DIALECTS[dialect].body(talk, max_tokens, rewritten=rewritten)
        if stream:
            body |= {"stream": True} | ({"stream_options": {"include_usage": True}} if dialect in USAGE else {})
        return json.dumps(body).encode()

    async def send(
        self, door: Door, route: str, body: bytes, headers: Mapping[str, str] = {}, *, key: str | None = None,
        reply: Callable[[Reply], None] = lambda reply: None,
    ) -> Reply:  # fmt: skip
        """Send bytes and read all that comes; ``reply`` is called when the head is there, and after each piece."""
        key = door.api_key if key is None else key
        sent = {"Authorization": f"Bearer {key}", "x-api-key": key, "Content-Type": "application/json", **headers}
        async with self.http.post(door.base_url + route, data=io.BytesIO(body), headers=sent) as response:
            found = Reply(response.status, dict(response.headers))
            reply(found)
            try:
                async for piece in response.content.iter_any():
                    found.raw += piece
                    reply(found)
            except aiohttp.ClientError as error:
                found.cut = f"{type(error).__name__}: {error}"
            return found

    async def ask(
        self, door: Door, dialect: str, talk: Talk, headers: Mapping[str, str] = {}, *, max_tokens: int | None = None,
        stream: bool = False, rewritten: bool = False,
    ) -> Said:  # fmt: skip
        """The answer to a conversation; raises Broken for anything but an answer."""
        body = self.body(dialect, talk, max_tokens=max_tokens, stream=stream, rewritten=rewritten)
        reply = await self.send(door, DIALECTS[dialect].route, body, headers)
        return self.read(dialect, reply, stream=stream)

    @staticmethod
    def read(dialect: str, reply: Reply, *, stream: bool = False) -> Said:
        """What a reply says; raises Broken for anything but an answer."""
        if reply.status != 200 or reply.cut:
            got = f"HTTP {reply.status} {reply.cut} {reply.text.strip()[:200]}".strip()
            raise Broken(f"{dialect}: the client got {got}")
        try:
            return DIALECTS[dialect].stream(list(reply.events())) if stream else DIALECTS[dialect].whole(reply.json)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise Broken(f"{dialect}: no answer can be read ({error!r}): {reply.text.strip()[:200]}") from error

    def start(self, waited: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run beside the promise, which ends it in any case."""
        task = asyncio.get_running_loop().create_task(waited)
        self.tasks.append(task)
        return task

    async def begin(self, door: Door, dialect: str, talk: Talk, **options: Any) -> asyncio.Task[Said]:
        """Ask, and return when the engine stands still in the middle of the answer."""
        before = await self.subject.held()
        task = self.start(self.ask(door, dialect, talk, **options))
        await self.caught(before + 1, task)
        return task

    async def hang_up(self, task: asyncio.Task[Any]) -> None:
        """Close the client's connection."""
        task.cancel()
        await asyncio.wait([task])

    # ---------------------------------------------------------------- waits

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        """Wait for something; raises Broken where it does not happen."""
        try:
            async with asyncio.timeout(self.subject.patience_s):
                while not await condition():  # noqa: ASYNC110 - a gateway tells nobody what happens in it
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise Broken(f"{what} did not happen in {self.subject.patience_s:g} s") from None

    async def caught(self, count: int, *tasks: asyncio.Task[Any]) -> None:
        """Wait until so many requests stand still; a client of ``tasks`` that has an answer by then has half of one."""

        async def there() -> bool:
            for task in tasks:
                if task.done():
                    raise Broken(f"a client was answered before its answer was whole: {task.result()}")
            return await self.subject.held() == count

        await self.until(there, f"{count} answers under way")

    async def answered(self, *tasks: asyncio.Task[Any]) -> list[Any]:
        """What the clients got, each within the subject's patience."""
        try:
            async with asyncio.timeout(self.subject.patience_s):
                return list(await asyncio.gather(*tasks))
        except TimeoutError:
            raise Broken(f"a client had no answer after {self.subject.patience_s:g} s") from None

    # ---------------------------------------------------------------- what is right

    async def generations(self, door: Door) -> list[list[int]]:
        """Contexts of the session's answers in the engine's record, without the attempts that go on with another."""
        attempts = await self.subject.record(door)
        found: list[list[int]] = []
        goes_on: list[list[int]] = []
        for attempt in attempts:
            context = list(attempt.context)
            if context in goes_on:
                goes_on.remove(context)
            else:
                found.append(context)
            goes_on.append([*context, *attempt.tokens])
        return found


async def settle() -> None:
    """Give what was sent the time to arrive, and to be answered wrongly."""
    for _ in range(10):
        await asyncio.sleep(LOOK_S)


def equal(found: Any, wanted: Any, what: str) -> None:
    """Raise Broken unless both are the same."""
    if found != wanted:
        raise Broken(f"{what}: {str(found)[:300]} instead of {str(wanted)[:300]}")


def whole(said: Said, text: str = LONG) -> None:
    """Raise Broken unless this is the whole answer, and ends as one."""
    equal(said.text, text, "the answer")
    equal(said.finish, "stop", "the reason of its end")


def traced(rows: Sequence[Row], attempts: Sequence[Attempt]) -> int:
    """The number of trained tokens, each in the engine's record behind the same tokens; raises Broken."""
    by_context: dict[tuple[int, ...], list[Attempt]] = {}
    for attempt in attempts:
        by_context.setdefault(tuple(attempt.context), []).append(attempt)
    count = 0
    for row in rows:
        ids, first = [*row.prompt, *row.tokens], len(row.prompt)
        if not len(row.tokens) == len(row.logprobs) == len(row.mask):
            lengths = f"{len(row.logprobs)} log-probabilities, {len(row.mask)} marks"
            raise Broken(f"a row of {len(row.tokens)} tokens has {lengths}")
        at = 0
        while at < len(row.tokens):
            if not row.mask[at]:
                at += 1
                continue
            made = by_context.get(tuple(ids[: first + at]), [])
            got = max((_common(row, at, attempt) for attempt in made), default=0)
            if not got:
                raise Broken(f"token {at} of a row is trained and was not generated behind the {first + at} before it")
            at, count = at + got, count + got
    return count


def _common(row: Row, at: int, attempt: Attempt) -> int:
    """How many of a row's trained tokens from here on are those of an attempt, with their log-probabilities."""
    count = 0
    for token, logprob in zip(attempt.tokens, attempt.logprobs, strict=True):
        i = at + count
        if i >= len(row.tokens) or not row.mask[i] or row.tokens[i] != token or abs(row.logprobs[i] - logprob) > 1e-5:
            break
        count += 1
    return count


def versions_of(row: Row) -> Sequence[Any]:
    """The version of each token; raises Broken where they are not as many as those."""
    if len(row.versions) != len(row.tokens):
        raise Broken("the row does not say under which weights its tokens were generated")
    return row.versions


def recomputed(subject: Subject, rows: Sequence[Row]) -> Figures:
    """Log-probabilities that agree with those computed again, and the largest difference; raises Broken."""
    count, most = 0, 0.0
    for row in rows:
        versions_of(row)
        trained = [i for i, mark in enumerate(row.mask) if mark]
        found = np.array(row.logprobs, np.float32)[trained]
        most = float(np.abs(found - subject.recompute(row)[trained]).max(initial=most))
        if not most <= subject.tolerance:  # no number is no agreement
            raise Broken(f"log-probabilities are up to {most:.2g} from those of the versions that the row says")
        count += len(trained)
    return {"log-probabilities": count, "largest difference": most}


@dataclass(frozen=True, slots=True)
class Promise:
    """One promise; ``number`` is its place among the twenty."""

    number: int
    name: str
    text: str
    body: Callable[[Bench], Awaitable[Figures]]

    def __str__(self) -> str:
        return self.name

    async def on(self, make: Callable[[], Subject]) -> Verdict:
        """The verdict on a new subject; never raises for what the gateway does."""
        subject = make()

        async def run() -> Figures:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(subject)
                http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)))
                bench = Bench(subject, http)
                stack.push_async_callback(_ended, bench.tasks)
                return await self.body(bench)

        return await verdict_on(f"{self.number} {self.name}", self.text, run(), LONGEST * subject.patience_s)


async def _ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """End what runs beside a promise."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def promise(number: int, text: str) -> Callable[[Callable[[Bench], Awaitable[Figures]]], Promise]:
    """Make a :class:`Promise` of a coroutine function; its name is the promise's."""

    def made(body: Callable[[Bench], Awaitable[Figures]]) -> Promise:
        return Promise(number, body.__name__, text, body)

    return made
