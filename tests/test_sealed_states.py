"""The seal of a state: it outlives what keeps states, and nothing that was changed passes it."""

from __future__ import annotations

import json
from datetime import date
from enum import IntEnum, StrEnum
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from saved_rollouts import by_torch, new, plain
from virtual_rollouts import prompt_ids, virtual

from april.core.state_checksum import LARGEST_ARRAY, checksum, data_out, is_plain, seal, verify_checksum
from april.core.types import SampleId
from april.driver.rollout_driver import copy_outputs
from april.errors import CheckpointError
from april.serialization.plain_values import plain as as_plain
from april.serialization.plain_values import restored
from april.serialization.state_file import LONG, MAGIC, _Head, checksum_of, pack, unpack

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


def empty_bytes(value: Any, path: str = "") -> list[str]:
    """Places of empty bytes, which torch.load does not read."""
    if isinstance(value, dict):
        return [p for key, item in value.items() for p in empty_bytes(item, f"{path}.{key}")]
    if isinstance(value, list):
        return [p for i, item in enumerate(value) for p in empty_bytes(item, f"{path}[{i}]")]
    return [path] if value == b"" else []


# ---------------------------------------------------------------- the checksum


@given(VALUES)
def test_msgpack_and_torch_keep_the_checksum(value: Any) -> None:
    """What comes back is what was sealed."""
    assert checksum("x", plain(value)) == checksum("x", value)


@given(VALUES, VALUES)
def test_other_values_have_other_checksums(one: Any, other: Any) -> None:
    """And equal ones the same, however a dict is ordered."""

    def unordered(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: unordered(value[key]) for key in reversed(value)}
        return [unordered(v) for v in value] if isinstance(value, list) else value

    assert checksum("x", one) == checksum("x", unordered(one))
    same = msgspec.msgpack.encode(one, order="sorted") == msgspec.msgpack.encode(other, order="sorted")
    assert same or one == other or checksum("x", one) != checksum("x", other)


@pytest.mark.parametrize(
    ("value", "comes_back"),
    [
        ((1, (2, "x")), [1, [2, "x"]]),
        ({5: "a", None: "b", True: "c"}, {"true": "c", "5": "a", "null": "b"}),
        (np.arange(4, dtype=np.int16), [0, 1, 2, 3]),
        (torch.tensor([[0.5, 1.0]]), [[0.5, 1]]),
        (np.float32(0.1), float(np.float32(0.1))),
        (float("nan"), json.loads("NaN")),
        ("\ud800", "\ud800"),
        (bytearray(b"x"), b"x"),
        (2**100, 2**100),
    ],
    ids=repr,
)
def test_other_forms_of_the_same_value(value: Any, comes_back: Any) -> None:
    """Tuples become lists, keys become text, arrays become lists of numbers: by msgpack, by JSON, by adapters."""
    assert checksum("x", value) == checksum("x", comes_back)


def test_what_nobody_can_compare_is_named_and_left_out() -> None:
    """An object, a set, a huge array, something that holds itself: the rest of the data is checked all the same."""
    loop: list[Any] = []
    loop.append(loop)
    data = {
        "answer": [1, {"a": (2,)}], "image": np.zeros(LARGEST_ARRAY + 1, np.uint8), "object": object(), "set": {1},
        "day": date(2026, 1, 1), "loop": loop, 7: "seven", (1, 2): "a tuple's name",
    }  # fmt: skip
    out, unchecked = data_out(data)
    assert unchecked == sorted(["image", "object", "set", "day", "loop"])
    assert not is_plain(object())
    assert out["image"] is data["image"]

    def state(**changes: Any) -> Any:
        return {"groups": [{"data": {**out, **changes}, "unchecked": unchecked}]}

    assert checksum("x", state()) == checksum("x", state(object=5, image=None))
    assert checksum("x", state()) != checksum("x", state(answer=[1, {"a": (3,)}]))


def test_data_of_a_state_is_a_copy() -> None:
    """A reward that goes on writing into its prompt does not break the seal of a state on its way to the disk."""
    data = {"history": [1], "scores": np.zeros(2)}
    out, unchecked = data_out(data)
    data["history"].append(2)  # type: ignore[attr-defined]
    data["scores"][0] = 1.0  # type: ignore[index]
    assert (out["history"], out["scores"].tolist(), unchecked) == ([1], [0.0, 0.0], [])


