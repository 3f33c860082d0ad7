"""What travels between april's processes arrives as it was, and nothing else arrives."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from several_rows import batch, row

from april.core.attachments import Attachment, Placed
from april.core.batch import Batch
from april.core.ledger import DropReason, Ledger
from april.core.sampling import LogprobKind, SamplingParams
from april.core.types import EngineFinish, FinishReason, Prompt, SampleId
from april.core.versions import PolicyVersion
from april.driver.rewards import Conversation, Response
from april.engines.protocol import Capabilities, Chunk, EngineLoad, Health, Request
from april.errors import LinkError
from april.serialization.own_values import pack, unpack

PICTURES = [Attachment.of("image", bytes([n]) * 50_000) for n in range(3)]
TOKENS = np.arange(5, dtype=np.int32)


def plain(b: Batch) -> list[Any]:
    return [
        (
            s.id, s.chain, s.prompt.token_ids.tolist(), dict(s.prompt.data), s.prompt.epoch, s.prompt.position,
            s.tokens.tolist(), s.logprobs.tolist(), s.loss_mask.tolist(), s.segments, s.staleness, s.reward, s.cohort,
            s.finish, s.attempts, s.resumes, s.attached, s.prompt.attached,
        )
        for s in b.samples
    ]  # fmt: skip


def with_more(b: Batch) -> Batch:
    """Its rows with images, and rows for their tokens: one conversation has an image of a tool besides."""
    rows = []
    for s in b.samples:
        prompt = replace(s.prompt, attached=(Placed(PICTURES[s.id.group - 7], 0, 1, (5,)),))
        more = (Placed(PICTURES[2], len(prompt.token_ids) + 1, 2, (5, 6)),) if s.chain == 4 else ()
        count = len(prompt.token_ids) + len(s.tokens) - 1
        extras: dict[str, np.ndarray] = {
            "experts": np.arange(count * 6, dtype=np.uint8).reshape(count, 3, 2),
            "states": np.full((count, 4), s.reward, np.float16),
        }
        rows.append(replace(s, prompt=prompt, attached=(*prompt.attached, *more), extras=extras))
    return replace(b, samples=tuple(rows))


def test_rows_keep_their_own_prompt_and_the_number_of_their_conversation() -> None:
    """Rows of a sample arrive side by side, each with what its own conversation began with, to write into."""
    sent = batch()
    come = unpack(pack(sent), Batch)
    assert plain(come) == plain(sent)
    assert type(come.samples[0].segments[0].version) is PolicyVersion
    assert type(come.samples[0].finish) is FinishReason
    assert come.sample_numbers.tolist() == [0, 0, 0, 1, 2, 3, 3]
    assert come.advantages("rloo").tolist() == sent.advantages("rloo").tolist()
    come.samples[0].prompt.token_ids[0] = 99
    assert come.samples[2].prompt.token_ids.tolist() == [1, 2]


def test_a_prompt_that_rows_share_travels_once() -> None:
    """Whatever number of responses its group has."""
    rows = tuple(row(7, index, 0, list(range(4000)), 3) for index in range(8))
    b = replace(batch(), samples=rows, group_sizes=(8,))
    assert len(pack(b)) < 2 * 4 * 4000


def test_what_a_rollout_function_returned_stays() -> None:
    """It may be anything, so a batch with it travels without it."""
    sent = batch()
    come = unpack(pack(replace(sent, samples=tuple(replace(s, output=object()) for s in sent.samples))), Batch)
    assert plain(come) == plain(sent)
    assert {s.output for s in come.samples} == {None}


def test_a_batch_keeps_what_its_tokens_bring_along() -> None:
    """Images at their places in each row, one copy of each for the batch; rows with their types and shapes."""
    sent = with_more(batch())
    packed = pack(sent)
    assert len(packed) < sum(p.size for p in PICTURES) + 20_000
    come = unpack(packed, Batch)
    for was, is_now in zip(sent.samples, come.samples, strict=True):
        assert is_now.attached == was.attached
        assert is_now.prompt.attached == was.prompt.attached
        assert [p.attachment.data for p in is_now.attached] == [p.attachment.data for p in was.attached]
        assert is_now.extras.keys() == was.extras.keys()
        for name, array in was.extras.items():
            assert np.array_equal(is_now.extras[name], array)
            assert is_now.extras[name].dtype == array.dtype
    assert len({id(p.attachment) for s in come.samples for p in s.attached}) == 3
    for name in ("experts", "states"):
        assert np.array_equal(come.ragged()[name], sent.ragged()[name])


def test_two_images_of_one_size_are_two_prompts() -> None:
    """Their tokens are equal: a conversation with another image than its group's prompt keeps its own."""
    first, own = (
        replace(r, attached=placed, prompt=replace(r.prompt, attached=placed))
        for r, placed in (
            (row(7, 0, n, [1, 2], 3), (Placed(picture, 0, 1, (5,)),)) for n, picture in enumerate(PICTURES[:2])
        )
    )
    come = unpack(pack(replace(batch(), samples=(first, own), group_sizes=(2,))), Batch)
    assert [s.prompt.attached[0].attachment for s in come.samples] == PICTURES[:2]


