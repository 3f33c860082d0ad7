"""The weights of the embedded engine: detects writes to them, gathers FSDP2 shards, loads new weights.

``fully_shard`` leaves every rank a shard of each parameter and gathers it layer by layer in ``forward``, which every
rank must enter at the same time. But ranks decode different numbers of tokens. So ``gather`` gathers all parameters
once, before any rank decodes, and ``release`` shards them again before the trainer continues. Decoding in between
calls the model's own ``forward``, with FSDP2's casts of mixed precision and without its collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from april.engines.weight_transfer import TensorSpec
from april.errors import ConfigError, EngineError

SAMPLED = 4
"""Number of values of each parameter that are compared to detect writes."""


class ModelWeights:
    """Weights of a model that is not sharded; the base class."""

    sharded = False
    ready = True
    """True if the model can be called on this rank alone."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._model_buffers: set[int] = set()
        """Ids of the buffers that the model writes itself in its forward pass."""
        self._tensors: list[Tensor] = _stored(model)

    def list_tensors(self) -> None:
        """List the tensors again, because the trainer may have replaced parameters."""
        self._tensors = [tensor for tensor in _stored(self._model) if id(tensor) not in self._model_buffers]

    @contextmanager
    def model_buffers_written(self) -> Iterator[None]:
        """From now on, ignore tensors that were written inside the block, because the model writes them itself."""
        before = {id(tensor): _writes(tensor) for tensor in self._tensors}
        yield
        self._model_buffers = {id(tensor) for tensor in self._tensors if before[id(tensor)] != _writes(tensor)}
        self.list_tensors()

    def trained_parameters(self) -> Iterable[Tensor]:
        """Yield the parameters, as the objects that optimizers hold."""
        yield from self._model.parameters()

    def stamp(self) -> tuple[int, int]:
        """Return (number of in-place writes, digest of addresses and some values), which changes with the weights."""
        tensors = self._tensors
        return sum(map(_writes, tensors)), hash((*(t.data_ptr() for t in tensors), *_few_values(tensors)))

    def sample(self) -> NDArray[np.float32]:
        """Return up to ``SAMPLED`` values of each parameter, evenly spread."""
        with torch.no_grad():
            flat = [p.reshape(-1) for p in self._model.parameters() if p.numel()]
            values = torch.cat([p[:: -(-p.numel() // SAMPLED)].float() for p in flat])
        return values.cpu().numpy()

    def gather(self) -> None:
        """Gather the weights on this rank; nothing to do here."""

    def release(self) -> None:
        """Undo :meth:`gather`; nothing to do here."""


class ShardedWeights(ModelWeights):
    """Weights that FSDP2 has sharded over the ranks."""

    sharded = True

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.ready = False
        self._units = _fsdp_modules(model)
        self._shards: list[Tensor] = []
        """The sharded parameters: the objects that optimizers hold, also while the weights are gathered."""
        self._reshard()

    def list_tensors(self) -> None:
        """Do nothing: the tensors are listed when they are gathered."""

    def trained_parameters(self) -> Iterable[Tensor]:
        """Yield the sharded parameters, because no optimizer holds the other tensors of a gathered model."""
        yield from self._shards

    def stamp(self) -> tuple[int, int]:
        """Return (writes to sharded or gathered parameters, digest of the shards' addresses); see the base class."""
        local = [getattr(p, "_local_tensor", p) for p in self._shards]
        writes = sum(map(_writes, [*self._shards, *local, *self._tensors]))
        return writes, hash(tuple(p.data_ptr() for p in local))

    def gather(self) -> None:
        """Gather the parameters. This is collective: all ranks of the mesh call it at the same time.

        Raises:
            EngineError: another rank did not take part, or parameters are also split by tensor parallelism.
        """
        self._reshard()  # a forward pass without backward leaves some gathered, with values from before the step
        try:
            for unit in self._units:
                unit.unshard()
        except Exception as error:
            self._reshard()
            raise EngineError(
                f"the parameters could not be gathered from all ranks ({type(error).__name__}: {error})"
            ) from error
        self._tensors = list(self._model.parameters())
        self._mark("PRE_BACKWARD")
        self.ready = True

    def release(self) -> None:
        """Shard the parameters again; without communication, so each rank can do it at any time."""
        self.ready = False
        self._mark("IDLE")
        self._reshard()

    def _reshard(self) -> None:
        for unit in self._units:
            unit.reshard()
        self._tensors = []
        self._shards = list(self._model.parameters())

    def _mark(self, state: str) -> None:
        """Set FSDP2's training state. In PRE_BACKWARD its forward hooks cast, but gather and shard nothing."""
        for unit in self._units:
            fsdp = unit._get_fsdp_state()
            fsdp._training_state = type(fsdp._training_state)[state]


def weights_of(model: Any) -> ModelWeights:
    """Return the weights of ``model``, which :func:`.model_support.refuse_unsupported` has accepted."""
    return ShardedWeights(model) if _fsdp_modules(model) else ModelWeights(model)


def inner_model(model: Any) -> Any:
    """Return the model inside ``DistributedDataParallel``, which has the same parameters; any other model as it is."""
    while type(model).__name__ == "DistributedDataParallel":
        model = model.module
    return model


def refuse_shards(model: Any, kind: str) -> None:
    """Raise ConfigError if the weights are sharded over ranks, except by FSDP2 with tested options."""
    parameters = list(model.parameters())
    units = _fsdp_modules(model)
    how = ""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        how = "FullyShardedDataParallel"
    elif any(hasattr(parameter, "ds_id") for parameter in parameters):
        how = "DeepSpeed's ZeRO-3"
    elif any(type(p).__name__ == "DTensor" for p in parameters) and not units:
        how = "DTensor, such as tensor parallelism without FSDP2"
    if how:
        raise ConfigError(
            f"the parameters of {kind} are sharded over ranks ({how}), so every rank would have to take part in every "
            "decode step: use FSDP2 (fully_shard), an engine behind a server (vllm, sglang), or give this engine an "
            "unsharded copy of the model, into which every rank gathers the weights (get_model_state_dict with "
            "full_state_dict=True) before weight_update()"
        )
    if units and (wrong := _untried(units, parameters)):
        raise ConfigError(
            f"the parameters of {kind} are sharded over ranks by fully_shard {wrong}, with which the transformers "
            "engine was not tested: use an engine behind a server (vllm, sglang), or leave that option out"
        )


def _untried(units: list[Any], parameters: list[Any]) -> str:
    """Describe an FSDP2 option in use with which generating was not tested; empty if there is none."""
    states = [unit._get_fsdp_state() for unit in units if hasattr(unit, "_get_fsdp_state")]
    if len(states) < len(units) or not all("PRE_BACKWARD" in dir(type(s._training_state)) for s in states):
        return f"of torch {torch.__version__}"
    groups = [group for state in states for group in _groups_of(state)]
    pieces = [fsdp.sharded_param for group in groups for fsdp in group.fsdp_params]
    if any(type(group.offload_policy).__name__ != "OffloadPolicy" for group in groups):
        return "with an offload_policy"
    if any(piece.device_mesh.ndim != 1 for piece in pieces):
        return "over a mesh of several dimensions (HSDP, or tensor parallelism beside it)"
    whole = [getattr(fsdp, "_unsharded_param", None) for group in groups for fsdp in group.fsdp_params]
    known = {id(p) for p in [*pieces, *whole]}
    if any(id(parameter) not in known for parameter in parameters):
        return "without some of them (ignored_params, or a model that is sharded only in part)"
    return ""


def _groups_of(state: Any) -> list[Any]:
    """Return the parameter groups of one FSDP2 module; before torch 2.11 there is at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [g for g in (state._fsdp_param_group,) if g is not None]


def _fsdp_modules(model: Any) -> list[Any]:
    """Return the modules that ``fully_shard`` was applied to, found by class name, because torch moved the class."""
    return [m for m in model.modules() if any(c.__name__ == "FSDPModule" for c in type(m).__mro__)]


def _stored(model: Any) -> list[Tensor]:
    """Return the parameters, and the buffers that are saved with them."""
    buffers = ((m._non_persistent_buffers_set, m._buffers.items()) for m in model.modules())
    return [
        *model.parameters(),
        *(b for not_saved, own in buffers for n, b in own if b is not None and n not in not_saved),
    ]


@torch.no_grad()
def _few_values(tensors: list[Tensor]) -> list[bytes]:
    """Return up to ``SAMPLED`` values of each tensor: writes through ``.data`` change neither counter nor address."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and tensor.layout == torch.strided and tensor.is_contiguous():
            step = -(-tensor.numel() // SAMPLED)
            values = tensor.as_strided((-(-tensor.numel() // step),), (step,))
            by_kind.setdefault((values.dtype, values.device), []).append(values)
    return [torch.cat(values).cpu().view(torch.uint8).numpy().tobytes() for values in by_kind.values()]


def _writes(parameter: Tensor) -> int:
    return 0 if parameter.is_inference() else parameter._version


def load_weights(model: Any, path: str) -> None:
    """Load the weights in ``path``, a directory that ``save_pretrained`` wrote (safetensors), into ``model`` in place.

    Raises EngineError if names or shapes differ or the directory is unusable; ``model`` is then unchanged.
    """
    if not Path(path).is_dir():
        raise EngineError(f"{path} is not a directory: save the weights there with save_pretrained")
    try:
        loaded, report = type(model).from_pretrained(
            path, config=model.config, dtype=model.dtype, use_safetensors=True, output_loading_info=True
        )
    except Exception as error:
        raise EngineError(f"the weights in {path} cannot be loaded ({type(error).__name__}: {error})") from error
    wrong = {what: sorted(map(str, names)) for what, names in report.items() if names and what != "error_msgs"}
    if wrong:
        raise EngineError(f"the weights in {path} do not fit this {type(model).__name__}: {wrong}")
    with torch.no_grad():
        new_weights = loaded.state_dict()
        for name, weight in model.state_dict().items():
            weight.copy_(new_weights[name])


class ModelWriter:
    """Copies weights into a model tensor by tensor, by the names of its state dict."""

    def __init__(self, model: Any) -> None:
        self._kind = type(model).__name__
        stored = model.state_dict(keep_vars=True)
        self._places: dict[str, Tensor] = {name: t for name, t in stored.items() if isinstance(t, Tensor)}
        self._missing = {id(t): name for name, t in self._places.items()}

    @torch.no_grad()
    def take(self, specs: Sequence[TensorSpec], tensors: Sequence[Tensor], last: bool) -> None:
        """Copy these tensors into the model, in place.

        Raises EngineError for an unknown name or another shape, and with ``last`` if a tensor of the model is missing.
        """
        for spec, tensor in zip(specs, tensors, strict=True):
            place = self._places.get(spec.name)
            if place is None or tuple(place.shape) != spec.shape:
                has = "no tensor of this name" if place is None else f"one of shape {tuple(place.shape)}"
                raise EngineError(
                    f"{spec.name} came with shape {spec.shape}, but this {self._kind} has {has}: give weights under "
                    "the names of the model's own state, or load a directory (path=)"
                )
            place.copy_(tensor)
            self._missing.pop(id(place), None)
        if last and self._missing:
            name = next(iter(self._missing.values()))
            more = f" and {len(self._missing) - 1} more" if len(self._missing) > 1 else ""
            raise EngineError(f"the weights were incomplete: {name}{more} of this {self._kind} did not arrive")
