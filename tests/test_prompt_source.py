"""Prompts are checked one by one as they are drawn, and named by position when they cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from april.core.types import Prompt
from april.driver.prompt_source import PromptSource, as_prompt
from april.errors import CheckpointError, ConfigError


def ids(prompts: list[Prompt]) -> list[list[int]]:
    return [p.token_ids.tolist() for p in prompts]


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


def test_a_prompt_is_a_copy() -> None:
    """A buffer that its owner uses again changes no prompt."""
    buffer = np.array([1, 2], np.int32)
    prompt = as_prompt(buffer, 10, 0)
    buffer[:] = 9
    assert prompt.token_ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ([], "prompt 4: token_ids must be a non-empty flat list of integers"),
        ([[1], [2]], "prompt 4: token_ids must be a non-empty flat list"),
        ([[1], [2, 3]], "prompt 4: token_ids must be a non-empty flat list"),
        ([1.0], "prompt 4: token_ids must be a non-empty flat list"),
        ([True], "prompt 4: token_ids must be a non-empty flat list"),
        (["a"], "prompt 4: token_ids must be a non-empty flat list"),
        ([2**70], "prompt 4: token_ids must be a non-empty flat list"),
        ({"token_ids": None}, "prompt 4: token_ids must be a non-empty flat list"),
        ({"token_ids": 5}, "prompt 4: token_ids must be a non-empty flat list"),
        ([1, 10], "prompt 4: token id 10 is outside the engine's vocabulary of 10"),
        ([1, -1], "prompt 4: token id -1 is outside"),
        ({"prompt": "hi", "id": 1}, r"prompt 4 has no token_ids; its keys are \['id', 'prompt'\]"),
        ("hello", "prompt 4 is a str.*apply your chat template"),
        (b"hello", "prompt 4 is a bytes"),
        (7, "prompt 4 is a int"),
        (None, "prompt 4 is a NoneType"),
    ],
    ids=str,
)
def test_what_a_prompt_may_not_be(item: Any, words: str) -> None:
    """One sentence with the position of the prompt and what was expected."""
    with pytest.raises(ConfigError, match=words):
        as_prompt(item, 10, 4)


@pytest.mark.parametrize("prompts", ["text", b"bytes", {"token_ids": [1]}, 5, None], ids=str)
def test_what_a_source_may_not_be(prompts: Any) -> None:
    """A single prompt or something that cannot be iterated is refused before anything starts."""
    with pytest.raises(ConfigError, match="prompts must be an iterable of prompts, got"):
        PromptSource(prompts, 10)


def test_draw() -> None:
    """Prompts in order, as many as asked for; the end is reported with what was left, and again after it."""
    source = PromptSource(([i] for i in range(1, 6)), 10)
    assert ids(source.draw(2)[0]) == [[1], [2]]
    assert source.position == 2
    prompts, exhausted, error = source.draw(2)
    assert (ids(prompts), exhausted, error) == ([[3], [4]], False, None)
    prompts, exhausted, error = source.draw(2)
    assert (ids(prompts), exhausted, error) == ([[5]], True, None)
    assert source.draw(2) == ([], True, None)
    assert source.position == 5


def test_good_prompts_before_a_bad_one_come_first() -> None:
    """The bad prompt is reported by the draw after them, once; the source goes on behind it."""
    source = PromptSource([[1], [2], [99], [3], "x", [4]], 10)
    prompts, exhausted, error = source.draw(4)
    assert (ids(prompts), exhausted, error) == ([[1], [2]], False, None)
    prompts, exhausted, error = source.draw(4)
    assert (prompts, exhausted) == ([], False)
    assert error is not None
    assert "prompt 2: token id 99" in error
    assert ids(source.draw(4)[0]) == [[3]]
    assert "prompt 4 is a str" in str(source.draw(4)[2])
    prompts, exhausted, error = source.draw(4)
    assert (ids(prompts), exhausted, error) == ([[4]], True, None)


def test_a_source_that_raises_is_reported_like_a_bad_prompt(caplog: pytest.LogCaptureFixture) -> None:
    """A data loader's exception names the position, keeps its traceback in the log and loses no prompt before it."""

    class Loader:
        def __init__(self) -> None:
            self.count = 0

        def __iter__(self) -> Iterator[list[int]]:
            return self

        def __next__(self) -> list[int]:
            self.count += 1
            if self.count == 3:
                raise OSError("shard 7\nis gone")
            return [self.count]

    source = PromptSource(Loader(), 10)
    assert ids(source.draw(5)[0]) == [[1], [2]]
    prompts, exhausted, error = source.draw(5)
    assert (prompts, exhausted) == ([], False)
    assert error == "the prompt source failed at prompt 2: OSError: shard 7 is gone"
    assert "Traceback" in caplog.text
    assert ids(source.draw(1)[0]) == [[4]]


