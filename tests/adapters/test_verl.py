"""april behind verl's rollouts, on a virtual clock: batches, partials, filters, quorums, mishaps, checkpoints."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from seeds import seeds

from adapters.stand_in_verl import EOS, Trainer, single_turn
from april.core.sampling import SamplingParams
from april.core.settings import CoreSettings, EngineLimits
from april.core.types import GenerationMode, Refill
from april.errors import CheckpointError, RolloutError
from april.processes.coordinator.calls import Session, generate
from april.processes.coordinator.coordinator import Coordinator
from april.processes.coordinator.messages import Delivery, Done, Go, Result, Start

Make = Callable[..., Trainer]
failures: Counter[tuple[int, int]] = Counter()
N, SIZE = 3, 6
TRTLLM = {"actor_rollout_ref__rollout__name": "trtllm"}
LONG = 200
"""More than any budget: such a response ends by its length."""


def mixed(row: int, sample: int) -> int:
    """Lengths from 3 to 39."""
    return 3 + (7 * row + 11 * sample) % 37


def five(row: int, sample: int) -> int:
    return 5


def half_long(row: int, sample: int) -> int:
    """Every second prompt goes on to its limit."""
    return LONG if row % 2 else 5 + row % 3


@pytest.fixture
def trainer() -> Iterator[Make]:
    """A maker of trainers that are closed at the end."""
    made: list[Trainer] = []

    def make(length_of: Callable[[int, int], int] = mixed, **more: Any) -> Trainer:
        made.append(Trainer(length_of, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_what_was_cut_goes_on_with_its_tokens_and_versions(trainer: Make) -> None:
    """A response that spans weight updates has the tokens of one that was not cut, and a span per version."""
    run = trainer(lambda row, sample: 30 if row == 0 else 5)
    seen = run.steps(8)
    long = [t for key, t in seen.items() if key.startswith("u0_")]
    assert len(long) == 2
    for response in long:
        assert response["tokens"] == [*range(101, 130), EOS]
        spans = response["spans"]
        assert response["resumes"] == len(spans) - 1 >= 2
        assert [s[0] for s in spans] == [0, *(s[1] for s in spans[:-1])]
        assert spans[-1][1] == 30
        assert [s[2] for s in spans] == sorted(s[2] for s in spans)


def test_nothing_waits_longer_than_the_rollouts(trainer: Make) -> None:
    """No polling: a step ends at the very moment in which its N-th group does."""
    run = trainer(lambda row, sample: 7)
    before = run.loop.time()
    run.step()
    assert run.loop.time() - before == 7.0


def test_late_requests_neither_hang_the_step_nor_are_lost(trainer: Make) -> None:
    """A server that keeps late requests waiting behind its gate: the step ends without them, and their tokens count."""

    async def over_a_slow_network(session: Session, prompt: list[int], send: Any) -> list[int]:
        async def slowly(token_ids: list[int], max_tokens: int) -> Any:
            await asyncio.sleep(2.4)
            return await send(token_ids, max_tokens)

        return await single_turn(session, prompt, slowly)

    run = trainer(lambda row, sample: 5 + row % 11, rejects=False, april__refill="sample", april__max_in_flight=6)
    run.agent_loop = over_a_slow_network
    for _ in range(8):
        before = run.loop.time()
        run.step()
        assert run.loop.time() - before < 60
        run.update()
        run.validate(15.0)  # the server goes on with what waited at its gate
    tokens = run.ask("ledgers")["tokens"]
    late = sum(len(result.tokens) for result in run.coordinator.host.mailboxes.late.values())
    assert tokens["observed"] == tokens["delivered"] + tokens["held"] == run.server.generated - late
    assert run.coordinator.core.counters["fenced_attempts"] > 0
    assert max(Counter(run.trained).values()) == 1


def test_the_cap_on_requests_holds(trainer: Make) -> None:
    """Never more at the server than max_in_flight, or than per replica times replicas."""
    run = trainer(april__max_in_flight=5)
    run.steps(4)
    assert run.server.most_in_flight == 5
    other = trainer(april__max_in_flight_per_replica=4)
    other.step()
    assert other.server.most_in_flight == 4


@pytest.mark.parametrize("refill", ["none", "group", "sample"])
def test_staleness_is_that_of_tokens_and_bounded(trainer: Make, refill: str) -> None:
    """With max_staleness 2 no trained token is older than two updates, whatever the refill; no token is dropped."""
    run = trainer(
        lambda row, sample: 39 if row % 4 == 0 else 3, april__max_staleness=2, april__refill=refill,
        april__max_in_flight=8,
    )  # fmt: skip
    oldest = 0
    for _ in range(15):
        delivery = run.step()
        for response in run.last.values():
            born = min(int(span[2].split(".")[1]) for span in response["spans"])
            oldest = max(oldest, run.step_number - 1 - born)
        assert delivery.metrics["staleness_max"] <= 2
        assert not delivery.masked
        run.update()
    assert 1 <= oldest <= 2


def test_groups_without_a_signal_are_replaced(trainer: Make) -> None:
    """Dynamic sampling: groups with equal rewards are dropped by name, replaced at once, and leave verl's queue.

    Rewards are equal if no float32 tells them apart.
    """
    run = trainer(
        reward_of=lambda row, sample, response: float(sample) if row % 3 else (0.3, 0.1 + 0.2)[sample % 2],
        algorithm__filter_groups__enable=True,
    )
    run.steps(6)
    assert all(row % 3 for row, _ in run.trained)
    prompts = run.ask("ledgers")["prompts"]
    assert prompts["dropped"]["filtered"] > 3
    held = {key.split("_")[0] for key in run.stored}
    assert held <= set(run.queue)
    assert not any(run.queue[uid] % 3 == 0 for uid in held if len([k for k in run.stored if k.startswith(uid)]) == 2)


def test_a_server_that_fails_is_asked_again(trainer: Make) -> None:
    """A request that raises is sent again; nothing is lost."""
    run = trainer()
    run.server.fails = [ConnectionError("actor died"), ConnectionError("actor died")]
    run.steps(3)
    assert run.ask("ledgers")["prompts"]["dropped"] == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"log_probs": None}, {"log_probs": [-1.0]}, {"log_probs": [float("nan")] * 7}, {"token_ids": [5] * 99},
        {"extra_fields": {"global_steps": 9}},
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_true_are_not_believed(trainer: Make, wrong: dict[str, Any]) -> None:
    """Missing or surplus log-probabilities, NaN, more tokens than asked for, weights of the future: asked again."""
    run = trainer(lambda row, sample: 7)
    run.server.wrong = [wrong]
    run.step()
    assert all(t["tokens"] == [*range(101, 107), EOS] for t in run.last.values())
    tokens = run.ask("ledgers")["tokens"]
    assert tokens["observed"] == tokens["delivered"] + tokens["held"] + tokens["dropped"].get("corrupt", 0)
    assert run.coordinator.core.counters["failed_attempts"] == 1


def test_several_turns_are_one_partial_rollout(trainer: Make) -> None:
    """Two calls with a tool between them, cut over updates: tokens of the tool are in no span."""

    async def two_turns(session: Session, prompt: list[int], send: Any) -> list[int]:
        first: Done = await generate(session, send, prompt, 9, 1.0)
        tool = [70, 71]
        second: Done = await generate(session, send, [*prompt, *first.tokens.tolist(), *tool], 20, 1.0)
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
    ended: Counter[tuple[int, int]] = Counter()

    async def with_a_slow_tool(session: Session, prompt: list[int], send: Any) -> list[int]:
        me = prompt[1], prompt[2]
        lives[me] += 1
        first: Done = await generate(session, send, prompt, 3, 1.0)
        if prompt[1] == 0 and lives[me] < 3:
            await asyncio.sleep(25.0)
        second: Done = await generate(session, send, [*prompt, *first.tokens.tolist()], 20, 1.0)
        ended[me] += 1
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
    assert ended[0, 0] == 1
    assert run.coordinator.core.counters["failed_samples"] == 0
    assert max(Counter(run.trained).values()) == 1
    assert run.ask("ledgers")["tokens"]["dropped"].get("stale", 0) > 0


def test_an_agent_loop_without_a_call_is_told(trainer: Make) -> None:
    """Groups that fail in a row end the step with the last reason."""

    async def silent(session: Session, prompt: list[int], send: Any) -> list[int]:
        return []

    run = trainer()
    run.agent_loop = silent
    with pytest.raises(RolloutError, match=r"8 groups failed in a row.*returned without a call of llm.generate"):
        run.step()


def test_a_batch_of_another_size_is_refused(trainer: Make) -> None:
    """verl must ask for train_batch_size prompts."""
    run = trainer()
    with pytest.raises(RolloutError, match="the trainer asked for 2 prompts, and its configuration says 3"):
        run.run.next_batch(0, 2)


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
            assert len(mask) == 3 + len(run.last[f"{uid}_{index}_0"]["tokens"])
        run.update()
    dropped = run.ask("ledgers")["tokens"]["dropped"]
    assert (masked > 0) == (on_stale == "mask")
    assert (dropped.get("stale", 0) > 0) == (on_stale != "mask")


# ---------------------------------------------------------------- mishaps


async def with_a_cancelled_tool(session: Session, prompt: list[int], send: Any) -> list[int]:
    """A CancelledError from within: for row 2 once, for row 1 always."""
    failures[prompt[1], 0] += 1
    if prompt[1] == 1 or (prompt[1] == 2 and failures[2, 0] == 1):
        raise asyncio.CancelledError
    return await single_turn(session, prompt, send)


async def in_a_hurry(session: Session, prompt: list[int], send: Any) -> list[int]:
    """For row 1, a timeout around a call, after which it goes on or asks again."""
    if prompt[1] != 1:
        return await single_turn(session, prompt, send)
    try:
        done = await asyncio.wait_for(generate(session, send, prompt, 40, 1.0), 2.0)
    except TimeoutError:
        return [] if session.index else [int(t) for t in (await generate(session, send, prompt, 40, 1.0)).tokens]
    return done.tokens.tolist()


async def parallel(session: Session, prompt: list[int], send: Any) -> list[int]:
    """For row 1, two calls at the same time, which are refused: one response per sample."""
    if prompt[1] == 1:
        await asyncio.gather(*(generate(session, send, prompt, 9, 1.0) for _ in range(2)))
    return await single_turn(session, prompt, send)


@pytest.mark.parametrize("agent_loop", [with_a_cancelled_tool, in_a_hurry, parallel])
def test_an_agent_loop_that_goes_wrong_costs_its_group_and_not_the_run(trainer: Make, agent_loop: Any) -> None:
    """Once costs a try; for good, the group is dropped by name, and what the server still sends is named."""
    failures.clear()
    run = trainer(five)
    run.agent_loop = agent_loop
    run.steps(4)
    assert 1 not in {row for row, _ in run.trained}
    assert 2 in {row for row, _ in run.trained}
    assert run.ask("ledgers")["prompts"]["dropped"] == {"failed": 1}


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
    assert run.coordinator.core.counters["fenced_attempts"] == 0
    run.validate(1.0)
    tokens = run.ask("ledgers")["tokens"]
    assert tokens["dropped"] == {"failed": 6, "late": 7}
    assert tokens["observed"] == run.server.generated


@pytest.mark.parametrize("policy", ["restart", "drop"])
def test_surplus_that_gets_too_old_after_a_restart(trainer: Make, tmp_path: Path, policy: str) -> None:
    """Somebody listens for it in the new process: it begins again, or is dropped and leaves verl's queue."""
    changes = {"april__max_staleness": 1, "april__on_stale": policy, "april__over_sampling_batch_size": 12}
    run = trainer(five, **changes)
    run.step()
    mine = run.save(tmp_path)
    again = trainer(five, **changes)
    again.trained = list(run.trained)
    assert len(again.load(tmp_path, mine)) == 9
    again.steps(6)
    assert max(Counter(again.trained).values()) == 1
    books = again.ask("ledgers")
    assert books["tokens"]["dropped"]["stale"] > 0
    if policy == "drop":
        assert set(again.queue.values()) & {row for row, _ in again.trained} == set()
        assert len(again.queue) == books["prompts"]["held"] + len(again.run._offered)


