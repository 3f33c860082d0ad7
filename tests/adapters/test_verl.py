"""april behind verl's rollouts, on a virtual clock: batches, filters, mishaps, checkpoints, experts and media."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from adapters.stand_in_verl import EOS, Trainer, generate, single_turn
from april.adapters.common.placed_media import digest_of, placed_media, runs_of
from april.adapters.verl.agent_calls import (
    AgentLoopSession,
    LLMCall,
    LLMResult,
    SampleGivenUp,
    ServerResult,
    WorkerCalls,
    result_of,
)
from april.core.versions import PolicyVersion
from april.engines.simulated.synthetic_rows import synthetic_rows
from april.errors import CheckpointError, RolloutError
from april.testing import run_virtual

Make = Callable[..., Trainer]
failures: Counter[tuple[int, int]] = Counter()
REPLAY = {"actor_rollout_ref__rollout__enable_rollout_routing_replay": True}
PAD, VIDEO = 7, 8


def mixed(row: int, sample: int) -> int:
    """Lengths from 3 to 39."""
    return 3 + (7 * row + 11 * sample) % 37


def five(row: int, sample: int) -> int:
    return 5


@pytest.fixture
def trainer() -> Iterator[Make]:
    made: list[Trainer] = []

    def make(length_of: Callable[[int, int], int] = mixed, **more: Any) -> Trainer:
        made.append(Trainer(length_of, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_late_requests_neither_hang_the_step_nor_are_lost(trainer: Make) -> None:
    """A server that keeps late requests waiting behind its gate: the step ends without them, and their tokens count."""
    run = trainer(lambda row, sample: 5 + row % 11, rejects=False, april__refill="sample", april__max_in_flight=6)
    run.way_s = 2.4
    for _ in range(8):
        before = run.loop.time()
        run.step()
        assert run.loop.time() - before < 60
        run.update()
        run.validate(15.0)  # the server goes on with what waited at its gate
    tokens = run.ledgers()["tokens"]
    late = sum(len(tokens) for _, _, _, tokens, *_ in run.run._servers.late_responses())
    assert tokens["observed"] == tokens["delivered"] + tokens["held"] == run.server.generated - late
    assert run.core.counters["fenced_attempts"] > 0
    assert max(Counter(run.trained).values()) == 1


def test_groups_without_a_signal_are_replaced_and_forgotten(trainer: Make) -> None:
    """Dynamic sampling: groups with equal rewards are dropped by name, replaced at once, and leave verl's queue.

    Rewards are equal if no float32 tells them apart. A long run holds no more at its end than what is under way.
    """
    run = trainer(
        reward_of=lambda row, sample, response: float(sample) if row % 3 else (0.3, 0.1 + 0.2)[sample % 2],
        algorithm__filter_groups__enable=True,
    )
    run.steps(40)
    assert all(row % 3 for row, _ in run.trained)
    assert run.ledgers()["prompts"]["dropped"]["filtered"] > 20
    held = {str(group.prompt.data["uid"]) for group in run.core.buffer}
    assert set(run.run.prompts.rows) <= held
    assert {uid for uid, _ in run.run.stored} <= held
    assert {key.split("_")[0] for key in run.stored} <= held
    assert set(run.queue) == {*held, *(uid for uid, _ in run.run.prompts.offered)}


def test_several_turns_are_one_partial_rollout(trainer: Make) -> None:
    """Two calls with a tool between them, cut over updates: tokens of the tool are in no span."""

    async def two_turns(session: AgentLoopSession, prompt: list[int]) -> list[int]:
        first: LLMResult = await generate(session, prompt, 9)
        tool = [70, 71]
        second: LLMResult = await generate(session, [*prompt, *first.tokens.tolist(), *tool], 20)
        return [*first.tokens.tolist(), *tool, *second.tokens.tolist()]

    run = trainer(lambda row, sample: 26 if row < 2 else 12)
    run.agent_loop = two_turns
    seen = run.steps(8)
    for key in ("u0_0_0", "u1_1_0"):
        spans = seen[key]["spans"]
        covered = {i for start, end, _ in spans for i in range(start, end)}
        assert covered == set(range(len(seen[key]["tokens"]))) - {9, 10}
        assert len({span[2] for span in spans}) > 1


def test_an_agent_loop_that_was_replaced_is_not_heard(trainer: Make) -> None:
    """A sample that is too old begins again while its loop waits for a tool: the old loop ends at its next call."""
    lives: Counter[tuple[int, int]] = Counter()
    ended: list[int] = []
    """Lives of one sample that came to their end."""
    told: list[int] = []
    """Those that were told that it goes on without them."""

    async def with_a_slow_tool(session: AgentLoopSession, prompt: list[int]) -> list[int]:
        me = prompt[1], prompt[2]
        lives[me] += 1
        life = lives[me]
        first: LLMResult = await generate(session, prompt, 3)
        if prompt[1] == 0 and lives[me] < 3:
            await asyncio.sleep(25.0)
        try:
            second: LLMResult = await generate(session, [*prompt, *first.tokens.tolist()], 20)
        except SampleGivenUp:
            told.append(life)
            raise
        if me == (0, 0):
            ended.append(life)
        return [*first.tokens.tolist(), *second.tokens.tolist()]

    run = trainer(lambda row, sample: 9, april__max_staleness=1, april__on_stale="restart")
    run.agent_loop = with_a_slow_tool
    for _ in range(12):
        run.step()
        for response in run.last.values():
            assert [(s[0], s[1]) for s in response["spans"]][-1][1] == len(response["tokens"])
        run.step_number += 1  # more updates than batches: no plan can hold the bound
        run.update()
    assert lives[0, 0] > 1
    assert min(ended) == 3
    assert {1, 2} <= set(told)
    assert run.core.counters["failed_samples"] == 0
    assert max(Counter(run.trained).values()) == 1
    assert run.ledgers()["tokens"]["dropped"].get("stale", 0) > 0


def test_an_agent_loop_without_a_call_is_told(trainer: Make) -> None:
    """Groups that fail in a row end the step with the last reason."""

    async def silent(session: AgentLoopSession, prompt: list[int]) -> list[int]:
        return []

    run = trainer()
    run.agent_loop = silent
    sentence = r"8 groups failed in a row.*returned without awaiting a call of llm.generate"
    with pytest.raises(RolloutError, match=sentence):
        run.step()


@pytest.mark.parametrize("on_stale", ["mask", "restart", "drop"])
def test_too_old_tokens(trainer: Make, on_stale: str) -> None:
    """mask takes the loss off old tokens, restart begins again, drop gives the group up; nothing else is touched."""
    run = trainer(
        lambda row, sample: 39 if row % 3 == 0 else 2, april__max_staleness=1, april__on_stale=on_stale,
        april__over_sampling_batch_size=12,
    )  # fmt: skip
    masked = 0
    for _ in range(30):
        delivery = run.step()
        masked += len(delivery.masked)
        for (uid, index), mask in delivery.masked.items():
            assert len(mask) == len(run.last[f"{uid}_{index}_0"]["tokens"])
        run.update()
    dropped = run.ledgers()["tokens"]["dropped"]
    assert (masked > 0) == (on_stale == "mask")
    assert (dropped.get("stale", 0) > 0) == (on_stale != "mask")


# ---------------------------------------------------------------- mishaps


async def with_a_cancelled_tool(session: AgentLoopSession, prompt: list[int]) -> list[int]:
    """A CancelledError from within: for row 2 once, for row 1 always."""
    failures[prompt[1], 0] += 1
    if prompt[1] == 1 or (prompt[1] == 2 and failures[2, 0] == 1):
        raise asyncio.CancelledError
    return await single_turn(session, prompt)


async def in_a_hurry(session: AgentLoopSession, prompt: list[int]) -> list[int]:
    """For row 1, a timeout around a call, after which it goes on or asks again."""
    if prompt[1] != 1:
        return await single_turn(session, prompt)
    try:
        done = await asyncio.wait_for(generate(session, prompt, 40), 2.0)
    except TimeoutError:
        return [] if session.index else [int(t) for t in (await generate(session, prompt, 40)).tokens]
    return done.tokens.tolist()


async def parallel(session: AgentLoopSession, prompt: list[int]) -> list[int]:
    """For row 1, two calls at the same time, which are refused: one response per sample."""
    if prompt[1] == 1:
        await asyncio.gather(*(generate(session, prompt, 9) for _ in range(2)))
    return await single_turn(session, prompt)


@pytest.mark.parametrize("agent_loop", [with_a_cancelled_tool, in_a_hurry, parallel])
def test_an_agent_loop_that_goes_wrong_costs_its_group_and_not_the_run(trainer: Make, agent_loop: Any) -> None:
    """Once costs a try; for good, the group is dropped by name, and what the server still sends is named."""
    failures.clear()
    run = trainer(five)
    run.agent_loop = agent_loop
    run.steps(4)
    assert 1 not in {row for row, _ in run.trained}
    assert 2 in {row for row, _ in run.trained}
    assert run.ledgers()["prompts"]["dropped"] == {"failed": 1}


def test_a_dropped_group_holds_up_no_step(trainer: Make) -> None:
    """Its sibling still generates when N groups are complete: the step ends then, and those tokens are named."""

    def reward(row: int, sample: int, response: list[int]) -> float:
        if row == 1:
            raise ValueError("no answer in the response")
        return float(sample)

    # the third failure is at 6, with the sibling on its way to 35
    run = trainer(lambda row, sample: (35 if sample else 2) if row == 1 else 7, reward_of=reward)
    before = run.loop.time()
    run.step()
    assert run.loop.time() - before == 7.0
    assert run.core.counters["fenced_attempts"] == 0
    run.validate(1.0)
    tokens = run.ledgers()["tokens"]
    assert tokens["dropped"] == {"failed": 6, "late": 7}
    assert tokens["observed"] == run.server.generated


def test_a_dropped_prompt_is_not_asked_again_after_a_restart(trainer: Make, tmp_path: Path) -> None:
    """It was dropped between a batch and its checkpoint, so it is still in verl's queue."""

    async def with_a_slow_tool(session: AgentLoopSession, prompt: list[int]) -> list[int]:
        if prompt[1] == 1 and session.index == 0:
            await asyncio.sleep(3.0)  # three times, and the step ends at 8
            raise ValueError("broken")
        response = await single_turn(session, prompt)
        if prompt[1] == 1:
            await asyncio.sleep(1000.0)
        return response

    run = trainer(lambda row, sample: 5 if row == 1 else 8)
    run.agent_loop = with_a_slow_tool
    run.step()
    run.validate(2.0)
    assert run.ledgers()["prompts"]["dropped"] == {"failed": 1}
    mine = run.save(tmp_path)
    assert 1 in mine["queue"].values()
    again = trainer(five)
    again.load(tmp_path, mine)
    assert 1 not in again.queue.values()
    again.steps(6)
    assert 1 not in {row for row, _ in again.trained}