def test_kinds_and_formats() -> None:
    """One sentence each for what is no state, another kind, another format."""
    state = seal("rollouts", {"a": 1})
    verify_checksum("rollouts", state)
    for wrong, words in (
        (5, "not a state that april's"), ({"a": 1}, "not a state that april's"),
        (state | {"format": 1}, "has format 1; this version of april reads format 4"),
        (seal("desk", {"a": 1}), "a state of april's 'desk'"), (state | {"a": 2}, "changed after state_dict"),
        (state | {"b": 2}, "is damaged"), (state | {"a": object()}, "is damaged: a object is not a plain value"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=words):
            verify_checksum("rollouts", wrong)


# ---------------------------------------------------------------- states of a scheduler


def a_state() -> Any:
    """With partials, samples without tokens, surplus, and a batch that was not trained on."""
    kept: list[Any] = []

    async def program() -> None:
        prompts = [{"token_ids": prompt_ids(i), "answer": {"of": (i,), 3: 0.5}} for i in range(30)]
        run = new(prompts=iter(prompts), max_in_flight=3, over=6)
        await run.step()
        await run.driver.next_batch()
        kept.append(run.driver.state_dict(None))
        await run.close()

    virtual(program)
    return kept[0]


def test_torch_reads_a_state_whose_samples_have_no_tokens() -> None:
    """The recipe of the README, weights_only included: there are no empty bytes anywhere in it."""
    state = a_state()
    samples = [s for part in ("ready", "waiting") for g in state["core"][part] for s in g["samples"]]
    tokens = [chain["tokens"] for s in samples for chain in s["chains"]]
    assert None in tokens
    assert any(tokens)
    assert empty_bytes(state) == []
    verify_checksum("rollouts", by_torch(state))
    verify_checksum("rollouts", plain(state))


class Verdict(StrEnum):
    RIGHT = "right"


class Level(IntEnum):
    HARD = 3


def test_what_functions_return_can_be_read_again_wherever_it_was_saved() -> None:
    """NumPy's float64 is a float, and torch.load refuses it with the whole checkpoint; a tool's output may be any.
    NumPy's other numbers stay its numbers."""
    returned = {
        "mean": np.float64(0.5), "verdict": Verdict.RIGHT, "level": Level.HARD, "yes": True, "seen": {np.int64(7): b""},
        Verdict.RIGHT: -(2**70), "output of a tool": "caf\udce9", ("a", 1): None, "count": np.int64(3),
    }  # fmt: skip
    sealed = seal("rollouts", {"outputs": as_plain(returned)})
    for state in (by_torch(sealed), plain(sealed), unpack("verl", pack("verl", sealed), "x")):
        verify_checksum("rollouts", state)
        found = restored(state["outputs"])
        assert found == returned | {"seen": {7: b""}}
        types = [float, str, int, bool, dict, int, str, type(None), np.int64]
        assert [type(value) for value in found.values()] == types


def test_a_function_that_returns_what_has_no_plain_form_stops_no_checkpoint() -> None:
    """An object that holds itself, a tensor of another layout, a key that is no value."""
    around: list[Any] = []
    around.append(around)
    odd = {SampleId(0, i): value for i, value in enumerate((around, torch.zeros(3).to_sparse(), {object(): 1}, 5))}
    assert copy_outputs(odd, {}) == {SampleId(0, 3): 5}


# ---------------------------------------------------------------- files of adapters


def test_no_bit_of_a_file_can_be_changed() -> None:
    """Arrays and tensors come back as lists; every flip of one bit is refused by name."""
    content = {"state": {"n": 1}, "held": [np.arange(3), torch.ones(2)], "late": b""}
    data = pack("slime", content)
    assert unpack("slime", data, "x") == {"state": {"n": 1}, "held": [[0, 1, 2], [1.0, 1.0]], "late": b""}
    for place in range(len(data)):
        for bit in range(8):
            bits = bytearray(data)
            bits[place] ^= 1 << bit
            with pytest.raises(CheckpointError, match="april's state in x "):
                unpack("slime", bytes(bits), "x")
    with pytest.raises(CheckpointError, match="cannot be saved: a object is not a plain value"):
        pack("slime", {"image": object()})


def test_a_file_that_ends_too_early_is_refused() -> None:
    """Wherever it ends: its last bytes are then any number, such as one that no file has as its length."""
    data = pack("openrlhf", {"held": b"\xff" * LONG})
    for end in range(len(data)):
        with pytest.raises(CheckpointError, match="april's state in x "):
            unpack("openrlhf", data[:end], "x")


def test_a_file_that_no_april_wrote_is_refused() -> None:
    """Its checksum fits, and its content is no state: a list in a list a hundred thousand times, or a huge value."""
    for content in (b"\x91" * 100_000 + b"\xc0", msgspec.msgpack.encode(msgspec.msgpack.Ext(1, b"\xff" * 8)), b""):
        end = msgspec.msgpack.encode(_Head("verl", checksum_of(content), b"", content))
        with pytest.raises(CheckpointError, match="april's state in x cannot be read"):
            unpack("verl", MAGIC + end + len(end).to_bytes(8, "big"), "x")
