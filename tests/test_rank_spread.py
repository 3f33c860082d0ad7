"""Work that is spread over the ranks: each is a host with its part of the servers, and runs functions of its groups."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_servers.base import next_token
from fake_servers.vllm import FakeVllmServer
from rank_threads import CONFIG, drain, names_of, raised, run_ranks
from server_fixtures import KNOWN, ServerThread

import april
from april.engines.kinds.factory import part_of_process
from april.processes.rank_scheduler import RankScheduler
from april.processes.remote_hosts import HostDoor

MEAN_LENGTH = 12


def servers_of(count: int) -> list[FakeVllmServer]:
    return [FakeVllmServer(mean_length=MEAN_LENGTH, turns=4) for _ in range(count)]


def config_for(servers: list[FakeVllmServer]) -> april.Config:
    """Eight requests at a time."""
    return april.Config(
        rollout_batch_size=4, n_samples_per_prompt=2, max_response_len=40,
        engine={"kind": "vllm", "urls": [s.url for s in servers], **KNOWN},
    )  # fmt: skip


def weights_named(version: april.PolicyVersion) -> str:
    return f"w{version.n}"


def check_tokens(batch: april.Batch) -> None:
    """Every token and log-probability is what the weights of its version say to what stands before it."""
    for sample in batch.samples:
        said = sample.prompt.token_ids.tolist()
        for token, logprob, version in zip(sample.tokens, sample.logprobs, sample.versions, strict=True):
            weights = weights_named(april.PolicyVersion(*version))
            assert (token, np.float32(logprob)) == next_token(weights, said, 512, 2, MEAN_LENGTH), weights
            said.append(int(token))


@pytest.mark.parametrize("way", ["path", "transfer"])
def test_every_rank_reads_its_servers_and_runs_functions(way: str, tmp_path: Path) -> None:
    """Servers in turn; rollouts, group reward and filter of a group on one rank. New weights reach all servers."""
    servers = servers_of(3)
    where: dict[str, dict[int, set[int]]] = {"rollout": {}, "group_reward": {}, "filter": {}}

    def functions(rank: int) -> dict[str, Any]:
        def note(what: str, prompt: april.Prompt) -> None:
            where[what].setdefault(prompt.position, set()).add(rank)

        async def rollout(prompt: april.Prompt, llm: april.LLM) -> int:
            note("rollout", prompt)
            await llm.generate(prompt.token_ids)
            return rank

        def group_reward(prompt: april.Prompt, responses: list[april.Response]) -> list[float]:
            note("group_reward", prompt)
            assert [r.output for r in responses] == [rank] * 2
            return [float(len(r.tokens)) for r in responses]

        def filter(prompt: april.Prompt, responses: list[april.Response]) -> bool:
            note("filter", prompt)
            return True

        return {"rollout": rollout, "group_reward": group_reward, "filter": filter}

    def program(rollouts: RankScheduler, rank: int) -> Any:
        batches = []
        for step in range(1, 5):
            batches.append(rollouts.next_batch())
            assert {v for s in batches[-1].samples for v in map(tuple, s.versions)} == {(0, step - 1)}
            name = f"w{step}"

            def hand_over(name: str = name) -> None:
                for server in servers[rank::2]:
                    assert server.open_requests == 0
                    server.weights, server.stale_cache = name, True

            if way == "path":
                rollouts.weight_update(path=str(tmp_path / name))
            else:
                rollouts.weight_update(transfer=hand_over)
        return batches, [e.name for e in rollouts.engines]

    for step in range(1, 5):
        (tmp_path / f"w{step}").mkdir()
        (tmp_path / f"w{step}" / "model.safetensors").touch()
    with ServerThread(*servers):
        (first, names_here), (second, names_there) = run_ranks(
            program, config=config_for(servers), engines=lambda rank: None, given=functions, spread=True,
            reward=None, prompts=[[3 + i, 4] for i in range(16)],
        )  # fmt: skip
        assert [server.weights for server in servers] == ["w4"] * 3
        assert not any(server.violations for server in servers)

    names = [server.url.removeprefix("http://") for server in servers]
    assert (names_here, names_there) == (names[::2], names[1::2])
    assert all(server.runs for server in servers)
    batches = first + second
    for batch in batches:
        check_tokens(batch)
    asked = {segment.engine for batch in batches for sample in batch.samples for segment in sample.segments}
    assert asked == {names[0], names[2], f"rank1/{names[1]}"}
    assert len({name for batch in batches for name in names_of(batch)}) == 32
    for what, ranks in where.items():
        assert all(len(of_group) == 1 for of_group in ranks.values()), what
        assert set.union(*ranks.values()) == {0, 1}, what


def test_a_rank_without_an_engine_runs_functions() -> None:
    """More ranks than servers: the groups' rewards are those of the ranks in turn, and each is asked for once."""
    scored: Counter[tuple[int, int]] = Counter()
    threads: dict[int, set[str]] = {}

    def functions(rank: int) -> dict[str, Any]:
        async def reward(prompt: april.Prompt, response: april.Response) -> float:
            scored[response.sample_id] += 1
            threads.setdefault(rank, set()).add(threading.current_thread().name)
            return float(rank)

        return {"reward": reward}

    config = CONFIG.model_copy(update={"rollout_batch_size": 4})
    outcomes = run_ranks(lambda rollouts, rank: drain(rollouts)[0], 3, config=config, given=functions, spread=True)
    assert scored == {(group, index): 1 for group in range(8) for index in range(3)}
    assert threads == {0: {"april-loop"}, 1: {"april-rank1"}, 2: {"april-rank2"}}
    rewards = {s.id.group: [r for _, r in s.cohort] for batches in outcomes for b in batches for s in b.samples}
    assert all(len(set(of_group)) == 1 for of_group in rewards.values())