def test_tokens_that_came_late_are_in_the_checkpoint(trainer: Make, tmp_path: Path) -> None:
    """Those of requests that the step did not wait for: the next process goes on behind them."""

    run = trainer(lambda row, sample: 30 if row == 0 else 4)
    run.delay_s = 3.0  # longer than the step waits
    run.step()
    run.validate(10.0)
    assert run.run._servers.late_responses()
    generated, mine = run.server.generated, run.save(tmp_path)
    again = trainer(lambda row, sample: 30 if row == 0 else 4)
    again.load(tmp_path, mine)
    seen = again.steps(6)
    for response in (t for key, t in seen.items() if key.startswith("u0_")):
        assert len(response["tokens"]) == 30
        assert response["spans"][0][2] == "0.0"
        assert response["spans"][1][2].startswith("1.")
    tokens = again.ledgers()["tokens"]
    assert tokens["observed"] == generated + again.server.generated


# ---------------------------------------------------------------- checkpoints


def test_a_trajectory_that_verl_has_not_saved_is_made_again_from_its_tokens(trainer: Make, tmp_path: Path) -> None:
    """verl saves its queue a moment before april's state: what was finished in between runs again without a server."""
    first = trainer()
    first.step()
    mine = first.save(tmp_path)
    surplus = sorted(set(mine["stored"]) - {k for k in mine["stored"] if k.split("_")[0] not in mine["queue"]})
    assert surplus
    lost = surplus[0]
    tokens = mine["stored"].pop(lost)["tokens"]
    second = trainer()
    second.load(tmp_path, mine)
    seen = second.steps(4)
    assert seen[lost]["tokens"] == tokens
    assert {span[2] for span in seen[lost]["spans"]} == {"0.0"}


