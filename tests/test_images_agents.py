"""Images in chats: ``llm.chat`` and the requests of agents' clients, in each dialect, over turns and restarts."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import aiohttp
import numpy as np
import pytest
from test_agents_endpoint import Generated
from tiny_vision import IMAGE_ID, VOCAB, encoded, picture, tiny_processor, tiny_tokenizer

pytest.importorskip("PIL")
pytest.importorskip("renderers")

import april
from april.agents.chat_template import ChatTemplate
from april.agents.endpoint import Endpoint, ServedSession
from april.agents.message_images import MessageImages
from april.agents.session import Session
from april.config.images import ImagesConfig
from april.core.attachments import Placed
from april.core.tape import Int32
from april.core.types import FinishReason, Prompt
from april.errors import RolloutError
from april.images.image_placer import ImagePlacer
from april.testing import FakeEngine, rollouts, run_virtual

RED, TALL = encoded(), encoded(picture(140, 300))
END = 2
"""The end of a turn."""


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def part(data: bytes) -> dict[str, Any]:
    """An image as OpenAI's clients send it."""
    return {"type": "image_url", "image_url": {"url": url(data)}}


def asks(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [c if isinstance(c, dict) else {"type": "text", "text": c} for c in content]}]


@cache
def way_in() -> ImagePlacer:
    return ImagePlacer(tiny_processor(), ImagesConfig(max_per_prompt=8))


def by_processor(messages: list[dict[str, Any]], *pictures: Any) -> list[int]:
    """What transformers makes of a chat whose images are marks."""
    text = tiny_processor().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    made: list[int] = tiny_processor()(text=[text], images=list(pictures) or None)["input_ids"][0]
    return made


@dataclass
class Model:
    """Says ``hi`` and notes what it was asked."""

    asked: list[tuple[list[int], tuple[Placed, ...]]] = field(default_factory=list)

    async def __call__(
        self, ids: Int32, sampling: Mapping[str, Any], attached: tuple[Placed, ...] | None = None
    ) -> Generated:
        self.asked.append((ids.tolist(), attached or ()))
        tokens = np.array([*tiny_tokenizer().encode("hi"), END], np.int32)
        return Generated(tokens, np.full(len(tokens), -0.5, np.float32), FinishReason.STOP, 0)


@dataclass
class World:
    """An endpoint with a session, and what a client may send there."""

    door: ServedSession
    model: Model
    http: aiohttp.ClientSession

    async def ask(self, route: str, body: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.door.key}"}
        async with self.http.post(f"{self.door.url}/{route}", json={"model": "m", **body}, headers=headers) as response:
            return response.status, await response.json()


@asynccontextmanager
async def world(prompt: Prompt | None = None, *, blind: bool = False) -> AsyncIterator[World]:
    """A world whose model reads images, unless it is ``blind``."""
    endpoint, model = Endpoint(), Model()
    endpoint.start()
    prompt = Prompt(np.array([1], np.int32)) if prompt is None else prompt
    sight = None if blind else MessageImages(way_in(), way_in().reader.for_clients(), prompt)
    template = ChatTemplate(tiny_tokenizer(), None, None if blind else way_in())
    try:
        async with aiohttp.ClientSession() as http:
            yield World(endpoint.serve(Session(model, template, 1 << 20, (), sight)), model, http)
    finally:
        await asyncio.to_thread(endpoint.stop)


def block(data: bytes) -> dict[str, Any]:
    """An image as Anthropic's clients send it."""
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": asks("what is", part(RED), "?")},
    "messages": {
        "max_tokens": 9,
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "what is"}, block(RED), {"type": "text", "text": "?"},
        ]}],
    },
    "responses": {
        "input": [{"role": "user", "content": [
            {"type": "input_text", "text": "what is"}, {"type": "input_image", "image_url": url(RED)},
            {"type": "input_text", "text": "?"},
        ]}],
    },
}  # fmt: skip
MARKED = asks("what is", {"type": "image"}, "?")


