"""The endpoint of a sample as a client sees it: retries, slow answers, failures and limits of three dialects."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import pytest
from toy_chat import ToyTokenizer

import april
from april.agents.chat import ChatRequest, message_key
from april.agents.chat_template import ChatTemplate
from april.agents.endpoint import MAX_BODY_BYTES, SMALL_BODY_BYTES, Endpoint, ServedSession
from april.agents.session import Session
from april.core.tape import Float32, Int32
from april.core.types import FinishReason
from april.driver.llm import AnsweredCall
from april.errors import RolloutError
from april.testing import FakeEngine

renderers = pytest.importorskip("renderers")
TOY = ToyTokenizer()
HELLO = [{"role": "user", "content": "hello"}]
CHAT = {"model": "m", "messages": HELLO}
ANTHROPIC = {"model": "m", "messages": HELLO, "max_tokens": 99}
TEXT = {"model": "m", "prompt": "hello"}
ROUTES = {"chat/completions": CHAT, "messages": ANTHROPIC, "completions": TEXT}
TOOL = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}


@dataclass
class Generated:
    tokens: Int32
    logprobs: Float32
    finish: FinishReason
    number: int


@dataclass
class Model:
    """Answers when it may; notes what it was asked."""

    says: str = "hi<|im_end|>"
    may: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    fails: Exception | None = None

    async def __call__(self, ids: Int32, sampling: Mapping[str, Any], attached: Any = None) -> Generated:
        self.asked.append((TOY.decode(ids.tolist()), dict(sampling)))
        number = len(self.asked)
        await self.may.wait()
        if self.fails is not None:
            raise self.fails
        tokens = TOY.encode(self.says)
        limit = sampling.get("max_tokens", 10**6)
        finish = FinishReason.LENGTH if len(tokens) > limit else FinishReason.STOP
        made = np.array(tokens[:limit], np.int32)
        return Generated(made, np.full(len(made), -0.5, np.float32), finish, number)


@dataclass
class World:
    """An endpoint with one open session, a model behind it and a client before it."""

    endpoint: Endpoint
    door: ServedSession
    model: Model
    http: aiohttp.ClientSession

    def post(self, route: str, body: Any = None, *, key: str | None = None, **headers: str) -> Any:
        sent = {"Authorization": f"Bearer {self.door.key if key is None else key}"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        return self.http.post(f"{self.door.url}/{route}", json=ROUTES[route] if body is None else body, headers=sent)

    async def ask(self, route: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        async with self.post(route, body, **headers) as response:
            return response.status, await response.json()

    def may(self) -> None:
        """Let the model answer."""
        self.endpoint._loop.call_soon_threadsafe(self.model.may.set)


@asynccontextmanager
async def world(says: str = "hi<|im_end|>", *, waits: bool = False, **options: Any) -> AsyncIterator[World]:
    """A world whose model answers at once, unless it ``waits``."""
    model = Model(says)
    if not waits:
        model.may.set()
    endpoint = Endpoint(**options)
    endpoint.start()
    template = ChatTemplate(TOY, renderers.Qwen3RendererConfig(enable_thinking=False))
    try:
        async with aiohttp.ClientSession() as http:
            yield World(endpoint, endpoint.serve(Session(model, template, 1 << 20)), model, http)
    finally:
        await asyncio.to_thread(endpoint.stop)


async def until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110 - the endpoint is on a thread of its own
        await asyncio.sleep(0.001)


def words(route: str, body: Any) -> str:
    if route == "messages":
        return "".join(block.get("text", "") for block in body["content"])
    choice = body["choices"][0]
    return str(choice["text"] if route == "completions" else choice["message"]["content"])


@pytest.mark.parametrize("received", [False, True])
async def test_retries_of_equal_requests_get_an_answer_each(received: bool) -> None:
    """Clients that time out together retry together: none gets the answer of another, and no answer is made again."""
    async with world(waits=not received) as w:
        asking = [asyncio.create_task(w.ask("chat/completions")) for _ in range(3)]
        await until(lambda: len(w.model.asked) == 3)
        equal = next(iter(w.door.session.requests.values()))
        for number in "12":
            if received:
                await asyncio.gather(*asking)
            again = [w.ask("chat/completions", x_stainless_retry_count=number) for _ in range(3)]
            retries = [asyncio.create_task(one) for one in again]
            if not received:
                await until(lambda: [asked.clients for asked in equal] == [2] * 3)
                for earlier in asking:
                    earlier.cancel()
                await until(lambda: [asked.clients for asked in equal] == [1] * 3)
            asking = retries
        w.may()
        ids = {body["id"] for _, body in await asyncio.gather(*asking)}
        assert (len(ids), len(w.model.asked)) == (3, 3)


async def test_an_answer_that_nobody_waits_for_is_given_up() -> None:
    """After the time of grace its request is cancelled, which its sample is told; who asks again gets another one."""
    async with world(waits=True, grace_s=0.0) as w:
        first = asyncio.create_task(w.ask("chat/completions"))
        await until(lambda: len(w.model.asked) == 1)
        (asked,) = next(iter(w.door.session.requests.values()))
        first.cancel()
        await until(asked.task.done)
        assert asked.task.cancelled()
        w.may()
        for number in ("1", "9" * 5000):
            assert (await w.ask("chat/completions", x_stainless_retry_count=number))[0] == 200
        assert w.door.session.received_calls() == [2]


async def test_the_time_of_grace_begins_when_the_latest_client_hangs_up() -> None:
    """A client that comes back and leaves again has as long as after its first departure."""
    async with world(waits=True) as w:
        first = asyncio.create_task(w.ask("chat/completions"))
        await until(lambda: len(w.model.asked) == 1)
        (asked,) = next(iter(w.door.session.requests.values()))
        first.cancel()
        await until(lambda: asked.grace_timer)
        earlier = asked.grace_timer
        second = asyncio.create_task(w.ask("chat/completions"))
        await until(earlier.cancelled)
        second.cancel()
        await until(lambda: asked.grace_timer is not earlier)
        assert not asked.grace_timer.cancelled()
        assert asked.grace_timer.when() >= earlier.when()


async def test_sessions_of_a_client_are_told_apart() -> None:
    """The same body under another X-Session-ID is another request, a retry or not."""
    async with world(waits=True) as w:
        first = asyncio.create_task(w.ask("chat/completions", X_Session_ID="a"))
        await until(lambda: len(w.model.asked) == 1)
        second = asyncio.create_task(w.ask("chat/completions", X_Session_ID="b", x_stainless_retry_count="1"))
        await until(lambda: len(w.model.asked) == 2)
        w.may()
        assert len({body["id"] for _, body in await asyncio.gather(first, second)}) == 2


async def test_unknown_routes_are_refused_as_clients_expect_it() -> None:
    """With an error in JSON that is not retried. The list of models is there for clients that ask for it first."""
    async with world() as w:
        assert w.door.key not in repr(w.door)
        async with w.http.get(f"{w.door.url}/models", headers={"x-api-key": w.door.key}) as response:
            assert [m["id"] for m in (await response.json())["data"]] == ["april"]
        async with w.post("embeddings", CHAT) as response:
            assert (response.status, response.headers["x-should-retry"]) == (404, "false")
            assert "embeddings" in (await response.json())["error"]["message"]
        async with w.http.get(f"{w.door.url}/messages") as response:
            assert response.status == 405


@pytest.mark.parametrize(
    ("route", "body", "status", "says"),
    [
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", CHAT | {"max_tokens": "9"}, 400, "max_tokens must be int"),
        ("chat/completions", CHAT | {"response_format": {"type": "regex"}}, 400, "response_format"),
        ("chat/completions", CHAT | {"response_format": {"type": "json_schema"}}, 400, "has no schema"),
        ("chat/completions", CHAT | {"tool_choice": "required"}, 400, "tools is empty"),
        ("chat/completions", CHAT | {"tool_choice": {"type": "custom"}}, 400, "tool_choice"),
        ("messages", ANTHROPIC | {"tool_choice": {"type": "tool", "name": "nobody"}}, 400, "nobody"),
        ("messages", ANTHROPIC | {"output_config": {"format": "json"}}, 400, "output_config.format must be an object"),
        ("responses", {"input": "x", "text": {"format": 5}}, 400, "text.format must be an object"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, 400, "content: a part"),
        ("chat/completions", CHAT | {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": 5}}, 400,
         "tools is empty"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": {}}]}]}, 400,
         "the text of a part must be a string, got dict"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400,
         "the text of a part must be a string, got NoneType"),
        ("chat/completions", {"messages": [{"role": "user", "content": ["look", {"type": "image_url"}]}]}, 400,
         "content: a part must have a type and a text or an image, got str"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, 400,
         "the text of a part must be a string, got int"),
        ("chat/completions", {"messages": [{"role": "tool", "content": "x", "tool_call_id": 1}]}, 400,
         "messages[0].tool_call_id must be a string"),
        ("chat/completions", {"messages": [{"role": "assistant", "function_call": {"name": "add"}}]}, 400,
         "messages[0].function_call is not supported; use tool_calls"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
        ("chat/completions", {"messages": HELLO * 5000}, 400, "messages"),
        ("chat/completions", [1], 400, "JSON object"),
        ("completions", {"prompt": [[1], [2]]}, 400, "prompt"),
        ("completions", {"prompt": [1 << 40]}, 400, "prompt must be one non-empty text or one non-empty list"),
        ("completions", TEXT | {"logprobs": 5}, 400, "logprobs"),
    ],
)  # fmt: skip
async def test_what_cannot_be_answered_is_refused_by_name(route: str, body: Any, status: int, says: str) -> None:
    """A parameter is honoured, changes nothing, or is refused; nothing is generated then."""
    async with world() as w:
        async with w.post(route, body) as response:
            assert (response.status, response.headers["x-should-retry"]) == (status, "false")
            assert says in (await response.text()).replace('\\"', '"')
        assert w.model.asked == []


async def test_one_client_for_several_sessions_names_each() -> None:
    """Address and key are those of the server; the name says which session, and a count needs none."""
    async with world() as w:
        other = Model("other<|im_end|>")
        other.may.set()
        second = w.endpoint.serve(Session(other, w.door.session.template, 1 << 20))
        url, key = w.door.shared_address()
        assert second.shared_address() == (url, key)
        w.door.register_name("a")
        second.register_name("b")

        async def ask(body: Any, headers: Mapping[str, str], route: str = "messages") -> tuple[int, Any]:
            async with w.http.post(f"{url}/{route}", json=body, headers=headers) as response:
                return response.status, await response.json()

        right = {"x-api-key": "EMPTY", "Authorization": f"Bearer {key}"}  # a placeholder beside it does not matter
        for name, says in (("a", "hi"), ("b", "other")):
            status, body = await ask(ANTHROPIC, right | {"X-Session-ID": name})
            assert (status, words("messages", body)) == (200, says)
        assert (await ask(ANTHROPIC, {"x-api-key": w.door.key, "X-Session-ID": "a"}))[0] == 401
        status, body = await ask(ANTHROPIC, right | {"X-Session-ID": "c"})
        assert (status, "'c'" in body["error"]["message"]) == (404, True)
        assert (await ask(ANTHROPIC, right))[0] == 404
        assert (await ask(ANTHROPIC, right, "messages/count_tokens"))[0] == 200
        w.endpoint.close_session(second, "it is over")
        assert (await ask(ANTHROPIC, right | {"X-Session-ID": "b"}))[0] == 404
        assert (await ask(ANTHROPIC, right | {"X-Session-ID": "a"}))[0] == 200


# ---------------------------------------------------------------- other machines


@pytest.mark.parametrize(("peer", "status"), [
    ("172.17.0.9", 200), ("::ffff:172.17.0.9", 200), ("fd00::9%eth0", 200), ("127.0.0.1", 200), ("::1", 200),
    ("172.18.0.9", 403), ("::ffff:172.18.0.9", 403), ("fd01::9", 403),
])  # fmt: skip
async def test_only_clients_of_named_networks_connect(
    peer: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And this machine; whoever else has the key is refused before anything is read."""
    monkeypatch.setattr("aiohttp.web.Request.remote", property(lambda self: peer))
    async with world(clients=("172.17.0.0/16", "fd00::/64")) as w:
        answered, body = await w.ask("messages")
        assert answered == status
        if status == 403:
            assert f"{peer.removeprefix('::ffff:')} may not connect; see agents.clients" in body["error"]["message"]
            assert w.model.asked == []


