"""Defines what reward functions and filters receive, and checks the rewards and verdicts that they return.

``april.core.function_results`` decides what happens when a function raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass, field, replace
from inspect import isawaitable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from april.core.row_rewards import RewardLayout, RowReward, wrong_row_rewards
from april.core.tape import Float32, Int32
from april.core.types import FinishReason, Prompt, Sample, SampleId
from april.core.value_checks import float32_reward, wrong_reward
from april.driver.detokenizer import Detokenizer
from april.errors import UsageError
from april.serialization.plain_values import why_not_plain


class Conversation(NamedTuple):
    """One conversation of a response, which becomes a row of the batch.

    ``prompt_ids`` int32 [P], ``tokens`` int32 [T], ``logprobs`` float32 [T], ``loss_mask`` uint8 [T].
    """

    prompt_ids: Int32
    tokens: Int32
    logprobs: Float32
    loss_mask: NDArray[np.uint8]
    turns: Int32 = np.empty((0, 2), np.int32)
    """Start and end in ``tokens`` of each ``llm.generate`` call that generated tokens, int32 [turns, 2]."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward with parts, arrays or a note: the result of a reward function, or an item of a group reward's result.

    The values are kept with the sample: in batches (``batch.parts``, ``batch.padded()``, ``sample.row_reward``), in
    metrics and saved states, and on other ranks. All rewards of a run must have the same names and shapes.
    """

    total: float | None = None
    """Number from which advantages are computed. None if the setting ``reward_weights`` makes it the weighted sum of
    ``parts``, or if it is the mean over ``rows``."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Components of the reward: numbers by name."""
    per_turn: Mapping[str, ArrayLike] = field(default_factory=dict)
    """Arrays by name, one row for each of the conversation's ``turns``, such as the rewards of single steps. Lists
    become float32; arrays and tensors of whole numbers stay whole numbers (int32)."""
    per_token: Mapping[str, ArrayLike] = field(default_factory=dict)
    """Arrays by name, one row for each of the conversation's ``tokens``, such as a teacher's log-probabilities."""
    note: Any = None
    """Text or other plain values that are stored with the reward."""
    rows: Sequence[Any] = ()
    """One reward for each of ``response.conversations``, in their order; all other fields must then be empty."""


@dataclass(frozen=True, slots=True)
class Response:
    """A finished response, as reward functions and filters receive it."""

    sample_id: SampleId
    conversations: tuple[Conversation, ...] = field(repr=False)
    """All conversations, in the order in which they began; usually only one."""
    finish: FinishReason
    output: Any
    """Return value of the rollout function."""
    reward: float | None = None
    """Reward of the sample, for filters; None for reward functions."""
    detokenizer: Detokenizer | None = field(default=None, repr=False, compare=False)
    row_rewards: tuple[RowReward, ...] = field(default=(), repr=False)
    """Reward with its parts, arrays and note, for filters and evaluations: one for the whole response, or one for each
    conversation. Empty if the reward is only a number."""

    @property
    def tokens(self) -> Int32:
        """Tokens of the first conversation's response, int32 [T], EOS included."""
        return self.conversations[0].tokens

    @property
    def logprobs(self) -> Float32:
        """Log-probabilities of the tokens, float32 [T]."""
        return self.conversations[0].logprobs

    @property
    def loss_mask(self) -> NDArray[np.uint8]:
        """Loss mask of the tokens, uint8 [T]: 0 for tokens of the environment, 1 for generated tokens."""
        return self.conversations[0].loss_mask

    def __repr__(self) -> str:
        return f"<Response {self.sample_id} of {len(self.tokens)} tokens, finish={self.finish}, reward={self.reward}>"

    def text(self, special_tokens: bool = False) -> str:
        """Return the whole response as text, tool results included, with or without special tokens such as EOS.

        Raises UsageError without a tokenizer.
        """
        if self.detokenizer is None:
            raise UsageError("response.text() needs a tokenizer; give the scheduler tokenizer=...")
        return self.detokenizer.text(self.tokens.tolist(), special_tokens)


