"""Extras: every token has the rows of the attempt that generated it, over cuts, restarts and batches, or is dropped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from core_machine import EOS, PROMPT, CoreMachine, asked

from april.core import commands as do
from april.core import events as ev
from april.core.attachments import wrong_rows
from april.core.sampling import SamplingParams
from april.core.settings import EngineLimits
from april.core.types import Attempt, Refill
from april.errors import CheckpointError, InvariantError

GIVES = EngineLimits("e0", 4096, None, (EOS,), extras=("experts",))
P = len(PROMPT.token_ids)


class Giving(CoreMachine):
    """A core whose engine gives two numbers per token: (the token that was read, the attempt's number)."""

    def rows(self, attempt: Attempt) -> dict[str, Any]:
        """The rows of all tokens of an attempt, and of those before that had none."""
        read = np.concatenate((attempt.request.token_ids, attempt.tape.packed()[0]))[attempt.request.extras_from : -1]
        number = int(attempt.id[-12:], 16)
        return {name: np.stack([read, np.full_like(read, number)], 1) for name in attempt.request.extras}

    def end(self, attempt_id: str, count: int = 10**6) -> list[do.Command]:
        attempt, before = self.in_flight[attempt_id], self.length
        self.tokens(attempt_id, count)
        if attempt.tape.count:
            attempt.tape.set_extras(self.rows(attempt), attempt.request.rows_wanted(0))
        commands = super().end(attempt_id, 0)
        assert self.length is before
        return commands


def giving(length: Any = 20, **changes: Any) -> Giving:
    """A machine that is asked for a batch of one sample, with rows."""
    return asked(length, (GIVES,), Giving, **({"extras": ("experts",)} | changes))


def test_each_row_is_of_the_attempt_that_generated_its_token() -> None:
    """Cut twice: the prompt's rows and the first tokens' are the first attempt's, the others those of later ones."""
    m = giving()
    for count in (7, 0, 5):
        (attempt,) = m.in_flight.values()
        m.end(attempt.id, count)
        assert not m.core.validate()
    m.finish(0)
    (row,) = m.batches[-1].samples
    ids = np.concatenate((row.prompt.token_ids, row.tokens))
    experts = row.extras["experts"]
    assert experts.shape == (P + 20 - 1, 2)
    assert not experts.flags.writeable
    assert np.array_equal(experts[:, 0], ids[:-1])
    made_by = [*[1] * (P - 1 + 7), *[3] * 5, *[4] * 8]  # the second attempt brought nothing
    assert experts[:, 1].tolist() == made_by
    padded, ragged = m.batches[-1].padded(), m.batches[-1].ragged()
    assert m.batches[-1].extras == ("experts",)
    assert np.array_equal(padded["experts"][0, : len(ids) - 1], experts)
    assert not padded["experts"][0, len(ids) - 1 :].any()
    assert np.array_equal(ragged["experts"], experts)
    assert ragged["extras_offsets"].tolist() == [0, len(experts)]


def test_rows_stand_in_the_columns_of_the_tokens_that_were_read() -> None:
    """With prompts padded on the left, too."""
    m = giving(n=2, samples=1, length={0: 3, 1: 9})
    m.finish(0, 1)
    arrays = m.batches[-1].padded(left_pad_prompts=True)
    for ids, mask, rows in zip(arrays["input_ids"], arrays["attention_mask"], arrays["experts"], strict=True):
        there = np.flatnonzero(mask)
        assert np.array_equal(rows[there[:-1], 0], ids[there[:-1]])
        assert not rows[there[-1]].any()


def test_tokens_without_their_rows_are_dropped_by_name_and_generated_again() -> None:
    """An attempt that is cut before its engine gave rows loses its tokens; the sample goes on from what has rows."""
    m = giving()
    m.end(m.only.id, 7)
    attempt = m.only
    m.tokens(attempt.id, 6)
    attempt.tape.drop_unnamed()
    assert attempt.tape.parsed == 6
    assert not attempt.tape.count
    CoreMachine.end(m, attempt.id, 0)
    assert m.dropped == {"no_extras": 6}
    m.check_ledger()
    assert m.only.request.extras_from == P + 7 - 1
    assert len(m.only.request.token_ids) == P + 7
    m.finish(0)
    assert len(m.batches[-1].samples[0].extras["experts"]) == P + 20 - 1


def test_a_state_has_the_rows_and_not_the_tokens_that_have_none_yet() -> None:
    """A running attempt has no rows yet, so its tokens are in no state; what was cut before is, with its rows."""
    m = giving()
    m.end(m.only.id, 7)
    m.tokens(m.only.id, 4)
    again = m.restarted()
    assert again.dropped == {"no_extras": 4}
    again.ask()
    assert again.only.request.extras_from == P + 7 - 1
    again.finish(0)
    experts = again.batches[-1].samples[0].extras["experts"]
    assert experts[:, 1].tolist()[: P - 1 + 7] == [1] * (P - 1 + 7)
    assert len(experts) == P + 20 - 1
    assert experts.dtype == np.int32


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda e: e["experts"].__setitem__(1, [8, 3]), "damaged"),
        (lambda e: e["experts"].__setitem__(0, "|O"), "no numbers"),
        (lambda e: e["experts"].__setitem__(2, b"1234"), "damaged"),
        (lambda e: e.clear(), "without experts"),
    ],
)
def test_wrong_rows_of_a_state_are_refused(change: Any, why: str) -> None:
    """Rows of another number or type, or none, never meet the tokens of a state."""
    m = giving()
    m.end(m.only.id, 7)
    state = m.saved()
    change(state["waiting"][0]["samples"][0]["chains"][0]["extras"])
    with pytest.raises(CheckpointError, match=why):
        m.restarted(state)