def test_prompts_that_verls_queue_has_not_are_named(trainer: Make, tmp_path: Path) -> None:
    """april's state and verl's checkpoint are not of the same moment."""
    first = trainer()
    first.step()
    mine = first.save(tmp_path)
    uid = next(iter(mine["queue"]))
    with pytest.raises(CheckpointError, match="are not in the trainer's checkpoint"):
        trainer().load(tmp_path, mine | {"queue": {u: r for u, r in mine["queue"].items() if u != uid}})


# ---------------------------------------------------------------- experts and media


def check_rows(row: int, sample: int, trajectory: dict[str, Any]) -> int:
    """Every row is of the version of its token, int16 as verl's own; returns how many versions there are."""
    ids = np.array([50, row, sample, *trajectory["tokens"]], np.int32)
    spans = [(PolicyVersion(0, int(name.partition(".")[2])), end - start) for start, end, name in trajectory["spans"]]
    spans[0] = (spans[0][0], spans[0][1] + 2)  # the prompt is read under the first one
    assert trajectory["experts"].dtype == np.int16
    assert np.array_equal(trajectory["experts"], synthetic_rows("routed_experts", ids, spans))
    return len(spans)


def checked(trainer: Trainer, count: int) -> int:
    """So many steps; how many of their trajectories several versions have written."""
    continued = 0
    for _ in range(count):
        delivery = trainer.step()
        for uid, rollout in delivery.rollouts:
            row = trainer.queue.get(uid, int(uid[1:]))
            continued += check_rows(row, rollout, trainer.last[f"{uid}_{rollout}_0"]) > 1
        trainer.update()
    return continued


