"""Rewards that are more than a number: parts, and values per turn, token and conversation, travel with the sample."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from rank_threads import drain, engine, run_ranks
from ray_stand_in import StandIn

import april
import april.ray
from april.core.row_rewards import RESERVED
from april.core.state_checksum import checksum
from april.core.types import FinishReason
from april.corrections.advantages import group_advantages
from april.driver.rewards import Conversation, row_rewards_of
from april.processes import rank_packing
from april.record.replay import replay
from april.serialization.own_values import pack, unpack
from april.serialization.state_file import read_state, write_state
from april.testing import FakeEngine, rollouts, run_virtual
from april.view.run_data import read_run

WEIGHTS = {"correct": 1.0, "format": 0.25}
TURNS, TOKENS = ("step", "data"), ("teacher_logprobs", "top_ids")
"""Names of values per turn and per token; ``data`` is also a field of states, which records leave out."""


def parts_of(tokens: Any) -> dict[str, float]:
    """Parts that follow from the tokens of a conversation."""
    return {"correct": float(tokens[-1] % 2), "format": float(tokens.sum() % 7) / 4}


def arrays_of(tokens: Any, turns: Any) -> dict[str, Any]:
    """Arrays that follow from the tokens and the turns of a conversation."""
    return {
        "step": np.array([float(tokens[start:end].sum() % 5) for start, end in turns], np.float32),
        "data": np.array([[start, end] for start, end in turns], np.int32),
        "teacher_logprobs": (-tokens / 97.0).astype(np.float32),
        "top_ids": np.stack([tokens, tokens + 1], 1).astype(np.int32),
    }


def everything(conversation: Conversation, total: float) -> april.Reward:
    """Lists and tensors are taken, too; whether a list has whole numbers differs from response to response."""
    arrays = arrays_of(conversation.tokens, conversation.turns)
    steps = [int(step) if conversation.tokens[0] % 2 else float(step) for step in arrays["step"]]
    return april.Reward(
        total, parts_of(conversation.tokens), {"step": steps, "data": torch.tensor(arrays["data"])},
        {"teacher_logprobs": torch.tensor(arrays["teacher_logprobs"]), "top_ids": arrays["top_ids"]},
        {"says": ["because", int(conversation.tokens[0])]},
    )  # fmt: skip


def weighted(prompt: april.Prompt, response: april.Response) -> dict[str, float]:
    return parts_of(response.tokens)


def with_total(prompt: april.Prompt, response: april.Response) -> dict[str, float]:
    return {"total": float(response.tokens[0]), **parts_of(response.tokens)}


def whole(prompt: april.Prompt, response: april.Response) -> april.Reward:
    return everything(response.conversations[0], float(response.tokens[0]))


def by_conversation(prompt: april.Prompt, response: april.Response) -> april.Reward:
    return april.Reward(rows=[everything(c, float(c.tokens[0])) for c in response.conversations])


def of_group(prompt: april.Prompt, responses: Sequence[april.Response]) -> list[april.Reward]:
    return [whole(prompt, response) for response in responses]


async def two_turns(prompt: april.Prompt, llm: april.LLM) -> None:
    first = await llm.generate(max_tokens=4)
    await llm.generate([*first.conversation, 5, 6], max_tokens=9)


async def two_roles(prompt: april.Prompt, llm: april.LLM) -> None:
    """Two conversations; those of samples with an odd index have a third."""
    for role in range(2 + llm.sample_id.index % 2):
        first = await llm.generate([*prompt.token_ids, 20 + role], max_tokens=4, any_conversation=True)
        await llm.generate([*first.conversation, 5], max_tokens=4, any_conversation=True)


def keeps_all(prompt: april.Prompt, responses: Sequence[april.Response]) -> bool:
    """See that filters get copies of what the rewards had, which they may change."""
    for own in (response.row_rewards[0] for response in responses):
        assert own.parts
        assert own.note["says"][0] == "because"
        own.parts.clear()  # type: ignore[attr-defined]
        own.note["says"].clear()
    return True


PARTLY: dict[str, Any] = {"group_quorum": 0.6, "n_samples_per_prompt": 5}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "parts with weights": ({"reward_weights": WEIGHTS}, {"reward": weighted}),
    "parts with a total": ({"generation": "continuous"}, {"reward": with_total}),
    "turns and tokens": ({}, {"reward": whole, "rollout": two_turns, "filter": keeps_all}),
    "turns and tokens in parts of groups": (PARTLY, {"reward": whole, "rollout": two_turns}),
    "groups": ({}, {"group_reward": of_group, "rollout": two_turns}),
    "conversations": ({}, {"reward": by_conversation, "rollout": two_roles}),
    "conversations in parts of groups": (PARTLY, {"reward": by_conversation, "rollout": two_roles}),
}


def check_row(row: april.DeliveredSample) -> None:
    """A row has what the reward function computed from its own tokens, to the last bit."""
    found = row.row_reward
    assert found is not None
    assert found.parts == {name: float(np.float32(value)) for name, value in parts_of(row.tokens).items()}
    if found.per_token:
        expected = arrays_of(row.tokens, row.turns)
        for name, values in [*found.per_turn.items(), *found.per_token.items()]:
            np.testing.assert_array_equal(values, expected.pop(name), strict=True)
        assert not expected
        assert found.note == {"says": ["because", int(row.tokens[0])]}
        ends = [end for _, end in row.turns]
        runs = [int(run.sum()) for run in np.split(row.loss_mask, ends) if run.any()]
        assert runs == [end - start for start, end in row.turns]
    if not found.per_token and "total" not in (found.note or ""):
        assert row.reward in (
            np.float32(sum(WEIGHTS[name] * value for name, value in found.parts.items())), float(row.tokens[0]),
        )  # fmt: skip
    else:
        assert row.reward == float(row.tokens[0])


def check_advantages(rows: Sequence[april.DeliveredSample], found: dict[str, Any], method: Any = "grpo") -> None:
    """Compare advantages of rows of whole groups with the textbook, written out over their groups.

    Args:
        rows: rows of whole groups.
        found: advantages of the rewards (""), of the part "correct", and of the values per turn "step", by name.
    """
    for i, row in enumerate(rows):
        place = 0 if row.row_reward is None or row.row_reward.row is None else row.row_reward.row
        siblings = [
            s for s in rows if s.id.group == row.id.group and ((s.row_reward and s.row_reward.row) or 0) == place
        ]
        rewards = np.array([s.reward for s in siblings], np.float64)
        correct = np.array([s.row_reward.parts["correct"] for s in siblings if s.row_reward], np.float64)
        own = row.row_reward
        assert own is not None
        for values, mine, name in ((rewards, row.reward, ""), (correct, own.parts["correct"], "correct")):
            expected = (mine - values.mean()) / (values.std() + 1e-6)
            np.testing.assert_allclose(found[name][i], expected, atol=2e-5)
        if "step" in found:
            every = np.concatenate([s.row_reward.per_turn["step"] for s in siblings if s.row_reward]).astype(np.float64)
            normal = (own.per_turn["step"] - every.mean()) / (every.std() + 1e-6)
            expected_tokens = np.zeros(found["step"].shape[1])
            for j, (start, end) in enumerate(row.turns):
                expected_tokens[start:end] = normal[j:].sum()
            np.testing.assert_allclose(found["step"][i], expected_tokens, atol=5e-5)


def advantages(batch: april.Batch) -> dict[str, Any]:
    names = ["", "correct"]
    if batch.samples and batch.samples[0].row_reward and batch.samples[0].row_reward.per_turn:
        names.append("step")
    return {name: batch.advantages(of=name) for name in names}


def config(**settings: Any) -> april.Config:
    """N = 2 groups of 3; N' = 4, so that partials, surplus and finished siblings are held over steps."""
    sizes = {"rollout_batch_size": 2, "n_samples_per_prompt": 3, "over_sampling_batch_size": 4, "max_response_len": 40}
    return april.Config(**(sizes | settings))


