"""Images on their way to servers: each by its digest, its bytes once where the server keeps them, and none left out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_servers.base import RequestFault, uncut
from fake_servers.images import PLACEHOLDER, TOKENS_EACH, FakeImages, features, salt_of
from fake_servers.sglang import FakeSglangServer
from fake_servers.vllm import FakeVllmServer
from msgspec import structs
from server_fixtures import beside, facts_of, read, request, saved, served, update

from april.core.attachments import Attachment, Placed
from april.core.engine_limits import LimitCode
from april.core.versions import PolicyVersion
from april.engines.http import sent_attachments
from april.engines.http.sent_attachments import SentAttachments, Urls, data_url
from april.engines.protocol import OnWeightUpdate, Request
from april.errors import AttachmentError, RequestRefused, WireError

TAKE = ["vllm", "sglang"]
"""Kinds of servers that take images."""
RED, BLUE = b"\x89PNG the red one", b"\xff\xd8\xff the blue one"
NEXT = PolicyVersion(0, 1)


def image(data: bytes) -> Attachment:
    return Attachment.of("image", data)


def shown(*images: bytes | Attachment, after: int = 0, max_tokens: int = 24, **more: Any) -> Request:
    """A request of some text around these images, and ``after`` tokens that were generated before."""
    ids: list[int] = [11, 12]
    placed = []
    for one in images:
        attachment = one if isinstance(one, Attachment) else image(one)
        placed.append(Placed(attachment, len(ids), TOKENS_EACH, (PLACEHOLDER,)))
        ids += [PLACEHOLDER] * TOKENS_EACH + [13]
    asked = request([*ids, *range(20, 20 + after)], max_tokens, banned_ids=(PLACEHOLDER,), **more)
    return structs.replace(asked, attached=tuple(placed), response_offset=after)


def answer_to(asked: Request, weights: str = "w0") -> list[int]:
    """What a server says that has seen the request's images with the vision tower of these weights."""
    seen = [features(placed.attachment.data or b"", weights) for placed in asked.attached]
    sampling = asked.sampling
    return uncut(
        asked.token_ids.tolist(), weights=weights + salt_of(seen), max_tokens=sampling.max_tokens,
        banned=sampling.banned_ids,
    )[0]  # fmt: skip


@pytest.fixture
def w1(tmp_path: Path) -> str:
    return saved(tmp_path, "w1")


def received(server: Any) -> list[str]:
    digests: list[str] = server.images.received
    return digests


async def seen(engine: Any, *asked: Request, weights: str = "w0") -> None:
    """All of them at once; each must be answered by who has seen its own images."""
    for one, got in zip(asked, await asyncio.gather(*(read(engine, one) for one in asked)), strict=True):
        assert got.error is None, got.error
        assert got.tokens == answer_to(one, weights)


@pytest.mark.parametrize("kind", TAKE)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_model_sees_the_images_of_its_prompt(kind: str, stream: bool) -> None:
    """One, two, one twice, and one with a response that goes on: the answers are those to these images in this order,
    and the server reads the prompt as the tokens that the request has."""
    async with served(kind, images=FakeImages()) as (_, engine):
        assert engine.capabilities.attachments == ("image",)
        asked = [shown(*images, after=after, stream=stream) for images, after in (
            ((RED,), 0), ((BLUE,), 0), ((RED, BLUE), 0), ((BLUE, RED), 0), ((RED, RED), 0), ((RED,), 3),
        )]  # fmt: skip
        await seen(engine, *asked)
        assert len({tuple(answer_to(one)) for one in asked}) == len(asked), "the fake would say the same to all"


async def test_a_server_that_speculates_bans_nothing() -> None:
    """vLLM refuses a request with a bias of logits then; it gets none, and april looks for banned ids in the answer."""
    async with served("vllm", speculation={"method": "ngram"}) as (_, engine):
        assert not engine.capabilities.bans
        assert (await read(engine, request(max_tokens=4, min_tokens=4, banned_ids=(5,)))).error is None