def test_what_the_ranks_must_have_alike() -> None:
    """Whether work is spread, and which functions there are: else a RankError on all, with both named."""
    for given, words in (
        (lambda rank: {"spread": rank == 0}, r"rank . RankScheduler\(.*spread=(True with reward|False)\)"),
        (lambda rank: {"spread": True} | ({"filter": april.rewards_differ} if rank else {}), "with filter, reward"),
    ):
        for outcome in run_ranks(lambda rollouts, rank: None, given=given):  # type: ignore[arg-type]
            assert "make different calls" in str(raised(outcome))
            with pytest.raises(april.RankError, match=words):
                raise outcome


def test_a_server_that_one_rank_cannot_reach() -> None:
    """Its own error comes out there, and a RankError with its name on the others."""
    here = servers_of(1)
    with ServerThread(*here):
        config = config_for(here)
        away = config.engine.model_copy(update={"urls": (here[0].url, "http://127.0.0.1:1")})
        config = config.model_copy(update={"engine": away})
        first, second = run_ranks(lambda rollouts, rank: None, config=config, engines=lambda rank: None, spread=True)
    assert str(raised(first)).startswith("the joining of rank 1 raised GET http://127.0.0.1:1/")
    assert first.ranks == (1,)
    assert isinstance(second, april.EngineError)


def test_hosts_are_brought_or_are_the_ranks() -> None:
    """Not both."""
    (outcome,) = run_ranks(lambda rollouts, rank: None, 1, spread=True, hosts=HostDoor())
    assert type(outcome) is april.ConfigError
    assert "give hosts= or spread=True" in str(outcome)


@pytest.mark.parametrize(
    ("engine", "parts"),
    [
        ({"kind": "vllm", "urls": ["http://a", "http://b", "http://c"]}, [("http://a", "http://c"), ("http://b",)]),
        ({"kind": "openai", "urls": ["http://a"]}, [("http://a",), None]),
        ({"kind": "sglang", "urls": ["http://a", "http://b"], "router": "http://r"}, [("http://a", "http://b"), None]),
        ({"kind": "simulated", "count": 3}, [2, 1]),
        ({"kind": "simulated", "count": 1}, [1, None]),
        ({"kind": "transformers"}, [None, None]),
        ({"kind": "transformers", "model": "m"}, ["m", "m"]),
    ],
    ids=str,
)
def test_what_each_rank_gets_of_the_engines(engine: dict[str, Any], parts: list[Any]) -> None:
    """In turn; what cannot be divided belongs to rank 0; an embedded engine is one for each model."""
    config = april.Config(**(CONFIG.model_dump() | {"engine": engine})).engine
    got = [part_of_process(config, None, place, 2) for place in range(2)]
    names = {"vllm": "urls", "openai": "urls", "sglang": "urls", "simulated": "count", "transformers": "model"}
    assert [part and getattr(part, names[engine["kind"]]) for part in got] == parts
    assert config == april.Config(**(CONFIG.model_dump() | {"engine": engine})).engine
