"""april behind verl's rollouts, on a virtual clock: batches, partials, versions, filters, failures."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from adapters.stand_in_verl import EOS, Trainer, single_turn
from april.errors import RolloutError
from april.processes.coordinator.calls import Session, generate
from april.processes.coordinator.messages import Done

Make = Callable[..., Trainer]


def mixed(row: int, sample: int) -> int:
    """Lengths from 3 to 33."""
    return 3 + (7 * row + 5 * sample) % 31


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


def test_every_step_delivers_n_groups_and_each_prompt_once(trainer: Make) -> None:
    """N whole groups a step; no sample is trained twice, and the oldest prompts are not left behind."""
    run = trainer()
    for _ in range(12):
        assert len(run.step().uids) == 3
        run.update()
    assert len(run.trained) == 12 * 3 * 2
    assert max(Counter(run.trained).values()) == 1
    assert {row for row, _ in run.trained} >= set(range(12 * 3 - 3))


def test_what_was_cut_goes_on_with_its_tokens_and_versions(trainer: Make) -> None:
    """A response that spans weight updates has the tokens of one that was not cut, and a span per version."""
    run = trainer(lambda row, sample: 30 if row == 0 else 5)
    seen: dict[str, Any] = {}
    for _ in range(8):
        run.step()
        seen |= run.last
        run.update()
    long = [t for key, t in seen.items() if key.startswith("u0_")]
    assert len(long) == 2
    for response in long:
        assert response["tokens"] == [*range(101, 130), EOS]
        spans = response["spans"]
        assert response["resumes"] == len(spans) - 1 >= 2
        assert [s[0] for s in spans] == [0, *(s[1] for s in spans[:-1])]
        assert spans[-1][1] == 30
        assert [s[2] for s in spans] == sorted(s[2] for s in spans)


def test_every_token_of_the_server_is_accounted_for(trainer: Make) -> None:
    """The ledgers against a count kept at the server: delivered and held is all that was generated."""
    run = trainer()
    for _ in range(6):
        run.step()
        run.update()
    tokens, prompts = run.ask("ledgers")["tokens"], run.ask("ledgers")["prompts"]
    assert tokens["dropped"] == prompts["dropped"] == {}
    assert tokens["observed"] == run.server.generated == tokens["delivered"] + tokens["held"]
    assert prompts["delivered"] == 18
    assert prompts["held"] == len(run.queue) - len(run.run._offered)


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
    for _ in range(4):
        run.step()
        run.update()
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
    for _ in range(6):
        run.step()
        run.update()
    assert all(row % 3 for row, _ in run.trained)
    prompts = run.ask("ledgers")["prompts"]
    assert prompts["dropped"]["filtered"] > 3
    held = {key.split("_")[0] for key in run.stored}
    assert held <= set(run.queue)
    assert not any(run.queue[uid] % 3 == 0 for uid in held if len([k for k in run.stored if k.startswith(uid)]) == 2)


def test_a_reward_that_fails_costs_a_try_and_then_its_group(trainer: Make) -> None:
    """Once is tried again; always is dropped by name and replaced; the rest is trained."""
    failures: Counter[int] = Counter()

    def reward(row: int, sample: int, response: list[int]) -> float:
        failures[row] += 1
        if row == 1 or (row == 2 and failures[row] == 1):
            raise ValueError("no answer in the response")
        return float(sample)

    run = trainer(reward_of=reward)
    for _ in range(4):
        run.step()
        run.update()
    assert 1 not in {row for row, _ in run.trained}
    assert 2 in {row for row, _ in run.trained}
    assert run.ask("ledgers")["prompts"]["dropped"] == {"failed": 1}
    assert "u1" not in run.queue


def test_a_server_that_fails_is_asked_again(trainer: Make) -> None:
    """A request that raises is sent again; nothing is lost."""
    run = trainer()
    run.server.fails = [ConnectionError("actor died"), ConnectionError("actor died")]
    for _ in range(3):
        run.step()
        run.update()
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
    seen: dict[str, Any] = {}
    for _ in range(8):
        run.step()
        seen |= run.last
        run.update()
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


def test_two_calls_at_the_same_time_are_refused(trainer: Make) -> None:
    """One response per sample: the group is dropped with a sentence that says so."""
    async def parallel(session: Session, prompt: list[int], send: Any) -> list[int]:
        if prompt[1] == 0:
            await asyncio.gather(*(generate(session, send, prompt, 9, 1.0) for _ in range(2)))
        return await single_turn(session, prompt, send)

    run = trainer()
    run.agent_loop = parallel
    run.step()
    assert run.ask("ledgers")["prompts"]["dropped"] == {"failed": 1}


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