def test_a_dropped_prompt_is_not_asked_again_after_a_restart(trainer: Make, tmp_path: Path) -> None:
    """Its rollouts have not all ended when verl saves, so it is still in verl's queue."""

    async def with_a_slow_tool(session: Session, prompt: list[int], send: Any) -> list[int]:
        if prompt[1] == 1 and session.index == 0:
            await asyncio.sleep(1.9)
            raise ValueError("broken")
        response = await single_turn(session, prompt, send)
        if prompt[1] == 1:
            await asyncio.sleep(1000.0)
        return response

    run = trainer(lambda row, sample: 5 if row == 1 else 8)
    run.agent_loop = with_a_slow_tool
    run.step()
    assert run.ask("ledgers")["prompts"]["dropped"] == {"failed": 1}
    mine = run.save(tmp_path)
    assert 1 in mine["queue"].values()
    again = trainer(five)
    again.load(tmp_path, mine)
    assert 1 not in again.queue.values()
    again.steps(6)
    assert 1 not in {row for row, _ in again.trained}


def test_tokens_that_came_late_are_in_the_checkpoint(trainer: Make, tmp_path: Path) -> None:
    """Those of requests that the step did not wait for: the next process goes on behind them."""

    async def over_a_slow_network(session: Session, prompt: list[int], send: Any) -> list[int]:
        async def slowly(token_ids: Any, max_tokens: int) -> Any:
            result = await send(token_ids, max_tokens)
            await asyncio.sleep(3.0)  # longer than the step waits
            return result

        return await single_turn(session, prompt, slowly)

    run = trainer(lambda row, sample: 30 if row == 0 else 4)
    run.agent_loop = over_a_slow_network
    run.step()
    run.validate(10.0)
    late = {i: list(r.tokens) for i, r in run.coordinator.host.mailboxes.late.items() if len(r.tokens)}
    assert late
    generated, mine = run.server.generated, run.save(tmp_path)
    again = trainer(lambda row, sample: 30 if row == 0 else 4)
    again.load(tmp_path, mine)
    seen = again.steps(6)
    for response in (t for key, t in seen.items() if key.startswith("u0_")):
        assert len(response["tokens"]) == 30
        assert response["spans"][0][2] == "0.0"
        assert response["spans"][1][2].startswith("1.")
    tokens = again.ask("ledgers")["tokens"]
    assert tokens["observed"] == generated + again.server.generated