@pytest.mark.parametrize(("agents", "says"), [
    ({"host": "0.0.0.0", "clients": "10.0.0.0/8"}, "agents.reached_at: no client can connect to 0.0.0.0"),  # noqa: S104
    ({"host": "10.0.0.7"}, "agents.clients: other machines can connect to 10.0.0.7"),
    ({"clients": ["docker"]}, "agents.clients.*such as 172.17.0.0/16"),
    *[({"reached_at": name}, "agents.reached_at.*a host or host:port")
      for name in ("http://me", "me:99999", "me:", "me:80:90", "[::1", "me\n")],
    ({"port": 1 << 16}, "agents.port"),
])  # fmt: skip
def test_an_address_that_nobody_or_everybody_reaches_is_refused(agents: dict[str, Any], says: str) -> None:
    """Before anything starts, with what is missing."""
    with pytest.raises(april.ConfigError, match=says):
        april.Config(rollout_batch_size=1, max_response_len=9, agents=agents)


@pytest.mark.parametrize(("reached_at", "url"), [
    ("", r"http://127\.0\.0\.1:\d+/"), ("me.example", r"http://me\.example:\d+/"),
    ("me.example:80", "http://me.example:80/"), ("2001:db8::5", r"http://\[2001:db8::5\]:\d+/"),
    ("[2001:db8::5]:80", r"http://\[2001:db8::5\]:80/"),
])  # fmt: skip
def test_base_urls_have_the_name_by_which_agents_reach_april(reached_at: str, url: str) -> None:
    """That of the settings, with the port that is listened on unless the name has one."""
    found = []

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        found.append(llm.base_url)
        await llm.generate()

    config = april.Config(rollout_batch_size=1, max_response_len=9, agents={"reached_at": reached_at})
    engines = [FakeEngine("e", seconds_per_token=0.001)]
    with april.RolloutScheduler(config, prompts=[[1]], rollout=rollout, reward=None, engines=engines) as rollouts:
        rollouts.next_batch()
    assert re.match(url, found[0])


