"""What travels between ranks arrives as it was: rows of several conversations, their prompts, and evaluations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from several_rows import batch, row

from april.core.batch import Batch
from april.core.types import FinishReason, SampleId
from april.driver.rewards import Conversation, EvaluationResult, Response
from april.processes.content import pack_batch, pack_evaluation, unpack_batch, unpack_evaluation


def plain(b: Batch) -> list[Any]:
    """All that the rows hold."""
    return [
        (
            s.id, s.chain, s.prompt.token_ids.tolist(), dict(s.prompt.data), s.prompt.epoch, s.prompt.position,
            s.tokens.tolist(), s.logprobs.tolist(), s.loss_mask.tolist(), s.segments, s.staleness, s.reward, s.cohort,
            s.finish, s.attempts, s.resumes,
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