@pytest.mark.asyncio
async def test_tokens_of_weights_that_nobody_told_of() -> None:
    """What separate_async would bring, whose servers get weights without a word: the tokens are dropped by name."""
    settings = CoreSettings(
        rollout_batch_size=1, n_samples_per_prompt=1, over_sampling_batch_size=2, max_response_len=50, max_in_flight=2,
        generation=GenerationMode.CONTINUOUS, refill=Refill.SAMPLE,
    )  # fmt: skip
    coordinator = Coordinator(settings, EngineLimits("verl", 100, None, (0,), "temperature"), check=True)
    await coordinator.begin(0)
    await coordinator.drawn(["a", "b"])
    start = await coordinator.start("a", 0)
    assert isinstance(start, Start)
    assert isinstance(await coordinator.call("a", 0, start.life, np.array([1, 2], np.int32), SamplingParams(50)), Go)
    tokens, logprobs = np.array([5, 6, 0], np.int32), np.zeros(3, np.float32)
    result = Result(offset=2, tokens=tokens, logprobs=logprobs, label=1, aborted=False)

    await coordinator.ended("a", 0, start.life, result)

    assert (await coordinator.ledgers())["tokens"]["dropped"] == {"corrupt": 3}


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


# ---------------------------------------------------------------- quorum and samples that fail


