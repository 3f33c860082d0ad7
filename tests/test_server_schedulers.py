"""The real scheduler over fake servers of every kind: aborts, faults and new weights, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_servers.base import (
    KEEPS_ALIVE,
    SGLANG_FAULTS,
    VLLM_FAULTS,
    ControlFault,
    PlannedControlFault,
    PlannedFault,
    RequestFault,
    uncut,
)
from fake_servers.openai import FakeOpenAIServer
from fake_servers.sglang import FakeSglangServer
from fake_servers.vllm import FakeVllmServer
from real_schedulers import assert_nothing_is_left, reward
from server_fixtures import KINDS, ServerThread, is_of_its_weights, saved, settings

import april
from april.core import engine_table
from april.core.batch import Batch
from april.engines.http import server_process

MAX_LEN = 80
STEPS = 3


OPENAI = {"honours_seeds": False}
"""So that no token depends on a seed."""


def prompts() -> Iterator[list[int]]:
    for i in range(400):
        yield [3 + i % 400, 7, 9]


def check(batch: Batch) -> int:
    """Each segment is what its weights say to what stands before it; returns how many samples were cut."""
    for sample in batch.samples:
        is_of_its_weights(sample)
        assert sample.tokens[-1] == 2 or len(sample.tokens) == MAX_LEN
    return sum(sample.attempts > 1 for sample in batch.samples)


def check_uncut(scheduler: april.RolloutScheduler) -> None:
    """The next batch has the servers' own uncut responses, of mean length 60; the ledger is exact."""
    for sample in scheduler.next_batch().samples:
        whole = uncut(sample.prompt.token_ids, max_tokens=MAX_LEN, mean_length=60)[0]
        assert sample.tokens.tolist() == whole
    assert scheduler.ledger()["tokens"].balanced


def train(servers: list[Any], scheduler: april.RolloutScheduler, directory: Path) -> int:
    """Steps with a weight update after each; the ledger is exact at every boundary."""
    cut = 0
    for step in range(STEPS):
        batch = scheduler.next_batch()
        assert batch.version.n == step
        cut += check(batch)
        assert scheduler.ledger()["tokens"].balanced
        weights = f"w{step + 1}"
        if isinstance(servers[0], FakeOpenAIServer):
            scheduler.weight_update(transfer=lambda name=weights: hand_over(servers, name))
        else:
            scheduler.weight_update(path=saved(directory, weights))
    return cut


def hand_over(servers: list[Any], weights: str) -> None:
    """What a trainer does where servers load nothing; their open streams have been closed."""
    for server in servers:
        server.weights = weights


def scheduler_over(kind: str, servers: list[Any], engine: dict[str, Any], **changes: Any) -> april.RolloutScheduler:
    """A scheduler that checks its books after every event."""
    config = april.Config(
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        over_sampling_batch_size=10,
        max_response_len=MAX_LEN,
        abort_resend_s=0.05,
        engine=settings(kind, *servers, eos_token_ids=(2,), **engine),
        **changes,
    )
    return april.RolloutScheduler(config, prompts=prompts(), reward=reward, check=True)


