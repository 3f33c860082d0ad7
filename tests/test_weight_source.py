"""The trainer's weights as they are sent: names, buckets, sharded parameters, and what is refused before a pause."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tiny_models import tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from april.errors import ConfigError
from april.weights.source import Bucket, WeightSource


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sent(weights: Any, **options: Any) -> dict[str, torch.Tensor]:
    """All tensors by name, copied as they come; every bucket is as its specs say, and only the last is the last."""
    found: dict[str, torch.Tensor] = {}
    lasts = []
    for bucket in WeightSource(weights, **options).buckets():
        assert [s.name for s in bucket.specs] == list(dict.fromkeys(s.name for s in bucket.specs))
        for spec, tensor in zip(bucket.specs, bucket.tensors, strict=True):
            assert (spec.dtype, spec.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            assert tensor.is_contiguous()
            assert spec.name not in found
            found[spec.name] = tensor.clone()
        lasts.append(bucket.last)
    assert lasts == [False] * (len(lasts) - 1) + [True]
    return found


def checkpoint_of(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return dict(load_file(folder / "model.safetensors"))


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    """Whether names and values are equal."""
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {"tie_word_embeddings": False}),
        ("llama", {"tie_word_embeddings": True}),
        ("glm4", {}),
        ("qwen3_moe", MIXTURE),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_a_model_is_sent_as_its_checkpoint(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Names, shapes and values are those of the directory: tied layers once, experts one by one."""
    model = tiny_model(architecture, **changes)
    found = sent(model, bucket_bytes=8192)
    assert same(found, checkpoint_of(model, tmp_path))


def test_tied_layers_have_the_name_that_the_checkpoint_gives_them() -> None:
    """Also where the module names the other one first."""

    class Reversed(torch.nn.Module):
        _tied_weights_keys = {"head.weight": "embed.weight"}  # noqa: RUF012 - as models of transformers have it

        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(4, 8, bias=False)
            self.embed = torch.nn.Embedding(8, 4)
            self.embed.weight = self.head.weight

    assert list(sent(Reversed())) == ["embed.weight"]


def test_buffers_that_are_saved_are_sent() -> None:
    """A router's bias of its experts is a buffer, which the trainer changes; what is not saved stays here."""
    model = torch.nn.Linear(2, 2)
    model.register_buffer("bias_of_experts", torch.ones(2))
    model.register_buffer("angles", torch.ones(2), persistent=False)
    assert list(sent(model)) == ["weight", "bias", "bias_of_experts"]


