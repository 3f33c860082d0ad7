"""The sender's end of an NCCL group, before stand-ins for NCCL's library and for CUDA: what is called, with what."""

from __future__ import annotations

import base64
import ctypes
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from april.engines.weight_transfer import TensorSpec
from april.weights.nccl import FLOAT32, SUM, UINT8, UNIQUE_ID_BYTES, NcclSender

ID = bytes([7]) * UNIQUE_ID_BYTES


class Library:
    """NCCL, as far as it is called; a broadcast looks at the bytes."""

    def __init__(self, fails: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.aborted = threading.Event()
        self.ncclCommInitRank = lambda into, *how: self._joined(into, *how) or fails
        self.ncclGetErrorString = lambda result: b"no such device"

    def ncclGetUniqueId(self, into: Any) -> int:
        ctypes.memset(ctypes.addressof(into._obj), 7, UNIQUE_ID_BYTES)
        return 0

    def _joined(self, into: Any, size: int, unique_id: Any, rank: int) -> None:
        into._obj.value = 99
        self.calls.append(("join", size, bytes(unique_id), rank))

    def ncclAllReduce(self, out: Any, into: Any, count: Any, kind: int, how: int, group: Any, stream: Any) -> int:
        self.calls.append(("sum", count.value, kind, how, group.value, out.value == into.value))
        return 0

    def ncclBroadcast(self, out: Any, into: Any, count: Any, kind: int, root: int, group: Any, stream: Any) -> int:
        self.calls.append(("send", kind, root, group.value, ctypes.string_at(out.value, count.value)))
        return 0

    def ncclCommAbort(self, group: Any) -> int:
        self.calls.append(("abort", group.value))
        self.aborted.set()
        return 0


def stand_in() -> Any:
    """torch with the CPU as its CUDA device."""
    stream = SimpleNamespace(cuda_stream=5, wait_stream=lambda other: None)
    event = SimpleNamespace(record=lambda stream: None, query=lambda: True)
    cuda = SimpleNamespace(
        Stream=lambda device: stream, Event=lambda: event, stream=lambda stream: nullcontext(),
        current_device=lambda: "cpu", current_stream=lambda device: stream, set_device=lambda device: None,
    )  # fmt: skip
    return SimpleNamespace(cuda=cuda, zeros=torch.zeros, cat=torch.cat, no_grad=torch.no_grad, uint8=torch.uint8)


def goes_on() -> None:
    """Nobody has failed."""


def test_a_group_by_its_unique_id() -> None:
    """Joined as rank 0 of all; a sum of one number, as vLLM's workers begin; buckets as bytes without gaps."""
    library = Library()
    sender = NcclSender(3, library, stand_in())
    assert base64.b64decode(sender.unique_id) == ID
    sender.connect(goes_on)
    assert library.calls == [("join", 3, ID, 0), ("sum", 1, FLOAT32, SUM, 99, True)]
    library.calls.clear()
    wide, narrow = torch.arange(6.0).view(2, 3).T, torch.ones(3, dtype=torch.bfloat16)
    sender.broadcast([wide, narrow], [TensorSpec("a", "float32", (3, 2)), TensorSpec("b", "bfloat16", (3,))], goes_on)
    sent = wide.contiguous().numpy().tobytes() + narrow.view(torch.uint8).numpy().tobytes()
    assert library.calls == [("send", UINT8, 0, 99, sent)]
    sender.close()
    assert library.aborted.wait(60)
    sender.close()
    assert library.calls[1:] == [("abort", 99)]


def test_a_group_that_cannot_be_made() -> None:
    """In NCCL's words."""
    sender = NcclSender(3, Library(fails=5), stand_in())
    with pytest.raises(RuntimeError, match="NCCL reports: no such device"):
        sender.connect(goes_on)


def test_a_group_that_is_not_waited_for_any_more() -> None:
    """Whoever waits may give up while NCCL still waits for the others."""

    def gives_up() -> None:
        raise TimeoutError

    library, stay = Library(), threading.Event()
    library.ncclCommInitRank = lambda *how: not stay.wait(60)
    sender = NcclSender(3, library, stand_in())
    with pytest.raises(TimeoutError):
        sender.connect(gives_up)
    stay.set()
