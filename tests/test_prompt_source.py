"""Prompts are checked one by one as they are drawn, and named by position when they cannot be used."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from tiny_tokenizers import END, tokenizer

from april.core.types import Prompt
from april.driver.prompt_reader import as_prompt
from april.driver.prompt_source import PromptSource
from april.errors import CheckpointError, ConfigError
from april.processes.rank_packing import pack_call


def drawn(source: PromptSource, count: int) -> tuple[list[list[int]], bool, str | None]:
    """(token ids, whether the source has ended, error) of one draw."""
    prompts, exhausted, error = source.draw(count)
    return [p.token_ids.tolist() for p in prompts], exhausted, error


def places(source: PromptSource, count: int) -> list[tuple[int, int, int]]:
    """(epoch, position, last token) of the prompts of one draw."""
    return [(p.epoch, p.position, int(p.token_ids[-1])) for p in source.draw(count)[0]]


@pytest.mark.parametrize(
    "item",
    [
        [1, 2, 3],
        (1, 2, 3),
        np.array([1, 2, 3], np.uint16),
        np.array([1, 0, 2, 0, 3])[::2],
        Prompt(np.array([1, 2, 3], np.int32)),
        {"token_ids": [1, 2, 3]},
        MappingProxyType({"token_ids": np.array([1, 2, 3])}),
        {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]},
        UserDict(input_ids=[[1, 2, 3]], attention_mask=[[1, 1, 1]]),
        {"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.ones(1, 3)},
        [[1, 2, 3]],
        torch.tensor([1, 2, 3]),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_a_prompt_may_be(item: Any) -> None:
    """Sequences, arrays, mappings and Prompt all become contiguous int32 [P]."""
    prompt = as_prompt(item, 10, 0)
    assert prompt.token_ids.tolist() == [1, 2, 3]
    assert prompt.token_ids.dtype == np.int32
    assert prompt.token_ids.flags.c_contiguous


def test_the_rest_of_a_mapping_is_data() -> None:
    """Everything but token_ids goes to rewards and rollout functions untouched."""
    answer = object()
    assert as_prompt({"token_ids": [1], "answer": answer, 7: "x"}, 10, 0).data == {"answer": answer, 7: "x"}
    assert as_prompt(Prompt(np.array([1], np.int32), {"a": 1}), 10, 0).data == {"a": 1}
    assert as_prompt([1], 10, 0).data == {}


def test_what_a_tokenizer_returns() -> None:
    """``input_ids`` are the prompt; its mask is no data, and other keys are. With token_ids beside it, it is data."""
    made = as_prompt({"input_ids": [[1, 2]], "attention_mask": [[1, 1]], "answer": 4}, 10, 0)
    assert (made.token_ids.tolist(), made.data) == ([1, 2], {"answer": 4})
    made = as_prompt({"token_ids": [3], "input_ids": [1], "attention_mask": [0]}, 10, 0)
    assert (made.token_ids.tolist(), made.data) == ([3], {"input_ids": [1], "attention_mask": [0]})
    with pytest.raises(ConfigError, match="prompt 5 is padded"):
        as_prompt({"input_ids": [[0, 2]], "attention_mask": [[0, 1]]}, 10, 5)


def test_a_chat_template_of_transformers() -> None:
    """``apply_chat_template`` gives a BatchEncoding since transformers 5, a list before: both are prompts."""
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer("byte level"), eos_token=END)
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    chat = [{"role": "user", "content": "Hello world!"}]
    expected = fast("Hello world!")["input_ids"]
    for more in ({}, {"return_dict": True}, {"return_dict": False}, {"return_tensors": "pt"}):
        prompt = as_prompt(fast.apply_chat_template(chat, **more), 1000, 0)
        assert prompt.token_ids.tolist() == expected
        assert not prompt.data


def test_a_prompt_is_a_copy() -> None:
    """A buffer that its owner uses again changes no prompt."""
    buffer = np.array([1, 2], np.int32)
    prompt = as_prompt(buffer, 10, 0)
    buffer[:] = 9
    assert prompt.token_ids.tolist() == [1, 2]


class Elsewhere:
    """A tensor on another device."""

    def __str__(self) -> str:  # for the names of tests, which are the same in all processes
        return "a tensor elsewhere"

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


@pytest.mark.parametrize(
    ("item", "words"),
    [
        *(
            (item, "prompt 4: token_ids must be a non-empty flat list of integers")
            for item in (
                [], [[1], [2]], [[1], [2, 3]], [1.0], [True], ["a"], [2**70], {"token_ids": None}, {"token_ids": 5},
                Elsewhere(),
            )
        ),
        ([[1, 2], [3, 4]], r"on the CPU, got list of shape \[2, 2\], int64"),
        ({"token_ids": [1.0]}, r"on the CPU, got list of shape \[1\], float64"),
        ({"token_ids": "What?"}, r"got str; give a text as messages, .* or as token ids"),
        ([1, 10], "prompt 4: token id 10 is outside the engine's vocabulary of 10"),
        ([1, -1], "prompt 4: token id -1 is outside"),
        ({"prompt": "hi", "id": 1}, r"neither messages nor token_ids; its keys are \['id', 'prompt'\]; give a text as"),
        ({"prompt": [{"role": "user", "content": "hi"}]},
         "its 'prompt' is a chat: give it under the key messages, with"),
        ({"conversation": [{"role": "user"}], "id": 1}, "its 'conversation' is a chat: give it under the key messages"),
        ({"prompt_token_ids": [1]}, "if its 'prompt_token_ids' holds token ids, give them under the key token_ids$"),
        (["hello", "there"], r"got list of shape \[2\], <U5; give a text as messages"),
        (np.array(["hello", 3], object), r"got ndarray of shape \[2\], object; give a text as messages"),
        ("hello", "prompt 4 is of type str; expected a mapping with messages or token_ids, .*; give a text as"),
        (b"hello", "prompt 4 is of type bytes"),
        (7, "prompt 4 is of type int"),
        (None, "prompt 4 is of type NoneType"),
    ],
    ids=str,
)
def test_what_a_prompt_may_not_be(item: Any, words: str) -> None:
    """One sentence with the position of the prompt and what was expected."""
    with pytest.raises(ConfigError, match=words):
        as_prompt(item, 10, 4)


class Table:
    def __iter__(self) -> Iterator[str]:
        return iter(["question", "answer"])

    def iterrows(self) -> None: ...


def generated() -> Iterator[list[int]]:
    yield [1]


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ("text", "got str; april does not read files: give the rows of the file"),
        (b"bytes", "got bytes; april does not read files: give the rows of the file"),
        ({"token_ids": [1]}, "got dict; give a list of prompts, or one split of a data set"),
        (5, "got int"),
        (None, "got NoneType"),
        (generated, "got function; call the function, and give what it returns"),
        (UserDict, "got ABCMeta; call the function, and give what it returns"),
        (Table(), "got Table, which iterates over its columns; give its rows as mappings"),
    ],
)
def test_what_a_source_may_not_be(prompts: Any, words: str) -> None:
    """A single prompt or something that cannot be iterated is refused before anything starts, with what is meant."""
    sentence = f"prompts must be an iterable of prompts, {words}$"
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        PromptSource(prompts, 10)
    with pytest.raises(ConfigError, match=f"^evaluate: {sentence}"):
        pack_call("evaluate", {"prompts": prompts})


def test_draw() -> None:
    """Prompts in order, as many as asked for; the end is reported with what was left, and again after it."""
    source = PromptSource(([i] for i in range(1, 6)), 10)
    assert drawn(source, 2) == ([[1], [2]], False, None)
    assert source.position == 2
    assert drawn(source, 2) == ([[3], [4]], False, None)
    assert drawn(source, 2) == ([[5]], True, None)
    assert drawn(source, 2) == ([], True, None)
    assert source.position == 5


def test_good_prompts_before_a_bad_one_come_first() -> None:
    """The bad prompt is reported by the draw after them, once; the source goes on behind it."""
    source = PromptSource([[1], [2], [99], [3], "x", [4]], 10)
    assert drawn(source, 4) == ([[1], [2]], False, None)
    assert drawn(source, 4) == ([], False, "prompt 2: token id 99 is outside the engine's vocabulary of 10")
    assert drawn(source, 4)[0] == [[3]]
    assert "prompt 4 is of type str" in str(drawn(source, 4)[2])
    assert drawn(source, 4) == ([[4]], True, None)


class Loader:
    """Raises instead of its third prompt, and goes on."""

    def __init__(self, error: BaseException) -> None:
        self.count, self.error = 0, error

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        self.count += 1
        if self.count == 3:
            raise self.error
        return [self.count]


@pytest.mark.parametrize(
    ("error", "words"),
    [(OSError("shard 7\nis gone"), "OSError: shard 7 is gone"), (SystemExit("no licence"), "SystemExit: no licence")],
)
def test_a_source_that_raises_is_reported_like_a_bad_prompt(
    error: BaseException, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The position is named, the traceback is in the log, no prompt before it is lost; sys.exit ends no loop."""
    source = PromptSource(Loader(error), 10)
    assert drawn(source, 5)[0] == [[1], [2]]
    assert drawn(source, 5) == ([], False, f"the prompt source failed at prompt 2: {words}")
    assert "Traceback" in caplog.text
    assert drawn(source, 1)[0] == [[4]]