@pytest.mark.parametrize("route", BODIES)
async def test_an_image_in_every_dialect(route: str) -> None:
    """The model gets what the processor makes of the same chat, and the image at its place."""
    async with world() as w:
        status, body = await w.ask(route, BODIES[route])
        assert status == 200, body
        ((ids, (placed,)),) = w.model.asked
    assert ids == by_processor(MARKED, picture())
    assert (placed.attachment.data, placed.count) == (RED, ids.count(IMAGE_ID))


RESULTS: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": [
            *asks(part(RED)), {"role": "assistant", "content": "hi"},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "seen"}, part(TALL)]},
        ],
    },
    "messages": {
        "max_tokens": 9,
        "messages": [
            {"role": "user", "content": [block(RED)]}, {"role": "assistant", "content": "hi"},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "seen"}, block(TALL)]}
            ]},
        ],
    },
    "responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_image", "image_url": url(RED)}]},
            {"role": "assistant", "content": "hi"},
            {"type": "function_call_output", "call_id": "c", "output": [
                {"type": "input_text", "text": "seen"}, {"type": "input_image", "image_url": url(TALL)},
            ]},
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("route", RESULTS)
async def test_the_next_turn_keeps_what_was_sampled_and_adds_the_image_of_a_tool(route: str) -> None:
    """The conversation goes on with the very tokens; images of before stay, that of the result stands behind them."""
    async with world() as w:
        first = {**RESULTS[route], **{k: v[:1] for k, v in RESULTS[route].items() if isinstance(v, list)}}
        assert (await w.ask(route, first))[0] == 200
        status, body = await w.ask(route, RESULTS[route])
        assert status == 200, body
        (asked, (red,)), (ids, attached) = w.model.asked
    answer = [*tiny_tokenizer().encode("hi"), END]
    assert ids[: len(asked) + len(answer)] == [*asked, *answer]
    assert attached[0] == red
    (tall,) = attached[1:]
    assert tall.attachment.data == TALL
    assert tall.at >= len(asked) + len(answer)
    assert ids[tall.at : tall.end] == [IMAGE_ID] * tall.count
    assert ids.count(IMAGE_ID) == red.count + tall.count


async def test_another_image_of_the_same_size_is_another_conversation() -> None:
    """Equal tokens with another picture do not go on with what was said of the first."""
    blue = encoded(picture(color=(0, 0, 255)))
    async with world() as w:
        _, first = await w.ask("chat/completions", {"messages": asks(part(RED))})
        more = [{"role": "assistant", "content": "hi"}, *asks("and?")]
        _, second = await w.ask("chat/completions", {"messages": [*asks(part(blue)), *more]})
        assert first["id"] != second["id"]
        (asked, red), (ids, other) = w.model.asked
    assert [p.attachment.data for p in (*red, *other)] == [RED, blue]
    assert ids[: len(asked)] == asked


async def test_a_mark_stands_for_an_image_of_the_prompt() -> None:
    """Clients that repeat ``prompt.data["messages"]`` need not send the bytes."""
    read = way_in().read([RED], "prompt 0")
    ids, attached = way_in().place(way_in().render(MARKED, None, ""), read, "prompt 0")
    async with world(Prompt(ids, {}, 0, 0, attached)) as w:
        assert (await w.ask("chat/completions", {"messages": MARKED}))[0] == 200
        assert w.model.asked == [(ids.tolist(), attached)]
        status, body = await w.ask("chat/completions", {"messages": asks({"type": "image"}, {"type": "image"})})
    assert status == 400
    assert "the request, image 2 has no content" in body["error"]["message"]


def in_dialect(route: str, *content: dict[str, Any], tool: bool = False) -> dict[str, Any]:
    """A request of one dialect with this content, of the user or of a tool's result."""
    if route == "responses":
        call = {"type": "function_call_output", "call_id": "c", "output": [*content]}
        return {"input": [call if tool else {"role": "user", "content": [*content]}]}
    if route == "messages":
        block = [{"type": "tool_result", "tool_use_id": "c", "content": [*content]}] if tool else [*content]
        return {"max_tokens": 9, "messages": [{"role": "user", "content": block}]}
    result = {"role": "tool", "tool_call_id": "c", "content": [*content]}
    return {"messages": [result] if tool else asks(*content)}


