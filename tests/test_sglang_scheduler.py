"""The real scheduler over fake SGLang servers: many steps with aborts, faults and weights from disk, nothing lost."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from fake_servers.base import KEEPS_ALIVE, SGLANG_FAULTS, PlannedFault, RequestFault
from fake_servers.sglang import FakeSglangRouter, FakeSglangServer, fake_sglang_response
from sglang_fixtures import ServerThread

import april
from april.core import engine_table
from april.core.batch import Batch
from april.driver.rewards import Response

MAX_LEN = 80
STEPS = 6


async def reward(prompt: april.Prompt, response: Response) -> float:
    return float(len(response.tokens))


def prompts() -> Iterator[list[int]]:
    for i in range(400):
        yield [3 + i % 400, 7, 9]


def check(batch: Batch) -> int:
    """Each segment is what its weights say to what stands before it; returns how many samples were cut."""
    for sample in batch.samples:
        before = np.asarray(sample.prompt.token_ids).tolist()
        at = 0
        for segment in sample.segments:
            tokens = sample.tokens[at : at + segment.count].tolist()
            logprobs = sample.logprobs[at : at + segment.count].tolist()
            expected = fake_sglang_response(before, weights=f"w{segment.version.n}", max_tokens=segment.count)
            assert (tokens, logprobs) == expected, sample.id
            before += tokens
            at += segment.count
        assert at == len(sample.tokens)
        assert sample.tokens[-1] == 2 or at == MAX_LEN
    return sum(sample.attempts > 1 for sample in batch.samples)


def train(scheduler: april.RolloutScheduler) -> int:
    """Steps with a weight update after each; the ledger is exact at every boundary."""
    cut = 0
    for step in range(STEPS):
        batch = scheduler.next_batch()
        assert batch.version.n == step
        cut += check(batch)
        books = scheduler.ledger()["tokens"]
        assert books.balanced
        scheduler.weight_update(path=f"/weights/w{step + 1}")
    return cut


def config(servers: list[FakeSglangServer], **engine: object) -> april.Config:
    return april.Config(
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        over_sampling_batch_size=10,
        max_response_len=MAX_LEN,
        abort_resend_s=0.05,
        engine={"kind": "sglang", "urls": [server.url for server in servers], "eos_token_ids": (2,), **engine},
    )


@pytest.mark.parametrize("incremental", [True, False], ids=["streamed", "plain"])
def test_steps_over_two_servers(incremental: bool) -> None:
    """Every delivered token is the servers' own under its version, samples were cut, and the ledger is exact."""
    # few places: when a step has what it needs, others are still in the queue, whatever the threads' order
    servers = [FakeSglangServer(incremental=incremental, max_running=2, turns=20) for _ in range(2)]
    with ServerThread(*servers), april.RolloutScheduler(
        config(servers), prompts=prompts(), reward=reward, check=True
    ) as scheduler:  # fmt: skip
        assert train(scheduler) > 0
        for server in servers:
            assert not server.violations
            assert server.weights == f"w{STEPS}"
            assert all(body.get("rid") for body in server.aborts)


def test_steps_through_a_router() -> None:
    """One engine for two workers: weights reach both, aborts find every request."""
    servers = [FakeSglangServer(max_running=2, turns=20) for _ in range(2)]
    with ServerThread(*servers) as thread:
        router = FakeSglangRouter([server.url for server in servers])
        thread.call(router.start())
        with april.RolloutScheduler(
            config(servers, router=router.url), prompts=prompts(), reward=reward, check=True
        ) as scheduler:
            assert train(scheduler) > 0
        assert {server.url for server in servers} == set(router.passed)
        assert [server.weights for server in servers] == [f"w{STEPS}"] * 2
        thread.call(router.close())


@pytest.mark.parametrize("fault", [f for f in SGLANG_FAULTS if f not in (
    RequestFault.SERVER_DIES, RequestFault.ABORT_NEVER_ENDS, *KEEPS_ALIVE
)])  # fmt: skip
def test_faults_lose_nothing_that_came(fault: RequestFault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the server does with a few requests, what is delivered is right and the ledger is exact."""
    monkeypatch.setattr(engine_table, "PROBE_INTERVAL_S", 0.01)
    server = FakeSglangServer(max_running=6, turns=20)
    with ServerThread(server), april.RolloutScheduler(
        config([server]), prompts=prompts(), reward=reward, check=True
    ) as scheduler:  # fmt: skip
        first = len(server.runs)
        server.faults += [PlannedFault(fault, request=first + i, after_tokens=i % 3) for i in (2, 7, 20)]
        train(scheduler)
        assert not server.violations
        assert [planned.times for planned in server.faults] == [0, 0, 0]


def test_an_abort_that_never_ends_is_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is delivered at the deadline; what the request had handed over is kept."""
    monkeypatch.setattr(engine_table, "PROBE_INTERVAL_S", 0.01)
    server = FakeSglangServer(max_running=12, turns=20, mean_length=40)
    with ServerThread(server):
        settings = config([server], max_token_loss=1).model_copy(update={"abort_deadline_s": 0.3})
        with april.RolloutScheduler(settings, prompts=prompts(), reward=reward, check=True) as scheduler:
            # more requests than places: the last ones still run when the step has what it needs
            server.faults += [PlannedFault(RequestFault.ABORT_NEVER_ENDS, request=len(server.runs) + 19)]
            for _ in range(2):
                batch = scheduler.next_batch()
                for sample in batch.samples:
                    whole = fake_sglang_response(sample.prompt.token_ids, max_tokens=MAX_LEN, mean_length=40)[0]
                    assert sample.tokens.tolist() == whole
                books = scheduler.ledger()["tokens"]
                assert books.balanced
                assert not books.dropped
            assert [planned.times for planned in server.faults] == [0]


def test_a_killed_server_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two servers dies with requests in flight: their samples finish on the other from what had come."""
    monkeypatch.setattr(engine_table, "PROBE_INTERVAL_S", 0.01)
    servers = [FakeSglangServer(max_running=6, turns=20, mean_length=60) for _ in range(2)]
    with ServerThread(*servers), april.RolloutScheduler(
        config(servers), prompts=prompts(), reward=reward, check=True
    ) as scheduler:  # fmt: skip
        first = len(servers[0].runs)
        # whichever of these first gets so far: some responses are shorter
        servers[0].faults += [
            PlannedFault(RequestFault.SERVER_DIES, request=first + i, after_tokens=9) for i in range(6)
        ]
        for _ in range(3):
            batch = scheduler.next_batch()
            for sample in batch.samples:
                whole = fake_sglang_response(sample.prompt.token_ids, max_tokens=MAX_LEN, mean_length=60)[0]
                assert sample.tokens.tolist() == whole
            assert scheduler.ledger()["tokens"].balanced
        assert not servers[0].alive