@pytest.mark.parametrize(
    ("kind", "options", "engine"),
    [
        *(("vllm", {}, {"max_token_loss": loss}) for loss in (None, 0)),
        *(("sglang", {"incremental": incremental}, {}) for incremental in (True, False)),
        ("openai", {"tokens_ahead": 2, **OPENAI}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_steps_over_two_servers(kind: str, options: dict[str, Any], engine: dict[str, Any], tmp_path: Path) -> None:
    """Every delivered token is the servers' own under its version, samples were cut, and the ledger is exact."""
    # few places: when a step has what it needs, others are still in the queue, whatever the threads' order
    servers = [KINDS[kind][0](**options, max_running=2, turns=5) for _ in range(2)]
    with ServerThread(*servers), scheduler_over(kind, servers, engine) as scheduler:
        assert train(servers, scheduler, tmp_path) > 0
        assert scheduler.ledger()["tokens"].observed <= sum(run.sent for server in servers for run in server.runs)
        for server in servers:
            assert not server.violations
            assert server.weights == f"w{STEPS}"
            assert server.label.startswith(f"v0.{STEPS}-") or kind == "openai"
            if kind == "vllm":
                assert all(body["request_ids"] for _, body in server.aborts)
            elif kind == "sglang":
                assert all(body.get("rid") for body in server.aborts)


NOT_HERE = (RequestFault.SERVER_DIES, RequestFault.ABORT_NEVER_ENDS, RequestFault.REFUSED, *KEEPS_ALIVE)


@pytest.mark.parametrize(
    ("kind", "fault", "engine"),
    [
        *(("vllm", fault, {"max_token_loss": loss}) for loss in (None, 0) for fault in VLLM_FAULTS
          if fault not in NOT_HERE),
        *(("sglang", fault, {}) for fault in SGLANG_FAULTS if fault not in NOT_HERE),
        *(("openai", fault, {}) for fault in VLLM_FAULTS if fault not in NOT_HERE),
    ],
    ids=str,
)  # fmt: skip
def test_faults_lose_nothing_that_came(
    kind: str, fault: RequestFault, engine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the server does with a few requests, what is delivered is right and the ledger is exact."""
    monkeypatch.setattr(engine_table, "PROBE_INTERVAL_S", 0.01)
    server = KINDS[kind][0](max_running=6, turns=5, **(OPENAI if kind == "openai" else {}))
    with ServerThread(server), scheduler_over(kind, [server], engine) as scheduler:
        first = len(server.runs)
        server.faults += [PlannedFault(fault, request=first + i, after_tokens=i % 3) for i in (2, 7, 20)]
        train([server], scheduler, tmp_path)
        assert not server.violations
        assert [planned.times for planned in server.faults] == [0, 0, 0]
        assert set(scheduler.ledger()["tokens"].dropped) <= {"corrupt"} or kind != "openai"


def test_an_abort_that_never_ends_is_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is delivered at the deadline; what the request had handed over is kept."""
    monkeypatch.setattr(engine_table, "PROBE_INTERVAL_S", 0.01)
    server = FakeSglangServer(max_running=12, turns=5, mean_length=60)
    with ServerThread(server), scheduler_over(
        "sglang", [server], {"max_token_loss": 1}, abort_deadline_s=0.3
    ) as scheduler:  # fmt: skip
        # more requests than places: the last ones still run when the step has what it needs
        server.faults += [PlannedFault(RequestFault.ABORT_NEVER_ENDS, request=len(server.runs) + 19)]
        for _ in range(2):
            check_uncut(scheduler)
            assert not scheduler.ledger()["tokens"].dropped
        assert [planned.times for planned in server.faults] == [0]


@pytest.mark.parametrize(("kind", "engine"), [("vllm", {"max_token_loss": 0}), ("sglang", {})], ids=str)
def test_a_killed_server_is_lived_without(kind: str, engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two servers dies with requests in flight: their samples finish on the other from what had come."""
    monkeypatch.setattr(engine_table, "PROBE_INTERVAL_S", 0.01)
    servers = [KINDS[kind][0](max_running=6, turns=5, mean_length=60) for _ in range(2)]
    with ServerThread(*servers), scheduler_over(kind, servers, engine) as scheduler:
        first = len(servers[0].runs)
        # which samples come here is a matter of threads, and a response that is shorter kills nothing
        servers[0].faults += [
            PlannedFault(RequestFault.SERVER_DIES, request=first + n, after_tokens=5) for n in range(12)
        ]
        for _ in range(3):
            check_uncut(scheduler)
        assert not servers[0].alive


@pytest.mark.parametrize("well_again", [True, False], ids=["well again", "failing"])
def test_a_restart_that_the_metrics_hide(well_again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch with tokens of the start's weights: the step fails by name, and goes on after the next update."""
    monkeypatch.setattr(engine_table, "PROBE_INTERVAL_S", 0.01)
    monkeypatch.setattr(server_process, "AGAIN_S", 0.01)
    monkeypatch.setattr(server_process, "CHECKS_APART_S", 0.0)
    monkeypatch.setattr(server_process, "IDENTITY_TIMEOUT_S", 0.1)
    server = FakeVllmServer(developer=False, max_running=6, turns=5)

    def until_refused() -> None:
        for _ in range(20):
            check(scheduler.next_batch())

    async def restart() -> None:
        server._restart_at_once()
        times = 15 if well_again else 10**6
        server.control_faults.append(PlannedControlFault(kind=ControlFault.HTML, route="/metrics", times=times))

    with ServerThread(server) as thread, scheduler_over("vllm", [server], {}, outage_deadline_s=1.0) as scheduler:
        check(scheduler.next_batch())
        scheduler.weight_update(transfer=lambda: hand_over([server], "w1"))
        check(scheduler.next_batch())
        thread.call(restart())
        with pytest.raises(april.AprilError, match="no engine with the current weights"):
            until_refused()
        server.control_faults.clear()
        scheduler.weight_update(transfer=lambda: hand_over([server], "w2"))
        for _ in range(3):
            batch = scheduler.next_batch()
            check(batch)
            assert batch.metrics[f"engine/{server.url.partition('//')[2]}/unverified_weights"] == 1.0
        assert scheduler.ledger()["tokens"].balanced


def test_a_server_that_cannot_be_used_fails_the_start() -> None:
    """Nothing stays open, not even the connections to the server that could be used."""
    servers = [FakeOpenAIServer(), FakeOpenAIServer(gives_ids=False)]
    with ServerThread(*servers), pytest.raises(april.ConfigError, match="does not return the id of each token"):
        scheduler_over("openai", servers, {})
    assert_nothing_is_left()
