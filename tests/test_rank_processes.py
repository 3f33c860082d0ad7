"""Ranks as processes: killed, stopped, and training one model. Nothing hangs, and whoever is at fault is named."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

import april
from tests.ranks.runs import start, trained_otherwise_than_once, weights_apart
from tests.ranks.trainer import Rank, options_of

PROMPTS = 9


def test_two_ranks_of_fsdp2_and_after_a_restart_one(tmp_path: Path) -> None:
    """Each response is trained once over all ranks and both starts; the log-probabilities equal a recomputation on each
    rank, also where one of them has nothing to generate; the final weights are those of one process that trains the
    same batches. Collectives work inside of transfers, and evaluations are alike. With DDP, three ranks, empty shares
    and ranks that die: ``python -m tests.ranks``."""
    data = ("--kind", "fsdp2", "--short", "--prompts", str(PROMPTS))
    first = start(2, tmp_path / "a", *data, "--steps", "2", "--save", str(tmp_path / "saved.pt"))
    assert first.code == 0, first.log[-3000:]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        alone = Rank(options_of([*data, "--out", str(tmp_path), "--resume", str(tmp_path / "saved.pt")]))
        alone.train()
    finally:
        dist.destroy_process_group()
    second = alone.kept
    batches = first.batches + second["steps"]
    assert (first.shares, [len(rows) for rows in second["steps"]]) == ([[4, 4], [4, 4]], [2])
    assert trained_otherwise_than_once(batches, PROMPTS) == []
    assert first.stale > 0
    assert [(rank["transfers"], rank["reward"]) for rank in first.ranks] == [([2.0, 2.0], first.ranks[0]["reward"])] * 2
    assert max(first.error, second["error"]) <= 1e-4
    assert weights_apart(batches, second["weights"]) <= 1e-5 < 1e-3 < weights_apart([], second["weights"])
    assert second["end"] == "the prompt source has ended; every prompt is delivered or dropped"


HERE = Path(__file__).parent
PATIENCE_S = 60.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]), "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def processes(count: int, deadline_s: float) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks, each of which has printed its share of the first batch and waits for a line."""
    where = [f"127.0.0.1:{free_port()}", april.new_token(), str(deadline_s)]
    started = [
        subprocess.Popen(
            [sys.executable, str(HERE / "ranks" / "one_of_several.py"), str(rank), str(count), *where],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT,
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        shares = [json.loads(line_of(process)) for process in started]
        assert sorted(tuple(s) for share in shares for s in share) == [(g, i) for g in range(2) for i in range(3)]
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate(timeout=PATIENCE_S)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.parametrize("victim", [0, 1])
def test_kill_9(victim: int) -> None:
    """Of any rank, also of rank 0: the others say so at once, long before any deadline, and end."""
    with processes(3, deadline_s=600.0) as ranks:
        others = [process for rank, process in enumerate(ranks) if rank != victim]
        go_on(others[0])  # waits in its call when it happens; the other one comes to it afterwards
        ranks[victim].send_signal(signal.SIGKILL)
        ranks[victim].wait(PATIENCE_S)
        go_on(others[1])
        for process in others:
            assert line_of(process).startswith(f"RankError: the connection to rank {victim} is lost: the connection")
            assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_stands_still(victim: int) -> None:
    """Stopped, with its connections open: named after the deadline; when it goes on, it hears of it, too."""
    with processes(2, deadline_s=3.0) as ranks:
        ranks[victim].send_signal(signal.SIGSTOP)
        other = ranks[1 - victim]
        go_on(other)
        assert line_of(other).startswith(f"RankError: the connection to rank {victim} is lost: it sent nothing for 3 s")
        assert other.wait(PATIENCE_S) == 0
        ranks[victim].send_signal(signal.SIGCONT)
        go_on(ranks[victim])
        assert line_of(ranks[victim]).startswith("RankError: the connection to rank ")
        assert ranks[victim].wait(PATIENCE_S) == 0
