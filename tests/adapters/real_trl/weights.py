"""What servers load of a PEFT model: merged weights, which give the trainer's own log-probabilities; in a copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from april.adapters.trl.ranks import merged, trains_tied_layers

ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": {"target_modules": "all-linear"},
    "DoRA": {"target_modules": ["q_proj", "v_proj"], "use_dora": True},
    "with whole layers": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}


def adapted(precision: torch.dtype = torch.float32, tied: bool = False, **settings: Any) -> Any:
    """A model whose adapters have moved."""
    model = tiny.model(tied=tied).to(precision)
    made = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **settings))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "modules_to_save" in name:
                parameter.mul_(1.1)
    return made.eval()


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_merged_weights_compute_what_the_trainer_computes(adapter: str, tmp_path: Path) -> None:
    """Read back from the directory, without PEFT; the trainer's own tensors are the same, to the bit, and no copies."""
    model = adapted(**ADAPTERS[adapter])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        expected = model(ids).logits.log_softmax(-1)
        merged(model).save_pretrained(tmp_path)
        found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(ids).logits.log_softmax(-1)
        model.disable_adapter_layers()
        without = model(ids).logits.log_softmax(-1)

    assert float((found - expected).abs().max()) < 2e-5
    assert float((without - expected).abs().max()) > 1e-2
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_merging_leaves_bfloat16_weights_alone() -> None:
    """Where merging in place and taking it back would move them."""
    model = adapted(torch.bfloat16, target_modules="all-linear")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged(model)

    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.merge_adapter()
    model.unmerge_adapter()
    assert not all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_adapters_of_tied_layers_are_known() -> None:
    """Of the embedding, of the output layer, and of neither."""
    assert trains_tied_layers(adapted(tied=True, target_modules=["q_proj"], modules_to_save=["embed_tokens"]))
    assert trains_tied_layers(adapted(tied=True, target_modules=["q_proj", "lm_head"]))
    assert not trains_tied_layers(adapted(tied=True, target_modules=["q_proj"]))
    assert not trains_tied_layers(adapted(target_modules=["q_proj", "lm_head"]))