def test_prompts_keep_their_images_and_the_paths_of_files() -> None:
    """Prompts of an evaluation: an image in memory travels as its bytes, one in a file as its path."""
    there = Attachment("image", "ab" * 32, 9, None, "/data/a.png")
    attached = (Placed(PICTURES[0], 0, 1, (5,)), Placed(there, 1, 2, (5,)))
    (come,) = unpack(pack([Prompt(np.array([1, 2, 3], np.int32), {"x": 1}, attached=attached)]), list[Prompt])
    assert come.attached == attached
    assert [p.attachment.data for p in come.attached] == [PICTURES[0].data, None]
    assert come.attached[1].attachment.path == "/data/a.png"


def test_what_engines_are_asked_and_answer_arrives_as_it_was() -> None:
    """Requests with their images and seeds, chunks with a version per token and their rows, limits, health."""
    asked = Request(
        attempt_id="a1", token_ids=TOKENS, sampling=SamplingParams(7, temperature=0.5, stop_token_ids=(2,), seed=3),
        sample_key=(4, 1), attached=(Placed(PICTURES[0], 0, 1, (5,)),), extras=("experts",), extras_from=2,
    )  # fmt: skip
    come = unpack(pack(asked), Request)
    assert (come.sampling, come.sample_key, come.attached) == (asked.sampling, asked.sample_key, asked.attached)
    assert np.array_equal(come.token_ids, TOKENS)
    said = Chunk(
        TOKENS, np.zeros(5, np.float32), PolicyVersion(1, 3), EngineFinish.STOP, 2, True,
        [(PolicyVersion(1, 2), 3), (PolicyVersion(1, 3), 2)], {"experts": np.ones((5, 2, 0), np.int16)},
    )  # fmt: skip
    chunk = unpack(pack(said), Chunk)
    assert (chunk.version, chunk.finish, chunk.stopped_at) == (said.version, EngineFinish.STOP, 2)
    assert chunk.versions == said.versions
    assert chunk.extras["experts"].shape == (5, 2, 0)
    can = Capabilities(logprob_kind=LogprobKind.RAW, vocab_size=9, max_context=8, eos_token_ids=(1, 2))
    assert unpack(pack(can), Capabilities) == can
    well = Health(ok=True, counters={"steps": 2.0}, load=EngineLoad(1, 2, 0.5))
    assert unpack(pack([well, well]), list[Health]) == [well, well]