def test_rows_of_what_was_cut_and_continued(trainer: Make) -> None:
    """Each row stays as the weights made it that wrote its token, over two cuts and more."""
    assert checked(trainer(**REPLAY), 8) >= 4


@pytest.mark.parametrize("delay_s", [0.0, 5.0])
def test_rows_go_on_after_a_restart(trainer: Make, delay_s: float, tmp_path: Path) -> None:
    """april's file has the rows of what was held, those of results that came late among them."""
    first = trainer(**REPLAY)
    first.delay_s = delay_s
    checked(first, 3)
    first.step()
    mine = first.save(tmp_path)
    second = trainer(**REPLAY)
    assert second.load(tmp_path, mine)
    assert checked(second, 4) >= 1


def test_a_cut_without_rows_is_generated_again(trainer: Make) -> None:
    """verl's server gives none for a request that was put back: its tokens are dropped by name."""
    run = trainer(**REPLAY)
    checked(run, 1)
    run.server.wrong += [{"routed_experts": None, "stop_reason": "aborted"}] * 2
    checked(run, 3)
    assert run.ledgers()["tokens"]["dropped"]["no_extras"] > 0


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_what_a_server_says(dtype: Any) -> None:
    """Rows of every type that verl's servers use are held in as few bytes as they need."""
    rows = np.arange(2 * 3 * 2, dtype=dtype).reshape(2, 3, 2) * dtype(20)
    output = SimpleNamespace(token_ids=[5, 6], log_probs=[-1.0, -1.0], stop_reason="completed", extra_fields={},
                             routed_experts=rows)  # fmt: skip
    result: ServerResult = result_of(1, output)
    assert result.extras["routed_experts"].dtype == np.uint8
    assert np.array_equal(result.extras["routed_experts"], rows)
    assert result_of(1, output, sampling={"stop": ["."]}).own_end  # which only verl's server sees


def test_media_are_known_by_their_content_at_their_places() -> None:
    """Each by its run of ids; a kind whose items and runs do not agree says nothing."""
    image_module = pytest.importorskip("PIL.Image")
    one, two = (image_module.new("RGB", (4, 4), color) for color in ("red", "blue"))
    ids = [1, PAD, PAD, 2, PAD, 3, VIDEO, VIDEO]
    frames = np.zeros((2, 3, 4, 4), np.uint8)
    stands = {"image": PAD, "video": VIDEO}
    placed = placed_media(ids, {"image": [one, two], "video": [(frames, {"fps": 2.0})], "audio": None}, stands)
    assert [(p.attachment.kind, p.at, p.count) for p in placed] == [("image", 1, 2), ("image", 4, 1), ("video", 6, 2)]
    assert placed[0].attachment.digest == digest_of(one.copy()) != digest_of(two) == placed[1].attachment.digest
    assert placed_media(ids, {"image": [one]}, stands) == placed_media(ids, {"image": [object(), one]}, stands) == ()
    assert runs_of(np.array([], np.int32), PAD) == []
    assert digest_of([frames, "a"]) != digest_of([frames, "b"])


def test_different_media_have_different_digests() -> None:
    """Images that only differ in their palette, and lists whose items run together in the same way."""
    image_module = pytest.importorskip("PIL.Image")
    red, blue = image_module.new("P", (4, 4)), image_module.new("P", (4, 4))
    red.putpalette([255, 0, 0])
    blue.putpalette([0, 0, 255])
    assert digest_of(red) == digest_of(red.copy())
    different = [red, blue, [1, 23], [12, 3], [1, [23]], [[1], 23], {1: 23}, [b"a", b"b"], [b"ab", b""], b"ab", "ab"]
    assert len({digest_of(item) for item in different}) == len(different)