PROMPTS = [[1 + i, 2] for i in range(6)]


def started(settings: Any = None, **functions: Any) -> Any:
    """A run of these functions on virtual time."""
    return rollouts(
        config(**(settings or {})), engines=[FakeEngine("e", lengths=5)], prompts=PROMPTS, **functions
    )


def first_batch(settings: Any = None, **functions: Any) -> april.Batch:
    """The first batch of such a run."""

    async def program() -> april.Batch:
        async with started(settings, **functions) as run:
            return await run.next_batch()

    return run_virtual(program())


@pytest.mark.parametrize(("settings", "functions"), CASES.values(), ids=CASES)
def test_every_row_has_its_own_over_restarts(
    settings: dict[str, Any], functions: dict[str, Any], tmp_path: Path
) -> None:
    """Whatever dies after each step: rows and advantages are those of the tokens, as without an end; records replay."""
    rows: list[april.DeliveredSample] = []
    first: list[april.Batch] = []

    async def life(state: Any, record: Path) -> Any:
        async with rollouts(
            config(**settings), prompts=PROMPTS, record=record, **functions,
            engines=[FakeEngine("e", lengths=lambda r: 2 + 3 * r.sample_key[1], max_running=5)],
        ) as run:  # fmt: skip
            if state is not None:
                await run.load_state_dict(state)
            try:
                batch = await run.next_batch()
            except april.DataExhausted:
                return None
            found = advantages(batch)
            if "group_quorum" not in settings:
                check_advantages(batch.samples, found)
            assert batch.metrics["reward_mean/correct"] == pytest.approx(_mean_of_samples(batch, "correct"))
            if not first:  # it dies before the batch was trained, so the next life delivers the batch again
                first.append(batch)
                return run.state_dict(trained_through=batch.id - 1)
            before = first.pop()
            for name, values in advantages(before).items():
                np.testing.assert_array_equal(values, found[name])
            for old, new in zip(before.samples, batch.samples, strict=True):
                assert (old.id, old.cohort, old.turns) == (new.id, new.cohort, new.turns)
                assert old.row_reward == new.row_reward
            rows.extend(batch.samples)
            await run.weight_update()
            return run.state_dict()

    state: Any = None
    lives = 0
    while lives == 0 or state is not None:
        record = tmp_path / f"{lives}.jsonl"
        state = run_virtual(life(state, record))
        if state is not None:
            write_state(tmp_path / "state", "test", state)
            state = read_state(tmp_path / "state", "test")
            assert read_run(record).batches[0].metrics["reward_mean/correct"] >= 0
        assert replay(record).checks
        lives += 1
    assert lives > 6
    assert len({row.id for row in rows}) == len(PROMPTS) * config(**settings).n_samples_per_prompt
    for row in rows:
        check_row(row)
    if "group_quorum" not in settings:
        return
    for row in rows:  # a row is compared with the same first k - 1 others, whenever these were delivered
        cohort = {s.id.index: s for s in rows if s.id.group == row.id.group and _place(s) == _place(row)}
        assert [cohort[index].reward for index, _ in row.cohort] == [reward for _, reward in row.cohort]
        for name, values in row.cohort_values.items():
            for (index, _), numbers in zip(row.cohort, values, strict=True):
                own = cohort[index].row_reward
                assert own is not None
                expected = own.per_turn[name].tolist() if name == "step" else [own.parts[name]]
                assert numbers[~np.isnan(numbers)].tolist() == expected


