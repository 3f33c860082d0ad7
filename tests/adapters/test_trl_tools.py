"""TRL's tools and environments before a stand-in of its trainer: rows, masks, messages, rewards, restarts.

``real_trl/tool_rows.py`` holds the same against the real package's own loop.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import tiny_model

import april
from april.adapters import trl as adapter
from april.adapters.trl import trainer as trainers
from april.adapters.trl.tools import ToolLoop

from . import stand_in_trl as trl
from .stand_in_ranks import in_threads

Trainer = adapter.april_trainer(trl.GRPOTrainer)
PARTIALS = trl.PARTIALS | {"over_sampling_batch_size": 4}
EXAMPLES: dict[str, Any] = {"max_completion_length": 120}


parser = pytest.fixture(autouse=True)(trl.install_parser)


def look(n: int) -> str:
    """Two numbers that follow from the argument; 13 fails."""
    if n == 13:
        raise ValueError("13 14")
    return f"{n} {(n + 1) % trl.VOCAB_SIZE}"


class Room:
    """An environment that greets with the number of its row and pays for what was looked at."""

    made: list[Room]

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.answer = -1
        Room.made.append(self)

    def reset(self, answer: int, **columns: Any) -> str:
        assert columns["prompt"][-1]["content"] == trl.prompts(12)[answer]["prompt"]
        self.seen, self.answer = [], answer
        return f" {20 + answer}"

    def look(self, n: int) -> str:
        self.seen.append(n)
        return look(n)

    def get_reward(self) -> float:
        return self.answer + sum(self.seen) / 1000


def rewards_of_rooms(environments: list[Room], **columns: Any) -> list[float]:
    """As TRL makes it of ``get_reward``."""
    return [room.get_reward() for room in environments]


def of_length(completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    """Refuses completions that are not the messages of their tokens."""
    for messages, ids in zip(completions, completion_ids, strict=True):
        assert [int(word) for m in messages if m["role"] == "assistant" for word in m["content"].split()] == [
            token for run in runs(ids) for token in run
        ]
    return [float(len(ids) % 5) for ids in completion_ids]


def trainer(count: int = 12, settings: dict[str, Any] | None = None, **args: Any) -> Any:
    """With the tool, or with an environment where ``args`` have one."""
    Room.made = []
    rollouts = adapter.rollout(PARTIALS if settings is None else settings, filter=args.pop("filter", None))
    if "environment_factory" not in args:
        args = {"tools": [look], "reward_funcs": [of_length], **args}
    columns, data = args.pop("columns", lambda row: {}), trl.conversations(count)
    return Trainer(tiny_model(), rollouts, trl.Rows(row | columns(row) for row in data), **EXAMPLES | args)


def turns_of(ids: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """What the policy wrote, and the results that stand behind it: a slow reading of a row by its calls."""
    while ids:
        end = next((i + 1 for i, token in enumerate(ids) if token == trl.EOS), len(ids))
        written, ids = ids[:end], ids[end:]
        calls = trl.parse_response(trl.Words(), written).get("tool_calls", ())
        results: list[int] = []
        for call in calls:
            n = call["function"]["arguments"]["n"]
            told = f"{n} {(n + 1) % trl.VOCAB_SIZE}" if n != 13 else None
            words = [int(word) for word in told.split()] if told else []
            results += [trl.RESULT, *words, trl.RESULT]
        yield written, [*results, trl.GO_ON] if calls and ids else []
        ids = ids[len(results) + 1 :] if calls and ids else ids


def runs(ids: list[int]) -> list[list[int]]:
    return [written for written, _ in turns_of(list(ids))]


def check(made: Any) -> Counter[str]:
    """Every row is that of a slow reading, its messages and counts too; returns what there was."""
    found: Counter[str] = Counter()
    for output in made.outputs:
        calls = 0
        for ids, mask, messages in zip(
            output["completion_ids"], output["tool_mask"], output["completions"], strict=True
        ):
            expected: list[int] = []
            own: list[int] = []
            said: list[str] = []
            for written, results in turns_of(list(ids)):
                expected += written + results
                own += [1] * len(written) + [0] * len(results)
                said += ["assistant", *["tool"] * (results.count(trl.RESULT) // 2)]
                found["turns behind results"] += bool(results)
            assert (expected, own) == (list(ids), list(mask))
            assert [m["role"] for m in messages] == said
            assert messages[0] == trl.parse_response(trl.Words(), runs(ids)[0])
            calls += sum(len(m.get("tool_calls", ())) for m in messages)
        assert output["calls"][0] == calls
        assert "env_mask" not in output
        found["calls"] += calls
    return found


def test_rows_are_those_of_the_loop_over_tools() -> None:
    """Results stand behind the turn that asked, masked, in one row; messages and counts are those of the tokens."""
    made = trainer()
    made.train(steps=6)

    found = check(made)
    assert found["calls"] > 10
    assert found["turns behind results"] > 3
    assert sum(made._metrics["train"]["april/resumed_samples"]) > 0
    assert Counter(row["answer"] for rows in made.scored for row in rows[::2]) == dict.fromkeys(range(12), 1)
    books = made.rollout_func.ledger
    assert books["tokens"].balanced
    delivered = sum(sum(mask) for output in made.outputs for mask in output["tool_mask"])
    assert books["tokens"].delivered == delivered


def test_a_round_too_many_and_results_that_do_not_fit_end_a_response() -> None:
    """As in TRL: the last call stays without an answer, and what its tool has said is in no message."""
    few = trainer(max_tool_calling_iterations=1)
    few.train(steps=6)
    short = trainer(max_completion_length=24)
    short.train(steps=6)

    for made, most in ((few, 1), (short, 99)):
        rows = [(row, ids) for output in made.outputs for row, ids in zip(
            output["completions"], output["completion_ids"], strict=True)]  # fmt: skip
        assert max(sum(m["role"] == "assistant" for m in messages) for messages, _ in rows) <= 1 + most
        assert any("tool_calls" in messages[-1] for messages, _ in rows)
        assert max(len(ids) for _, ids in rows) <= made.max_completion_length


@pytest.mark.parametrize("ranks", [1, 2])
def test_environments_serve_one_response_each_and_reward_it(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greeted in the prompt, rewarded once, on rank 0, and used again; every rank has its rows of them.

    TRL neither resets them nor asks functions again. Evaluations play with the rows that were asked, in their order.
    """
    in_threads(monkeypatch, alone=trainers.scheduler_of)
    rows, asked, evaluated, Room.made = [dict(row) for row in trl.conversations(4)], list[Any](), list[Any](), []

    def noted(environments: list[Room], **columns: Any) -> list[float]:
        asked.append([room.answer for room in environments])
        return rewards_of_rooms(environments)

    def evaluate(made: Any) -> None:
        count = len(rows) // ranks
        mine = rows[made.accelerator.process_index * count :][:count]
        made.optimizer_step = lambda output: evaluated.append((mine, made.evaluate(mine)))

    trained = trl.train(
        4, ranks=ranks, data=lambda: trl.conversations(12), environment_factory=Room, reward_funcs=[noted],
        prepare=evaluate, **EXAMPLES,
    )  # fmt: skip

    assert all(len(rooms) == 1 for rooms in asked)
    assert len(asked) == 2 * 12 + 4 * len(rows)
    assert len(Room.made) < len(asked)  # the first one shows TRL its tools
    for step in range(4):
        rewards = []
        for made in trained:
            scored, output = [s for s in made.scored if len(s) == 6 // ranks][step], made.outputs[step]
            for row, ids, messages in zip(scored, output["prompt_ids"], output["completions"], strict=True):
                assert row["prompt"][-1]["content"].endswith(f" {20 + row['answer']}")
                assert ids == made._tokenize_prompts([row["prompt"]])[0][0]
                looked = [call["function"]["arguments"]["n"] for m in messages for call in m.get("tool_calls", ())]
                rewards.append(row["answer"] + sum(looked) / 1000)
        groups = np.array(rewards).reshape(-1, 2)
        said = [a for made in trained for a in made.outputs[step]["advantages"].tolist()]
        assert said == pytest.approx((groups - groups.mean(1, keepdims=True)).flatten(), abs=1e-4)
    for mine, output in evaluated:
        assert [ids[-1] for ids in output["prompt_ids"]] == [20 + row["answer"] for row in mine]
        assert "old_per_token_logps" not in output
    assert all(made.environment_factories is not None for made in trained)
    assert trained[0].rollout_func.ledger["tokens"].balanced
    assert trained[0].rollout_func.ledger["prompts"].delivered == 12


def test_finished_responses_have_their_messages_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are delivered by the next process; a checkpoint without tools is refused, and one with them."""
    released, noted = threading.Event(), threading.Event()
    converse = ToolLoop._converse

    def one_waits(loop: ToolLoop, llm: Any, *args: Any) -> None:
        """Group 2 has one response that is finished before the checkpoint, and one that waits for it."""
        group, index = llm.sample_id
        if (group, index) == (2, 1):
            released.wait()
        converse(loop, llm, *args)
        if (group, index) == (2, 0):
            noted.set()
        elif group > 2:
            noted.wait()

    def saved(loop: ToolLoop) -> list[Any]:
        notes = state(loop)
        if before.state.global_step == 3:
            released.set()
        return notes

    state = ToolLoop.state
    monkeypatch.setattr(ToolLoop, "_converse", one_waits)
    monkeypatch.setattr(ToolLoop, "state", saved)
    before = trainer()
    before.folder = tmp_path
    before.train(steps=3)
    checkpoint = str(tmp_path / "checkpoint-3")
    after = trainer()
    after.train(6, checkpoint)

    check(after)
    trained = Counter(row["answer"] for made in (before, after) for rows in made.scored for row in rows[::2])
    assert trained == dict.fromkeys(range(12), 1)
    assert not after.rollout_func.ledger["tokens"].dropped
    with pytest.raises(april.CheckpointError, match="saved with some of tools and environment_factory, but now there"):
        Trainer(tiny_model(), adapter.rollout(PARTIALS), trl.conversations(12), **EXAMPLES).train(6, checkpoint)


@pytest.mark.parametrize("settings", [
    {"group_quorum": 0.75}, {"on_data_end": "wrap"},
])  # fmt: skip
@pytest.mark.parametrize("environment", [False, True])
def test_filters_and_quorums_see_what_the_tools_have_said(environment: bool, settings: dict[str, Any]) -> None:
    """Rewards of responses that are not trained yet are of their messages."""
    fours: dict[str, Any] = {"num_generations": 4, "generation_batch_size": 8}
    options = {"environment_factory": Room, "reward_funcs": [rewards_of_rooms]} if environment else {}
    chosen = {"filter": april.rewards_differ} if "on_data_end" in settings else {}
    made = trainer(8, PARTIALS | settings, **fours, **options, **chosen)
    made.train(steps=3)

    check(made)
    assert all(output["advantages"].shape == (8,) for output in made.outputs)


def test_a_row_of_an_unknown_environment_is_named() -> None:
    """Where there are several, rows say which is theirs."""
    rooms: dict[str, Any] = {"environment_factory": {"red": Room, "blue": Room}, "reward_funcs": [rewards_of_rooms]}
    made = trainer(columns=lambda row: {"environment": "green"}, **rooms)
    with pytest.raises(april.RolloutError, match=r"environment='green', but environment_factory has \['red', 'blue'\]"):
        made.train(steps=1)


def test_each_row_has_the_environment_that_it_names() -> None:
    """And only that one is reset with the row's columns, without its name."""

    class Other(Room):
        def reset(self, answer: int, **columns: Any) -> None:  # type: ignore[override]
            assert "environment" not in columns
            self.seen, self.answer = [], 1000

    rooms: dict[str, Any] = {"environment_factory": {"red": Room, "blue": Other}, "reward_funcs": [rewards_of_rooms]}
    made = trainer(columns=lambda row: {"environment": "blue" if row["answer"] % 2 else "red"}, **rooms)
    made.train(steps=6)

    for rows in made.scored:
        for row in rows:
            greeted = len(row["prompt"][-1]["content"].split()) == 3
            assert greeted == (row["environment"] == "red")
