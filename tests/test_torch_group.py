"""The sender's end of a group that an engine joins by torch's own helper, which a process of its own does here."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from april.engines.gloo_group import GlooReceiver
from april.engines.weight_transfer import GLOO, Handshake, TensorSpec
from april.weights.group import open_group

PEER = Path(__file__).parent / "torch_group_peer.py"
SPEC = TensorSpec("w", "float32", (3,))
PATIENCE_S = 60.0


@contextmanager
def peer(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A worker, which is ended if it does not end."""
    with subprocess.Popen([sys.executable, str(PEER), *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


class CalledOff(Exception):
    """As the sender's thread raises it."""


def test_tensors_reach_a_worker_that_joins_by_torchs_helper() -> None:
    """Each as it is, in order; the end of the group is quiet on both sides."""
    group, meeting = open_group(GLOO, Handshake.TORCH, "127.0.0.1", 2, PATIENCE_S, 1 << 20)
    with peer(str(meeting.port), meeting.group, "3") as process:
        group.connect(lambda: None)
        assert line(process) == "joined"
        group.broadcast([torch.ones(3), torch.arange(3.0)], [SPEC, SPEC], lambda: None)
        group.broadcast([torch.full((3,), 2.0)], [SPEC], lambda: None)
        assert [line(process) for _ in range(3)] == ["3.0", "3.0", "6.0"]
        group.close()
        assert process.wait(PATIENCE_S) == 0


def test_a_worker_that_waits_in_vain_is_let_go() -> None:
    """The sender has given up: the worker's broadcast fails at once, and not at its own limit."""
    group, meeting = open_group(GLOO, Handshake.TORCH, "127.0.0.1", 2, PATIENCE_S, 1 << 20)
    with peer(str(meeting.port), meeting.group, "1") as process:
        group.connect(lambda: None)
        assert line(process) == "joined"
        group.close()
        assert line(process) == "RuntimeError"


def test_a_meeting_that_is_called_off_ends() -> None:
    """Nobody comes; whoever waits is told by what it calls meanwhile, and nothing of the meeting is left."""
    group, _ = open_group(GLOO, Handshake.TORCH, "127.0.0.1", 2, PATIENCE_S, 1 << 20)
    calls = iter(range(3))

    def goes_on() -> None:
        if next(calls, None) is None:
            raise CalledOff

    with pytest.raises(CalledOff):
        group.connect(goes_on)
    group.close()
    assert group._thread is not None
    group._thread.join(PATIENCE_S)
    assert not group._thread.is_alive()


def test_groups_of_aprils_carry_every_dtype_and_shape() -> None:
    """Tensor by tensor into one buffer of the worker's: empty ones, numbers, odd lengths, and views of others."""
    tensors = [
        torch.arange(5.0), torch.tensor(3), torch.empty(0), torch.arange(6, dtype=torch.bfloat16).view(2, 3).T,
        torch.tensor([True, False, True]),
    ]  # fmt: skip
    specs = [TensorSpec(f"t{i}", str(t.dtype).removeprefix("torch."), tuple(t.shape)) for i, t in enumerate(tensors)]
    group, meeting = open_group(GLOO, Handshake.TORCH, "127.0.0.1", 2, PATIENCE_S, 1 << 20)
    found: list[tuple[str, torch.Tensor]] = []

    def receive() -> None:
        worker = GlooReceiver("127.0.0.1", meeting.port, meeting.group, 1, 2, PATIENCE_S)
        found.extend(worker.receive(specs))
        worker.close()

    thread = threading.Thread(target=receive)
    thread.start()
    group.connect(lambda: None)
    group.broadcast(tensors, specs, lambda: None)
    thread.join(PATIENCE_S)
    group.close()
    assert [name for name, _ in found] == [spec.name for spec in specs]
    assert all(torch.equal(there, here) for (_, there), here in zip(found, tensors, strict=True))