def reward_of(row: int, sample: int, response: list[int]) -> float:
    """Names row and sample."""
    return row + sample / 100


QUORUM: dict[str, Any] = {
    "april__group_quorum": 0.5, "algorithm__adv_estimator": "april_grpo", "actor_rollout_ref__rollout__n": SIZE,
    "reward_of": reward_of,
}  # fmt: skip
def check(run: Trainer, delivery: Delivery) -> None:
    """N * n rows; the baseline of each is of two rewards of its prompt, its own not among them."""
    assert len(set(delivery.rollouts)) == len(delivery.rollouts) == len(delivery.rewards) == N * SIZE
    rows = {uid: int(uid[1:]) for uid in delivery.uids}
    for (uid, rollout), reward, others in zip(
        delivery.rollouts, delivery.rewards, delivery.baseline_rewards, strict=True
    ):
        assert reward == pytest.approx(rows[uid] + rollout / 100)
        others = others[~np.isnan(others)]
        assert len(others) == 2
        assert {int(other) for other in others} == {rows[uid]}
        assert all(abs(other - reward) > 1e-3 for other in others)


def test_batches_are_full_and_stragglers_follow(trainer: Make) -> None:
    """Parts of groups; each sample once; one cohort makes the baselines of all of a group; the books balance."""
    run = trainer(**QUORUM)
    settled: list[str] = []
    seen: dict[str, set[float]] = {}
    split = 0
    for _ in range(14):
        delivery = run.step()
        check(run, delivery)
        settled += delivery.settled
        split += len(delivery.uids) > len(delivery.settled)
        for (uid, _), others in zip(delivery.rollouts, delivery.baseline_rewards, strict=True):
            seen.setdefault(uid, set()).update(others[~np.isnan(others)].tolist())
        run.update()
    assert split
    assert max(map(len, seen.values())) == 3  # the first three finishers, whoever is compared with them
    assert max(Counter(run.trained).values()) == 1
    by_prompt = Counter(row for row, _ in run.trained)
    assert all(by_prompt[int(uid[1:])] == SIZE for uid in settled)
    assert len(settled) == len(set(settled)) == run.ask("ledgers")["prompts"]["delivered"]
    tokens = run.ask("ledgers")["tokens"]
    assert tokens["observed"] == run.server.generated == tokens["delivered"] + tokens["held"]
    assert set(run.stored) == {key for key in run.stored if key.split("_")[0] in run.queue}