def test_structs_responses_and_ledgers_arrive_as_they_were() -> None:
    """Also inside of another message: a struct has a response, which has several conversations."""

    class Told(msgspec.Struct):
        response: Response
        books: dict[str, Ledger]

    mask = np.array([1, 0, 1, 1, 1], np.uint8)
    of_a_tool = Conversation(TOKENS, TOKENS, np.zeros(5, np.float32), mask)
    response = Response(SampleId(3, 1), (of_a_tool, of_a_tool), FinishReason.LENGTH, {"a": [1, None]}, 0.5)
    books = {"tokens": Ledger(9, 4, 3, Counter({DropReason.STALE: 2}))}
    come = unpack(pack(Told(response, books)), Told)
    assert come.books == books
    assert type(come.books["tokens"].dropped) is Counter
    assert (come.response.sample_id, come.response.output) == (SampleId(3, 1), {"a": [1, None]})
    assert np.array_equal(come.response.loss_mask, mask)
    assert [c.prompt_ids.tolist() for c in come.response.conversations] == [TOKENS.tolist()] * 2


@pytest.mark.parametrize("order", ["<", ">"])
def test_arrays_of_any_byte_order_and_layout_arrive_as_their_numbers(order: str) -> None:
    """A machine of another byte order, and an array that is a view of another one, change no number."""
    numbers = np.arange(12, dtype=f"{order}i4").reshape(3, 4).T[::2]
    (come,) = unpack(pack([numbers]), list[np.ndarray])
    assert come.tolist() == numbers.tolist()
    assert come.dtype == np.int32
    assert come.flags.writeable


@pytest.mark.parametrize(
    "odd",
    [
        object(), np.array([object()]), np.array(["text"]), TOKENS.astype("M8[s]"), TOKENS.astype(np.longdouble),
        1 << 70, "\ud800", {"a": {1, object()}},
    ],
)  # fmt: skip
def test_what_cannot_travel_is_refused_where_it_is(odd: Any) -> None:
    """Objects, arrays of them, dates and numbers of more than 64 bits; nothing is pickled."""
    with pytest.raises(TypeError):
        pack(odd)


CHUNK = pack(Chunk(TOKENS, np.zeros(5, np.float32), PolicyVersion(0, 1)))


def _chunk(tokens: Any) -> bytes:
    return pack({"tokens": tokens, "logprobs": np.zeros(5, np.float32), "version": (0, 1)})


@pytest.mark.parametrize(
    "bad",
    [
        b"", b"\x00", CHUNK[:-1], CHUNK + b"\x00", pack(3), pack(None), pack(batch()), _chunk(TOKENS.astype(np.int64)),
        _chunk(TOKENS.astype(np.float32)), _chunk([1, 2]), _chunk(["|O", [1], b"12345678"]),
        _chunk(["<i4", [-1], b"1234"]), _chunk(["<i4", [3], b"1234"]), _chunk(["<i4,<i4", [1], b"12345678"]),
        _chunk(["no type", [1], b"1234"]),
        msgspec.msgpack.encode(([], msgspec.msgpack.Ext(1, b"\0\0\0\0"))),
        msgspec.msgpack.encode(([b"\x80"], msgspec.msgpack.Ext(1, b"\0\0\0\1"))),
        msgspec.msgpack.encode(([b"\x01"], msgspec.msgpack.Ext(1, b"\0\0\0\0"))),
        msgspec.msgpack.encode(([b"\xc1"], 1)), b"\x92\x90" + b"\x91" * 100_000,
    ],
)  # fmt: skip
def test_bytes_that_are_no_such_value_raise_one_error(bad: bytes) -> None:
    """Cut off, of another type, an array of objects or of another number type than its field has, a missing part."""
    with pytest.raises(LinkError, match="bytes that are not a valid Chunk"):
        unpack(bad, Chunk)


def test_bytes_of_chance_raise_one_error() -> None:
    """Whatever byte of a message is another one: it is read as a value of its type, or refused."""
    for at in range(len(CHUNK)):
        for bit in range(8):
            torn = bytearray(CHUNK)
            torn[at] ^= 1 << bit
            try:
                assert isinstance(unpack(bytes(torn), Chunk), Chunk)
            except LinkError:
                continue