@pytest.mark.parametrize("kind", TAKE)
async def test_banned_ids_do_not_come(kind: str) -> None:
    """Ids that the model would say are not said, and what it says instead comes with its log-probability."""
    async with served(kind) as (_, engine):
        assert engine.capabilities.bans
        said = set((await read(engine, request(max_tokens=40, min_tokens=40))).tokens)
        got = await read(engine, request(max_tokens=40, min_tokens=40, banned_ids=tuple(sorted(said))))
        assert got.error is None
        assert (len(got.tokens), len(got.logprobs)) == (40, 40)
        assert not said & set(got.tokens)


async def test_bytes_go_once_to_a_server_that_keeps_them(w1: str) -> None:
    """32 samples of two prompts at once, then over a weight update: each image comes once, and the vision tower's new
    weights look at it."""
    async with served("vllm", images=FakeImages()) as (server, engine):
        asked = [shown(RED, BLUE, after=i) for i in range(16)] + [shown(BLUE, after=i) for i in range(16)]
        await seen(engine, *asked)
        await update(engine, NEXT, w1)
        again = [structs.replace(one, attempt_id=request().attempt_id) for one in asked]
        await seen(engine, *again, weights="w1")

        assert sorted(received(server)) == sorted([image(RED).digest, image(BLUE).digest])


async def test_bytes_go_again_to_a_server_that_has_lost_them(w1: str) -> None:
    """A restart and an emptied cache are seen by the server's refusal alone: 8 samples, one more sending, no error."""
    async with served("vllm", images=FakeImages()) as (server, engine):
        await seen(engine, shown(RED, after=1))
        await server.restart()
        await update(engine, NEXT, w1)
        await seen(engine, *(shown(RED, after=i) for i in range(8)), weights="w1")
        assert len(received(server)) == 2
        server.images.named.clear()
        await seen(engine, shown(RED, BLUE, after=2), *(shown(RED, after=i) for i in range(8)), weights="w1")
        assert received(server).count(image(RED).digest) == 3
        assert received(server).count(image(BLUE).digest) == 1


async def test_a_pause_that_empties_the_caches_is_known(w1: str) -> None:
    """With the keys recomputed over an update, the server forgets its images too, and is not asked for them in vain."""
    async with served("vllm", images=FakeImages()) as (server, engine):
        await seen(engine, shown(RED))
        await engine.pause_in_flight(OnWeightUpdate.RECOMPUTE)
        await engine.update_weights(NEXT, w1)
        await engine.resume()
        await seen(engine, shown(RED), weights="w1")
        assert (len(received(server)), server.images.misses) == (2, 1), "the probe's miss alone"


async def test_a_server_that_keeps_nothing_gets_the_bytes_each_time() -> None:
    """vLLM without a cache for its processor is found out by the probe."""
    async with served("vllm", images=FakeImages(keeps=False)) as (server, engine):
        assert engine.capabilities.attachments == ("image",)
        await seen(engine, *(shown(RED, after=i) for i in range(3)))
        assert (len(received(server)), server.images.misses) == (3, 0)


@pytest.mark.parametrize("kind", TAKE)
@pytest.mark.parametrize("way", ["disk", "trainer"])
async def test_new_weights_look_at_images_anew(kind: str, way: str, w1: str) -> None:
    """Whatever the server keeps of what its old vision tower has seen is not used, SGLang's cache by names included,
    which nothing empties."""
    async with served(kind, images=FakeImages()) as (server, engine):
        await seen(engine, shown(RED, BLUE))
        if way == "disk":
            await update(engine, NEXT, w1)
        else:
            server.weights = "w1"
            await update(engine, NEXT)
        await seen(engine, shown(RED, BLUE), shown(RED), weights="w1")


