"""What travels between ranks arrives as it was: rows of several conversations, their prompts, and evaluations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from several_rows import batch, row

from april.core.attachments import Attachment, Placed
from april.core.batch import Batch
from april.core.types import FinishReason, Prompt, SampleId
from april.driver.loop_thread import Reply
from april.driver.rewards import Conversation, EvaluationResult, Response
from april.processes import rank_messages as say
from april.processes.content import (
    pack_batch,
    pack_call,
    pack_evaluation,
    unpack_batch,
    unpack_call,
    unpack_evaluation,
)
from april.processes.member import Member
from april.processes.ranks import Ranks


def plain(b: Batch) -> list[Any]:
    """All that the rows hold."""
    return [
        (
            s.id, s.chain, s.prompt.token_ids.tolist(), dict(s.prompt.data), s.prompt.epoch, s.prompt.position,
            s.tokens.tolist(), s.logprobs.tolist(), s.loss_mask.tolist(), s.segments, s.staleness, s.reward, s.cohort,
            s.finish, s.attempts, s.resumes, s.attached, s.prompt.attached,
        )
        for s in b.samples
    ]  # fmt: skip


def test_rows_keep_their_own_prompt_and_the_number_of_their_conversation() -> None:
    """Rows of a sample arrive side by side, each with what its own conversation began with."""
    sent = batch()
    come = unpack_batch(pack_batch(sent))
    assert plain(come) == plain(sent)
    assert come.sample_numbers.tolist() == [0, 0, 0, 1, 2, 3, 3]
    assert come.advantages("rloo").tolist() == sent.advantages("rloo").tolist()
    come.samples[0].prompt.token_ids[0] = 99
    assert come.samples[2].prompt.token_ids.tolist() == [1, 2]


def test_shares_of_ranks_have_whole_samples() -> None:
    """A sample's rows go to one rank, by samples and by tokens; what a loss is divided by counts samples."""
    for by in ("samples", "tokens"):
        shares = [unpack_batch(pack_batch(share)) for share in batch().split(3, by)]  # type: ignore[arg-type]
        ids = [{s.id for s in share.samples} for share in shares]
        assert sum(map(len, ids)) == len(set.union(*ids)) == 4
        assert sorted(str(row) for share in shares for row in plain(share)) == sorted(map(str, plain(batch())))
        assert {share.share.samples for share in shares} == {4}


def test_a_row_of_one_conversation_repeats_no_prompt() -> None:
    """Where all samples are one row, the prompt travels once for its group."""
    rows = tuple(row(7, index, 0, list(range(4000)), 3) for index in range(8))
    b = replace(batch(), samples=rows, group_sizes=(8,))
    assert len(pack_batch(b)) < 2 * 4 * 4000


def test_an_evaluation_keeps_all_conversations_of_a_response() -> None:
    """Responses of another rank have the conversations that those of rank 0 have, in their order."""

    def conversation(*prompt: int) -> Conversation:
        tokens = np.array([*prompt, 5], np.int32)
        mask = np.ones(len(tokens), np.uint8)
        return Conversation(np.array(prompt, np.int32), tokens, np.zeros(len(tokens), np.float32), mask)

    def response(index: int, *conversations: Conversation) -> Response:
        _, tokens, logprobs, mask = conversations[0]
        return Response(SampleId(0, index), tokens, logprobs, mask, FinishReason.STOP, {"x": 1}, 1.0, conversations)

    several = response(0, conversation(1, 2), conversation(3), conversation(4, 4))
    sent = EvaluationResult(((several, response(1, conversation(1, 2))),), np.array([[1.0, 0.0]]))
    ((first, second),) = unpack_evaluation(pack_evaluation(sent), None).responses
    for come, was in ((first, several), (second, sent.responses[0][1])):
        assert len(come.conversations) == len(was.conversations)
        for a, b in zip(come.conversations, was.conversations, strict=True):
            assert all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))
        assert come.conversations[0].tokens is come.tokens


PICTURES = [Attachment.of("image", bytes([n]) * 50_000) for n in range(3)]


def with_more(b: Batch) -> Batch:
    """Its rows with images, and rows for their tokens: one conversation has an image of a tool besides."""
    rows = []
    for s in b.samples:
        prompt = replace(s.prompt, attached=(Placed(PICTURES[s.id.group - 7], 0, 1, (5,)),))
        more = (Placed(PICTURES[2], len(prompt.token_ids) + 1, 2, (5, 6)),) if s.chain == 4 else ()
        count = len(prompt.token_ids) + len(s.tokens) - 1
        extras = {
            "experts": np.arange(count * 6, dtype=np.uint8).reshape(count, 3, 2),
            "states": np.full((count, 4), s.reward, np.float16),
        }
        rows.append(replace(s, prompt=prompt, attached=(*prompt.attached, *more), extras=extras))
    return replace(b, samples=tuple(rows))


def test_a_batch_keeps_what_its_tokens_bring_along() -> None:
    """Images at their places in each row, one copy of each for the batch; rows with their types and shapes."""
    sent = with_more(batch())
    packed = pack_batch(sent)
    assert len(packed) < sum(p.size for p in PICTURES) + 20_000
    come = unpack_batch(packed)
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
    own = replace(row(7, 0, 1, [1, 2], 3), attached=(Placed(PICTURES[1], 0, 1, (5,)),))
    own = replace(own, prompt=replace(own.prompt, attached=own.attached))
    first = replace(row(7, 0, 0, [1, 2], 3), attached=(Placed(PICTURES[0], 0, 1, (5,)),))
    first = replace(first, prompt=replace(first.prompt, attached=first.attached))
    come = unpack_batch(pack_batch(replace(batch(), samples=(first, own), group_sizes=(2,))))
    assert [s.prompt.attached[0].attachment for s in come.samples] == PICTURES[:2]


def test_a_prompt_that_ranks_evaluate_keeps_its_images() -> None:
    """Their arguments travel to the core's actor; a file travels as its path."""
    there = Attachment("image", "ab" * 32, 9, None, "/data/a.png")
    attached = (Placed(PICTURES[0], 0, 1, (5,)), Placed(there, 1, 2, (5,)))
    prompt = Prompt(np.array([1, 2, 3], np.int32), {"x": 1}, attached=attached)
    _, ([come], _), _ = unpack_call(pack_call("evaluate", [[prompt], 2], {}), lambda: None)
    assert come.attached == attached
    assert [p.attachment.data for p in come.attached] == [PICTURES[0].data, None]
    assert come.attached[1].attachment.path == "/data/a.png"


def test_a_share_that_is_too_long_for_a_frame_comes_in_parts() -> None:
    """However many: the answer of a call and what is shown to one rank are whole again, and not mixed up."""
    content = bytes(range(256)) * (5 * say.PART_BYTES // 512)
    member = Member(Ranks(rank=1, world_size=2, address="127.0.0.1:1", token="00" * 32))
    try:
        reply = Reply[bytes]()
        member._asked[0] = reply
        answer = list(say.frames(say.Answer(0, content)))
        told = list(say.frames(say.Shown(0, content[::-1])))
        assert len(answer) == len(told) == 4
        assert max(map(len, answer + told)) < say.PART_BYTES + 100
        frames = [frame for pair in zip(answer, told, strict=True) for frame in pair]

        async def hear() -> None:
            for frame in frames:
                member._frame(frame)

        member._thread.run(hear)
        (end,) = member._come[0]
        assert isinstance(end, say.Answer)
        assert end.content == content
        assert reply.result() == content[::-1]
        assert not member._parts
    finally:
        member._thread.begin_to_stop(None)
        member._thread.stop()
