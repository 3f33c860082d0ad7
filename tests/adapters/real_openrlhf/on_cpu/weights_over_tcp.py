"""Weights from the trainer to vLLM without NCCL: pickled parameters through vLLM's own StatelessProcessGroup.

vLLM on a CPU cannot be given single parameters (it keeps them repacked), so a transfer is collected and loaded at once.
"""

from __future__ import annotations

from typing import Any


class _Group:
    def __init__(self, host: str, port: int, rank: int, world_size: int) -> None:
        from vllm.distributed.utils import StatelessProcessGroup

        self._group = StatelessProcessGroup.create(host=host, port=port, rank=rank, world_size=world_size)

    def broadcast(self, tensor: Any, src: int = 0, stream: Any = None) -> Any:
        return self._group.broadcast_obj(None if tensor is None else tensor.detach().clone(), src)


def join(host: str, port: int, rank: int, world_size: int, device: Any) -> _Group:
    """In place of OpenRLHF's ``stateless_init_process_group``."""
    return _Group(host, port, rank, world_size)


class Receiver:
    """vLLM's worker extension, in place of OpenRLHF's ``WorkerWrap``."""

    def init_process_group(
        self, host: str, port: int, rank_offset: int, world_size: int, name: str, backend: str = "", use_ray: Any = None
    ) -> None:
        self._group = _Group(host, port, rank_offset, world_size)
        self._received: list[tuple[str, Any]] = []

    def update_weight(self, name: str, dtype: Any, shape: Any, empty_cache: bool = False) -> None:
        weight = self._group.broadcast(None)
        assert tuple(weight.shape) == tuple(shape), (name, weight.shape, shape)
        self._received.append((name, weight))
        if empty_cache:
            self.reload_weights(weights_iterator=iter(self._received))  # type: ignore[attr-defined]
            self._received = []