# ---------------------------------------------------------------- passes and restarts


class Shuffled:
    """A data set whose sampler is told the epoch, as those of data loaders are."""

    def __init__(self, sizes: int | list[int], fails_in: int | None = None) -> None:
        self.sizes = sizes
        self.epochs: list[int] = []
        self.fails_in = fails_in

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)
        if epoch == self.fails_in:
            self.fails_in = None
            raise OSError("shard list is gone")

    def __iter__(self) -> Iterator[list[int]]:
        size = self.sizes if isinstance(self.sizes, int) else self.sizes[self.epochs[-1]]
        first = self.epochs[-1]
        return iter([[(first + i) % size + 1] for i in range(size)])


SHUFFLED = [(e, i, (e + i) % 3 + 1) for e in range(3) for i in range(3)]
"""What three passes over ``Shuffled(3)`` give."""


def test_passes_name_every_prompt_by_epoch_and_position() -> None:
    """Pass after pass until the last one has ended; set_epoch is called before each."""
    data = Shuffled(3)
    assert places(PromptSource(data, 10, epochs=2), 10) == SHUFFLED[:6]
    assert data.epochs == [0, 1]
    assert places(PromptSource(Shuffled(3), 10, epochs=None), 7) == SHUFFLED[:7]


@pytest.mark.parametrize("count", range(7))
@pytest.mark.parametrize("epochs", [1, 2, None])
def test_a_new_source_goes_on_where_the_old_one_stood(count: int, epochs: int | None) -> None:
    """Saved after any number of prompts: together they hand over each prompt once, each pass in its own order."""
    expected = SHUFFLED[: 3 * (epochs or 3)]
    old, data = PromptSource(Shuffled(3), 10, epochs), Shuffled(3)
    before = places(old, count)
    new = PromptSource(data, 10, epochs)
    new.load_state_dict(old.state_dict())
    assert new.state_dict() == old.state_dict()
    assert before + places(new, len(expected) - len(before)) == expected
    whole = PromptSource(Shuffled(3), 10, epochs)
    places(whole, len(expected))
    assert new.state_dict() == whole.state_dict()
    assert new.draw(1)[1] == (epochs is not None)
    assert epochs != 2 or data.epochs == ([0, 0, 1] if count <= 3 else [0, 1])