def fails_for_one(row: int, sample: int, response: list[int]) -> float:
    """The first three runs of the second rollout of every third row raise, which is as often as one is tried."""
    failures[row, sample] += 1
    if row % 3 == 0 and sample == 1 and failures[row, sample] <= 3:
        raise ValueError("the judge cannot read this")
    return reward_of(row, sample, response)


@pytest.mark.parametrize("quorum", [1.0, 0.5])
@pytest.mark.parametrize("policy", ["replace", "shrink"])
def test_a_sample_that_fails_for_good_costs_itself(trainer: Make, quorum: float, policy: str) -> None:
    """Its rollout goes on with a fresh sample, or ends and its siblings are trained; no prompt is dropped.

    With a quorum batches stay full, and baselines are right.
    """
    failures.clear()
    changes = {**QUORUM, "april__group_quorum": quorum, "reward_of": fails_for_one}
    run = trainer(april__on_failed_sample=policy, **changes)
    for _ in range(12):
        delivery = run.step()
        assert len(delivery.rollouts) == N * SIZE or (policy, quorum) == ("shrink", 1.0)
        if quorum < 1 and policy == "replace":
            check(run, delivery)
        run.update()
    assert run.ask("ledgers")["prompts"]["dropped"] == {}
    assert max(Counter(run.trained).values()) == 1
    assert any(row % 3 == 0 and rollout == 1 for row, rollout in run.trained) == (policy == "replace")
    assert (run.coordinator.core.counters["replaced_samples"] > 3) == (policy == "replace")
    by_prompt = Counter(row for row, _ in run.trained)
    assert {by_prompt[row] for row in range(0, 18, 3)} == {SIZE - (policy == "shrink")}
    assert all(key.split("_")[0] in run.queue for key in run.stored)


@pytest.mark.parametrize("quorum", [False, True])
@pytest.mark.parametrize("seed", seeds(8))
def test_random_restarts(trainer: Make, tmp_path: Path, seed: int, quorum: bool) -> None:
    """Whatever the mode, and however often: each sample once in the history that the checkpoints kept, none lost."""
    chance = random.Random(seed)
    failures.clear()
    changes = {
        **(QUORUM if quorum else {}), "april__refill": chance.choice(["none", "group", "sample"]),
        "april__max_in_flight": chance.choice([4, 8, 12]) if not quorum else None,
        "april__on_failed_sample": chance.choice(["replace", "shrink"]) if quorum else None,
        "algorithm__filter_groups__enable": chance.random() < 0.5, "rejects": chance.random() < 0.5,
        "reward_of": fails_for_one if quorum else lambda row, sample, response: float(sample if row % 4 else 1),
    }  # fmt: skip
    run = trainer(**changes)
    for life in range(4):
        for _ in range(chance.randint(1, 4)):
            run.step()
            folder = tmp_path / str(life)
            mine, kept = run.save(folder), list(run.trained)
            run.update()
        run.steps(chance.randint(0, 2))  # in vain: the process ends before the next checkpoint
        run = trainer(**changes)
        run.trained = kept
        held = run.load(folder, mine)
        assert all(held.values()) or not quorum
    for _ in range(4):
        assert len(run.step().rollouts) == (N * SIZE if quorum else 3 * 2)
        run.update()
    assert max(Counter(run.trained).values()) == 1
    trained = Counter(row for row, _ in run.trained)
    filters = changes["algorithm__filter_groups__enable"] and not quorum
    # a row that is neither trained nor held was filtered
    gone = [row for row in range(run.drawn) if row not in run.queue.values() and trained[row] < run.n - quorum]
    assert all(row % 4 == 0 for row in gone)
    assert filters or not gone
    assert all(row % 4 for row in trained) or not filters
    assert run.ask("ledgers")["prompts"]["dropped"] == {} or filters