UNREADABLE: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"type": "image_url", "image_url": None}, "has image_url of null and no image"),
    ("chat/completions", {"type": "image_url"}, "a part of type image_url has no other field and no image"),
    ("chat/completions", {"type": "image_url", "image_url": {"url": None}}, "is a mapping with url; give a data: URL"),
    ("chat/completions", {"type": "image_url", "image_url": {}}, "is a mapping with nothing in it; give a data: URL"),
    ("chat/completions", {"type": "image_url", "image_url": 7}, "is of type int; give a data: URL"),
    ("chat/completions", {"type": "image_url", "image_url": ""}, "a client must send an image as a data: URL"),
    ("chat/completions", {"type": "image_url", "image_url": "/etc/passwd"}, "must send an image as a data: URL"),
    ("chat/completions", {"type": "image_url", "image_url": "file:///etc/passwd"}, "must send an image as a data: URL"),
    ("chat/completions", part(RED[:60]), "the request, image 1 is damaged or truncated"),
    ("chat/completions", {"type": "text", "text": "<|image_pad|>"}, "1 placeholder <|image_pad|> (id 5) and no images"),
    ("chat/completions", {"type": "input_audio", "input_audio": {}}, "a part of type 'input_audio' is not supported"),
    ("chat/completions", {"type": "image_url", "file_id": "f"}, "has file_id and no image"),
    ("chat/completions", {"type": "image", "id": "img-17"}, "has id and no image"),
    ("chat/completions", {"type": "image", "image": None}, "has image of null and no image"),
    ("chat/completions", {"type": "image", "bytes": "abc"}, "is a mapping with bytes, path; give a data: URL"),
    ("chat/completions", {"type": "text", "text": "a", "image_url": {"url": "x"}}, "a text part has 'image_url'"),
    ("chat/completions", {"type": "text", "text": "a", "video": "clip.mp4"}, "a text part has 'video'; april takes"),
    ("chat/completions", {"type": "image", "text": "a", "image_url": url(RED)}, "a part has an image and a text; give"),
    ("messages", {"type": "text", "text": "a", "image": url(RED)}, "a text part has 'image'; april takes text, and"),
    ("responses", {"type": "input_image", "file_id": "f"}, "has file_id and no image"),
    ("responses", {"type": "input_image", "image_url": None}, "has image_url of null and no image"),
    ("responses", {"type": "input_image", "detail": "low"}, "has detail and no image"),
    ("messages", {"type": "image"}, "messages[0]: an image has no source"),
    ("messages", {"type": "image", "cache_control": {}}, "has cache_control and no image"),
    ("messages", {"type": "image", "source": None}, "has source of null and no image"),
    ("messages", {"type": "image", "source": {"type": "file", "file_id": "f"}}, "a mapping with type, file_id; give"),
    ("messages", {"type": "image", "source": {"type": "url", "url": "http://a/b"}}, "but april fetches no images"),
    ("messages", {"type": "image", "source": {"type": "base64", "media_type": "image/png"}}, "with type, media_type;"),
    ("messages", {"type": "image", "source": {"type": "base64", "data": "QUJD"}}, "is not an image that can be read"),
]


@pytest.mark.parametrize("tool", [False, True], ids=["user", "tool"])
@pytest.mark.parametrize(("route", "content", "says"), UNREADABLE)
async def test_only_a_part_that_says_nothing_stands_for_the_prompts_image(
    route: str, content: dict[str, Any], says: str, tool: bool
) -> None:
    """A part with an image that cannot be read is refused by its field, and so are paths, sound and a placeholder in a
    text: 400, the model is not asked, and no path is suggested to a client."""
    ids, attached = way_in().place(way_in().render(MARKED, None, ""), way_in().read([RED], "prompt 0"), "prompt 0")
    async with world(Prompt(ids, {}, 0, 0, attached)) as w:
        status, body = await w.ask(route, in_dialect(route, content, tool=tool))
        assert (status, w.model.asked) == (400, []), body
        message = body["error"]["message"]
        assert says in message
        assert "a path" not in message
        assert '"path"' not in message


async def test_too_many_images_are_refused_by_their_number() -> None:
    """In Anthropic's words, before one is decoded."""
    async with world() as w:
        content = [block(b"x")] * 9
        status, body = await w.ask("messages", {"max_tokens": 5, "messages": [{"role": "user", "content": content}]})
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert "the request has 9 images, but images.max_per_prompt is 8" in body["error"]["message"]


