"""The real scheduler over fake vLLM servers: many steps with aborts, faults and weights from disk, nothing lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_servers.base import KEEPS_ALIVE, VLLM_FAULTS, ControlFault, PlannedControlFault, PlannedFault, RequestFault
from fake_servers.vllm import FakeVllmServer, fake_vllm_response
from sglang_fixtures import ServerThread
from vllm_fixtures import KNOWN

import april
from april.core import engine_table
from april.core.batch import Batch
from april.driver.rewards import Response
from april.engines.http import server_process

MAX_LEN = 80
STEPS = 5


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
            expected = fake_vllm_response(before, weights=f"w{segment.version.n}", max_tokens=segment.count)
            assert (tokens, logprobs) == expected, sample.id
            before += tokens
            at += segment.count
        assert at == len(sample.tokens)
        assert sample.tokens[-1] == 2 or at == MAX_LEN
    return sum(sample.attempts > 1 for sample in batch.samples)


def train(scheduler: april.RolloutScheduler, directory: Path) -> int:
    """Steps with a weight update after each; the ledger is exact at every boundary."""
    cut = 0
    for step in range(STEPS):
        batch = scheduler.next_batch()
        assert batch.version.n == step
        cut += check(batch)
        assert scheduler.ledger()["tokens"].balanced
        weights = directory / f"w{step + 1}"
        weights.mkdir()
        (weights / "model.safetensors").write_bytes(b"")
        scheduler.weight_update(path=str(weights))
    return cut


def config(servers: list[FakeVllmServer], **engine: object) -> april.Config:
    return april.Config(
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        over_sampling_batch_size=10,
        max_response_len=MAX_LEN,
        abort_resend_s=0.05,
        engine={"kind": "vllm", "urls": [server.url for server in servers], **KNOWN, **engine},
    )


@pytest.mark.parametrize("options", [{}, {"scale_out": False}, {"processes": 2}], ids=str)
@pytest.mark.parametrize("loss", [None, 0], ids=["plain", "streamed"])
def test_steps_over_two_servers(options: dict[str, Any], loss: int | None, tmp_path: Path) -> None:
    """Every delivered token is the servers' own under its version, samples were cut, and the ledger is exact."""
    # few places: when a step has what it needs, others are still in the queue, whatever the threads' order
    servers = [FakeVllmServer(**options, max_running=2, turns=20) for _ in range(2)]
    with ServerThread(*servers), april.RolloutScheduler(
        config(servers, max_token_loss=loss), prompts=prompts(), reward=reward, check=True
    ) as scheduler:  # fmt: skip
        assert train(scheduler, tmp_path) > 0
        for server in servers:
            assert not server.violations
            assert server.weights == f"w{STEPS}"
            assert server.label.startswith(f"v0.{STEPS}-")
            assert all(body["request_ids"] for _, body in server.aborts)


SCHEDULED = [
    f
    for f in VLLM_FAULTS
    if f not in (RequestFault.SERVER_DIES, RequestFault.ABORT_NEVER_ENDS, RequestFault.REFUSED, *KEEPS_ALIVE)
]


@pytest.mark.parametrize("loss", [None, 0], ids=["plain", "streamed"])
@pytest.mark.parametrize("fault", SCHEDULED, ids=str)
def test_faults_lose_nothing_that_came(
    fault: RequestFault, loss: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the server does with a few requests, what is delivered is right and the ledger is exact."""
    monkeypatch.setattr(engine_table, "PROBE_INTERVAL_S", 0.01)
    server = FakeVllmServer(max_running=6, turns=20)
    with ServerThread(server), april.RolloutScheduler(
        config([server], max_token_loss=loss), prompts=prompts(), reward=reward, check=True
    ) as scheduler:  # fmt: skip
        first = len(server.runs)
        server.faults += [PlannedFault(fault, request=first + i, after_tokens=i % 3) for i in (2, 7, 20)]
        train(scheduler, tmp_path)
        assert not server.violations
        assert [planned.times for planned in server.faults] == [0, 0, 0]


def test_a_killed_server_is_lived_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two servers dies with requests in flight: their samples finish on the other from what had come."""
    monkeypatch.setattr(engine_table, "PROBE_INTERVAL_S", 0.01)
    servers = [FakeVllmServer(max_running=6, turns=20, mean_length=60) for _ in range(2)]
    with ServerThread(*servers), april.RolloutScheduler(
        config(servers, max_token_loss=0), prompts=prompts(), reward=reward, check=True
    ) as scheduler:  # fmt: skip
        first = len(servers[0].runs)
        # which samples come here is a matter of threads, and a response that is shorter kills nothing
        servers[0].faults += [
            PlannedFault(RequestFault.SERVER_DIES, request=first + n, after_tokens=5) for n in range(3, 12)
        ]
        for _ in range(3):
            batch = scheduler.next_batch()
            for sample in batch.samples:
                whole = fake_vllm_response(sample.prompt.token_ids, max_tokens=MAX_LEN, mean_length=60)[0]
                assert sample.tokens.tolist() == whole
            assert scheduler.ledger()["tokens"].balanced
        assert not servers[0].alive


@pytest.mark.parametrize("scale_out", [True, False], ids=["tokens", "completions"])
@pytest.mark.parametrize("well_again", [True, False], ids=["well again", "failing"])
def test_a_restart_that_the_metrics_hide(scale_out: bool, well_again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch with tokens of the start's weights: the step fails by name, and goes on after the next update."""
    monkeypatch.setattr(engine_table, "PROBE_INTERVAL_S", 0.01)
    monkeypatch.setattr(server_process, "AGAIN_S", 0.01)
    monkeypatch.setattr(server_process, "CHECKS_APART_S", 0.0)
    monkeypatch.setattr(server_process, "PATIENCE_S", 0.1)
    server = FakeVllmServer(developer=False, scale_out=scale_out, max_running=6, turns=20)

    def hand_over(n: int) -> None:
        server.weights = f"w{n}"

    def until_refused() -> None:
        for _ in range(20):
            check(scheduler.next_batch())

    async def restart() -> None:
        server._restart_at_once()
        times = 15 if well_again else 10**6
        server.control_faults.append(PlannedControlFault(kind=ControlFault.HTML, route="/metrics", times=times))

    with ServerThread(server) as thread:
        settings = config([server]).model_copy(update={"outage_deadline_s": 1.0})
        with april.RolloutScheduler(settings, prompts=prompts(), reward=reward, check=True) as scheduler:
            check(scheduler.next_batch())
            scheduler.weight_update(transfer=lambda: hand_over(1))
            check(scheduler.next_batch())
            thread.call(restart())
            with pytest.raises(april.AprilError, match="no engine with the current weights"):
                until_refused()
            server.control_faults.clear()
            scheduler.weight_update(transfer=lambda: hand_over(2))
            for _ in range(3):
                batch = scheduler.next_batch()
                check(batch)
                assert batch.metrics[f"engine/{server.url.partition('//')[2]}/unverified_weights"] == 1.0
            assert scheduler.ledger()["tokens"].balanced