@pytest.mark.parametrize("drawn", range(7))
@pytest.mark.parametrize("epochs", [1, 2, None])
def test_restart_goes_on_with_the_next_prompt(drawn: int, epochs: int | None) -> None:
    """What was drawn is skipped, and nothing else: both lives together draw what one would have drawn."""
    prompts = [[i] for i in range(1, 5)]

    def some(source: PromptSource, count: int) -> list[tuple[int, int, int]]:
        return [(p.epoch, p.position, int(p.token_ids[0])) for p in source.draw(count)[0]]

    first = PromptSource(prompts, 10, epochs)
    before = some(first, drawn)
    second = PromptSource(prompts, 10, epochs)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()

    whole = [(e, i, i + 1) for e in range(3) for i in range(4)][: (epochs or 3) * 4]
    assert before + some(second, len(whole) - len(before)) == whole
    assert second.draw(1)[1] == (epochs is not None)


def test_restart_among_fewer_prompts_is_an_error_where_another_pass_would_hide_it() -> None:
    """The data set became smaller: the position is beyond its end."""
    source = PromptSource([[1], [2]], 10, epochs=3)
    source.load_state_dict({"epoch": 1, "position": 3})
    prompts, exhausted, error = source.draw(1)
    assert (prompts, exhausted) == ([], False)
    assert "the prompts ended after 2 of epoch 1, where 3 had been drawn before" in str(error)


def test_empty_prompts_with_more_passes_are_an_error() -> None:
    """An endless loop over nothing has no end."""
    assert "the prompts ended after 0 of epoch 0" in str(PromptSource([], 10, epochs=None).draw(1)[2])


def test_epoch_that_the_configuration_does_not_have_is_refused() -> None:
    """The state belongs to a longer run."""
    with pytest.raises(CheckpointError, match="saved in epoch 2, the configuration has epochs=2"):
        PromptSource([[1]], 10, epochs=2).load_state_dict({"epoch": 2, "position": 0})


def test_restart_among_prompts_that_were_extended() -> None:
    """The position counts them too: given again, those that were drawn are skipped."""
    source = PromptSource([[1]], 10)
    source.extend([[2], [3], [4]])
    assert ids(source.draw(3)[0]) == [[1], [2], [3]]
    again = PromptSource([[1]], 10)
    again.load_state_dict(source.state_dict())
    assert again.draw(1) == ([], True, None)
    again.extend([[2], [3], [4]])
    assert ids(again.draw(5)[0]) == [[4]]


def test_samplers_are_told_the_epoch() -> None:
    """set_epoch is called before each pass, and with the right number after a restart."""

    class Shuffled:
        told: list[int]

        def __init__(self) -> None:
            self.told = []

        def set_epoch(self, epoch: int) -> None:
            self.told.append(epoch)

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[1 + self.told[-1]], [5 + self.told[-1]]])

    sampler = Shuffled()
    source = PromptSource(sampler, 10, epochs=2)
    assert ids(source.draw(3)[0]) == [[1], [5], [2]]
    assert sampler.told == [0, 1]
    again = PromptSource(Shuffled(), 10, epochs=2)
    again.load_state_dict(source.state_dict())
    assert ids(again.draw(3)[0]) == [[6]]


def test_iterators_cannot_be_passed_over_twice() -> None:
    """A generator has one pass; more are refused before anything starts."""
    with pytest.raises(ConfigError, match=r"iterated only once \(list_iterator\)"):
        PromptSource(iter([[1]]), 10, epochs=2)
