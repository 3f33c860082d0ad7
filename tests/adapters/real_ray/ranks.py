"""The page docs/processes.md on a real Ray: its blocks as they stand, with a rank that is killed and started anew."""

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
    page = (ROOT / "docs" / "processes.md").read_text("utf-8").partition("\n## Ray\n")[2]
    driver, rank = re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M)
    return driver, rank


def lengths(request: Any) -> int:
    """Some are long, so that all steps leave some unfinished."""
    group, index = request.sample_key
    return 4 + (7 * group + 13 * index) % 50


def engines(host: int) -> list[SimulatedEngine]:
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
        """One share."""
        self.shares.append((rank, pid, batch, samples))

    def may_die(self) -> bool:
        """Once."""
        self.died += 1
        return self.died == 1

    def all(self) -> list[tuple[int, int, int, list[Any]]]:
        """Everything."""
        return self.shares


def trainer(name: str, block: str) -> Any:
    """An actor class that runs the page's loop."""

    @ray.remote(num_cpus=0, max_restarts=1, max_task_retries=1)
    class Trainer:
        def run(self, rank: int, trained: Any, dies_at: int | None, host_dies: bool = False) -> None:
            step = -1

            def train(batch: april.Batch) -> None:
                nonlocal step
                step = batch.id
                engines = [sorted({segment.engine for segment in s.segments}) for s in batch.samples]
                found = [
                    (*s.id, s.tokens.tolist(), round(float(s.logprobs.sum()), 3), names)
                    for s, names in zip(batch.samples, engines, strict=True)
                ]
                for s in batch.samples:
                    s.tokens[:] = 0  # they are this rank's own
                if batch.id == dies_at and ray.get(trained.may_die.remote()):
                    os.kill(os.getpid(), signal.SIGKILL)
                ray.get(trained.add.remote(rank, os.getpid(), batch.id, found))

            def hand_over() -> None:
                if host_dies and rank == 0 and step == 3:
                    ray.kill(ray.get_actor("host1", f"april/{name}"), no_restart=False)
                if host_dies and rank == 0 and step == 6:
                    ray.get(ray.get_actor("host1", f"april/{name}").joined.remote())

            space: dict[str, Any] = {"rank": rank, "train": train, "hand_over": hand_over}
            exec(block.replace("my-run", name), space)  # noqa: S102 - of the page

    return Trainer


def start(name: str, block: str, more: str = "") -> april.ray.Run:
    """The driver's block."""
    space: dict[str, Any] = {
        "config": CONFIG, "reward": reward, "prompts": [[1 + i % 90, 2] for i in range(STEPS * GROUPS)],
    }  # fmt: skip
    found = block.replace("my-run", name).replace("reward=reward", f"reward=reward, engines=engines, check=True{more}")
    exec(found, space | {"engines": engines}, space)  # noqa: S102 - of the page
    return space["run"]  # type: ignore[no-any-return]


def run_to_the_end(name: str, dies_at: int | None, hosts: int = 0) -> list[tuple[int, int, int, list[Any]]]:
    """All shares that were trained, after the books were looked at."""
    driver, rank = blocks()
    with start(name, driver, f", hosts={hosts}") as run:
        trained = Trained.remote()
        made = trainer(name, rank)
        actors = [made.remote() for _ in range(2)]
        ray.get(
            [actor.run.remote(r, trained, dies_at if r == 1 else None, hosts > 1) for r, actor in enumerate(actors)]
        )
        run.validate()
        books = run.ledger()
        assert books["prompts"].delivered == STEPS * GROUPS
        assert books["tokens"].balanced
        assert books["tokens"].held == 0
        assert run.version.n == STEPS
        return ray.get(trained.all.remote())  # type: ignore[no-any-return]


EVERYTHING = Counter({(g, i): 1 for g in range(STEPS * GROUPS) for i in range(SAMPLES)})


def samples_of(shares: list[tuple[int, int, int, list[Any]]]) -> Counter[tuple[int, int]]:
    """How often each was trained."""
    return Counter((row[0], row[1]) for *_, found in shares for row in found)


def texts_of(shares: list[tuple[int, int, int, list[Any]]]) -> set[str]:
    """Samples with their tokens and log-probabilities."""
    return {str(row[:4]) for *_, found in shares for row in found}


def test_hosts_and_ranks_are_killed_and_started_anew() -> None:
    """Two hosts and two ranks: a host is killed in step 4 and works again from step 8, a rank is killed in step 6."""
    killed = run_to_the_end("hosts", dies_at=5, hosts=2)
    assert samples_of(killed) == EVERYTHING
    assert len({pid for rank, pid, *_ in killed if rank == 1}) == 2
    by_step = {
        b: {name.partition("/")[0] for _, _, at, found in killed if at == b for row in found for name in row[4]}
        for b in range(STEPS)
    }
    assert by_step[0] == by_step[STEPS - 1] == {"host0", "host1"}
    assert by_step[5] == {"host0"}


def test_a_rank_is_killed_and_started_anew() -> None:
    """Ten steps on two ranks: every response is trained once, with the tokens of the run in which nobody died."""
    killed = run_to_the_end("killed", dies_at=4)
    whole = run_to_the_end("whole", dies_at=None)
    assert samples_of(killed) == EVERYTHING
    assert texts_of(killed) == texts_of(whole)
    assert len({pid for rank, pid, *_ in killed if rank == 1}) == 2
    assert [b for rank, _, b, _ in killed if rank == 1] == list(range(STEPS))


def test_mistakes() -> None:
    """Each with a sentence."""
    driver, _ = blocks()
    with start("mistakes", driver):
        with pytest.raises(april.ConfigError, match="there is a run 'mistakes' in this cluster already"):
            start("mistakes", driver)
        with pytest.raises(april.RankError, match="rank 5 is none of 2"):
            april.ray.attach("mistakes", 5)
    with pytest.raises(april.ConfigError, match="there is no run 'mistakes'"):
        april.ray.attach("mistakes", 0)
    with pytest.raises(april.ConfigError, match="reward"):
        april.ray.scheduler(CONFIG, name="bad", prompts=[[1]], engines=engines, reward=3)
    np.testing.assert_equal(ray.is_initialized(), True)