@pytest.mark.parametrize(("epochs", "at"), [(1, 0), (2, 0), (2, 1), (None, 4)])
def test_fewer_prompts_than_before_the_restart(epochs: int | None, at: int) -> None:
    """Refused in one sentence, in the last pass as well, and the source stands where it stood."""
    before = PromptSource([[1], [2], [3], [4], [5]], 10, epochs=epochs)
    before.draw(5 * (at + 1))
    source = PromptSource([[1], [2], [3]], 10, epochs=epochs)
    with pytest.raises(CheckpointError) as caught:
        source.load_state_dict(before.state_dict())
    assert str(caught.value) == (
        f"the prompts ended after 3 of epoch {at}, where 5 had been drawn before; give the same prompts in every "
        "epoch, and after a restart"
    )
    assert drawn(source, 2)[0] == [[1], [2]]


@pytest.mark.parametrize(
    "state",
    [{}, {"epoch": 0}, {"epoch": None, "position": 1}, {"epoch": 0, "position": "x"}, {"epoch": -1, "position": 0},
     {"epoch": 0, "position": -1}, {"epoch": 2, "position": 0}, 5],
    ids=str,
)  # fmt: skip
def test_positions_that_cannot_be(state: Any) -> None:
    """CheckpointError, and the source stands where it stood."""
    source = PromptSource([[1], [2]], 10, epochs=2)
    source.draw(1)
    with pytest.raises(CheckpointError, match=r"the state (is damaged|was saved in epoch 2)"):
        source.load_state_dict(state)
    assert drawn(source, 1)[0] == [[2]]


