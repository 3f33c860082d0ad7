"""Reads the trainer's weights bucket by bucket, under the names in the model's checkpoint.

A bucket stays within its size limit, unless it holds a single larger tensor. Sharded parameters (DTensor: FSDP2, tensor
parallelism) are gathered one by one, on every rank at the same time, so that no rank ever holds more than two buckets
of gathered tensors. torch is imported only when there are weights.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from april.engines.weight_transfer import TensorSpec
from april.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BUCKET_BYTES = 256 << 20
"""Default size of a bucket, in bytes."""
WHAT_TO_GIVE = "give a torch module, a dict of tensors by name, or an iterable of (name, tensor)"
_ALREADY_READ = (
    "weights: an iterator was given, and its items are already used; give a list, or an object whose __iter__ starts "
    "over, so that weights can be sent again"
)
_WRAPPED_ATTRIBUTE = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}
"""Wrapper classes of torch, each with the attribute that holds the wrapped model."""
_INSERTED_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Texts that torch.compile and activation checkpointing insert into the names of parameters."""


@dataclass(slots=True)
class Bucket:
    """Some whole, contiguous tensors; they are dropped when the next bucket is requested."""

    specs: tuple[TensorSpec, ...]
    tensors: list[Tensor] = field(repr=False)
    last: bool
    """True if no other bucket follows."""