async def test_two_runs_at_one_server_share_no_features() -> None:
    """A later run's first version is not the earlier one's: SGLang knows both by names of their own."""
    async with served("sglang", images=FakeImages()) as (server, engine):
        await seen(engine, shown(RED))
        server.weights = "w1"
        other = await beside("sglang", server)
        await seen(other, shown(RED), weights="w1")
        await other.close()


@pytest.mark.parametrize("kind", TAKE)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_that_reads_an_image_as_other_tokens_is_an_error(kind: str, stream: bool) -> None:
    """No token of it is handed over, and the sentence says what may differ."""
    async with served(kind, images=FakeImages(each=TOKENS_EACH + 1)) as (_, engine):
        got = await read(engine, shown(RED, max_tokens=60, stream=stream))
        assert isinstance(got.error, WireError)
        assert "11 tokens" not in str(got.error)
        assert "a prompt of 10 tokens, but 9 were sent" in str(got.error)
        assert "min_pixels and max_pixels" in str(got.error)
        assert not got.tokens


def in_file(path: Path, data: bytes) -> Attachment:
    path.write_bytes(data)
    return replace(image(data), data=None, path=str(path))


@pytest.mark.parametrize("kind", TAKE)
async def test_an_image_in_a_file_is_read_when_it_is_sent(kind: str, tmp_path: Path) -> None:
    """And if the file has changed, or gone, the request is refused with the file's name, before anything is sent."""
    async with served(kind, images=FakeImages()) as (server, engine):
        kept = in_file(tmp_path / "kept.png", RED)
        asked = shown(kept)
        assert (await read(engine, asked)).tokens == answer_to(shown(RED))
        for name, spoil, says in (
            ("changed.png", lambda path: path.write_bytes(b"another"), "has changed since"),
            ("gone.png", lambda path: path.unlink(), "cannot be read: No such file"),
        ):
            lost = in_file(tmp_path / name, name.encode())
            spoil(tmp_path / name)
            got = await read(engine, shown(lost))
            assert isinstance(got.error, AttachmentError)
            assert says in str(got.error)
            assert name in str(got.error)
        assert received(server) == [kept.digest]
        assert not engine._endpoint.open_streams


@pytest.mark.parametrize("kind", ["vllm", "sglang", "openai"])
async def test_who_takes_no_images_gets_none(kind: str) -> None:
    """A text model's server answers 200 and leaves them out, or hangs; the request is refused by name instead."""
    async with served(kind) as (server, engine):
        assert engine.capabilities.attachments == ()
        got = await read(engine, shown(RED))
        assert isinstance(got.error, RequestRefused)
        assert "contains images, which engine" in str(got.error)
        assert not server.runs


@pytest.mark.parametrize("kind", TAKE)
async def test_a_generated_placeholder_is_not_sent(kind: str) -> None:
    """SGLang would never answer a request that has one, and vLLM takes it for text, which no trainer does."""
    async with served(kind, images=FakeImages()) as (server, engine):
        asked = shown(RED, after=2)
        got = await read(engine, structs.replace(asked, token_ids=np.append(asked.token_ids, np.int32(PLACEHOLDER))))
        assert isinstance(got.error, RequestRefused)
        assert "2 placeholder tokens for attachments, but its attachments need 1" in str(got.error)
        assert not server.runs


def sees(directory: Path) -> str:
    (directory / "config.json").write_text(json.dumps({"vision_config": {}, "eos_token_id": 2}))
    return str(directory)


def test_a_model_that_sees_behind_a_route_that_does_not_is_named(tmp_path: Path) -> None:
    """vLLM's completions route answers without the image; the limit says what to start the server with."""
    for options, flag in (({"scale_out": False}, "--enable-scale-out"), ({"processes": 2}, "--api-server-count 1")):
        can = facts_of(FakeVllmServer(images=FakeImages(), root=sees(tmp_path), **options)).capabilities
        assert can.attachments == ()
        assert flag in can.needs["attachments"]
    blind = facts_of(FakeVllmServer(images=None, root=sees(tmp_path))).capabilities
    assert (blind.attachments, blind.needs.get("attachments", "")) == ((), "")