# ---------------------------------------------------------------- TensorRT-LLM: budgets of its own


def test_long_responses_are_cut_to_their_limit_and_none_is_lost(trainer: Make) -> None:
    """Tokens beyond the budget are dropped by name, and the response is complete: long prompts are trained as short
    ones are."""
    by_length: Counter[bool] = Counter()

    async def single_call(session: Session, prompt: list[int], send: Any) -> list[int]:
        done: Done = await generate(session, send, prompt, 40, 1.0)
        by_length[done.by_length] += prompt[1] % 2
        return done.tokens.tolist()

    run = trainer(half_long, **TRTLLM)
    run.agent_loop = single_call
    trained = run.steps(8)
    books = run.ask("ledgers")
    assert books["prompts"]["dropped"] == {}
    assert sorted(Counter(run.trained).values()) == [1] * 8 * 3 * 2
    rows = sorted({row for row, _ in run.trained})
    assert len([row for row in rows if row % 2]) >= len(rows) // 2 - 2
    long = [t for t in trained.values() if len(t["tokens"]) > 7]
    assert any(response["resumes"] for response in long)
    for response in long:
        assert response["tokens"] == list(range(101, 141))
        assert response["spans"][-1][1] == 40
    assert set(by_length) >= {True}
    assert by_length[False] == 0
    assert set(books["tokens"]["dropped"]) == {"over_budget"}
    assert books["tokens"]["observed"] == run.server.generated


def test_a_late_response_is_cut_as_well(trainer: Make, tmp_path: Path) -> None:
    """One that came after its step, over a restart too: what it has beyond the budget is counted once."""
    run = trainer(half_long, **TRTLLM)
    run.delay_s = 3.0  # longer than a step waits
    for _ in range(4):
        run.step()
        run.update()
        run.validate(5.0)
    late = run.coordinator.host.mailboxes.late
    assert late
    generated, mine = run.server.generated, run.save(tmp_path)
    again = trainer(half_long, **TRTLLM)
    again.load(tmp_path, mine)
    again.steps(8)
    books = again.ask("ledgers")
    assert books["prompts"]["dropped"] == {}
    assert books["tokens"]["dropped"]["over_budget"] > 0
    assert books["tokens"]["observed"] == generated + again.server.generated


def test_an_aborted_output_without_all_its_log_probabilities_costs_tokens_and_no_group(trainer: Make) -> None:
    """Its tokens are dropped by name, for nobody knows which number belongs to which; nothing else has failed."""
    run = trainer(lambda row, sample: 30 if row == 0 else 5, **TRTLLM, april__max_age=4)  # then a step waits for it
    run.server.cut_logprobs = 1
    run.steps(8)
    books = run.ask("ledgers")
    assert books["prompts"]["dropped"] == {}
    assert 0 in {row for row, _ in run.trained}
    assert books["tokens"]["dropped"]["corrupt"] > 0
    assert run.coordinator.core.counters["failed_attempts"] == 0
    assert books["tokens"]["observed"] == run.server.generated


def test_other_servers_that_overrun_are_not_believed(trainer: Make) -> None:
    """vLLM's and SGLang's keep to what they are asked for: more tokens than that cannot be true."""
    run = trainer(five)
    more = {"token_ids": list(range(101, 151)), "log_probs": [-1.0] * 50}
    run.server.wrong = [more]
    run.step()
    assert run.ask("ledgers")["tokens"]["dropped"] == {"corrupt": 50}
