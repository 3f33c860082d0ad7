"""The synchronous decoder: exact log-probabilities whatever happens to slots, nothing of a former occupant visible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import ARCHITECTURES, VOCAB_SIZE, apart, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from april.core.versions import FIRST_VERSION
from april.engines.protocol import Chunk, EngineFinish, Float32, Int32
from april.engines.transformers.model_check import check_model
from april.engines.transformers.model_support import refuse_unsupported
from april.engines.transformers.slot_batch import SlotDecoder, SlotRequest
from april.engines.transformers.stats import EngineStats
from april.errors import ConfigError

Result = dict[str, tuple[Int32, Float32, EngineFinish | None]]


def _prompts(count: int, shortest: int = 1, longest: int = 40, seed: int = 0) -> list[Int32]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB_SIZE, rng.integers(shortest, longest + 1), dtype=np.int32) for _ in range(count)]


def _request(name: str, tokens: Int32, new: int = 16, **changes: Any) -> SlotRequest:
    fields = {"min_tokens": 0, "temperature": 0.0, "top_p": 1.0, "stop_ids": (), "seed": sum(map(ord, name))}
    return SlotRequest(name, tokens, new, **(fields | changes))


def _decoder(model: Any, slots: int = 8, max_len: int = 256) -> SlotDecoder:
    return SlotDecoder(model.eval(), slots, max_len, EngineStats())


def _run(
    decoder: SlotDecoder, requests: list[SlotRequest], max_steps: int = 32, between: Callable[[], None] | None = None
) -> Result:
    for request in requests:
        decoder.submit(request)
    result: Result = {}
    while not decoder.idle:
        for output in decoder.tick(max_steps):
            result[output.request.attempt_id] = (output.tokens, output.logprobs, output.finish)
        if between is not None:
            between()
    return result


def _largest_difference(model: Any, prompts: dict[str, Int32], result: Result, temperature: float) -> float:
    """In nats, between log-probabilities and those of a plain forward pass."""
    assert len(result) == len(prompts)
    return max(
        float(apart(model, prompts[name], Chunk(tokens, logprobs, FIRST_VERSION), temperature).max())
        for name, (tokens, logprobs, _) in result.items()
    )


PATTERNS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "head_dim": 8, "attn_implementation": "eager"},
    "gemma3_text": {"sliding_window": 8, "head_dim": 8},
    "llama4_text": {"attention_chunk_size": 8, "head_dim": 8, "num_hidden_layers": 4, "num_local_experts": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
}
"""Sliding windows for all or some layers, chunks, eager attention, experts."""


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *PATTERNS])
def test_logprobs_equal_a_full_recompute(architecture: str, record_property: Callable[[str, object], None]) -> None:
    """30 ragged requests over 8 slots, so that slots are freed, filled by a move and taken again: <= 1e-5 nats."""
    model = tiny_model(architecture, **PATTERNS.get(architecture, {}))
    prompts = {f"r{i}": p for i, p in enumerate(_prompts(30))}
    lengths = np.random.default_rng(1).integers(1, 60, 30)
    requests = [_request(n, p, int(k), temperature=0.8) for (n, p), k in zip(prompts.items(), lengths, strict=True)]
    result = _run(_decoder(model), requests)

    assert {name: len(tokens) for name, (tokens, _, _) in result.items()} == {
        request.attempt_id: request.max_tokens for request in requests
    }
    difference = _largest_difference(model, prompts, result, 0.8)
    record_property("largest_difference", difference)
    assert difference <= 1e-5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_cut_anywhere_and_resumed_equals_the_uncut_run(architecture: str) -> None:
    """20 prompts, cut after every single token, resumed all together in other slots among other companions."""
    model = tiny_model(architecture)
    prompts = _prompts(20, longest=12)
    uncut = _run(_decoder(model), [_request(f"{i}", p, 20) for i, p in enumerate(prompts)])
    resumed = [
        _request(f"{i}/{cut}", np.concatenate([p, uncut[f"{i}"][0][:cut]]), 20 - cut)
        for i, p in enumerate(prompts)
        for cut in range(1, 20)
    ]
    result = _run(_decoder(model, slots=64), resumed)

    assert len(result) == 20 * 19
    for name, (tokens, logprobs, _) in result.items():
        i, cut = name.split("/")
        np.testing.assert_array_equal(uncut[i][0][int(cut) :], tokens)
        np.testing.assert_allclose(uncut[i][1][int(cut) :], logprobs, rtol=0, atol=1e-5)


def test_nothing_of_a_former_occupant_is_visible() -> None:
    """Every cell that belongs to nobody is NaN before each tick; results are the same, bit for bit."""
    model = tiny_model()
    lengths = np.random.default_rng(2).integers(1, 70, 40)
    prompts = _prompts(40, longest=120, seed=3)

    def requests() -> list[SlotRequest]:
        return [
            _request(f"{i}", p, int(k), temperature=1.0) for i, (p, k) in enumerate(zip(prompts, lengths, strict=True))
        ]

    clean = _run(_decoder(model), requests())
    decoder = _decoder(model)
    poisoned_cells = 0

    def poison() -> None:
        nonlocal poisoned_cells
        cache, active = decoder._cache, decoder.active
        with torch.inference_mode():
            for store in cache._stores.values():
                for cells in (store.keys, store.values):
                    cells[active:] = torch.nan
                    cells[:, cache._clean :] = torch.nan
                    poisoned_cells += int(cells.isnan().sum())

    poisoned = _run(decoder, requests(), max_steps=3, between=poison)
    assert poisoned_cells > 0
    for name, (tokens, logprobs, finish) in clean.items():
        np.testing.assert_array_equal(tokens, poisoned[name][0])
        np.testing.assert_array_equal(logprobs, poisoned[name][1])
        assert finish == poisoned[name][2]


def test_a_seed_gives_the_same_tokens_in_any_company() -> None:
    """Alone, among 20 others, in another slot and admitted later: the same tokens, nucleus and temperature included."""
    model = tiny_model()
    prompts = _prompts(20, seed=4)
    wanted = {"temperature": 0.9, "top_p": 0.95, "seed": 1234}
    alone = _run(_decoder(model), [_request("x", prompts[0], 50, **wanted)])["x"]
    others = [_request(f"{i}", p, 5 + 3 * i, temperature=1.0) for i, p in enumerate(prompts)]
    among = _run(_decoder(model, slots=6), [*others[:9], _request("x", prompts[0], 50, **wanted), *others[9:]])["x"]

    np.testing.assert_array_equal(alone[0], among[0])
    np.testing.assert_allclose(alone[1], among[1], rtol=0, atol=1e-5)
    other_seed = _run(_decoder(model), [_request("x", prompts[0], 50, **(wanted | {"seed": 1235}))])["x"]
    assert not np.array_equal(alone[0], other_seed[0])


def test_equal_prompts_go_through_the_model_once() -> None:
    """A group of 8 samples costs one prefill of its prompt, and every sample's log-probabilities are exact."""
    model = tiny_model()
    first, second = _prompts(2, shortest=10, seed=7)
    prompts = {f"{g}{i}": p for g, p in (("a", first), ("b", second)) for i in range(8)}
    decoder = _decoder(model, slots=16)
    result = _run(decoder, [_request(n, p, 20, temperature=1.0, seed=i) for i, (n, p) in enumerate(prompts.items())])

    assert decoder._stats.prefill_tokens == first.size + second.size
    assert len({result[f"a{i}"][0].tobytes() for i in range(8)}) == 8
    assert _largest_difference(model, prompts, result, 1.0) <= 1e-5