def _place(row: april.DeliveredSample) -> int | None:
    return None if row.row_reward is None else row.row_reward.row


def _mean_of_samples(batch: april.Batch, name: str) -> float:
    means = [batch.parts[name][batch.sample_numbers == n].mean() for n in range(batch.sample_numbers[-1] + 1)]
    return float(np.mean(means))


@pytest.mark.parametrize("case", ["turns and tokens", "conversations"])
def test_ranks_get_what_was_delivered(case: str) -> None:
    """Shares on three ranks, one of which may be empty, have rows, arrays and advantages of the whole batch."""
    settings, functions = CASES[case]

    def program(run: Any, rank: int) -> Any:
        batches, _ = drain(run)
        result = run.evaluate(PROMPTS[:2] if rank == 0 else [], n_samples=2)
        return batches, result

    outcomes = run_ranks(
        program, 3, prompts=PROMPTS[:4], configs=[config(rollout_batch_size=1, **settings)] * 3,
        **functions,
    )  # fmt: skip
    for outcome in outcomes:
        assert not isinstance(outcome, BaseException), outcome
    for shares in zip(*(batches for batches, _ in outcomes), strict=True):
        rows = [row for share in shares for row in share.samples]
        for row in rows:
            check_row(row)
        longest = max(len(row.tokens) for row in rows)
        found: dict[str, list[Any]] = {}
        for share in shares:
            padded = share.padded()
            assert padded["top_ids"].shape == (*padded["response_ids"].shape, 2)
            for name, values in advantages(share).items():
                wide = ((0, 0), (0, longest - values.shape[1])) if values.ndim == 2 else ((0, 0),)
                found.setdefault(name, []).append(np.pad(values, wide))
        check_advantages(rows, {name: np.concatenate(parts) for name, parts in found.items()})
    for _, result in outcomes:
        assert result.parts["correct"].shape == (2, 2)
        assert result.parts["correct"].tolist() == outcomes[0][1].parts["correct"].tolist()


