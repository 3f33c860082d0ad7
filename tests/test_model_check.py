"""The trial run of the embedded engine: exact in float32, the model's own noise and no bug below it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import ARCHITECTURES, tiny_model

from april.core.sampling import SamplingParams
from april.engines.protocol import Request
from april.engines.transformers import model_support
from april.engines.transformers.engine import TransformersEngine
from april.engines.transformers.model_check import check_model
from april.engines.transformers.model_support import (
    DecodeMasks,
    affordable_context,
    cache_argument,
    named_lengths,
    refuse_unsupported,
)
from april.engines.transformers.slot_cache import SlotCache
from april.errors import ConfigError

MIXTURE = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "head_dim": 8,
}  # fmt: skip
MODELS = [*((name, {}) for name in (*ARCHITECTURES, "cohere2")), ("glm4_moe", MIXTURE)]
pytestmark = pytest.mark.usefixtures("one_thread")


def _autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


PRECISIONS = {
    "float32": (torch.float32, nullcontext),
    "bfloat16": (torch.bfloat16, nullcontext),
    "float16": (torch.float16, nullcontext),
    "bfloat16 autocast": (torch.float32, _autocast),
}


def _shifted(model: Any, patch: pytest.MonkeyPatch) -> None:
    """Each decode step is one position late."""
    forward = model.forward

    def late(*arguments: Any, **named: Any) -> Any:
        if named.get("attention_mask") is not None:
            named["position_ids"] = named["position_ids"] + 1
        return forward(*arguments, **named)

    model.forward = late


def _stale(model: Any, patch: pytest.MonkeyPatch) -> None:
    """A request that moves to a freed slot finds the keys and values of the one before it there."""
    patch.setattr(SlotCache, "move", lambda *_: None)


def _blind(model: Any, patch: pytest.MonkeyPatch) -> None:
    """No token sees itself."""
    at = DecodeMasks.at
    patch.setattr(DecodeMasks, "at", lambda self, positions, window: at(self, positions - 1, window))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("architecture", "changes"), MODELS, ids=[name for name, _ in MODELS])
def test_models_pass_in_their_own_precision(architecture: str, changes: dict[str, Any], precision: str) -> None:
    """Below float32 a model differs from itself by more than the float32 bound: that is no fault of the decoder."""
    dtype, context = PRECISIONS[precision]
    with context():
        difference = check_model(tiny_model(architecture, **changes).to(dtype), 64)
    assert difference <= (1e-5 if precision == "float32" else 0.1)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bug", [_shifted, _stale, _blind])
@pytest.mark.parametrize("architecture", ["qwen3", "cohere2"])
def test_a_bug_is_no_noise(
    architecture: str, bug: Callable[..., None], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shifted position, a stale key, a wrong mask: refused in every precision."""
    dtype, context = PRECISIONS[precision]
    model = tiny_model(architecture).to(dtype)
    bug(model, monkeypatch)
    with pytest.raises(ConfigError, match="differs from a full forward pass"), context():
        check_model(model, 64)