def test_admission_waits_for_an_eighth_of_the_slots_or_for_all_that_wait() -> None:
    """With 16 slots and many waiting, one freed slot is not filled alone; two are."""
    model = tiny_model()
    decoder = _decoder(model, slots=16)
    prompts = _prompts(24)
    for i, prompt in enumerate(prompts):
        decoder.submit(_request(f"{i}", prompt, {0: 3, 1: 6}.get(i, 50)))

    assert [o.request.attempt_id for o in decoder.tick(32)] == ["0"]
    assert (decoder.active, decoder.waiting) == (15, 8)
    assert [o.request.attempt_id for o in decoder.tick(32)] == ["1"]
    assert decoder.active == 14  # one free slot was not worth a prefill
    decoder.tick(1)
    assert (decoder.active, decoder.waiting) == (16, 6)


def test_lower_priority_numbers_are_admitted_first() -> None:
    """With one slot the order of completion is that of priority, then of arrival; an abort frees no other's place."""
    model = tiny_model()
    decoder = _decoder(model, slots=1)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", 0), ("e", -1)):
        decoder.submit(_request(name, _prompts(1)[0], 3, priority=priority))
    decoder.abort(["d"])

    order = []
    while not decoder.idle:
        order += [o.request.attempt_id for o in decoder.tick(32)]
    assert order == ["e", "b", "a", "c"]


