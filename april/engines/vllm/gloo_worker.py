"""Receives weights over gloo inside a vLLM worker, into which vLLM imports this module by name.

The tensors of each bucket are loaded with ``load_weights``, like those of a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from april.engines.gloo_group import GlooReceiver
from april.engines.weight_transfer import TensorSpec


@dataclass
class MeetingInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Address and size of the process group. A worker's rank is ``rank_offset`` plus its index in the server."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group: str
    timeout_s: float


@dataclass
class BucketInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Names, dtypes and shapes of the tensors in one bucket."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def specs(self) -> list[TensorSpec]:
        every = zip(self.names, self.dtype_names, self.shapes, strict=True)
        return [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in every]


class GlooWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """vLLM weight transfer engine that receives weights from april's sender over its own gloo group."""

    init_info_cls = MeetingInfo
    update_info_cls = BucketInfo

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._receiver: GlooReceiver | None = None

    def init_transfer_engine(self, init_info: MeetingInfo) -> None:
        """Join the sender's group, after leaving the previous one."""
        self.shutdown()
        parallel = self.parallel_config
        number = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._receiver = GlooReceiver(
            init_info.master_address, init_info.master_port, init_info.group, init_info.rank_offset + number,
            init_info.world_size, init_info.timeout_s,
        )  # fmt: skip

    def start_weight_update(self) -> None:
        """Prepare the layers to receive the weights of a checkpoint."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: BucketInfo) -> None:
        if self._receiver is None:
            raise RuntimeError("init_weight_transfer_engine has not been called, or the group was closed")
        try:
            tensors = self._receiver.receive(update_info.specs())
        except BaseException:
            self.shutdown()  # the state of a group after an error is undefined
            raise
        self.model.load_weights((name, tensor.to(self.device)) for name, tensor in tensors)

    def finish_weight_update(self) -> None:
        """Have vLLM finish the layers that have not received all of their weights."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