def test_a_rollout_that_sees_another_image_after_a_restart_begins_anew(trainer: Make, tmp_path: Path) -> None:
    """Their tokens are equal: what was said of the one is no answer about the other. With the same image it goes on."""

    def looks_at(picture: bytes) -> Any:
        async def rollout(session: AgentLoopSession, prompt: list[int]) -> list[int]:
            attached = placed_media(prompt, {"image": [picture]}, {"image": 50})
            assert len(attached) == 1
            done = await generate(session, prompt, 40, attached=attached)
            return [int(token) for token in done.tokens]

        return rollout

    run = trainer()
    run.agent_loop = looks_at(b"a cat")
    run.steps(2)
    mine = run.save(tmp_path)
    assert run.ledgers()["tokens"]["held"]
    diverged = {}
    for picture in (b"a cat", b"a dog"):
        again = trainer()
        again.agent_loop = looks_at(picture)
        again.load(tmp_path, mine)
        again.steps(2)
        diverged[picture] = again.ledgers()["tokens"]["dropped"].get("replay_diverged", 0)
    assert diverged[b"a cat"] == 0
    assert diverged[b"a dog"] > 0


def test_a_generated_placeholder_is_dropped_by_name(trainer: Make) -> None:
    """A server without bans may write one; the actor could not read the row, so it is generated again."""

    async def rollout(session: AgentLoopSession, prompt: list[int]) -> list[int]:
        done = await generate(session, prompt, 40, banned_ids=(PAD,))
        return [int(token) for token in done.tokens]

    run = trainer()
    run.agent_loop = rollout
    run.server.wrong = [{"token_ids": [PAD, EOS], "log_probs": [-0.1, -0.1]}]
    run.step()
    assert all(PAD not in response["tokens"] for response in run.last.values())
    assert run.ledgers()["tokens"]["dropped"]["corrupt"] == 2


# ---------------------------------------------------------------- workers

ASKED = LLMCall(token_ids=[1, 2, 3], sampling={})


def said_by(agent_loop: Callable[[Any], Awaitable[None]], *told: Any) -> tuple[list[Any], list[str]]:
    """What a worker with one session says, and the keys that it forgets, if it is told this, a second apart."""
    forgotten: list[str] = []

    async def forget(keys: Any) -> None:
        forgotten.extend(keys)

    async def program() -> list[Any]:
        calls = WorkerCalls()
        calls.begin(7, "u0", 1, ["u0_1_0"])
        task = asyncio.ensure_future(calls.run(7, agent_loop, forget))
        said = []
        for answer in told:
            said += await calls.messages()
            await asyncio.sleep(1.0)
            calls.answer([(7, answer)])
        await task
        calls.answer([(7, None)])  # it is over
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                while True:
                    said += await calls.messages()
        return [what for number, what in said if number == 7]

    return run_virtual(program()), forgotten


def test_a_sample_that_goes_on_without_its_agent_loop_ends_it() -> None:
    """By what ``except Exception`` lets through; what it has stored all the same goes, and nobody is told."""

    async def stubborn(session: Any) -> None:
        session.keys.append("u0_1_1")
        with pytest.raises(SampleGivenUp, match="u0 continues without this rollout"):
            await session.generate(ASKED)

    said, forgotten = said_by(stubborn, None)
    assert said == [ASKED]
    assert forgotten == ["u0_1_0", "u0_1_1"]
    assert not issubclass(SampleGivenUp, Exception)


def test_what_april_refuses_fails_in_generate() -> None:
    """And the agent loop with it, unless it knows better; its failure is told with its place."""

    async def loop(session: Any) -> None:
        with pytest.raises(RolloutError, match="never rewrite it"):
            await session.generate(ASKED)
        raise NameError("x")

    said, _ = said_by(loop, "append to the conversation, and never rewrite it")
    told, kind = said[1]
    assert told.startswith("NameError: x (line ")
    assert kind.startswith("NameError, line ")


def test_a_worker_that_is_gone_ends_the_step_with_a_sentence(trainer: Make) -> None:
    """Its sessions fail, those that are begun later too; the step does not wait for it."""
    run = trainer(five)

    async def dead() -> None:
        raise ConnectionError("the actor died")

    run.worker.messages = dead  # type: ignore[method-assign, assignment]
    with pytest.raises(RolloutError, match=r"groups failed in a row.*verl's worker could not be called"):
        run.step()


def test_prompts_that_were_drawn_and_not_begun_are_in_the_checkpoint(trainer: Make, tmp_path: Path) -> None:
    """A slow draw may be under way when the batch is complete: what it has taken is nobody's yet."""
    run = trainer(five)
    run.step()
    run.fetch(1)
    taken = next(run.run.prompts)["uid"]
    mine = run.save(tmp_path)
    again = trainer(five)
    again.load(tmp_path, mine)
    assert taken in again.queue
    assert taken in {uid for uid, _ in again.run.prompts.offered}