@pytest.mark.parametrize("route", BODIES)
async def test_a_model_that_reads_text_refuses_images(route: str) -> None:
    """By the type of the part, as before."""
    async with world(blind=True) as w:
        status, body = await w.ask(route, BODIES[route])
    assert status == 400
    assert "is not supported; april takes text, and images with processor= of" in body["error"]["message"]


# ---------------------------------------------------------------- llm.chat


def engine() -> FakeEngine:
    """Ends each answer with the end of a turn."""
    return FakeEngine(
        "e", responses=lambda request: [*tiny_tokenizer().encode("a cat"), END], vocab_size=VOCAB, eos_token_id=END,
        seconds_per_token=0.1, chunk_tokens=1,
    )  # fmt: skip


def run_of(rollout: Any, **options: Any) -> Any:
    """A run of a function whose prompts have an image."""
    config = april.Config(rollout_batch_size=1, n_samples_per_prompt=2, max_response_len=400)
    prompts = [{"messages": MARKED, "images": [RED]}] * 3
    given: dict[str, Any] = {"engines": [engine()], "prompts": prompts, "reward": lambda p, r: 1.0}
    return rollouts(config, rollout=rollout, processor=tiny_processor(), **given | options)


async def chats(prompt: Prompt, llm: april.LLM) -> list[str]:
    """Goes on with the prompt's chat, and shows a file of its own."""
    messages = list(prompt.data["messages"])
    first = await llm.chat(messages)
    messages += [first.message, *asks("and", part(TALL))]
    second = await llm.chat(messages)
    return [first.text, second.text]


def test_a_chat_goes_on_with_the_prompt_and_its_image() -> None:
    """One row: the prompt's tokens and image, what was sampled, then the function's own image, which has no loss."""

    async def program() -> None:
        async with run_of(chats) as run:
            batch = await run.next_batch()
            run.audit()
        assert batch.one_row_each
        for sample in batch.samples:
            assert sample.prompt.token_ids.tolist() == by_processor(MARKED, picture())
            said = [*tiny_tokenizer().encode("a cat"), END]
            assert sample.tokens[sample.loss_mask == 1].tolist() == said * 2
            tall = (sample.tokens == IMAGE_ID) & (sample.loss_mask == 0)
            assert tall.sum() == way_in()._token_count(300, 140)

    run_virtual(program())


def test_a_call_that_reads_an_image_when_its_function_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken for a call of the function's next run."""
    began_again, calls, read = threading.Event(), [], ImagePlacer.read

    def slow(self: ImagePlacer, images: Any, where: str, **options: Any) -> Any:
        if where == "llm.generate":
            assert began_again.wait(10)
        return read(self, images, where, **options)

    async def fails_once(prompt: Prompt, llm: april.LLM) -> None:
        if llm.sample_id.index == 0 and not calls:
            mark = tiny_tokenizer().convert_tokens_to_ids("<|image_pad|>")
            call = llm.generate([*prompt.token_ids, mark], images=[TALL], max_tokens=4)
            calls.append(asyncio.ensure_future(call))
            await asyncio.sleep(0)
            raise OSError("the tool is away")
        began_again.set()
        if llm.sample_id.index == 0:
            with pytest.raises(RolloutError, match="after its rollout function had ended"):
                await calls[0]
        await llm.generate(max_tokens=6)

    monkeypatch.setattr(ImagePlacer, "read", slow)
    config = april.Config(rollout_batch_size=1, n_samples_per_prompt=2, max_response_len=400)
    engine = FakeEngine("e", lengths=50, vocab_size=VOCAB, eos_token_id=END, seconds_per_token=1e-3)
    with april.RolloutScheduler(  # threads read images only where no virtual clock is
        config, engines=[engine], prompts=[{"messages": MARKED, "images": [RED]}], reward=lambda p, r: 1.0,
        rollout=fails_once, processor=tiny_processor(), progress=False,
    ) as run:  # fmt: skip
        batch = run.next_batch()
    assert [sample.turns for sample in batch.samples] == [((0, 6),)] * 2
