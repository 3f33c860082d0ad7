"""The page docs/processes.md on a real Ray: its blocks as they stand; ranks and actors of functions are killed."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import april
import april.ray
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.engine import SimulatedEngine

ROOT = Path(__file__).parents[3]
STEPS, GROUPS, SAMPLES = 10, 4, 4
CONFIG = april.Config(
    rollout_batch_size=GROUPS, over_sampling_batch_size=2 * GROUPS, n_samples_per_prompt=SAMPLES, max_response_len=60,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One for all tests."""
    os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(Path(__file__).parent)))  # of the actors
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    yield
    ray.shutdown()


def blocks() -> tuple[str, str]:
    """Of the page: the driver's and a rank's."""
    page = (ROOT / "docs" / "processes.md").read_text("utf-8").partition("\n## Ray\n")[2].partition("\n## ")[0]
    driver, rank = re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M)
    return driver, rank


def lengths(request: Any) -> int:
    """Some are long, so that all steps leave some unfinished."""
    group, index = request.sample_key
    return 4 + (7 * group + 13 * index) % 50


def engines() -> list[SimulatedEngine]:
    """Two, which take their time."""
    return [SimulatedEngine(f"e{i}", DecodeCost(5e-4, 0.0, 0.0), lengths, max_running=16) for i in range(2)]


def reward(prompt: april.Prompt, response: april.Response) -> float:
    """Differs inside of groups."""
    return float(len(response.tokens) % 3)


@ray.remote
class Trained:
    """What all ranks have trained, in whatever process."""

    def __init__(self) -> None:
        self.shares: list[tuple[int, int, int, list[Any]]] = []
        self.died = 0

    def add(self, rank: int, pid: int, batch: int, samples: list[Any]) -> None:
        self.shares.append((rank, pid, batch, samples))

    def may_die(self) -> bool:
        self.died += 1
        return self.died == 1

    def deaths(self) -> int:
        """How often that was asked."""
        return self.died

    def all(self) -> list[tuple[int, int, int, list[Any]]]:
        return self.shares


def reward_with_more(prompt: april.Prompt, response: april.Response) -> april.Reward:
    """Parts, values per turn and per token, and a note, all of which follow from the response."""
    (conversation,) = response.conversations
    parts = {"odd": reward(prompt, response), "length": float(len(conversation.tokens))}
    return april.Reward(
        parts["odd"], parts, {"end": conversation.turns[:, 1]},
        {"teacher_logprobs": conversation.tokens / np.float32(-97)}, ["last token", int(conversation.tokens[-1])],
    )  # fmt: skip


def with_more(sample: april.DeliveredSample) -> Any:
    """What came with the number of a reward, arrays as bytes; None if nothing did."""
    if (own := sample.row_reward) is None:
        return None
    arrays = {name: (v.dtype.str, v.tobytes()) for name, v in [*own.per_turn.items(), *own.per_token.items()]}
    assert len(own.per_turn["end"]) == len(sample.turns)
    assert len(own.per_token["teacher_logprobs"]) == len(sample.tokens)
    return own.reward, dict(own.parts), arrays, own.note


def functions(trained: Any | None) -> dict[str, Any]:
    """A rollout function of two turns, a reward and a filter, each in actors; the first actor is killed in a turn."""

    async def turns(prompt: april.Prompt, llm: april.LLM) -> int:
        first = await llm.generate(max_tokens=8)
        if trained is not None and llm.sample_id == (9, 1) and await trained.may_die.remote():
            os.kill(os.getpid(), signal.SIGKILL)
        last = await llm.generate([*first.conversation, 5, 6])
        return len(last.tokens)

    def scores(prompt: april.Prompt, response: april.Response) -> april.Reward:
        if trained is not None and response.sample_id == (15, 2) and ray.get(trained.may_die.remote()):
            os.kill(os.getpid(), signal.SIGKILL)
        assert response.output <= len(response.tokens)
        return reward_with_more(prompt, response)

    def keeps(prompt: april.Prompt, responses: list[april.Response]) -> bool:
        return all(response.reward is not None for response in responses)

    few: dict[str, Any] = {"num_cpus": 0.5}
    return {
        "rollout": april.ray.remote(turns, num_actors=2, **few), "reward": april.ray.remote(scores, **few),
        "filter": april.ray.remote(keeps, **few),
    }  # fmt: skip


