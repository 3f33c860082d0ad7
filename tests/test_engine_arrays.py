"""Arrays of an engine are copied and checked as they come: april holds what the engine gave, and all of it fits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import april
from april.core.batch import Batch
from april.engines.protocol import Chunk, Request
from april.testing import FakeEngine, rollouts, run_virtual

NAME = "routed_experts"
Change = Callable[[Request, Chunk], Chunk]


class Changed(FakeEngine):
    """An engine whose chunks are changed on their way, and whose arrays are overwritten once a chunk was taken."""

    def __init__(self, change: Change, *, reuses: bool = False) -> None:
        super().__init__(
            "e", lengths=lambda r: 20 + 7 * r.sample_key[1], seconds_per_token=0.01, chunk_tokens=5, extras=[NAME]
        )
        self._change, self._reuses = change, reuses

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        async for chunk in super().generate(request):
            given = self._change(request, chunk)
            yield given
            if self._reuses:
                for array in (given.tokens, given.logprobs, *given.extras.values()):
                    array[:] = 1


def in_buffers(request: Request, chunk: Chunk) -> Chunk:
    """Arrays that lie in larger ones, every second number of which is another's."""

    def within(array: Any) -> Any:
        buffer = np.zeros((2 * len(array), *array.shape[1:]), array.dtype)
        buffer[::2] = array
        return buffer[::2]

    rows = {name: within(array) for name, array in chunk.extras.items()}
    return replace(chunk, tokens=within(chunk.tokens), logprobs=within(chunk.logprobs), extras=rows)


def with_rows(change: Callable[[Request, Any], dict[str, Any]]) -> Change:
    """Other extras in place of the engine's."""
    return lambda request, chunk: replace(chunk, extras=change(request, chunk.extras[NAME])) if chunk.extras else chunk


def batches(engine: FakeEngine, steps: int = 3, *, honest: bool = True) -> list[Batch]:
    """The batches of a run whose steps cut responses; ``honest``: nothing that the engine gives is refused."""
    made: list[Batch] = []

    async def program() -> None:
        config = april.Config(
            rollout_batch_size=2, over_sampling_batch_size=4, n_samples_per_prompt=2, max_response_len=60, extras=NAME,
        )  # fmt: skip
        async with rollouts(config, prompts=[[1, 2, 3]] * 40, reward=None, engines=[engine]) as run:
            for _ in range(steps):
                made.append(await run.next_batch())
                made[-1].padded()
                await run.weight_update()
            if honest:
                run.audit()

    run_virtual(program())
    return made


def content(made: list[Batch]) -> list[dict[str, Any]]:
    return [{name: array.tolist() for name, array in batch.ragged().items()} for batch in made]


def test_an_engine_may_use_its_buffers_again() -> None:
    """Delivered tokens, log-probabilities and rows are those that came, whatever became of the engine's arrays."""
    assert content(batches(Changed(in_buffers, reuses=True))) == content(batches(Changed(lambda _, chunk: chunk)))


def test_extras_that_were_not_asked_for_are_left_out_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Now and then, or always, over cuts: the run goes on with the rows that it wants."""

    def change(request: Request, rows: Any) -> dict[str, Any]:
        return {"more": rows[:1], NAME: rows} if int(request.attempt_id[-1], 16) % 2 else {NAME: rows}

    made = batches(Changed(with_rows(change)))
    assert {batch.extras for batch in made} == {(NAME,)}
    assert content(made) == content(batches(Changed(lambda _, chunk: chunk)))
    assert [r.getMessage() for r in caplog.records if "more" in r.getMessage()] == [
        "engine e returns more with its tokens, which the setting extras does not name; april drops these rows"
    ]
    assert made[-1].metrics["unasked_extras"] > 1


@pytest.mark.parametrize(
    ("spoilt", "says"),
    [
        (lambda rows: np.concatenate([rows, rows], axis=-1), "of shape"),
        (lambda rows: rows.reshape(len(rows), -1), "of shape"),
        (lambda rows: rows.astype(np.float32), "of type float32, after rows of type"),
        (lambda rows: rows.astype(np.longdouble), "not numbers of up to 8 bytes"),
        (lambda rows: rows > 0, r"not numbers of up to 8 bytes \(bool\)"),
        (lambda rows: rows.tolist(), f"no rows of {NAME}"),
        (lambda rows: rows[:-1], f"rows of {NAME}, but"),
    ],
)
def test_rows_that_do_not_fit_the_runs_are_refused_where_they_come(
    spoilt: Callable[[Any], Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of one sample that no batch could hold beside the others' are that engine's error; they are made again."""
    seen: list[str] = []

    def change(request: Request, rows: Any) -> dict[str, Any]:
        seen.append(request.attempt_id)
        return {NAME: spoilt(rows) if len(seen) in (3, 5) else rows}

    made = batches(Changed(with_rows(change)), honest=False)
    assert len({(s.extras[NAME].shape[1:], s.extras[NAME].dtype) for batch in made for s in batch.samples}) == 1
    assert sum(batch.metrics["failed_attempts"] for batch in made) == 2
    assert says.replace("\\", "") in caplog.text


def test_rows_of_other_widths_fit_together() -> None:
    """Small ids may take one byte in one answer and two in the next: a batch has the wider type, and the same ids."""
    widths = [np.uint8, ">u2", np.uint64]
    change = with_rows(lambda r, rows: {NAME: rows.astype(widths[int(r.attempt_id[-4:], 16) % 3])})
    plain = with_rows(lambda r, rows: {NAME: rows.astype(np.uint64)})
    made = batches(Changed(change))
    assert content(made) == content(batches(Changed(plain)))
    assert all(s.extras[NAME].dtype.isnative for batch in made for s in batch.samples)


def test_an_engine_cannot_write_into_a_prompt() -> None:
    """The ids of a request are the group's own: an engine that writes into them hears of it, and no sample changes."""
    prompts = np.arange(1, 4, dtype=np.int32)
    heard: list[str] = []

    def change(request: Request, chunk: Chunk) -> Chunk:
        if not request.response_offset:
            with pytest.raises(ValueError, match="read-only") as error:
                request.token_ids[0] = 9
            heard.append(str(error.value))
        return chunk

    made = batches(Changed(change), 1)
    assert heard
    assert all(np.array_equal(s.prompt.token_ids, prompts) for s in made[0].samples)
    made[0].samples[0].prompt.token_ids[0] = 7  # a batch's arrays are the trainer's
    assert np.array_equal(made[0].samples[1].prompt.token_ids, prompts)