def test_noise_is_no_excuse_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a thousandth of a nat, which bfloat16 would explain, is refused in float32."""
    update = SlotCache.update

    def off(self: Any, keys: Any, values: Any, layer: int, *rest: Any, **named: Any) -> Any:
        return update(self, keys * (1 + 2e-3), values, layer, *rest, **named)

    monkeypatch.setattr(SlotCache, "update", off)
    with pytest.raises(ConfigError, match="differs from a full forward pass"):
        check_model(tiny_model(), 64)
    check_model(tiny_model().to(torch.bfloat16), 64)


def test_the_cache_is_given_by_the_name_that_the_model_has_for_it() -> None:
    """Renamed by transformers: code that is older keeps the old name, and what is wrapped its own."""

    class Named(torch.nn.Module):
        def forward(self, input_ids: Any, past_key_values: Any = None) -> None: ...

    class Wrapped(torch.nn.Module):
        def __init__(self, inside: torch.nn.Module) -> None:
            super().__init__()
            self.inside = inside

        def forward(self, *args: Any, **named: Any) -> Any:
            return self.inside(*args, **named)

    class Renamed(torch.nn.Module):
        def forward(self, input_ids: Any, cache: Any = None, **named: Any) -> None: ...

    class Compiled(torch.nn.Module):
        forward = range  # has no signature

    assert cache_argument(Wrapped(Wrapped(Named()))) == "past_key_values"
    patched = Named()
    patched.inside, forward = Renamed(), patched.forward
    patched.forward = lambda *args, **named: forward(*args, **named)  # type: ignore[method-assign]
    assert cache_argument(patched) == "past_key_values"
    assert cache_argument(torch.nn.Sequential(Compiled(), Renamed())) == "cache"
    assert cache_argument(Wrapped(Renamed())) == "cache"
    assert cache_argument(torch.nn.Linear(1, 1)) == "past_key_values"


def test_nothing_that_the_model_returns_looks_like_a_tensor() -> None:
    """Accelerate calls ``.float()`` on whatever has a bfloat16 ``dtype``, the cache in a model's output included."""
    model = tiny_model().to(torch.bfloat16)
    seen = []
    model.register_forward_hook(lambda *call: seen.append(getattr(call[-1], cache_argument(model))))
    check_model(model, 64)
    assert any(isinstance(cache, SlotCache) for cache in seen)
    assert not any(hasattr(cache, "dtype") for cache in seen if cache is not None)


async def test_an_engine_generates_in_the_precision_in_which_it_was_made() -> None:
    """An autocast around the trainer's lines is the engine's too, in its own thread, and spoils no gradients."""
    model, sampling = tiny_model(), SamplingParams(max_tokens=20, seed=3)
    request = Request(attempt_id="a", token_ids=np.array([5, 6, 7], np.int32), sampling=sampling)
    dtypes: set[torch.dtype] = set()
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *call: dtypes.add(call[-1].dtype))
    with _autocast():
        engine = TransformersEngine(model, slots=2, max_len=64, eos_token_ids=())
    dtypes.clear()
    (chunk,) = [c async for c in engine.generate(request)]
    assert dtypes == {torch.bfloat16}
    with _autocast():
        ids = torch.tensor([[*request.token_ids.tolist(), *chunk.tokens.tolist()]])
        model(input_ids=ids, labels=ids).loss.backward()
        with torch.no_grad():
            logprobs = model.eval()(input_ids=ids).logits[0, 2:-1].float().log_softmax(-1)
    expected = logprobs.gather(1, ids[0, 3:, None])[:, 0].numpy()
    assert np.abs(expected - chunk.logprobs).mean() < 0.03
    await engine.close()


