"""Groups of torch.distributed with a name, which engines join by torch's own means (SGLang): the sender's end, rank 0.

The other ends are made by torch at an address and a port, into groups beside their own; these are made without torch's
helpers, so that the default group of the trainer is not touched, or need not be there. Tensors go one by one, as such
engines take them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeVar

from april.engines.groups.gloo import listening
from april.engines.groups.waiting import wait_until
from april.engines.weight_routes import GLOO, TensorSpec

T = TypeVar("T")
DEVICE = {GLOO: "cpu"}
"""The device for which torch files a back-end's keys in the store; NCCL's is cuda."""
LONGEST_S = 24 * 3600.0
"""Longest wait that NCCL is told of: torch ends the whole process of a trainer when that is over, so april's own limit
has to come first."""
PATIENCE_S = 2.0
"""Longest wait for a thread that is in the middle of a call of torch."""


class TorchSender:
    """Rank 0 of a group, as :class:`april.weights.group.Group` says.

    Args:
        address: of this machine, as the workers reach it.
    """

    def __init__(self, backend: str, address: str, group: str, world_size: int, timeout_s: float) -> None:
        import torch

        dist: Any = torch.distributed
        self._backend, self._address, self._group, self._world_size = backend, address, group, world_size
        self._limit = timedelta(seconds=timeout_s)
        at = listening(address)
        self.port: int = at.getsockname()[1]
        self._store = dist.TCPStore(
            address, self.port, None, True, self._limit, wait_for_workers=False, master_listen_fd=at.detach()
        )
        self._process_group: Any = None
        self._works: list[Any] = []
        """Of the last bucket."""
        self._thread: threading.Thread | None = None

    def connect(self, goes_on: Callable[[], None]) -> None:
        """Wait for the workers; with NCCL that comes with the first tensor."""
        self._process_group = self._apart(self._make, goes_on)

    def _make(self) -> Any:
        import torch

        dist: Any = torch.distributed
        # a client, which the end of the store's server wakes
        store = dist.TCPStore(self._address, self.port, None, False, self._limit)
        keys: Any = dist.PrefixStore(self._group, store)
        for prefix in (self._group, DEVICE.get(self._backend, "cuda")):
            keys = dist.PrefixStore(f"{prefix}/", keys)
        if self._backend == GLOO:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = self._limit
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
            return dist.ProcessGroupGloo(keys, 0, self._world_size, options)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=LONGEST_S)
        return dist.ProcessGroupNCCL(keys, 0, self._world_size, options)

    def broadcast(self, tensors: Sequence[Any], specs: Sequence[TensorSpec], goes_on: Callable[[], None]) -> None:
        """Send one bucket, tensor by tensor."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.asyncOp = 0, True
        # NCCL sends from the device that is the current one, gloo from memory
        ready = [t.detach().to("cpu" if self._backend == GLOO else "cuda").contiguous() for t in tensors]
        self._works = []
        # in a thread: the first one makes the group of NCCL
        self._apart(lambda: self._works.extend(self._process_group.broadcast([t], options) for t in ready), goes_on)
        wait_until(lambda: all(work.is_completed() for work in self._works), goes_on)
        for work in self._works:
            work.wait()

    def close(self) -> None:
        """Let go of the workers; what hangs is broken off where the back-end can."""
        group, self._process_group, self._store = self._process_group, None, None
        if self._thread is not None:
            self._thread.join(PATIENCE_S)  # its wait ends with the store
        hangs = not all(work.is_completed() for work in self._works)
        self._works = []
        if group is None or (self._backend == GLOO and not hangs):
            return
        held = [group]
        del group

        def end() -> None:
            with suppress(Exception):
                if self._backend != GLOO:
                    held[0].abort()
            held.clear()  # of gloo, when what hangs is over its time

        # a thread in torch when Python ends would end the process by a signal; NCCL may never come back
        threading.Thread(target=end, name="april-group-ends", daemon=self._backend != GLOO).start()

    def _apart(self, call: Callable[[], T], goes_on: Callable[[], None]) -> T:
        """Make a call in a thread, as it may wait for the workers and cannot be broken off; the store's end ends it."""
        import torch

        cuda: Any = torch.cuda
        stream = cuda.current_stream() if cuda.is_initialized() else None
        ended: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                with nullcontext() if stream is None else cuda.stream(stream):
                    ended.append(call())
            except BaseException as error:
                errors.append(error)

        self._thread = threading.Thread(target=run, name="april-group-calls", daemon=True)
        self._thread.start()
        wait_until(lambda: bool(ended or errors), goes_on)
        if errors:
            raise errors[0]
        return ended[0]