def test_sglang_that_cannot_name_images_takes_none() -> None:
    """Its cache of what the vision tower has seen would serve old features after an update."""
    can = facts_of(FakeSglangServer(images=FakeImages(), names_images=False)).capabilities
    assert can.attachments == ()
    assert LimitCode.NO_ATTACHMENTS in [limit.code for limit in can.limits]


async def test_a_sender_that_fails_leaves_it_to_the_next() -> None:
    """The first of four is refused for now; one of the others brings the image, once."""
    async with served("vllm", RequestFault.BUSY, images=FakeImages()) as (server, engine):
        got = await asyncio.gather(*(read(engine, shown(RED, after=i)) for i in range(4)))
        assert [g.error is None for g in got] == [False, True, True, True]
        assert list(engine.attachments.sendings.values()) == [1]
        assert len(received(server)) == 2  # the busy server had looked at it before it refused


# ---------------------------------------------------------------- what is known of a server


def misses(error: RequestRefused) -> bool:
    return "missing" in str(error)


class Posts:
    """A server that keeps what it was sent."""

    def __init__(self) -> None:
        self.has: set[str] = set()
        self.bodies: list[list[str]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    def of(self, *attachments: Attachment) -> Callable[[Urls], Any]:
        async def post(urls: Urls) -> str:
            self.bodies.append(sorted(urls))
            await self.gate.wait()
            if any(a.digest not in urls and a.digest not in self.has for a in attachments):
                raise RequestRefused("something is missing")
            self.has |= set(urls)
            return "sent"

        return post


def placed(*attachments: Attachment) -> list[Placed]:
    return [Placed(a, 0, 1, (PLACEHOLDER,)) for a in attachments]


async def test_a_sender_that_is_cancelled_holds_nobody_up() -> None:
    """The next in line brings the image."""
    sent, posts, red = SentAttachments(misses), Posts(), image(RED)
    posts.gate.clear()
    first = asyncio.create_task(sent.send("a", placed(red), posts.of(red)))
    second = asyncio.create_task(sent.send("b", placed(red), posts.of(red)))
    await asyncio.sleep(0)
    first.cancel()
    posts.gate.set()
    assert await second == "sent"
    assert posts.bodies == [[red.digest], [red.digest]]


async def test_a_server_that_always_misses_gets_everything_at_last() -> None:
    """A request is refused for what the server misses only after all of it went along."""
    sent, red = SentAttachments(misses), image(RED)
    bodies: list[list[str]] = []

    async def post(urls: Urls) -> str:
        bodies.append(list(urls))
        raise RequestRefused("something is missing")

    sent._note_known([red.digest], {})
    with pytest.raises(RequestRefused, match="missing"):
        await sent.send("a", placed(red), post)
    assert bodies == [[], [red.digest]]
    assert not sent.sendings


async def test_only_so_many_digests_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those used last; an older one is sent again, which is always right."""
    monkeypatch.setattr(sent_attachments, "MAX_REMEMBERED", 2)
    sent, posts = SentAttachments(misses), Posts()
    one, two, three = (image(bytes([i])) for i in range(3))
    for a in (one, two, one, three, one, two):
        await sent.send("a", placed(a), posts.of(a))
    assert posts.bodies == [[one.digest], [two.digest], [], [three.digest], [], [two.digest]]
    assert len(sent._known) == len(sent.sendings) == 2


def test_the_type_of_an_image_is_that_of_its_bytes() -> None:
    """Servers that look at it find the right one; what is unknown is not called an image."""
    heads = {
        b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF89a": "image/gif", b"BM": "image/bmp",
        b"RIFF1234WEBP": "image/webp", b"RIFF1234WAVE": "application/octet-stream", b"": "application/octet-stream",
    }  # fmt: skip
    for head, media in heads.items():
        assert data_url("image", head).startswith(f"data:{media};base64,")