def test_an_empty_share_has_the_shapes() -> None:
    """A rank without rows has arrays of every name, with the dimensions and types that the other ranks' have."""
    batch = first_batch(reward=whole, rollout=two_turns)
    *_, empty = batch.split(9)
    there = unpack(pack(empty), april.Batch)
    for make in ("padded", "ragged"):
        arrays = getattr(batch, make)()
        assert arrays.keys() - {*TURNS, *TOKENS, *WEIGHTS} <= RESERVED
        for name, values in getattr(there, make)().items():
            assert (values.dtype, values.ndim) == (arrays[name].dtype, arrays[name].ndim), name
            assert values.shape[2:] == arrays[name].shape[2:]
    assert there.advantages(of="step").shape == (0, 0)
    padded, ragged = batch.padded(), batch.ragged()
    for i, row in enumerate(batch.samples):
        assert row.row_reward is not None
        n, turns = len(row.tokens), len(row.turns)
        for name in TOKENS:
            np.testing.assert_array_equal(padded[name][i, :n], row.row_reward.per_token[name])
            assert not padded[name][i, n:].any()
            start, end = ragged["response_offsets"][i : i + 2]
            np.testing.assert_array_equal(ragged[name][start:end], row.row_reward.per_token[name])
        start, end = ragged["turn_offsets"][i : i + 2]
        np.testing.assert_array_equal(ragged["step"][start:end], padded["step"][i, :turns])
        numbers = padded["turn_numbers"][i]
        assert [np.flatnonzero(numbers == t).tolist() for t in range(turns)] == [list(range(*t)) for t in row.turns]
        assert ((numbers >= 0) == (padded["loss_mask"][i] == 1)).all()