# ---------------------------------------------------------------- hostile clients


def wire(w: World, body: bytes, *more: str, path: str = "chat/completions", version: str = "1.1") -> bytes:
    """A request as it is sent, which closes its connection; headers of ``more`` go before the others."""
    head = [
        f"POST /{w.door.path}/v1/{path} HTTP/{version}", *more, "Host: x", "Content-Type: application/json",
        f"Authorization: Bearer {w.door.key}", f"Content-Length: {len(body)}", "Connection: close", "", "",
    ]  # fmt: skip
    return "\r\n".join(head).encode(errors="surrogateescape") + body


async def sends(w: World, data: bytes) -> bytes:
    """All that comes back."""
    host, port = w.endpoint.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


def asks(**more: Any) -> bytes:
    return json.dumps(CHAT | more).encode()


QUOTE = "a secret of the prompt"
WRONG: dict[str, tuple[Any, str, int, str]] = {
    "compressed": (gzip.compress(asks()), "Content-Encoding: gzip", 200, "hi"),
    "says that it is compressed": (QUOTE.encode(), "Content-Encoding: gzip", 400, "cannot be decoded"),
    "grows when it is read": (gzip.compress(bytes(MAX_BODY_BYTES + 1)), "Content-Encoding: gzip", 413, "larger than"),
    "half a pair": (asks(messages=[{"role": "user", "content": QUOTE + "\ud800"}]), "", 400, "surrogate"),
    "half a pair in arguments": (asks(messages=[*HELLO, {"role": "assistant", "tool_calls": [
        {"id": "x", "function": {"name": "add", "arguments": '{"a": "\\ud800"}'}},
    ]}, {"role": "tool", "tool_call_id": "x", "content": "3"}]), "", 200, "hi"),
    "half a pair in bytes": (b'{"messages": "' + b"\xed\xa0\x80" + b'"}', "", 400, "not JSON"),
    "deep": (b"[" * 10**5, "", 400, "not JSON"),
    "endless number": (b'{"max_tokens": ' + b"9" * 5000 + b"}", "", 400, "not JSON"),
    "calls that are no list": (asks(messages=[{"role": "assistant", "tool_calls": 5}]), "", 400, "tool_calls must be"),
    "calls of nothing": (asks(messages=[{"role": "assistant", "tool_calls": [{"function": 1}]}]), "", 400, "function"),
    "stops that are no text": (asks(stop=[1]), "", 400, "stop must be"),
    "many stops": (asks(stop=["x"] * 1000), "", 400, "stop must be"),
    "schema that is no object": (asks(tools=[{"type": "function", "function": []}]), "", 400, "tools[0]"),
    "other key first": (asks(), "Authorization: Bearer \udcff", 401, "API key"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_hostile_body_is_answered_by_name(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The log has nothing of it, and the next client is answered."""
    body, header, status, says = WRONG[name]
    async with world() as w:
        answer = (await sends(w, wire(w, body, *[header] * bool(header)))).decode()
        assert answer.startswith(f"HTTP/1.1 {status} ")
        assert says in answer
        assert ("x-should-retry: false" in answer) == (status != 200)
        assert (await w.ask("chat/completions"))[0] == 200
    assert "secret" not in caplog.text


@pytest.mark.parametrize("lie", [-20, 20])
async def test_a_body_of_another_length_than_it_says(lie: int, caplog: pytest.LogCaptureFixture) -> None:
    """A longer one is a second request that is none, a shorter one is waited for until its client goes."""
    async with world() as w:
        body = asks(messages=[{"role": "user", "content": QUOTE}])
        sent = wire(w, body).replace(b"Content-Length: %d" % len(body), b"Content-Length: %d" % (len(body) + lie))
        host, port = w.endpoint.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        assert (await w.ask("messages"))[0] == 200  # others do not wait
        if lie < 0:
            assert (await reader.read()).startswith(b"HTTP/1.")
        writer.close()
        assert (await w.ask("messages"))[0] == 200
        assert len(w.model.asked) == 2
    assert "secret" not in caplog.text


async def test_a_body_for_which_the_context_has_no_room_is_not_tokenised() -> None:
    """It would keep everybody waiting; a body of a megabyte is read whatever the context is."""
    async with world() as w:
        w.door.session.max_context = 64
        answer = await sends(w, wire(w, asks(messages=[{"role": "user", "content": "x" * SMALL_BODY_BYTES}])))
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"x-should-retry: false" in answer
        assert (await w.ask("chat/completions"))[0] == 200


async def test_what_fails_is_not_kept() -> None:
    """A client that asks for ever what cannot be answered costs no memory."""
    async with world() as w:
        w.model.fails = RolloutError("no chain is left")
        for _ in range(3):
            assert (await w.ask("chat/completions"))[0] == 400
        assert list(w.door.session.requests.values()) == [[]]


async def test_a_session_that_is_shut_answers_nothing_any_more() -> None:
    """What is being answered ends with a named error that is not retried; its address is unknown from then on."""
    async with world(waits=True) as w:
        asking = asyncio.create_task(w.ask("chat/completions"))
        await until(lambda: len(w.model.asked) == 1)
        assert w.endpoint.close_session(w.door, "its rollout function has ended") == []
        assert (await asking)[0] == 410
        assert (await w.ask("chat/completions"))[0] == 404


class EveryMark(ToyTokenizer):
    """Has a token for each mark that a renderer asks for; other text is UTF-8, one token for each byte."""

    def __init__(self) -> None:
        self.marks: list[str] = []

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, list):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        if tokens not in self.marks:
            self.marks.append(tokens)
        return 256 + self.marks.index(tokens)

    def get_vocab(self) -> dict[str, int]:
        return {mark: 256 + number for number, mark in enumerate(self.marks)}

    def encode(self, text: str, *_: Any, **others: Any) -> list[int]:
        parts = re.split("|".join(f"({re.escape(mark)})" for mark in sorted(self.marks, key=len)[::-1]), text)
        vocab = self.get_vocab()
        return [i for part in parts if part for i in ([vocab[part]] if part in vocab else part.encode())]

    def decode(self, ids: Any, **others: Any) -> str:
        return "".join(chr(i) if i < 256 else self.marks[i - 256] for i in ids)


RESULTS = {
    "Qwen3": "<tool_response>\nA\n</tool_response>\n<tool_response>\nB\n</tool_response>",
    "GLM53": "<tool_response>A</tool_response><tool_response>B</tool_response>",
    "Gemma4": 'add{value:<|"|>A<|"|>}<tool_response|><|tool_response>response:mul{value:<|"|>B<|"|>}',
    "Inkling": "add<|content_text|>A<|end_message|><|message_tool|>mul<|content_text|>B",
    "KimiK2": "functions.add:0\nA<|im_end|><|im_system|>tool<|im_middle|>## Return of functions.mul:1\nB",
}
"""How renderers write the result A of a call of "add" and the result B of a call of "mul"."""


@pytest.mark.parametrize("ids", [None, "xy", "swapped", "zz"])
@pytest.mark.parametrize("kind", RESULTS)
async def test_a_result_of_a_parallel_call_stays_that_of_its_call(kind: str, ids: str | None) -> None:
    """Whatever ids the client gives the calls, and in whatever order it sends the results, after a restart too."""
    template = ChatTemplate(EveryMark(), getattr(renderers, f"{kind}RendererConfig")())
    tools = [{"type": "function", "function": TOOL | {"name": name}} for name in ("add", "mul")]
    functions = [{"name": name, "arguments": "{}"} for name in ("add", "mul")]
    named = zip(("functions.add:0", "functions.mul:1"), functions, strict=True)
    message = {"role": "assistant", "content": "", "tool_calls": [{"id": i, "function": f} for i, f in named]}
    prompt = template.render(HELLO, tools)
    says = template._renderer.render_ids([*HELLO, message], tools=tools)[len(prompt) :]
    asked: list[list[int]] = []

    async def generate(ids: Int32, sampling: Any, attached: Any = None) -> Generated:
        asked.append(ids.tolist())
        return Generated(np.array(says, np.int32), np.zeros(len(says), np.float32), FinishReason.STOP, len(asked))

    session = Session(generate, template, 1 << 20)
    sent = (await session.submit(ChatRequest(messages=HELLO, tools=tools), "1", retry=0).task).message
    own = [call["id"] for call in sent["tool_calls"]]
    names = own if ids is None else own[::-1] if ids == "swapped" else ids
    calls = [call | {"id": name} for call, name in zip(sent["tool_calls"], names, strict=True)]
    results = [{"role": "tool", "tool_call_id": name, "content": c} for name, c in zip(names, "AB", strict=True)]
    messages = [*HELLO, sent | {"tool_calls": calls}, *(results if ids == "zz" else results[::-1])]
    earlier = AnsweredCall(np.array(prompt, np.int32), np.array(says, np.int32), 0, len(says))
    for later in (session, Session(generate, template, 1 << 20, [earlier])):
        await later.submit(ChatRequest(messages=messages, tools=tools), "2", retry=0).task
        text = template._tokenizer.decode(asked.pop())
        assert text.startswith(template._tokenizer.decode(prompt + says))
        assert RESULTS[kind] in text


async def test_parallel_calls_of_a_stream_have_a_chunk_each() -> None:
    """Some clients read only the first tool call of a chunk."""
    call = '<tool_call>\n{{"name": "add", "arguments": {{"a": {}}}}}\n</tool_call>'
    async with world(f"{call.format(1)}\n{call.format(2)}<|im_end|>") as w:
        body = CHAT | {"stream": True, "tools": [{"type": "function", "function": TOOL}]}
        async with w.post("chat/completions", body) as response:
            lines = (await response.text()).split("data: ")
    chunks = [json.loads(line) for line in lines if '"tool_calls":' in line]
    calls = [chunk["choices"][0]["delta"]["tool_calls"] for chunk in chunks]
    assert [[(call["index"], call["function"]["arguments"]) for call in one] for one in calls] == [
        [(0, '{"a": 1}')], [(1, '{"a": 2}')],
    ]  # fmt: skip


SENT_BACK = {
    "stop string put back": "as if \n  it fit K</code>",
    "another stop string put back": "as if \n  it fit KObservation:",
    "white space stripped": "as if\n  it fit K", "white space added": "\nas if \r\n  it fit K  \n",
    "other Unicode": "as if \n  it fit \u212a",
}  # fmt: skip


@pytest.mark.parametrize("how", SENT_BACK)
@pytest.mark.parametrize("route", ["chat/completions", "messages"])
async def test_an_answer_that_reads_alike_is_the_same_conversation(route: str, how: str) -> None:
    """However the client writes the answer down, its next turns begin with the tokens that were sampled."""
    stops = {"stop" if route == "chat/completions" else "stop_sequences": ["</code>", "Observation:"]}
    says = "as if \n  it fit K</code><|im_end|>"
    async with world(says) as w:
        _, body = await w.ask(route, ROUTES[route] | stops)
        assert words(route, body) == "as if \n  it fit K"
        messages: list[Any] = [*HELLO, {"role": "assistant", "content": SENT_BACK[how]}]
        for turn in range(2):
            messages.append({"role": "user", "content": f"go on {turn}"})
            await w.ask(route, ROUTES[route] | stops | {"messages": messages})
            messages.append({"role": "assistant", "content": SENT_BACK[how]})
        (first, _), (second, _), (third, _) = w.model.asked
        assert second.startswith(first + says)
        assert third.startswith(second + says)


@pytest.mark.parametrize("retention", [None, "all"])
async def test_thoughts_stay_in_the_row_if_the_renderer_keeps_them(retention: Any) -> None:
    """A further message of the user removes a thinking model's thoughts, unless the renderer's setting keeps them."""
    says = "<think>\nwell\n</think>\n\nhi<|im_end|>"
    async with world(says) as w:
        w.door.session.conversations._template = ChatTemplate(
            TOY, renderers.Qwen3RendererConfig(thinking_retention=retention)
        )
        await w.ask("chat/completions")
        more = [*HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "go on"}]
        await w.ask("chat/completions", {"messages": more})
        (first, _), (second, _) = w.model.asked
        assert second.startswith(first + says) == (retention == "all")


async def test_an_answer_that_reads_otherwise_is_another_conversation() -> None:
    """Other words or another indentation are an edited history. Of answers that read alike the exact one counts."""
    async with world("a \nb<|im_end|>") as w:

        async def goes_on(text: str) -> str:
            more = [*HELLO, {"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
            await w.ask("chat/completions", {"messages": more})
            return w.model.asked[-1][0]

        await w.ask("chat/completions")
        first = w.model.asked[0][0]
        w.model.says = "a\nb  <|im_end|>"
        await w.ask("chat/completions")
        assert (await goes_on("a \nb")).startswith(f"{first}a \nb<|im_end|>")
        for text in ("a\nb", "a \nb  "):
            assert (await goes_on(text)).startswith(f"{first}a\nb  <|im_end|>")
        for text in ("a\n b", "a \nc", "A \nb"):
            assert (await goes_on(text)).startswith(f"{first}{text}<|im_end|>")
    assert len({message_key({"role": "user", "content": text}) for text in ("x2", "x\N{SUPERSCRIPT TWO}")}) == 2
    results = [{"role": "tool", "content": "x", "tool_call_id": name} for name in ("one", "other")]
    assert len({message_key(one, calls=[{"id": "one"}, {"id": "other"}]) for one in results}) == 2
    for role, keys in (("user", 2), ("tool", 2), ("assistant", 1)):  # a template may write the names of speakers
        assert len({message_key({"role": role, "content": "x", "name": name}) for name in ("ann", "bob")}) == keys


async def test_arguments_of_another_type_are_another_conversation() -> None:
    """Python takes true for 1 and 1.0; a history in which a client changed one into the other is an edited one."""
    says = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    async with world(says) as w:
        tools = {"tools": [{"type": "function", "function": TOOL}]}
        _, body = await w.ask("chat/completions", CHAT | tools)
        message = body["choices"][0]["message"]
        (call,) = message["tool_calls"]
        for arguments in ({"a": 1}, {"a": True}, {"a": 1.0}):
            call["function"]["arguments"] = arguments
            result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
            await w.ask("chat/completions", tools | {"messages": [*HELLO, message, result]})
            assert json.dumps(arguments) in w.model.asked[-1][0].rpartition("<tool_call>")[2]


class Templated(ToyTokenizer):
    """Writes a word before each message that depends on the number of the message and on how many there are."""

    chat_template = "its own"

    def __init__(self, word: Any) -> None:
        self.word = word

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool, **others: Any) -> str:
        shown = [*messages, {"content": ""}] if add_generation_prompt else messages
        text = "".join(f"{self.word(i, len(messages))}: {m['content']}<|im_end|>" for i, m in enumerate(shown))
        return text.removesuffix("<|im_end|>") if add_generation_prompt else text


@pytest.mark.parametrize("per_turn", [2, 4])
@pytest.mark.parametrize("word", [lambda i, n: i, lambda i, n: "late" if n > 24 else "early"])
def test_a_template_may_look_at_the_whole_conversation(word: Any, per_turn: int) -> None:
    """What follows an answer is what the template writes after all earlier messages, however many a turn adds."""
    tokenizer = Templated(word)
    template = ChatTemplate(tokenizer, renderers.DefaultRendererConfig())
    said, compared = [{"role": "user", "content": "hello"}], 0
    for turn in range(20):
        said = [*said, {"role": "assistant", "content": f"answer {turn}"}]
        new = [{"role": "tool", "content": f"result {i}"} for i in range(per_turn - 2)]
        new.append({"role": "user", "content": f"question {turn}"})
        found = template.extend(np.array([7], np.int32), 1, said, new, ())
        said = [*said, *new]
        whole = tokenizer.apply_chat_template(said, add_generation_prompt=True)
        if found is not None:  # the template may write earlier turns otherwise now
            assert tokenizer.decode(found[1:].tolist()) == whole.partition(f"answer {turn}")[2]
            compared += 1
    assert compared >= 19


def strict(text: str) -> Any:
    """Read JSON as every client does: without NaN and Infinity, which Python's parser takes."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


NO_OBJECTS = (
    '"x"', "null", "[1]", "5", '{"a": NaN}', '{"a": [1e400]}', '"[1]"', '{"a": "\\ud800"}', "[" * 3000 + "]" * 3000,
    "1" * 5000,
)  # fmt: skip
AS_TOOLS: dict[str, Any] = {
    "chat/completions": CHAT | {"tools": [{"type": "function", "function": TOOL}]},
    "messages": ANTHROPIC | {"tools": [{"name": "add", "input_schema": TOOL["parameters"]}]},
    "responses": {"model": "m", "input": HELLO, "tools": [{"type": "function", **TOOL}]},
}


@pytest.mark.parametrize("arguments", NO_OBJECTS, ids=lambda text: text[:12])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", AS_TOOLS)
async def test_a_call_whose_arguments_are_no_object_is_text(route: str, stream: bool, arguments: str) -> None:
    """Every client reads the answer, and can go on with it: nothing that it sends back is refused."""
    call = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    async with world(f"{call}<|im_end|>") as w:
        async with w.post(route, AS_TOOLS[route] | {"stream": stream}) as response:
            assert response.status == 200
            lines = (await response.text()).splitlines()
        events = [strict(line.removeprefix("data: ")) for line in lines if line.startswith(("{", "data: {"))]
        assert events
        assert not any(kind in json.dumps(events) for kind in ('"tool_calls": [', '"tool_use"', '"function_call"'))
        if route != "responses":
            body = AS_TOOLS[route]
            again = [*HELLO, {"role": "assistant", "content": call}, {"role": "user", "content": "well?"}]
            assert (await w.ask(route, body | {"messages": again}))[0] == 200
            (first, _), (second, _) = w.model.asked
            assert second.startswith(f"{first}{call}<|im_end|>")


@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.parametrize(
    ("says", "stop", "text"),
    [
        ("look\nObservation:\n", "Observation:\n", "look\n"), ("one\n\n", "\n\n", "one"),
        ("x=1\n```\n", "\n```\n", "x=1"), ("\n\nHuman:", "\n\nHuman:", ""), ("one two", "two", "one "),
    ],
)  # fmt: skip
async def test_stop_strings_may_begin_and_end_with_white_space(
    says: str, stop: str, text: str, configured: bool
) -> None:
    """Renderers strip it from the text of an answer. Configured strings are cut and named as those of clients."""
    async with world(says) as w:
        if configured:
            w.door.session.stop = (stop,)
        _, body = await w.ask("messages", ANTHROPIC | ({} if configured else {"stop_sequences": [stop]}))
        assert (words("messages", body), body["stop_reason"], body["stop_sequence"]) == (text, "stop_sequence", stop)
        answer = {"role": "assistant", "content": text or " "}
        await w.ask("messages", ANTHROPIC | {"messages": [*HELLO, answer, *HELLO], "stop_sequences": [stop]})
        (first, _), (second, _) = w.model.asked
        assert second.startswith(first + says)
        assert [list(sampling["stop"]) for _, sampling in w.model.asked] == [[stop]] * 2


async def test_a_tool_call_is_named_before_the_stop_string_at_its_end() -> None:
    """Clients call tools only if that is the reason of the end."""
    async with world('<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>') as w:
        body = ANTHROPIC | {"tools": [{"name": "add", "input_schema": TOOL["parameters"]}]}
        _, body = await w.ask("messages", body | {"stop_sequences": ["</tool_call>"]})
        assert (body["content"][0]["name"], body["stop_reason"]) == ("add", "tool_use")


LOADS = """
import sys
import april
from april.testing import FakeEngine
from tests.gateway_suite.script import EOS, TOKENIZER, VOCAB

async def own(prompt, llm):
    await llm.generate()

def loaded():
    return [name in sys.modules for name in ("renderers", "april.agents.endpoint", "april.agents.chat_template")]

engine = FakeEngine("e", vocab_size=VOCAB, eos_token_id=EOS)
common = dict(engines=[engine], tokenizer=TOKENIZER, reward=lambda prompt, response: 0.0, RUNS)
print(loaded(), end=" ")
april.RolloutScheduler(april.Config(rollout_batch_size=1, max_response_len=9), prompts=[[1]], **common).close()
print(loaded())
"""


@pytest.mark.parametrize("own", [False, True])
def test_what_writes_messages_is_loaded_before_the_loop_has_work(own: bool) -> None:
    """It takes a second to import: on the loop nobody would be answered meanwhile. Without a function of the user's own
    it is never loaded."""
    code = LOADS.replace("RUNS", "rollout=own" if own else "")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == f"{[False] * 3} {[own] * 3}\n", run.stderr
