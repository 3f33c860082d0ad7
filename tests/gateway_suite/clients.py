"""Promises to clients: retries, long waits, failures, refusals, and the same answer in every shape."""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import json
import logging
import socket
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from april.testing.conformance.subject import Broken, Figures
from tests.gateway_suite.answers import LONG_TALK
from tests.gateway_suite.bench import RETRY, Bench, equal, promise, settle, whole
from tests.gateway_suite.client import DIALECTS, Reply, Talk
from tests.gateway_suite.subject import ALIVE_S, Door

PINGS = 3
"""Signs of life that are waited for."""


async def _joined(bench: Bench, *, hangs_up: bool) -> Figures:
    """Ask, and ask again with the same bytes; raises Broken unless both are one generation."""
    for dialect in bench.dialects:
        door = await bench.subject.open()
        await bench.subject.hold()
        first = await bench.begin(door, dialect, LONG_TALK)
        if hangs_up:
            await bench.hang_up(first)
            await bench.subject.release()
            (second,) = await bench.answered(bench.start(bench.ask(door, dialect, LONG_TALK, RETRY)))
            whole(second)
        else:
            again = bench.start(bench.ask(door, dialect, LONG_TALK, RETRY))
            await settle()
            await bench.caught(1, first, again)
            await bench.subject.release()
            answer, second = await bench.answered(first, again)
            whole(answer)
            equal(second, answer, f"{dialect}: the answer to the retry")
        equal(len(await bench.generations(door)), 1, f"{dialect}: generations")
    return {"dialects": len(bench.dialects)}


@promise(11, "A retry of a request that is not answered yet joins it: one generation, the same answer.")
async def retries_join(bench: Bench) -> Figures:
    return await _joined(bench, hangs_up=False)


@promise(12, "A retry after the answer went to a dead connection gets that answer.")
async def answers_are_kept(bench: Bench) -> Figures:
    return await _joined(bench, hangs_up=True)


@promise(13, "Two equal requests of clients that both wait are two generations.")
async def equal_requests_are_two(bench: Bench) -> Figures:
    for dialect in bench.dialects:
        door = await bench.subject.open()
        await bench.subject.hold()
        tasks = [await bench.begin(door, dialect, LONG_TALK) for _ in range(2)]
        await bench.subject.release()
        one, other = await bench.answered(*tasks)
        equal(one.id == other.id, False, f"{dialect}: two answers have one id,")
        equal(len(await bench.generations(door)), 2, f"{dialect}: generations")
    return {"dialects": len(bench.dialects)}


@promise(14, "The silence of an answer that takes long is never longer than the interval that the gateway names.")
async def silence_is_bounded(bench: Bench) -> Figures:
    interval = ALIVE_S
    await bench.subject.hold()
    door = await bench.subject.open()
    for dialect, stream in itertools.product(bench.dialects, (False, True)):
        signs: list[int] = []
        body = bench.body(dialect, LONG_TALK, stream=stream)
        sending = bench.send(door, DIALECTS[dialect].route, body, reply=lambda r, signs=signs: signs.append(len(r.raw)))  # type: ignore[misc]
        task = bench.start(sending)
        for count in range(1, PINGS + 1):
            try:
                async with asyncio.timeout(interval + bench.subject.patience_s / 2):
                    while len(signs) < count + 1:  # noqa: ASYNC110 - bytes come on this loop
                        await asyncio.sleep(interval / 10)
            except TimeoutError:
                raise Broken(f"{dialect}: nothing came for much longer than {interval:g} s") from None
        await bench.subject.release()
        (reply,) = await bench.answered(task)
        whole(bench.read(dialect, reply, stream=stream))
        await bench.subject.hold()
    return {"interval, s": interval}


@promise(15, "A failure after the 200 is an event of an error in a stream, and a cut connection otherwise.")
async def failures_are_no_answers(bench: Bench) -> Figures:
    late = 0
    for dialect, stream in itertools.product(bench.dialects, (False, True)):
        door = await bench.subject.open()
        await bench.subject.hold()
        begun: list[Reply] = []
        body = bench.body(dialect, LONG_TALK, stream=stream)
        task = bench.start(bench.send(door, DIALECTS[dialect].route, body, reply=begun.append))

        async def under_way(begun: list[Reply] = begun) -> bool:
            return await bench.subject.held() > 0 and bool(begun)

        await bench.until(under_way, "the beginning of an answer")
        await bench.subject.fail(door)
        (reply,) = await bench.answered(task)
        await bench.subject.release()
        if reply.status != 200:
            continue
        late += 1
        if stream:
            if not any(name == "error" or (isinstance(d, dict) and d.get("error")) for name, d in reply.events()):
                raise Broken(f"{dialect}: a stream that failed ends without an error: {reply.text[-200:]!r}")
        elif not reply.cut:
            raise Broken(f"{dialect}: a body that failed is {reply.text.strip()[:200]!r}, as if it were an answer")
    return {"failures after the 200": late}


@promise(19, "A wrong key, another's session, 100 MB, 10,000 messages, an unknown tool or parameter: a 4xx that names "
             "it and is not retried.")  # fmt: skip