def test_actors_of_ray_return_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward function in an actor returns the same as one in this process."""
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    try:
        with april.RolloutScheduler(
            config(), prompts=PROMPTS, engines=[engine()], reward=april.ray.remote(whole), rollout=two_turns
        ) as run:
            batch = run.next_batch()
    finally:
        for actor in stand_in.actors:
            actor.end()
    for row in batch.samples:
        check_row(row)
    check_advantages(batch.samples, advantages(batch))


def test_gdpo_is_a_sum_of_advantages_of_parts() -> None:
    """GDPO (arXiv 2601.05242): each part is normalised in its group, the weighted sum over the batch."""
    batch = first_batch({"reward_weights": WEIGHTS}, reward=weighted)
    found = sum(w * batch.advantages(of=name, epsilon=1e-4, ddof=1) for name, w in WEIGHTS.items())
    groups = np.stack([batch.parts[name].astype(np.float64).reshape(2, 3) for name in WEIGHTS], 2)
    normal = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-4)
    np.testing.assert_allclose(found, (normal @ np.array([*WEIGHTS.values()])).ravel(), atol=1e-5)
    for wrong in ("corect", "rewards"):
        with pytest.raises(ValueError, match=r"of must name a part or values per turn \(correct, format of them\)"):
            batch.advantages(of=wrong)
    correct = batch.parts["correct"].reshape(2, 3)
    others = [np.delete(of_group, i) for of_group in correct for i in range(3)]
    assert batch.advantages("rloo", of="correct").tolist() == group_advantages(
        batch.parts["correct"], others, "rloo"
    ).tolist()


# ---------------------------------------------------------------- refusals


def response(conversations: int = 1) -> april.Response:
    """A response of 5 tokens in two turns, in as many conversations."""
    tokens = np.arange(5, dtype=np.int32)
    one = Conversation(
        tokens, tokens, np.zeros(5, np.float32), np.ones(5, np.uint8), np.array([[0, 2], [3, 5]], np.int32)
    )
    return april.Response(april.SampleId(3, 1), (one,) * conversations, FinishReason.STOP, None)


NAN = float("nan")
SEAL = ("april", "format", "checksum")
SAME = "return the same names and shapes for every response"
WRONG: dict[str, tuple[Any, str]] = {
    "no total": ({"correct": 1.0}, "has the parts correct but no total; add total, or set reward_weights"),
    "nothing": (april.Reward(), r"has the parts \(none\) but no total"),
    "a part that is text": ({"total": 1.0, "correct": "yes"}, r"has a part correct that is 'yes' \(str\); expected a"),
    "a number as text": ("0.5", r"is '0.5' \(str\); expected a number"),
    "a part as text": ({"total": 1.0, "correct": b"1"}, r"has a part correct that is b'1' \(bytes\); expected"),
    "a part that is NaN": ({"total": 1.0, "correct": NAN}, "has a part correct that is nan; expected a finite number"),
    "a part too large": ({"total": 1.0, "correct": 1e39}, "has a part correct that is 1e[+]39, which does not fit in"),
    "a total that is NaN": (april.Reward(NAN), "is nan; expected a finite number"),
    "a total that is text": (april.Reward("1,0"), r"is '1,0' \(str\); expected a number"),  # type: ignore[arg-type]
    "another part": ({"total": 1.0, "correct": 1.0, "x": 1}, "has x, which earlier rewards of this run had not;"),
    "a missing part": (april.Reward(1.0), f"has no correct, which earlier rewards of this run had; {SAME}"),
    "a number alone": (1.0, f"has no correct, which earlier rewards of this run had; {SAME}"),
    "rows": (
        april.Reward(rows=[{"total": 1, "correct": 1}]),
        "belongs to a conversation, but earlier rewards of this run to a response; return rows=",
    ),
    "no identifier": ({"total": 1.0, "is correct": 1.0}, "has the name 'is correct'; use names such as format_ok"),
    "a batch's own name": ({"total": 1.0, "logprobs": 1.0}, "has the name 'logprobs'; use names such as format_ok"),
    "twice": (april.Reward(1.0, {"a": 1.0}, per_token={"a": [0.0] * 5}), "has the name a twice; parts, per_turn and"),
    "too few tokens": (
        april.Reward(1.0, per_token={"a": [0.0] * 4}), r"has a per token of shape \[4\], but the conversation has 5 to"
    ),
    "a number per token": (april.Reward(1.0, per_token={"a": 0.5}), r"has a per token of shape \[\], but the"),
    "too many turns": (april.Reward(1.0, per_turn={"a": [1, 2, 3]}), r"has a per turn of shape \[3\], but the"),
    "NaN of a token": (april.Reward(1.0, per_token={"a": [0, 1, NAN, 3, 4]}), "has a per token with the value nan; ex"),
    "too large for float32": (april.Reward(1.0, per_turn={"a": [1e39, 0]}), "has a per turn with the value inf; expec"),
    "text per turn": (april.Reward(1.0, per_turn={"a": ["x", "y"]}), "has a per turn of type <U1; expected numbers"),
    "too large for int32": (
        april.Reward(1.0, per_turn={"a": np.array([1, 2**31])}), "has a per turn of type int64; expected numbers of fl"
    ),
    "ragged": (april.Reward(1.0, per_turn={"a": [[1], [1, 2]]}), r"has a per turn that are no array: \[\[1\], \[1, 2"),
    "an object as note": (april.Reward(1.0, note={"x": {1}}), r"has a note that cannot be kept: note\['x'\] is a set"),
    "no names": (
        april.Reward(1.0, per_token=[0.0] * 5),  # type: ignore[arg-type]
        r"has per_token=\[0.0, .*\]; expected a mapping of names to values",
    ),
    "rows and a total": (april.Reward(1.0, rows=[1.0]), "has rows and other values; give the values in the items of"),
    "rows in rows": (april.Reward(rows=[april.Reward(rows=[1])]), "has rows in an item of rows; a conversation has no"),
    "an array in rows": (april.Reward(rows=[april.Reward(rows=np.ones(2))]), "has rows in an item of rows"),
    "rows and a note": (april.Reward(note=np.ones(2), rows=[1.0]), "has rows and other values; give the values in"),
    "one number as rows": (april.Reward(rows=3), "has rows=3; expected a list with"),  # type: ignore[arg-type]
    "no rows at all": (april.Reward(rows=None), "has rows=None; expected a list"),  # type: ignore[arg-type]
    "rows by name": (april.Reward(rows={0: 1.0}), r"has rows=\{0: 1.0\}; expected a"),  # type: ignore[arg-type]
    "a complex number": (1j, r"is 1j \(complex\); expected a number"),
    "a tensor without numbers": (
        april.Reward(1.0, per_token={"a": torch.ones(5, device="meta")}), "has a per token that are no array: tensor"
    ),
    "tensors with gradients": (
        april.Reward(1.0, per_token={"a": [torch.ones((), requires_grad=True)] * 5}), "has a per token that are no arr"
    ),
    "too many rows": (april.Reward(rows=[1.0, 2.0]), "has 2 rows, but the response has 1 conversations"),
}  # fmt: skip
WRONG_WITH_WEIGHTS: list[tuple[Any, str]] = [
    ({"correct": 1.0}, "has no part format, which reward_weights names; return all of these parts"),
    (1.0, "has no part correct, which reward_weights names; return all of these parts"),
    ({"correct": 1.0, "format": 1, "x": 2}, "has the part x, which is not in reward_weights; with reward_weights,"),
    ({"correct": 1.0, "format": NAN}, "has a part format that is nan; expected a finite number"),
    ({"correct": 1.0, "format": 1, "total": 2}, "has a total; with reward_weights, return the parts that it names"),
]
"""No part is forgotten, and none counts twice."""


@pytest.mark.parametrize(
    ("value", "sentence", "weights"),
    [(*row, {}) for row in WRONG.values()] + [(*row, WEIGHTS) for row in WRONG_WITH_WEIGHTS],
    ids=[*WRONG, *(repr(value) for value, _ in WRONG_WITH_WEIGHTS)],
)
def test_a_wrong_reward_is_one_sentence(value: Any, sentence: str, weights: dict[str, float]) -> None:
    """It names the sample, what is wrong, and what to return."""
    layout: Any = {}
    if not weights:
        row_rewards_of({"total": 1.0, "correct": 1.0}, response(), {}, layout)
    with pytest.raises(april.UsageError, match=f"^the reward of g3.s1 {sentence}"):
        row_rewards_of(value, response(), weights, layout)


def test_values_of_several_conversations_say_which() -> None:
    """An array for a response of two conversations could be either's."""
    with pytest.raises(april.UsageError, match=r"per turn or token, but the response has 2 conversations; use rows"):
        row_rewards_of(april.Reward(1.0, per_token={"a": [0.0] * 5}), response(2), {}, {})
    number, rows = row_rewards_of(april.Reward(rows=[1.0, {"total": 3}]), response(2), {}, {})
    assert (number, [row.reward for row in rows]) == (2.0, [1.0, 3.0])
    with pytest.raises(april.UsageError, match="of conversation 1 has b, which the conversation before had not"):
        row_rewards_of(april.Reward(rows=[{"total": 1}, {"total": 1, "b": 2}]), response(2), {}, {})


