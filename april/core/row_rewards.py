"""Defines what a reward function may return besides a number: parts, values per turn and per token, and a note.

A response consists of one or more conversations; each becomes a row of the batch. A :class:`RowReward` belongs to a
response or to one conversation. All rewards of a run have parts and arrays of the same names and shapes (the *layout*),
so that a batch can join the values of each name into one array.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from april.core.attachments import NO_EXTRAS, Extras, NoRows
from april.core.value_checks import wrong_reward

NO_PARTS: Mapping[str, float] = NoRows()
RESERVED = frozenset(
    {
        "attention_mask", "constrained_mask", "extras_offsets", "group_ids", "input_ids", "kept_mask", "logprobs",
        "loss_mask", "prompt_ids", "prompt_mask", "prompt_offsets", "response_ids", "response_mask",
        "response_offsets", "rewards", "routed_experts", "sample_numbers", "staleness", "temperatures", "total",
        "turn_numbers", "turn_offsets", "version_incarnation", "version_n",
    }
)  # fmt: skip
"""Names that rewards' parts and arrays may not have: names of a batch's arrays, of extras, and a reward's ``total``."""


@dataclass(frozen=True, slots=True)
class RowReward:
    """The reward of a response or of one of its conversations. Arrays are read-only, float32 or int32."""

    reward: float
    """the number from which advantages are computed"""
    row: int | None = None
    """index of the conversation that the reward belongs to; None if it belongs to the whole response"""
    parts: Mapping[str, float] = field(default=NO_PARTS)
    """numbers by name, for example the terms whose sum is the reward"""
    per_turn: Extras = field(default=NO_EXTRAS, compare=False)
    """arrays by name, [number of turns, ...]: one row for each call of llm.generate that generated tokens"""
    per_token: Extras = field(default=NO_EXTRAS, compare=False)
    """arrays by name, [T, ...]: one row for each token of the response, including tokens of the environment"""
    note: Any = field(default=None, compare=False)
    """value for logs or for the trainer, made of text, numbers, lists and mappings"""


RewardLayout = dict[str, tuple[Any, ...]]
"""(Kind, row shape, type of number) of each part and array of the rewards, by name; a kind is ``part``, ``per turn`` or
``per token``. The entry "" says whether rewards belong to responses or to conversations."""


def wrong_row_rewards(
    rows: Sequence[RowReward], sizes: Sequence[tuple[int, int]], layout: RewardLayout
) -> str | None:
    """Describe what is wrong with the rewards of a response, in words to put after "the reward"; None if all are valid.

    If ``layout`` is empty (before a run's first reward), the layout of a valid reward is written into it.

    Args:
        rows: the rewards; empty if the reward function returned a number.
        sizes: (number of turns, number of tokens) of each conversation.
        layout: layout of the earlier rewards of the run.
    """
    by_row = bool(rows) and rows[0].row is not None
    if by_row and len(rows) != len(sizes):
        return f"has {len(rows)} rows, but the response has {len(sizes)} conversations"
    found: RewardLayout = {"": ("conversation" if by_row else "response",)}
    for number, row in enumerate(rows):
        if (row.per_turn or row.per_token) and not by_row and len(sizes) > 1:
            return f"has values per turn or token, but the response has {len(sizes)} conversations; use rows=[...]"
        wrong = _wrong_numbers(row) or _wrong_arrays(row, sizes[number])
        if wrong is not None:
            return wrong
        its_own = found | _layout_of(row)
        if number and its_own != found:
            return f"of conversation {number} {_difference(its_own, found, 'the conversation before')}"
        found = its_own
    if not layout:
        layout |= found
    return None if layout == found else _difference(found, layout, "earlier rewards of this run")


def _wrong_numbers(row: RowReward) -> str | None:
    names = [*row.parts, *row.per_turn, *row.per_token]
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or name in RESERVED:
            return f"has the name {name!r:.100}; use names such as format_ok, and none that a batch itself has"
    if len({*names}) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        return f"has the name {twice} twice; parts, per_turn and per_token need different names"
    # parts first, since a wrong part also makes their sum wrong
    wrong_part = next(((n, wrong) for n, value in row.parts.items() if (wrong := wrong_reward(value))), None)
    if wrong_part is not None:
        return f"has a part {wrong_part[0]} that is {wrong_part[1]}"
    wrong = wrong_reward(row.reward)
    return None if wrong is None else f"is {wrong}"


def _wrong_arrays(row: RowReward, size: tuple[int, int]) -> str | None:
    for arrays, count, unit in ((row.per_turn, size[0], "turn"), (row.per_token, size[1], "token")):
        for name, values in arrays.items():
            if values.dtype not in (np.float32, np.int32):
                return f"has {name} per {unit} of type {values.dtype}; expected numbers of float32 or int32"
            if values.ndim < 1 or len(values) != count:
                shape = list(values.shape)
                return f"has {name} per {unit} of shape {shape}, but the conversation has {count} {unit}s"
            if not np.isfinite(values).all():
                bad = values[~np.isfinite(values)][0]
                return f"has {name} per {unit} with the value {bad}; expected finite numbers"
    return None


def _layout_of(row: RowReward) -> RewardLayout:
    layout: RewardLayout = dict.fromkeys(row.parts, ("part", (), "float32"))
    for unit, arrays in (("per turn", row.per_turn), ("per token", row.per_token)):
        layout |= {name: (unit, values.shape[1:], values.dtype.name) for name, values in arrays.items()}
    return layout


def _difference(found: RewardLayout, layout: RewardLayout, before: str) -> str:
    same = "return the same names and shapes for every response"
    if missing := sorted(layout.keys() - found.keys()):
        return f"has no {missing[0]}, which {before} had; {same}"
    if new := sorted(found.keys() - layout.keys()):
        return f"has {new[0]}, which {before} had not; {same}"
    name = next(name for name in found if found[name] != layout[name])
    if not name:
        return f"belongs to a {found[''][0]}, but {before} to a {layout[''][0]}; return rows=[...] always or never"
    described = [f"{unit}, row shape {list(shape)}, type {kind}" for unit, shape, kind in (found[name], layout[name])]
    return f"has {name} ({described[0]}), but {before} had it otherwise ({described[1]}); {same}"


def cohort_values(members: Iterable[Sequence[RowReward]]) -> Extras:
    """Return the rewards of k samples for computing advantages: float32 [k, rows, values] by name, padded with NaN.

    ``values`` is 1 for a part, and the number of turns for an array per turn. If rewards belong to conversations, the
    name "" has their numbers. Arrays per token, and arrays per turn with more axes, are left out.
    """
    rewards = [list(rows) for rows in members]
    if not all(rewards):
        return NO_EXTRAS
    first = rewards[0][0]
    arrays: dict[str, list[list[Any]]] = {
        name: [[[row.parts[name]] for row in rows] for rows in rewards] for name in first.parts
    }
    for name, values in first.per_turn.items():
        if values.ndim == 1:
            arrays[name] = [[row.per_turn[name] for row in rows] for rows in rewards]
    if first.row is not None:
        arrays[""] = [[[row.reward] for row in rows] for rows in rewards]
    return {name: _rectangle(of_samples) for name, of_samples in arrays.items()}


def _rectangle(of_samples: list[list[Any]]) -> Any:
    rows = max(len(values) for values in of_samples)
    longest = max(len(row) for values in of_samples for row in values)
    table = np.full((len(of_samples), rows, longest), np.nan, np.float32)
    for i, values in enumerate(of_samples):
        for j, row in enumerate(values):
            table[i, j, : len(row)] = row
    table.flags.writeable = False
    return table
