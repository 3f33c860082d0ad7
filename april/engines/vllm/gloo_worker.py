"""april's back-end for weight transfers inside a vLLM worker; imported there only, by its name.

A bucket comes in one buffer and goes through ``load_weights``, as a checkpoint does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from april.engines.groups.gloo import GlooReceiver
from april.engines.weight_routes import TensorSpec


@dataclass
class MeetingInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the group meets; the worker's own rank is ``rank_offset`` and its number in the server."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group: str
    timeout_s: float


@dataclass
class BucketInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The tensors of one bucket."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def specs(self) -> list[TensorSpec]:
        """One for each tensor."""
        every = zip(self.names, self.dtype_names, self.shapes, strict=True)
        return [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in every]


class GlooWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Takes weights from april's sender over a gloo group of its own."""

    init_info_cls = MeetingInfo
    update_info_cls = BucketInfo

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._receiver: GlooReceiver | None = None

    def init_transfer_engine(self, init_info: MeetingInfo) -> None:
        """Meet the sender; the group before is let go."""
        self.shutdown()
        parallel = self.parallel_config
        number = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._receiver = GlooReceiver(
            init_info.master_address, init_info.master_port, init_info.group, init_info.rank_offset + number,
            init_info.world_size, init_info.timeout_s,
        )  # fmt: skip

    def start_weight_update(self) -> None:
        """Have the layers wait for weights of a checkpoint."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: BucketInfo) -> None:
        """Take one bucket and load it."""
        if self._receiver is None:
            raise RuntimeError("init_weight_transfer_engine has not been called, or the group was let go")
        try:
            tensors = self._receiver.receive(update_info.specs())
        except BaseException:
            self.shutdown()  # what a group does after an error, nobody knows
            raise
        self.model.load_weights((name, tensor.to(self.device)) for name, tensor in tensors)

    def finish_weight_update(self) -> None:
        """Process the layers that still wait."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Let the group go."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