def test_long_requests_grow_the_memory_and_release_gives_it_back() -> None:
    """From 32 columns to 480 with companions alive all the while, and again after a release."""
    model = tiny_model()
    prompts = {f"{i}": p for i, p in enumerate(_prompts(3, longest=9, seed=8))}
    decoder = _decoder(model, slots=3, max_len=500)
    for _ in range(2):
        decoder.release_memory()
        assert decoder._cache.columns == 0
        lengths = {"0": 480, "1": 300, "2": 200}
        result = _run(decoder, [_request(n, p, lengths[n], temperature=1.0) for n, p in prompts.items()])
        assert 480 <= decoder._cache.columns <= 512
        assert _largest_difference(model, prompts, result, 1.0) <= 1e-5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_decode_step_waits_for_the_device_once(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No operator of a step, the model's included, has a result whose size or value the host must know; one copy."""
    decoder = _decoder(tiny_model(architecture))
    for i, prompt in enumerate(_prompts(6)):
        decoder.submit(
            _request(f"{i}", prompt, 60, temperature=0.9, top_p=0.9, stop_ids=(VOCAB_SIZE - 1,), min_tokens=60)
        )
    decoder.tick(1)
    copies: list[torch.Tensor] = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (copies.append(tensor), cpu(tensor))[1])
    with _HostReads() as reads:
        assert decoder.tick(30) == []

    assert len(copies) == 30
    assert reads.operators > 30 * 50
    assert reads.waiting == []


class _HostReads(TorchDispatchMode):
    """Notes the operators that make the host wait for a device."""

    _WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "is_nonzero", "bincount")

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.waiting: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        name = func.name().removeprefix("aten::")
        if name.split(".")[0] in self._WAITING:
            self.waiting.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("architecture", "changes", "complaint"),
    [
        ("qwen3_next", {"num_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 4}, "recurrent"),
        ("lfm2", {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}, "type conv"),
        ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "max_len"),
    ],
)
def test_models_that_cannot_be_exact_are_refused(architecture: str, changes: dict[str, Any], complaint: str) -> None:
    """Recurrent state, convolutions, rotary embeddings that depend on the batch: one clear sentence."""
    with pytest.raises(ConfigError, match=complaint):
        refuse_unsupported(tiny_model(architecture, **changes), max_len=1024)


def test_the_trial_finds_a_model_that_does_not_keep_to_its_cache() -> None:
    """A model that ignores the positions it is given is refused: it numbers them by the length of its cache."""
    model = tiny_model()
    assert check_model(model, 64) <= 1e-5
    assert model.training
    forward = model.forward
    model.forward = lambda *a, **k: forward(*a, **(k | {"position_ids": None}))
    with pytest.raises(ConfigError, match="computes with the length of its cache"):
        check_model(model, 64)