def test_the_filter_of_dapo_compares_what_advantages_compare() -> None:
    """Rewards of the same conversation: in a game for two their mean is 0, whoever wins."""

    def group(*of_rows: Sequence[float]) -> list[april.Response]:
        each = [row_rewards_of(april.Reward(rows=rows), response(len(rows)), {}, {}) for rows in of_rows]
        return [replace(response(len(rows)), reward=number, row_rewards=rows) for number, rows in each]

    prompt = april.Prompt(np.array([1], np.int32))
    assert april.rewards_differ(prompt, group([1, -1], [-1, 1]))
    assert not april.rewards_differ(prompt, group([1, -1], [1, -1], [1]))
    assert april.rewards_differ(prompt, [replace(response(), reward=reward) for reward in (0.0, 1.0)])
    assert not april.rewards_differ(prompt, [replace(response(), reward=1.0)] * 2)


def test_a_group_with_an_invalid_reward_decides_no_names() -> None:
    """The valid rewards of such a group are dropped with the invalid one, so that other names may follow."""
    calls: list[april.Prompt] = []

    def scores(prompt: april.Prompt, responses: Sequence[april.Response]) -> list[dict[str, float]]:
        calls.append(prompt)
        if len(calls) == 1:
            return [{"total": 1.0, "corect": 1.0}, {"total": NAN}, {"total": NAN}]
        return [{"total": 1.0, "correct": 1.0}] * len(responses)
    assert [*first_batch(group_reward=scores).parts] == ["correct"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda row: row.update(parts={"correct": NAN}), "has a part correct that is nan"),
        (lambda row: row.update(parts={}), "has no correct"),
        (lambda row: row["per_token"]["teacher_logprobs"].__setitem__(1, [1]), "damaged"),
        (lambda row: row.update(row=0), "belongs to a conversation"),
    ],
)
def test_a_damaged_state_is_refused(change: Any, sentence: str) -> None:
    """Numbers of a state are checked as those of a reward function are."""
    async def saved() -> Any:
        async with started(reward=whole, rollout=two_turns) as run:
            await run.next_batch()
            return run.state_dict(trained_through=-1)

    state = msgspec.msgpack.decode(msgspec.msgpack.encode(run_virtual(saved())))
    samples = [s for g in state["core"]["ready"] for s in g["samples"] if "row_rewards" in s]
    change(samples[-1]["row_rewards"][0])
    state["checksum"] = checksum(state["april"], {k: v for k, v in state.items() if k not in SEAL})

    async def restored() -> None:
        async with started(reward=whole, rollout=two_turns) as run:
            await run.load_state_dict(state)

    with pytest.raises(april.CheckpointError, match=re.escape(sentence)):
        run_virtual(restored())


def test_weights_are_settings() -> None:
    """They come from a file as from Python; names that no part can have, and no numbers, are refused at once."""
    for given in (WEIGHTS, ["correct=1", "format=.25"], config(reward_weights=WEIGHTS).to_mapping()["reward_weights"]):
        assert april.Config.from_mapping(config(reward_weights=given).to_mapping()).weights_of_parts == WEIGHTS
    for wrong in ({"total": 1.0}, {"correct": NAN}, {"correct": "x"}, {"a b": 1.0}, ["correct"], ["a=1", "a=2"], [7]):
        with pytest.raises(april.ConfigError, match=r"reward_weights"):
            config(reward_weights=wrong)
    assert rank_packing.plain_value(np.float32(0.5)) == 0.5