def test_wrapped_models_are_sent_as_the_model_inside(one_rank: None, tmp_path: Path) -> None:
    """DDP, torch.compile and activation checkpointing put words into names that no engine knows."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = tiny_model()
    wanted = checkpoint_of(model, tmp_path)
    assert same(sent(DistributedDataParallel(model)), wanted)
    assert same(sent(torch.compile(model, backend="eager")), wanted)
    model.model.layers[0] = torch.compile(checkpoint_wrapper(model.model.layers[0]), backend="eager")
    assert same(sent(DistributedDataParallel(torch.compile(model, backend="eager"))), wanted)


def test_sharded_parameters_are_whole(one_rank: None, tmp_path: Path) -> None:
    """FSDP2 and tensor parallelism leave pieces; what is sent is the tensor."""
    model = tiny_model(tie_word_embeddings=True)
    wanted = checkpoint_of(model, tmp_path)
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert same(sent(model, bucket_bytes=8192), wanted)
    column = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(sent([("w", distribute_tensor(column, mesh, [Shard(1)]))])["w"], column)


def test_ranks_that_hold_other_tensors_differ_before_they_gather() -> None:
    """Name, shape and dtype of each, and the end: where one differs, a collective would hang."""

    def digests(*pairs: tuple[str, torch.Tensor]) -> list[bytes]:
        return [portion.digest() for portion in WeightSource(list(pairs)).ungathered_buckets()]

    a, b = torch.zeros(2), torch.zeros(3)
    kinds = [[("a", a)], [("b", a)], [("a", b)], [("a", a.bfloat16())], [("a", a), ("b", b)]]
    assert len({tuple(digests(*kind)) for kind in kinds}) == len(kinds)
    assert digests(("a", a)) == digests(("a", torch.ones(2)))


def test_buckets_hold_no_more_than_they_may() -> None:
    """As many tensors as fit, in order; one that is larger than a bucket is one by itself."""
    sizes = [10, 20, 30, 100, 5, 5, 60]
    tensors = [(f"t{i}", torch.zeros(n)) for i, n in enumerate(sizes)]
    for given in (tensors, iter(tensors), (pair for pair in tensors)):
        buckets = [[t.numel() for t in b.tensors] for b in WeightSource(given, bucket_bytes=60 * 4).buckets()]
        assert buckets == [[10, 20, 30], [100], [5, 5], [60]]


def test_a_bucket_is_dropped_when_the_next_one_is_asked_for() -> None:
    """Also by a loop that still names it: no tensor of an iterable is drawn while an earlier bucket holds any."""
    seen: list[Bucket] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(12):
            assert not any(bucket.tensors for bucket in seen)
            yield f"t{number}", torch.zeros(10)

    for bucket in WeightSource(tensors(), bucket_bytes=3 * 40).buckets():
        assert len(bucket.tensors) == 3
        seen.append(bucket)
    assert len(seen) == 4


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_what_an_iterable_yields_is_what_is_sent(bucket_bytes: int) -> None:
    """Also if it overwrites one buffer for all tensors, or frees each parameter, or all, after its last use."""

    def one_buffer() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(4)
        for number, name in enumerate("abc"):
            yield name, buffer.fill_(number)

    def one_parameter_at_a_time() -> Iterator[tuple[str, torch.Tensor]]:
        for number, name in enumerate("abc"):
            gathered = torch.nn.Parameter(torch.full((4,), float(number)))
            yield name, gathered
            gathered.data = torch.empty(0)

    def parts_of_one_tensor() -> Iterator[tuple[str, torch.Tensor]]:
        whole = torch.arange(3.0).repeat_interleave(4)
        yield from zip("abc", whole.split(4), strict=True)
        whole.untyped_storage().resize_(0)

    wanted = {name: torch.full((4,), float(number)) for number, name in enumerate("abc")}
    for weights in (one_buffer(), one_parameter_at_a_time(), parts_of_one_tensor()):
        assert same(sent(weights, bucket_bytes=bucket_bytes), wanted)


def test_a_list_is_not_copied() -> None:
    """Its tensors all exist until the end, so the buckets hold the tensors themselves."""
    tensors = [("a", torch.ones(2)), ("b", torch.ones(2))]
    for given in (tensors, tuple(tensors), dict(tensors)):
        buckets = WeightSource(given).buckets()
        assert [t.data_ptr() for t in next(buckets).tensors] == [t.data_ptr() for _, t in tensors]


def test_weights_can_be_sent_again() -> None:
    """After a transfer that failed: a module, a mapping, a list, an object that begins anew; not an iterator."""

    class Anew:
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter([("w", torch.ones(2))])

    for weights in (torch.nn.Linear(2, 2), {"w": torch.ones(2)}, [("w", torch.ones(2))], Anew()):
        source = WeightSource(weights)
        assert source.repeatable
        assert [b.specs for b in source.buckets()] == [b.specs for b in source.buckets()]
    once = WeightSource(iter([("w", torch.ones(2))]))
    assert not once.repeatable
    assert len(list(once.buckets())) == 1
    with pytest.raises(ConfigError, match="an iterator was given, and its items are already used"):
        next(once.buckets())


def test_the_rest_of_a_generator_is_not_all() -> None:
    """One that an earlier call has begun with is refused before anything happens, whole or not."""
    begun = torch.nn.Linear(2, 2).named_parameters()
    next(WeightSource(begun, bucket_bytes=1).buckets())
    with pytest.raises(ConfigError, match="an iterator was given, and its items are already used"):
        WeightSource(begun)
    ended = torch.nn.Linear(2, 2).named_parameters()
    assert len(list(ended)) == 2
    with pytest.raises(ConfigError, match="an iterator was given, and its items are already used"):
        WeightSource(ended)


class PeftModel(torch.nn.Linear):
    """Named as PEFT names its own."""


class FullyShardedDataParallel(torch.nn.Linear):
    """Named as FSDP1 is."""


class Quantized(torch.nn.Linear):
    """As transformers marks it."""

    is_quantized = True


OF_ZERO_3 = torch.empty(0)
OF_ZERO_3.ds_id = 0  # type: ignore[attr-defined]
"""As DeepSpeed leaves each parameter."""


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (None, "got NoneType; give a torch module, a dict of tensors by name, or an iterable"),
        ("some/directory", "got str; give a torch module"),
        (torch.ones(3), "got Tensor; give a torch module"),
        ({}, "there are no tensors"),
        ([], "there are no tensors"),
        (torch.nn.ReLU(), "ReLU has no parameters"),
        ([torch.ones(3)], r"item 0 is a Tensor instead of \(name, tensor\)"),
        ([("a", torch.ones(1)), ("b",)], "item 1 is a tuple instead of"),
        ({"a": torch.ones(1), 3: torch.ones(1)}, "item 1 is a tuple instead of"),
        ({"a": [1.0]}, "a is a list, not a tensor of torch"),
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "a is given twice"),
        ({"a": torch.empty(2, device="meta")}, "a is on the meta device, where tensors have no values"),
        ({"a": torch.eye(2).to_sparse()}, "a is sparse or quantized"),
        ({"x.lora_A.weight": torch.ones(1)}, "x.lora_A.weight belongs to an adapter; save it"),
        (PeftModel(1, 1), r"PeftModel is a model with adapters \(PEFT\); save it"),
        (FullyShardedDataParallel(1, 1), "FSDP1 keeps the parameters of a layer in one flat tensor"),
        (Quantized(1, 1), "the parameters of Quantized are quantized"),
        ({"w": OF_ZERO_3}, "w is sharded over ranks by DeepSpeed ZeRO-3"),
    ],
)
def test_what_is_no_weights_is_refused_at_once(weights: Any, words: str) -> None:
    """Before an engine is paused, in one sentence that names the tensor and says what to give."""
    with pytest.raises(ConfigError, match=words):
        WeightSource(weights)


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([], "there are no tensors"),
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "a is given twice"),
        ([("a", torch.ones(1)), None], "item 1 is a NoneType"),
    ],
)
def test_an_iterator_is_refused_where_it_goes_wrong(pairs: list[Any], words: str) -> None:
    """It is drawn while it is sent, so no sooner."""
    source = WeightSource(iter(pairs))
    with pytest.raises(ConfigError, match=words):
        list(source.buckets())
