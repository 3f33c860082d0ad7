"""Sends weights as rank 0 of a named torch.distributed group that engines join.

SGLang's workers join through torch's own functions, with an address and a port; vLLM's workers join through
:mod:`april.engines.gloo_group`. The sender avoids the functions of torch that would change or need the trainer's
default group. Tensors are sent one by one, as SGLang receives them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeVar

from april.engines.gloo_group import bytes_of, gloo_group, group_keys, listening_store
from april.engines.weight_transfer import GLOO, TensorSpec
from april.weights.polling import poll_until

T = TypeVar("T")
NCCL_TIMEOUT_S = 24 * 3600.0
"""NCCL's own timeout, in seconds. If it expired, torch would end the trainer's whole process, so it must be longer than
april's limits."""
JOIN_TIMEOUT_S = 2.0
"""Seconds that :meth:`TorchSender.close` waits for a thread that is inside a call of torch."""


class TorchSender:
    """Rank 0 of a group; implements :class:`april.weights.group.Group`.

    Args:
        address: address at which the workers reach this machine.
    """

    def __init__(self, backend: str, address: str, group: str, world_size: int, timeout_s: float) -> None:
        import torch

        dist: Any = torch.distributed
        self._backend, self._address, self._group, self._world_size = backend, address, group, world_size
        self._device = "cpu" if backend == GLOO else "cuda"
        self._timeout_s, self._limit = timeout_s, timedelta(seconds=timeout_s)
        at = listening_store(address)
        self.port: int = at.getsockname()[1]
        self._store = dist.TCPStore(
            address, self.port, None, True, self._limit, wait_for_workers=False, master_listen_fd=at.detach()
        )
        self._process_group: Any = None
        self._works: list[Any] = []
        """Broadcasts of the last bucket."""
        self._thread: threading.Thread | None = None

    def connect(self, check: Callable[[], None]) -> None:
        """Wait until the workers have joined; with NCCL they join at the first tensor."""
        self._process_group = self._run_in_thread(self._make, check)

    def _make(self) -> Any:
        import torch

        dist: Any = torch.distributed
        # a client of the store, whose waits end when the store's server is closed
        store = dist.TCPStore(self._address, self.port, None, False, self._limit)
        keys = group_keys(store, self._group, self._device)
        if self._backend == GLOO:
            return gloo_group(keys, 0, self._world_size, self._address, self._timeout_s)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=NCCL_TIMEOUT_S)
        return dist.ProcessGroupNCCL(keys, 0, self._world_size, options)

    def broadcast(self, tensors: Sequence[Any], specs: Sequence[TensorSpec], check: Callable[[], None]) -> None:
        """Send one bucket, tensor by tensor."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.asyncOp = 0, True
        # NCCL sends from the current device, gloo from main memory
        ready = [t.detach().to(self._device).contiguous() for t in tensors]
        if self._backend == GLOO:
            ready = [bytes_of(t) for t in ready]
        self._works = []
        # in a thread, because the first broadcast creates NCCL's group, which may block
        works = (self._process_group.broadcast([t], options) for t in ready)
        self._run_in_thread(lambda: self._works.extend(works), check)
        poll_until(lambda: all(work.is_completed() for work in self._works), check)
        for work in self._works:
            work.wait()

    def close(self) -> None:
        """End the group; a transfer that hangs is aborted if the backend can do that."""
        group, self._process_group, self._store = self._process_group, None, None
        if self._thread is not None:
            self._thread.join(JOIN_TIMEOUT_S)  # if the thread waits for the store, that wait ends now
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
            held.clear()  # this blocks until the timeout if a transfer of a gloo group hangs

        # With gloo, Python must wait for this thread at exit: a daemon thread inside torch would crash the process.
        # With NCCL, Python must not wait, because the call may never return.
        threading.Thread(target=end, name="april-group-ends", daemon=self._backend != GLOO).start()

    def _run_in_thread(self, call: Callable[[], T], check: Callable[[], None]) -> T:
        """Run a call in a thread, because it may block and cannot be cancelled; closing the store ends its waits."""
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
        poll_until(lambda: bool(ended or errors), check)
        if errors:
            raise errors[0]
        return ended[0]