@dataclass(slots=True)
class UngatheredBucket:
    """The tensors of one bucket before they are gathered: sharded tensors are still shards."""

    items: list[_SourceTensor]
    last: bool

    def digest(self) -> bytes:
        """Return a digest that two ranks share if they are about to gather the same tensors."""
        words = [(item.name, item.dtype, item.shape, item.sharded) for item in self.items]
        return hashlib.blake2b(repr((words, self.last)).encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class _SourceTensor:
    name: str
    tensor: Tensor
    split: Callable[[str, Tensor], Mapping[str, Tensor]] | None = None
    """Function that splits the tensor into tensors of the checkpoint; None if the checkpoint has this tensor itself."""

    @property
    def sharded(self) -> bool:
        return hasattr(self.tensor, "full_tensor")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> str:
        return dtype_name(self.tensor.dtype)

    @property
    def size(self) -> int:
        """Size of the whole tensor in bytes."""
        return int(self.tensor.numel()) * self.tensor.dtype.itemsize

    def full_tensor(self) -> Tensor:
        """Return the whole tensor; a collective call if the tensor is sharded over ranks."""
        tensor: Any = self.tensor.detach()
        if self.sharded:
            tensor = tensor.full_tensor()
            tensor = tensor.wait() if hasattr(tensor, "wait") else tensor
        return tensor.contiguous()  # type: ignore[no-any-return]


class Weights:
    """Weights that can be sent, bucket by bucket."""

    module: Any = None
    """The model without its wrappers; None if something other than a module was given."""
    bucket_bytes = BUCKET_BYTES
    """Largest size of a bucket in bytes; a larger tensor is a bucket by itself."""
    repeatable = True
    """True if the weights can be read again after a failed transfer; an iterator cannot."""

    def buckets(self) -> Iterator[Bucket]:
        """Yield all buckets, at least one; the tensors of each are dropped when the next one is requested."""
        raise NotImplementedError


class WeightSource(Weights):
    """The weights of one process.

    Args:
        weights: a torch module, a mapping from name to tensor, or an iterable of (name, tensor).
        bucket_bytes: largest size of a bucket in bytes; a larger tensor is a bucket by itself.

    Raises:
        ConfigError: ``weights`` has another type, or tensors that no engine could load. An iterator is checked only
            while it is read.
    """

    def __init__(self, weights: Any, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        import torch

        self.bucket_bytes = bucket_bytes
        self.module = _unwrapped(weights) if isinstance(weights, torch.nn.Module) else None
        self._items = _items_of(weights)
        self.repeatable = self._items is not None or not isinstance(weights, Iterator)
        self._iterable: Iterable[Any] = () if self._items is not None else weights
        # the rest of a generator that was read before would be sent as if it were all weights
        self._read_started = inspect.isgenerator(weights) and inspect.getgeneratorstate(weights) != inspect.GEN_CREATED
        if self._read_started:
            raise ConfigError(_ALREADY_READ)

    def ungathered_buckets(self) -> Iterator[UngatheredBucket]:
        """Yield the content of each bucket before it is gathered. Not a collective call.

        Each tensor of an iterable is copied before the next one is requested, because the iterable may then overwrite
        or free its memory. The tensors of a module, a mapping or a list are not copied.

        Raises:
            ConfigError: the iterable yields something other than (name, tensor), a name twice, or nothing.
        """
        if self._read_started and not self.repeatable:
            raise ConfigError(_ALREADY_READ)
        self._read_started = True
        items = iter(self._items) if self._items is not None else map(_copied, _checked(self._iterable))
        next_item = next(items, None)
        if next_item is None:
            raise ConfigError(f"weights: there are no tensors; {WHAT_TO_GIVE}")
        while next_item is not None:
            items_taken, size = [next_item], next_item.size
            next_item = next(items, None)
            while next_item is not None and size + next_item.size <= self.bucket_bytes:
                size += next_item.size
                items_taken.append(next_item)
                next_item = next(items, None)
            yield UngatheredBucket(items_taken, next_item is None)
            items_taken.clear()

    def gather(self, portion: UngatheredBucket) -> Bucket:
        """Return a bucket with whole tensors. If some are sharded, all ranks must call this at the same time."""
        specs: list[TensorSpec] = []
        tensors: list[Tensor] = []
        for item in portion.items:
            whole = item.full_tensor()
            parts = {item.name: whole} if item.split is None else item.split(item.name, whole)
            for name, part in parts.items():
                specs.append(TensorSpec(name, dtype_name(part.dtype), tuple(part.shape)))
                tensors.append(part.contiguous())
            del whole, parts
        return Bucket(tuple(specs), tensors, portion.last)

    def gather_for_others(self, portion: UngatheredBucket) -> None:
        """Take part in gathering a bucket for another rank, and keep nothing. Collective, like :meth:`gather`."""
        for item in portion.items:
            if item.sharded:
                item.full_tensor()

    def buckets(self) -> Iterator[Bucket]:
        """Yield all buckets, with whole tensors; the tensors of each are dropped when the next one is requested."""
        for portion in self.ungathered_buckets():
            bucket = self.gather(portion)
            portion.items.clear()
            yield bucket
            bucket.tensors.clear()


def weight_source(weights: Any) -> Weights:
    """Return the argument of ``weight_update(weights=...)`` as :class:`Weights`; Weights are returned unchanged."""
    return weights if isinstance(weights, Weights) else WeightSource(weights)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as servers take it, such as ``bfloat16``."""
    return str(dtype).rpartition(".")[2]


# ---------------------------------------------------------------- the argument of weight_update


def _items_of(weights: Any) -> list[_SourceTensor] | None:
    """Return all tensors, checked; None for an iterable, whose tensors can be checked only while it is read."""
    import torch

    if isinstance(weights, torch.nn.Module):
        return _items_of_module(weights)
    if isinstance(weights, Mapping):
        weights = list(weights.items())
    if isinstance(weights, (str, bytes, torch.Tensor)) or not isinstance(weights, Iterable):
        raise ConfigError(f"weights: got {type(weights).__name__}; {WHAT_TO_GIVE}")
    if not isinstance(weights, (list, tuple)):
        return None
    items = list(_checked(weights))
    if not items:
        raise ConfigError(f"weights: there are no tensors; {WHAT_TO_GIVE}")
    return items


def _checked(pairs: Iterable[Any]) -> Iterator[_SourceTensor]:
    """Yield an item for each (name, tensor); raises ConfigError for anything else."""
    import torch

    seen: set[str] = set()
    for number, pair in enumerate(pairs):
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)):
            got = type(pair).__name__
            raise ConfigError(f"weights: item {number} is a {got} instead of (name, tensor); {WHAT_TO_GIVE}")
        name, tensor = pair
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"weights: {name} is a {type(tensor).__name__}, not a tensor of torch")
        if name in seen:
            raise ConfigError(f"weights: {name} is given twice; an engine would load only one of the two")
        seen.add(name)
        _require_sendable(name, tensor)
        yield _SourceTensor(name, tensor)
        del pair, tensor  # free this tensor before the next one is read


def _copied(item: _SourceTensor) -> _SourceTensor:
    return _SourceTensor(item.name, item.tensor.detach().clone())


def _require_sendable(name: str, tensor: Any) -> None:
    import torch

    if tensor.is_meta:
        raise ConfigError(f"weights: {name} is on the meta device, where tensors have no values; load the model first")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ConfigError(f"weights: {name} is sparse or quantized, but engines only accept plain tensors; convert it")
    if getattr(tensor, "ds_id", None) is not None and not tensor.numel():
        raise ConfigError(
            f"weights: {name} is sharded over ranks by DeepSpeed ZeRO-3; give an iterable that gathers each parameter "
            "(deepspeed.zero.GatheredParameters) and yields (name, tensor)"
        )
    if ".lora_A." in name or ".lora_B." in name:
        raise ConfigError(f"weights: {name} belongs to an adapter; {_ADAPTERS}")


_ADAPTERS = (
    "save it (save_pretrained) and give its directory as path= to servers that accept adapters, or merge it into a "
    "copy of the model and give that"
)


# ---------------------------------------------------------------- a module


def _items_of_module(module: Any) -> list[_SourceTensor]:
    model = _unwrapped(module)
    names: dict[str, tuple[str, Any]] = {}
    tied = _tied_names(model)
    first: dict[int, str] = {}
    stored = {_without_inserted(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    for name, tensor in stored.items():
        if name.endswith("_extra_state"):
            continue  # state of a layer's kernel, not a weight of the checkpoint
        before = first.get(id(tensor))
        if before is not None and (name in tied or before not in tied):
            continue
        if before is not None:
            del names[before]
        first[id(tensor)] = name
        names[name] = (name, tensor)
    items = list(_checked(names.values()))
    if not items:
        raise ConfigError(f"weights: {type(model).__name__} has no parameters; {WHAT_TO_GIVE}")
    return _as_in_checkpoint(model, items)


def _without_inserted(name: str) -> str:
    for word in _INSERTED_NAMES:
        name = name.replace(word, "")
    return name


def _unwrapped(module: Any) -> Any:
    """Return the model without torch's wrappers; raises ConfigError if its tensors cannot be sent as weights."""
    while (kind := next((k for k in _kinds(module) if k in _WRAPPED_ATTRIBUTE), None)) is not None:
        module = getattr(module, _WRAPPED_ATTRIBUTE[kind])
    if "FullyShardedDataParallel" in _kinds(module):
        raise ConfigError(
            "weights: FSDP1 keeps the parameters of a layer in one flat tensor; use FSDP2 (fully_shard), or give an "
            "iterable of (name, tensor) that gathers them"
        )
    if "PeftModel" in _kinds(module) or any("BaseTunerLayer" in _kinds(part) for part in module.modules()):
        raise ConfigError(f"weights: {type(module).__name__} is a model with adapters (PEFT); {_ADAPTERS}")
    if getattr(module, "is_quantized", False):
        raise ConfigError(
            f"weights: the parameters of {type(module).__name__} are quantized, but engines only accept plain ones; "
            "dequantize a copy of the model and give that"
        )
    return module


def _kinds(module: Any) -> list[str]:
    return [kind.__name__ for kind in type(module).__mro__]


def _tied_names(model: Any) -> set[str]:
    """Return the names that a checkpoint leaves out because they repeat other tensors (tied embeddings)."""
    tied: set[str] = set()
    for prefix, part in model.named_modules():
        keys = getattr(part, "all_tied_weights_keys", None) or getattr(part, "_tied_weights_keys", None) or ()
        tied |= {_without_inserted(f"{prefix}.{key}" if prefix else key) for key in keys}
    return tied


def _as_in_checkpoint(model: Any, items: list[_SourceTensor]) -> list[_SourceTensor]:
    """Rename and split tensors that transformers stores differently from the checkpoint (such as fused experts).

    Raises:
        ConfigError: a tensor of the checkpoint is made of several tensors of the model.
    """
    if "PreTrainedModel" not in _kinds(model):
        return items
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers below 5 stores tensors as the checkpoint does
        return items
    import torch

    def split(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        parts: Mapping[str, Tensor] = revert_weight_conversion(model, {name: tensor})
        return parts

    shapes = {i.name: torch.empty(i.shape, dtype=i.tensor.dtype, device="meta") for i in items}
    whole = revert_weight_conversion(model, dict(shapes))
    if whole.keys() == shapes.keys():
        return items
    parts = {name: split(name, tensor) for name, tensor in shapes.items()}
    found = {n: t.shape for n, t in chain.from_iterable(part.items() for part in parts.values())}
    if found != {n: t.shape for n, t in whole.items()}:
        raise ConfigError(
            f"weights: some tensors in a checkpoint of {type(model).__name__} combine several tensors of the model; "
            "give an iterable of (name in the checkpoint, tensor)"
        )
    return [i if list(parts[i.name]) == [i.name] else _SourceTensor(i.name, i.tensor, split) for i in items]
