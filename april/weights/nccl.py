"""Sends weights to vLLM's workers as rank 0 of an NCCL group, which they join with only the group's unique id.

The module calls the C interface of the NCCL library that torch has loaded, because torch's own groups need a store and
do not use vLLM's handshake.
"""

from __future__ import annotations

import base64
import ctypes
import importlib
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from april.engines.weight_transfer import TensorSpec
from april.weights.polling import poll_until

LIBRARY = "libnccl.so.2"
UNIQUE_ID_BYTES = 128
UINT8, FLOAT32, SUM = 1, 7, 0
"""Values of ncclDataType_t and ncclRedOp_t."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class NcclSender:
    """Rank 0 of a group, on the current CUDA device; implements :class:`april.weights.group.Group`."""

    def __init__(self, world_size: int, library: Any = None, torch: Any = None) -> None:
        self._torch = importlib.import_module("torch") if torch is None else torch
        self._world_size = world_size
        self._nccl = ctypes.CDLL(LIBRARY) if library is None else library
        self._id = _UniqueId()
        self._require(self._nccl.ncclGetUniqueId(ctypes.byref(self._id)))
        self._device = self._torch.cuda.current_device()
        self._group = ctypes.c_void_p()
        self._stream: Any = None
        self._buffer: Any = None

    @property
    def unique_id(self) -> str:
        """The group's unique id in base64, for the workers."""
        return base64.b64encode(bytes(self._id)).decode()

    def connect(self, check: Callable[[], None]) -> None:
        """Wait until all workers have joined; NCCL's call blocks and cannot be cancelled, so it runs in a thread."""
        ended: list[BaseException | None] = []

        def connect() -> None:
            try:
                self._torch.cuda.set_device(self._device)
                self._require(
                    self._nccl.ncclCommInitRank(ctypes.byref(self._group), self._world_size, self._id, 0)
                )
            except BaseException as error:
                ended.append(error)
            else:
                ended.append(None)

        threading.Thread(target=connect, name="april-nccl-joins", daemon=True).start()
        poll_until(lambda: bool(ended), check)
        if ended[0] is not None:
            raise ended[0]
        self._stream = self._torch.cuda.Stream(self._device)
        # vLLM's workers begin with an all-reduce of one element
        one = self._torch.zeros(1, device=self._device)
        self._run(check, lambda stream: self._nccl.ncclAllReduce(
            _at(one), _at(one), ctypes.c_size_t(1), FLOAT32, SUM, self._group, stream
        ))  # fmt: skip

    def broadcast(self, tensors: Sequence[Any], specs: Sequence[TensorSpec], check: Callable[[], None]) -> None:
        """Send one bucket as one buffer without gaps, which is vLLM's packed format."""
        with self._torch.no_grad():
            parts = [t.detach().to(self._device).contiguous().view(-1).view(self._torch.uint8) for t in tensors]
            self._buffer = self._torch.cat(parts)
        del parts
        flat = self._buffer
        self._run(check, lambda stream: self._nccl.ncclBroadcast(
            _at(flat), _at(flat), ctypes.c_size_t(flat.numel()), UINT8, 0, self._group, stream
        ))  # fmt: skip

    def close(self) -> None:
        """End the group; a call that hangs is aborted if NCCL can do that."""
        group, self._group, self._buffer = self._group, ctypes.c_void_p(), None
        if group:

            def abort() -> None:
                with suppress(Exception):
                    self._nccl.ncclCommAbort(group)

            threading.Thread(target=abort, name="april-group-ends", daemon=True).start()

    def _run(self, check: Callable[[], None], begin: Callable[[Any], int]) -> None:
        """Start a call on the sender's own CUDA stream, after the work queued by the trainer, and wait for its end."""
        cuda = self._torch.cuda
        self._stream.wait_stream(cuda.current_stream(self._device))
        with cuda.stream(self._stream):
            self._require(begin(ctypes.c_void_p(self._stream.cuda_stream)))
            over = cuda.Event()
            over.record(self._stream)
        poll_until(over.query, check)

    def _require(self, result: int) -> None:
        if result:
            self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
            what = self._nccl.ncclGetErrorString(result)
            raise RuntimeError(f"NCCL reports: {what.decode() if isinstance(what, bytes) else result}")


def _at(tensor: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