def trainer(name: str, block: str) -> Any:
    """An actor class that runs the page's loop."""

    @ray.remote(num_cpus=0, max_restarts=1, max_task_retries=1)
    class Trainer:
        def run(self, rank: int, trained: Any, dies_at: int | None) -> None:
            def train(batch: april.Batch) -> None:
                found = [
                    (*s.id, s.tokens.tolist(), round(float(s.logprobs.sum()), 3), with_more(s)) for s in batch.samples
                ]
                for s in batch.samples:
                    s.tokens[:] = 0  # they are this rank's own
                if batch.id == dies_at and ray.get(trained.may_die.remote()):
                    os.kill(os.getpid(), signal.SIGKILL)
                ray.get(trained.add.remote(rank, os.getpid(), batch.id, found))

            space: dict[str, Any] = {"rank": rank, "train": train, "hand_over": lambda: None}
            exec(block.replace("my-run", name), space)  # noqa: S102 - of the page

    return Trainer


def start(name: str, block: str, **others: Any) -> april.ray.Run:
    """The driver's block."""
    space: dict[str, Any] = {
        "config": CONFIG, "reward": reward, "prompts": [[1 + i % 90, 2] for i in range(STEPS * GROUPS)],
    }  # fmt: skip
    found = block.replace("my-run", name).replace("reward=reward", "engines=engines, check=True, **others")
    exec(found, space | {"engines": engines, "others": {"reward": reward} | others}, space)  # noqa: S102 - of the page
    return space["run"]  # type: ignore[no-any-return]


def run_to_the_end(
    name: str, dies_at: int | None = None, trained: Any = None, **others: Any
) -> list[tuple[int, int, int, list[Any]]]:
    """All shares that were trained, after the books were looked at."""
    driver, rank = blocks()
    with start(name, driver, **others):
        trained = trained or Trained.remote()
        made = trainer(name, rank)
        actors = [made.remote() for _ in range(2)]
        ray.get([actor.run.remote(r, trained, dies_at if r == 1 else None) for r, actor in enumerate(actors)])
        with april.ray.attach(name, 0) as rank_0:
            rank_0.validate()
            books = rank_0.ledger()
            assert rank_0.version.n == STEPS
        assert books["prompts"].delivered == STEPS * GROUPS
        assert books["tokens"].balanced
        assert books["tokens"].held == 0
        assert not books["tokens"].dropped
        return ray.get(trained.all.remote())  # type: ignore[no-any-return]


EVERYTHING = Counter({(g, i): 1 for g in range(STEPS * GROUPS) for i in range(SAMPLES)})


def samples_of(shares: list[tuple[int, int, int, list[Any]]]) -> Counter[tuple[int, int]]:
    """How often each was trained."""
    return Counter((row[0], row[1]) for *_, found in shares for row in found)


def texts_of(shares: list[tuple[int, int, int, list[Any]]]) -> set[str]:
    """Samples with their tokens, log-probabilities and what came with their rewards."""
    return {str(row) for *_, found in shares for row in found}


def test_actors_of_functions_are_killed() -> None:
    """A rollout's in the middle of its turns, beside others: nothing is lost, generated twice or trained twice."""
    trained = Trained.remote()
    killed = run_to_the_end("functions", trained=trained, **functions(trained))
    assert ray.get(trained.deaths.remote()) >= 2
    whole = run_to_the_end("no-deaths", **functions(None))
    assert samples_of(killed) == EVERYTHING
    assert texts_of(killed) == texts_of(whole)


@pytest.mark.parametrize("kind", ["numbers in the scheduler", "rewards with more in an actor"])
def test_a_rank_is_killed_and_started_anew(kind: str) -> None:
    """Ten steps on two ranks: every response is trained once, with the tokens and the reward, to the last bit, of the
    run in which nobody died."""
    rewards = {"reward": april.ray.remote(reward_with_more, num_cpus=0.5)} if "actor" in kind else {}
    killed = run_to_the_end(f"killed-{len(rewards)}", dies_at=4, **rewards)
    whole = run_to_the_end(f"whole-{len(rewards)}", dies_at=None, **rewards)
    assert all((row[4] is None) == (not rewards) for *_, found in killed for row in found)
    assert samples_of(killed) == EVERYTHING
    assert texts_of(killed) == texts_of(whole)
    assert len({pid for rank, pid, *_ in killed if rank == 1}) == 2
    assert [b for rank, _, b, _ in killed if rank == 1] == list(range(STEPS))