async def refusals_have_names(bench: Bench) -> Figures:
    door, other = await bench.subject.open(), await bench.subject.open()
    refused = 0
    for dialect in bench.dialects:
        good = json.loads(bench.body(dialect, Talk(("#hello",))))
        many = json.loads(bench.body(dialect, Talk(("#hello",) * 10_000)))
        asked: list[tuple[str, Any, str, tuple[str, ...]]] = [
            ("a wrong key", good, "wrong", ("key", "auth")),
            ("another's key", good, other.api_key, ("key", "auth", "session")),
            ("10,000 messages", many, door.api_key, ("messages", "conversation", "context", "input")),
            ("an unknown tool", {**good, "tools": [{"type": "time_machine"}]}, door.api_key, ("tool",)),
            ("an unknown parameter", {**good, "frobnicate": 1}, door.api_key, ("frobnicate",)),
            ("100 MB", b'{"model": "' + bytes(100 << 20) + b'"}', door.api_key, ("large", "size", "MB", "entity")),
        ]
        if dialect not in bench.chats:
            del asked[2]  # it has no messages
        if other.base_url == door.base_url:  # there the key is what names the session
            del asked[1]
        for what, body, key, names in asked:
            try:
                sent = body if isinstance(body, bytes) else json.dumps(body).encode()
                reply = await bench.send(door, DIALECTS[dialect].route, sent, key=key)
            except aiohttp.ClientError as error:
                raise Broken(f"{dialect}, {what}: the connection broke ({type(error).__name__})") from error
            _refused(reply, f"{dialect}, {what}", names)
            refused += 1
        whole(await bench.ask(door, dialect, Talk(("#hello",))), "hi")
    return {"refused": refused}


def _refused(reply: Reply, what: str, names: tuple[str, ...]) -> None:
    """Raise Broken unless this is a refusal that says why, and that a client does not try again."""
    if not 400 <= reply.status < 500:
        raise Broken(f"{what}: HTTP {reply.status} {reply.text.strip()[:200]}")
    if reply.status in (408, 409, 429) and reply.headers.get("x-should-retry") != "false":
        raise Broken(f"{what}: HTTP {reply.status} is tried again by clients")
    if not any(name.lower() in reply.text.lower() for name in names):
        raise Broken(f"{what}: HTTP {reply.status} does not name it: {reply.text.strip()[:200]}")


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


@promise(20, "Counts, reasons and ids are there in each dialect, a stream says what the whole answer says, no log has "
             "a word of a prompt, and nobody outside the machine can ask.")  # fmt: skip
async def shapes_agree(bench: Bench) -> Figures:
    heard, root = _Heard(), logging.getLogger()
    level, loggers = root.level, [logging.getLogger(name) for name in ("april", "aiohttp", "asyncio")]
    levels = [logger.level for logger in loggers]
    secret = "xyzzyplugh"  # noqa: S105 - a word to be found in a log, and no secret
    root.addHandler(heard)
    try:
        for logger in (root, *loggers):
            logger.setLevel(logging.DEBUG)
        answers = await _shapes(bench, secret)
    finally:
        root.removeHandler(heard)
        root.setLevel(level)
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)
    if told := [text for text in heard.texts if secret in text]:
        raise Broken(f"a log has a word of a prompt: {told[0][:200]}")
    await _loopback_only(await bench.subject.open())
    return {"answers": answers, "lines of logs": len(heard.texts)}


async def _shapes(bench: Bench, secret: str) -> int:
    answers = 0
    for dialect in bench.dialects:
        talks: list[tuple[Talk, int | None, str]] = [
            (Talk((f"{secret} #hello",)), None, "stop"), (Talk((f"{secret} #long",)), 20, "length")
        ]  # fmt: skip
        if dialect in bench.chats:
            talks.append((Talk((f"{secret} #add",), tools=True), None, "tool_calls"))
        for talk, budget, finish in talks:
            doors = [await bench.subject.open() for _ in range(2)]
            plain, streamed = [
                await bench.ask(door, dialect, talk, max_tokens=budget, stream=stream)
                for door, stream in zip(doors, (False, True), strict=True)
            ]
            equal(streamed.meaning, plain.meaning, f"{dialect}: what a stream says")
            equal(plain.finish, finish, f"{dialect}: the reason of the end")
            (attempt,) = await bench.subject.record(doors[0])
            counted = (plain.prompt_tokens, plain.completion_tokens)
            equal(counted, (len(attempt.context), len(attempt.tokens)), f"{dialect}: the counts of tokens")
            ids = [plain.id, *(call[0] for call in plain.calls)]
            if not all(ids) or len(set(ids)) < len(ids):
                raise Broken(f"{dialect}: ids are missing or equal: {ids}")
            answers += 2
        door = await bench.subject.open()
        body = {**json.loads(bench.body(dialect, Talk((f"{secret} #hello",)))), "frobnicate": 1}
        await bench.send(door, DIALECTS[dialect].route, json.dumps(body).encode())
    return answers


async def _loopback_only(door: Door) -> None:
    """Raise Broken if the session can be reached from elsewhere."""
    at = urlsplit(door.base_url)
    host = at.hostname or ""
    if not (host == "localhost" or ipaddress.ip_address(host).is_loopback):
        raise Broken(f"the session's address is {host}")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            asked.connect(("192.0.2.1", 9))  # sends nothing: only the route is looked up
            own = asked.getsockname()[0]
    except OSError:
        return
    if ipaddress.ip_address(own).is_loopback:
        return
    try:
        _, writer = await asyncio.open_connection(own, at.port)
    except OSError:
        return
    writer.close()
    raise Broken(f"the gateway also listens on {own}")