@dataclass(frozen=True)
class EvaluationResult:
    """Responses and rewards of an evaluation, prompt by prompt."""

    responses: tuple[tuple[Response, ...], ...]
    """Responses by prompt and sample, ``[prompts][n]``."""
    rewards: NDArray[np.float64]
    """Rewards, float64 [prompts, n]."""

    @property
    def parts(self) -> dict[str, NDArray[np.float64]]:
        """Parts of the rewards, float64 [prompts, n] by name; means over conversations that have their own rewards."""
        names = next((rows[0].parts for group in self.responses for r in group if (rows := r.row_rewards)), {})
        return {
            name: np.array([[np.mean([row.parts[name] for row in r.row_rewards]) for r in g] for g in self.responses])
            for name in names
        }

    @property
    def reward_mean(self) -> float:
        """Mean of all rewards."""
        return float(self.rewards.mean())

    @property
    def reward_standard_error(self) -> float:
        """Standard error of the mean reward, computed over prompts; 0 for one prompt."""
        means = self.rewards.mean(axis=1)
        return float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else 0.0


def response_of(
    sample: Sample, output: Any, detokenizer: Detokenizer | None = None, reward: float | None = None
) -> Response:
    """Return a finished sample as a Response made of copies, which the user's functions may change."""
    assert sample.finish is not None
    conversations = tuple(
        Conversation(
            c.prompt.copy(), c.tape.tokens.copy(), c.tape.logprobs.copy(), c.tape.loss_mask(),
            np.array(c.turns, np.int32).reshape(-1, 2),
        )
        for c in sample.row_chains
    )
    return Response(
        sample.key, conversations, sample.finish, output, reward, detokenizer,
        tuple(replace(row, parts=dict(row.parts), note=deepcopy(row.note)) for row in sample.row_rewards),
    )  # fmt: skip


def rewards_differ(prompt: Prompt, responses: Sequence[Response]) -> bool:
    """Accept a group if its rewards differ: the filter of DAPO's dynamic sampling (arXiv 2503.14476, section 3.2).

    If conversations have rewards of their own, those with the same index are compared, as for advantages: in a zero-sum
    game, the means over conversations would never differ.
    """
    found: dict[int | None, set[float | None]] = {}
    for response in responses:
        own: list[tuple[int | None, float | None]] = [(row.row, row.reward) for row in response.row_rewards]
        for place, reward in own or [(None, response.reward)]:
            found.setdefault(place, set()).add(reward)
    return any(len(rewards) > 1 for rewards in found.values())


