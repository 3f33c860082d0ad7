"""Hosts as processes: joined over TCP, one killed in the middle of its work, the other told when it is over."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import april
from april.testing import FakeEngine

PROMPTS = 16


def lengths(request: Any) -> int:
    """Of a response."""
    group, index = request.sample_key
    return int(5 + (7 * group + 11 * index) % 40)


async def reward(prompt: Any, response: Any) -> float:
    """Says who was asked."""
    return float(prompt.data["i"])


def host(name: str, address: str) -> None:
    """Lend an engine and a reward until the scheduler says goodbye, as a process of its own."""
    engine = FakeEngine("f", lengths=lengths, chunk_tokens=1, seconds_per_token=0.002)
    with april.Host(name, engines=[engine], reward=reward, address=address, token=os.environ["APRIL_TOKEN"]) as host:
        print("joined", flush=True)
        print(host.wait(), flush=True)


def start(name: str, listener: april.HostListener, token: str) -> subprocess.Popen[str]:
    """A host that has joined, or is joining."""
    return subprocess.Popen(
        [sys.executable, __file__, name, listener.address], env=os.environ | {"APRIL_TOKEN": token},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def said(host: subprocess.Popen[str]) -> str:
    """Its next line."""
    assert host.stdout is not None
    return host.stdout.readline().strip()


def test_a_host_that_is_killed_while_it_generates_costs_no_prompt(tmp_path: Path) -> None:
    """Every prompt is trained once, the books balance, and the host that is left ends by the scheduler's goodbye."""
    token = april.new_token()
    listener = april.HostListener(token)
    config = april.Config(
        rollout_batch_size=2, n_samples_per_prompt=2, over_sampling_batch_size=6, max_response_len=60,
        generation="continuous",
    )  # fmt: skip
    prompts = [{"token_ids": [1, 2, i + 3], "i": i} for i in range(PROMPTS)]
    hosts = [start(name, listener, token) for name in ("a", "b")]
    batches: list[Any] = []
    try:
        with april.RolloutScheduler(config, prompts=prompts, reward=reward, hosts=listener, check=True) as rollouts:
            assert [said(host) for host in hosts] == ["joined", "joined"]
            while True:
                try:
                    batch = rollouts.next_batch()
                except april.DataExhausted:
                    break
                batches.append(batch)
                if batch.id == 2:
                    hosts[0].kill()  # continuous: its requests are running
                rollouts.weight_update(path=str(tmp_path))
            ledger = rollouts.ledger()
        assert said(hosts[1]) == "the scheduler is closed"
        assert hosts[1].wait(20) == 0
    finally:
        for host in hosts:
            host.kill()
            host.communicate()

    samples = [s for b in batches for s in b.samples]
    assert Counter(s.prompt.data["i"] for s in samples) == Counter(dict.fromkeys(range(PROMPTS), 2))
    assert all(s.reward == s.prompt.data["i"] for s in samples)
    assert {s.engine for x in samples for s in x.segments} == {"a/f", "b/f"}
    assert ledger["tokens"].observed == ledger["tokens"].delivered == sum(len(s.tokens) for s in samples)


@pytest.mark.parametrize("wrong", ["no host comes", "no prompts"])
def test_a_scheduler_that_could_not_be_made_listens_no_longer(wrong: str) -> None:
    """A host that comes is refused at once, and does not wait before a door that nobody opens."""
    config = april.Config(rollout_batch_size=1, n_samples_per_prompt=1, max_response_len=9)
    door = april.HostListener(april.new_token(), first_s=0.01)
    given: dict[str, Any] = {"prompts": [[1]]}
    if wrong == "no prompts":
        given = {"prompts": 5, "engines": [FakeEngine("f")]}
    with pytest.raises(april.ConfigError):
        april.RolloutScheduler(config, reward=None, hosts=door, **given)
    host, _, port = door.address.partition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))


if __name__ == "__main__":
    host(*sys.argv[1:])