AT = 40
"""Where the models below change their arithmetic."""
SAFE = 32
"""Columns come by 32."""
LOCAL = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "attn_implementation": "eager"}
TEMPERED = {
    "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 32,
    "no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 24,
}  # fmt: skip
LENGTHS = {
    "gpt_neo": (LOCAL | {"window_size": AT}, "window_size"),
    "llama4_text": (TEMPERED | {"floor_scale": AT}, "floor_scale"),
    "doge": ({"keep_window_size": AT}, "keep_window_size"),
    "moshi": ({"head_dim": 8, "ffn_dim": 64, "sliding_window": AT}, "sliding_window"),
    "mistral": ({"sliding_window": AT}, ""),
    "gemma3_text": ({"head_dim": 8, "sliding_window": AT, "layer_types": ["sliding_attention", "full_attention"]}, ""),
    "ministral": ({"head_dim": 8, "sliding_window": AT}, ""),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", LENGTHS)
def test_a_length_at_which_the_arithmetic_changes_is_tried(family: str, dtype: torch.dtype) -> None:
    """Right beyond it, or refused by the setting that names it; shorter sequences are generated all the same."""
    changes, wrong = LENGTHS[family]
    model = tiny_model(family, **changes).to(dtype)
    check_model(model, SAFE)
    sentence = rf"has 40 tokens \({wrong} in its configuration: a max_len of at most 32 avoids it"
    with pytest.raises(ConfigError, match=sentence) if wrong else nullcontext():
        check_model(model, 2 * AT)
    if family == "gpt_neo":  # the columns of a window that are still empty count
        with pytest.raises(ConfigError, match=sentence):
            check_model(model, AT - 1)


@pytest.mark.parametrize("longest", [2 * AT, AT // 2])
def test_a_length_that_is_named_nowhere_is_tried_where_that_is_cheap(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to ``max_len``: code may keep a window to itself."""
    at = DecodeMasks.at

    def local(self: Any, positions: Any, window: int) -> Any:
        mask = at(self, positions, window)
        assert isinstance(mask, torch.Tensor)
        return mask.masked_fill(torch.arange(window) < max(0, window - AT), -torch.inf)

    monkeypatch.setattr(DecodeMasks, "at", local)
    model = tiny_model()
    assert not named_lengths(model, 2 * AT)
    refused = pytest.raises(ConfigError, match=rf"once a sequence of its batch has {2 * AT} tokens, where")
    with refused if longest > AT else nullcontext():
        check_model(model, longest)


def test_an_embedding_scaled_by_the_longest_sequence_is_refused_for_each_type_of_layer() -> None:
    """Also where the configuration has one setting per type."""
    scaled = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": AT}
    plain = {"rope_type": "default", "rope_theta": 1e4}
    model = tiny_model("gemma3_text", head_dim=8, layer_types=["sliding_attention", "full_attention"])
    model.config.rope_parameters = {"full_attention": scaled, "sliding_attention": plain}
    refuse_unsupported(model, AT)
    with pytest.raises(ConfigError, match="set max_len to at most 40"):
        refuse_unsupported(model, AT + 1)


def test_where_a_trial_would_take_long_the_default_context_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the length that was not tried, with a line that says so; whoever gives ``max_len`` has it tried."""
    model = tiny_model("mistral", sliding_window=AT)
    assert affordable_context(model) == 512
    monkeypatch.setattr(model_support, "_MOST_COST", {"cpu": 1000})
    assert affordable_context(model) == SAFE
    assert "max_len is 32: beyond it the arithmetic of mistral may change (sliding_window in" in caplog.text
    assert TransformersEngine(model).capabilities.max_context == SAFE
    assert TransformersEngine(model, max_len=2 * AT).capabilities.max_context == 2 * AT


class DTensor(torch.Tensor):
    """As FSDP2 leaves them, as far as a name goes."""


def test_what_the_engine_cannot_drive_is_refused_by_its_name() -> None:
    """Sharded, with prompt learning: the sentence names the cause and what to do."""
    sharded = tiny_model()
    weight = sharded.lm_head.weight
    sharded.lm_head.weight = torch.nn.Parameter(weight.detach().as_subclass(DTensor))
    with pytest.raises(ConfigError, match=r"qwen3 are sharded over ranks \(DTensor, .*get_model_state_dict"):
        refuse_unsupported(sharded, 64)

    partitioned = tiny_model()
    partitioned.lm_head.weight.ds_id = 1
    with pytest.raises(ConfigError, match=r"sharded over ranks .DeepSpeed's ZeRO-3"):
        TransformersEngine(partitioned)

    prompted = tiny_model()
    prompted.peft_config = {"default": type("PromptTuningConfig", (), {"is_prompt_learning": True})()}
    with pytest.raises(ConfigError, match=r"of the kind prompt learning, .*: use LoRA"):
        TransformersEngine(prompted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_dynamic_quantisation_is_refused() -> None:
    """Its scales are of the whole batch: no slot decoder can be exact with it."""
    quantised = torch.ao.quantization.quantize_dynamic(tiny_model().eval(), {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ConfigError, match="differs from a full forward pass"):
        TransformersEngine(quantised)


def test_a_compiled_model_that_fails_is_told_of_its_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled models are tried like others; the sentence says what to give instead."""
    compiled = torch.compile(tiny_model(), backend="eager")
    check_model(compiled, 64)
    monkeypatch.setattr(SlotCache, "move", lambda *_: None)
    with pytest.raises(ConfigError, match="it is compiled: give the engine the model from before"):
        check_model(compiled, 64)