def checked_verdict(value: Any, group: int) -> bool:
    """Return a filter's verdict as a bool; raises UsageError naming the group for another type."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise UsageError(
        f"the filter of group {group} returned {value!r} ({type(value).__name__}); expected True or False"
    )


def checked_reward(value: Any, sample_id: SampleId) -> float:
    """Return a reward as a finite float within the range of float32; raises UsageError naming the sample."""
    number = _number(value, f"the reward of {sample_id} is")
    if wrong := wrong_reward(number):
        raise UsageError(f"the reward of {sample_id} is {wrong}")
    return number


def _number(value: Any, what: str) -> float:
    """Return the value as a number, which may be NaN or too large; raises UsageError that begins with ``what``."""
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError  # float("1_0") is 10, which the user may not have meant
        return float(value)
    except Exception:  # tensors and classes of the user raise errors of their own
        shown = f"{value!r:.100} ({type(value).__name__})"
        shown = "a coroutine that was not awaited" if isawaitable(value) else shown
        raise UsageError(f"{what} {shown}; expected a number") from None


def _rounded(number: float) -> float:
    return number if wrong_reward(number) else float32_reward(number)


def row_rewards_of(
    value: Any, response: Response, weights: Mapping[str, float], layout: RewardLayout
) -> tuple[float, tuple[RowReward, ...]]:
    """Convert a reward function's result to a number and its RowRewards (empty if the result is only a number).

    ``weights`` is the setting ``reward_weights``. ``layout`` has the names and shapes of the rewards of the run; the
    first valid reward sets it. Raises UsageError naming the sample.
    """
    where = f"the reward of {response.sample_id}"
    rows: tuple[RowReward, ...] = ()
    if isinstance(value, Reward) and (items := _rows_of(value, where)):
        others = (value.total, value.parts, value.per_turn, value.per_token, value.note)
        if any(other is not None and (not isinstance(other, Mapping) or other) for other in others):
            raise UsageError(f"{where} has rows and other values; give the values in the items of rows")
        rows = tuple(_row_reward(item, response, weights, i) for i, item in enumerate(items))
        number = float(np.mean([row.reward for row in rows]))
    elif isinstance(value, (Reward, Mapping)) or weights:
        rows = (_row_reward(value, response, weights, None),)
        number = rows[0].reward
    else:
        number = checked_reward(value, response.sample_id)
    sizes = [(len(c.turns), len(c.tokens)) for c in response.conversations]
    if wrong := wrong_row_rewards(rows, sizes, layout):
        raise UsageError(f"{where} {wrong}")
    return number, rows


def _row_reward(value: Any, response: Response, weights: Mapping[str, float], row: int | None) -> RowReward:
    where = f"the reward of {response.sample_id}"
    if isinstance(value, Mapping):
        value = Reward(value.get("total"), {name: part for name, part in value.items() if name != "total"})
    elif not isinstance(value, Reward):
        value = Reward(value)
    if _rows_of(value, where):
        raise UsageError(f"{where} has rows in an item of rows; a conversation has no rows of its own")
    for kind in ("parts", "per_turn", "per_token"):
        if not isinstance(given := getattr(value, kind), Mapping):
            raise UsageError(f"{where} has {kind}={given!r:.100}; expected a mapping of names to values")
    parts = {name: _rounded(_number(part, f"{where} has a part {name} that is")) for name, part in value.parts.items()}
    total = value.total
    if weights:
        if missing := sorted(weights.keys() - parts.keys()):
            raise UsageError(f"{where} has no part {missing[0]}, which reward_weights names; return all of these parts")
        if total is not None or (more := sorted(parts.keys() - weights.keys(), key=str)):
            what = "a total" if total is not None else f"the part {more[0]}, which is not in reward_weights"
            raise UsageError(f"{where} has {what}; with reward_weights, return the parts that it names and no others")
        total = sum(weights[name] * part for name, part in parts.items())
    elif total is None:
        raise UsageError(
            f"{where} has the parts {', '.join(map(str, parts)) or '(none)'} but no total; add total, or set "
            "reward_weights, by which april sums the parts"
        )
    if why := why_not_plain(value.note, "note"):
        raise UsageError(f"{where} has a note that cannot be kept: {why}; use text, numbers, lists and dicts")
    return RowReward(
        _rounded(_number(total, f"{where} is")), row, parts,
        {name: _array(values, f"{where} has {name} per turn") for name, values in value.per_turn.items()},
        {name: _array(values, f"{where} has {name} per token") for name, values in value.per_token.items()},
        deepcopy(value.note),
    )  # fmt: skip


def _rows_of(value: Reward, where: str) -> list[Any]:
    rows = _in_order(value.rows)
    if rows is None:
        raise UsageError(f"{where} has rows={value.rows!r:.100}; expected a list with a reward per conversation")
    return rows


def _in_order(values: Any) -> list[Any] | None:
    """Return the items of a list, tuple or array; None for other values, such as a mapping or text."""
    if isinstance(values, (Mapping, Set, str, bytes)) or not hasattr(values, "__len__"):
        return None
    return list(values)


def _array(values: Any, where: str) -> NDArray[Any]:
    """Return numbers as a read-only copy: integers of an array or tensor as int32, all others as float32.

    Lists always become float32, as the same reward may be [0, 1] for one response and [0.5, 1] for another. Values that
    are not numbers become an array that is refused later.
    """
    typed = hasattr(values, "dtype")
    try:
        if hasattr(values, "detach"):  # a tensor, also of a type that numpy does not have
            values = values.detach().cpu()
            values = (values.double() if values.is_floating_point() else values).numpy()
        array = np.array(values)
    except Exception:  # tensors without numbers of their own raise errors of many types
        raise UsageError(f"{where} that are no array: {values!r:.100}; expected numbers of one shape") from None
    if array.dtype.kind in "fiub":
        integral = typed and array.dtype.kind != "f"
        if not integral or not array.size or abs(array.astype(np.float64)).max() < 2**31:
            with np.errstate(over="ignore"):
                array = array.astype(np.int32 if integral else np.float32)
    array.flags.writeable = False
    return array


def checked_rewards(values: Any, sample_ids: Sequence[SampleId]) -> list[Any]:
    """Return the rewards of a group, one value per sample; raises UsageError naming the group."""
    found = _in_order(values)
    if found is None or len(found) != len(sample_ids):
        raise UsageError(
            f"the group reward of group {sample_ids[0].group} returned {values!r}; "
            f"expected {len(sample_ids)} numbers, one per sample"
        )
    return found