def test_rows_after_a_restart_have_the_layout_of_those_before() -> None:
    """A state with rows says what later rows look like; rows that differ among themselves are refused."""
    m = giving(n=1, samples=2)
    for attempt_id in list(m.in_flight):
        m.end(attempt_id, 7)
    state = m.saved()
    layout = m.restarted(state).core.engines.row_layout
    assert {name: (rows.shape, rows.dtype) for name, rows in layout.items()} == {"experts": ((0, 2), np.int32)}
    floats = {"experts": np.zeros((5, 2), np.float32)}
    assert wrong_rows(floats, ("experts",), 5, layout) == "rows of experts of type float32, after rows of type int32"
    assert wrong_rows({"experts": np.zeros((5, 2), np.int64)}, ("experts",), 5, layout) is None
    state["waiting"][0]["samples"][1]["chains"][0]["extras"]["experts"][0] = "<f4"
    with pytest.raises(CheckpointError, match=r"damaged.*of type float32, after rows of type int32"):
        m.restarted(state)


def test_rows_leave_with_their_tokens() -> None:
    """What is cut off a conversation takes its rows along, and what comes instead brings its own."""
    m = giving()
    m.end(m.only.id, 7)
    chain = m.sample(0).chains[0]
    assert len(chain.extras["experts"]) == chain.rows_due == P + 7 - 1
    assert chain.cut(4) == 3
    assert len(chain.extras["experts"]) == chain.rows_due == P + 4 - 1


def test_books_that_miss_a_row_are_found() -> None:
    """The core's own check counts rows against tokens."""
    m = giving()
    m.end(m.only.id, 7)
    chain = m.sample(0).chains[0]
    chain.extras = {"experts": chain.extras["experts"][:-1]}
    with pytest.raises(InvariantError, match="rows of extras"):
        m.core.validate()


def test_evaluations_want_no_rows() -> None:
    """Rows are for training: an evaluation asks for none, and keeps its tokens."""
    m = giving()
    m.finish(0)
    m.evaluate()
    assert m.only.sample.evaluation is not None
    assert m.only.request.extras == ()
    assert not m.only.tape.needs_rows


@pytest.mark.parametrize(("bound", "drawn"), [(2**40, [1]), (None, [1]), (257, [1]), (256, [])])
def test_held_rows_stop_drawing_beyond_the_need(bound: int | None, drawn: list[int]) -> None:
    """max_extras_bytes: at the bound no prompt is drawn that the step can do without."""
    more = {"over": 3, "refill": Refill.GROUP, "max_in_flight": 9, "max_extras_bytes": bound}
    m = giving({0: 50, 1: 50}, **more)
    for group in (0, 1):
        m.tokens(m.attempt(group).id, 15)
    m.finish(2)
    commands = m.next_step()
    assert m.core.buffer.extras_bytes == 2 * (P + 15 - 1) * 8
    assert [c.count for c in commands if isinstance(c, do.DrawPrompts)] == drawn


@pytest.mark.parametrize("empty", [0, 1])
def test_a_response_in_which_nothing_was_generated_has_rows_of_zeros(empty: int) -> None:
    """A tool has used up all of it: the batch has the rows of the others, and as many for it as it has tokens."""
    m = giving(n=2, samples=1, auto_call=False)
    for sample in list(m.to_call):
        full = sample.group == empty
        ids = np.concatenate((PROMPT.token_ids, np.full(m.core.settings.max_response_len, 9, np.int32)))
        m.post(ev.CallMade(sample, SamplingParams(5), ids if full else None))
    assert len(m.in_flight) == 1
    m.end(m.only.id)
    (batch,) = m.batches
    assert batch.extras == ("experts",)
    rows = {s.id.group: s.extras["experts"] for s in batch.samples}
    assert not rows[empty].any()
    assert rows[empty].shape == (P + m.core.settings.max_response_len - 1, 2)
    assert rows[1 - empty].any()
    assert batch.padded()["experts"].shape[:2] == batch.padded()["input_ids"].shape
    assert batch.ragged()["extras_offsets"][-1] == sum(map(len, rows.values()))