def test_a_bad_prompt_that_nobody_was_told_of_is_reported_after_a_restart() -> None:
    """It counts as drawn only when its error was handed over."""
    prompts = [[1], "oops", [3]]
    source = PromptSource(prompts, 10)
    source.draw(2)
    assert source.state_dict()["position"] == 1
    again = PromptSource(prompts, 10)
    again.load_state_dict(source.state_dict())
    assert "prompt 1 is of type str" in str(again.draw(2)[2])
    assert again.state_dict()["position"] == 2
    once_more = PromptSource(prompts, 10)
    once_more.load_state_dict(again.state_dict())
    assert drawn(once_more, 1)[0] == [[3]]
    assert drawn(again, 1)[0] == [[3]]


def test_a_pass_that_cannot_begin_is_an_error_and_is_tried_again() -> None:
    """set_epoch and __iter__ are the user's: what they raise names the epoch, and ends nothing else."""
    source = PromptSource(Shuffled(2, fails_in=1), 10, epochs=2)
    assert drawn(source, 3)[0] == [[1], [2]]
    assert source.draw(1) == ([], False, "the prompt source failed to begin epoch 1: OSError: shard list is gone")
    assert drawn(source, 3)[0] == [[2], [1]]
    assert source.draw(1) == ([], True, None)


@pytest.mark.parametrize("epochs", [2, None])
def test_no_prompts_at_all(epochs: int | None) -> None:
    """An empty data set is an error, not an endless loop."""
    source = PromptSource([], 10, epochs=epochs)
    assert "there are no prompts" in str(source.draw(1)[2])


def test_restart_among_prompts_that_were_extended() -> None:
    """The position counts them too: given again, those that were drawn are skipped."""
    source = PromptSource([[1]], 10)
    source.extend([[2], [3], [4]])
    assert drawn(source, 3)[0] == [[1], [2], [3]]
    again = PromptSource([[1]], 10)
    again.load_state_dict(source.state_dict())
    again.extend([[2], [3], [4]])
    assert drawn(again, 5)[0] == [[4]]


# ---------------------------------------------------------------- sources that fail once


class Flaky:
    """Prompts that end in 0 to 19; ``fails`` are the positions at which the next look fails, once each."""

    def __init__(self, *fails: int) -> None:
        self.fails = list(fails)

    def __getitem__(self, i: int) -> list[int]:
        if i >= 20:
            raise IndexError
        if i in self.fails:
            self.fails.remove(i)
            raise OSError("network")
        return [1, 2 + i]


def drained(source: PromptSource, count: int = 3) -> tuple[list[tuple[int, int, int]], list[str]]:
    """(epoch, position, last token) of everything that comes, and the errors between."""
    seen, errors, exhausted = [], [], False
    for _ in range(100):
        if exhausted:
            break
        prompts, exhausted, error = source.draw(count)
        seen += [(p.epoch, p.position, int(p.token_ids[-1])) for p in prompts]
        errors += [] if error is None else [error]
    return seen, errors


@pytest.mark.parametrize("fails", [(7,), (0,), (19,), (7, 7), (3, 11, 11)])
def test_a_source_that_fails_goes_on_where_it_was(fails: tuple[int, ...]) -> None:
    """Each failure is told once, and no prompt of the pass is left out or drawn twice."""
    seen, errors = drained(PromptSource(Flaky(*fails), 100, epochs=2))  # type: ignore[arg-type]
    assert seen == [(epoch, i, 2 + i) for epoch in (0, 1) for i in range(20)]
    assert len(errors) == len(fails)
    assert all("the prompt source failed at prompt" in error and "OSError: network" in error for error in errors)


def test_a_generator_that_fails_has_ended() -> None:
    """Its rest is not passed over without a word: every draw says so, until more prompts are given."""
    source = PromptSource((i for i in Flaky(7)), 100)  # type: ignore[attr-defined]
    seen, errors = drained(source)
    assert seen == [(0, i, 2 + i) for i in range(7)]
    assert errors[0] == "the prompt source failed at prompt 7: OSError: network"
    assert len(set(errors[1:])) == 1
    assert "after 7 prompts of epoch 0, and gives no more; restart from a checkpoint" in errors[1]
    source.extend([[3], [4]])
    seen, errors = drained(source)
    assert (seen, errors) == ([(0, 7, 3), (0, 8, 4)], [])
