"""The unmodified GRPOTrainer trains on aborted and resumed responses, and every one of its numbers is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import short_runs
import tiny
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from april.adapters.trl.ranks import merged_copy, trains_tied_layers

LOSSES = {
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "grpo": {"loss_type": "grpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
}


@pytest.mark.parametrize("loss", LOSSES)
def test_aborted_and_resumed_responses_are_trained_exactly(loss: str, tmp_path: Path) -> None:
    """Partials cross updates; log-probabilities agree; each prompt settled once; rewards see the rows of april."""
    trainer = short_runs.trainer(tmp_path, temperature=0.8, **LOSSES[loss])
    trainer.train()

    assert trainer.state.global_step == short_runs.ROWS // short_runs.GROUPS >= 4
    assert trainer.delivered == dict.fromkeys(range(short_runs.ROWS), 1)
    ledger = trainer.rollout_func.ledger
    assert (ledger["prompts"].delivered, ledger["prompts"].held) == (short_runs.ROWS, 0)
    assert ledger["tokens"].balanced
    assert ledger["tokens"].delivered == ledger["tokens"].observed == trainer.tokens
    assert sum(trainer.trained.values()) == short_runs.ROWS * short_runs.SAMPLES
    logged = [row for row in trainer.state.log_history if "april/aborted_attempts" in row]
    aborted = sum(float(row["april/aborted_attempts"]) for row in logged)
    assert aborted > 0
    assert trainer.resumed > 0
    assert trainer.stale_tokens > 0
    largest = max(trainer.logprob_errors)
    assert largest <= 1e-3
    # behind the present weights, the ratio is not 1, which TRL without the subclass would take it for
    assert max(trainer.stale_differences) > 10 * largest
    clipped = max(float(row["clip_ratio/region_mean"]) for row in logged)
    assert loss != "gspo" or clipped > 0
    print(
        f"\n{loss}: {aborted:.0f} attempts aborted, {trainer.resumed} resumed responses trained, "
        f"{trainer.stale_tokens / trainer.tokens:.0%} of {trainer.tokens} tokens from older weights; log-probabilities "
        f"differ by at most {largest:.1e} (older weights: {max(trainer.stale_differences):.1e}); clipped {clipped:.3f}"
    )


STEPS: dict[str, tuple[dict[str, int], int, list[int]]] = {
    "several per generation batch, two passes": (
        {"num_iterations": 2, "gradient_accumulation_steps": 1, "num_train_epochs": 2}, 2, list(range(0, 48, 4))
    ),
    "one per two generation batches": ({"gradient_accumulation_steps": 4}, 1, [0, 0, 1, 1, 2, 2]),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_optimizer_steps_that_are_no_generation_batches(name: str, tmp_path: Path) -> None:
    """Each prompt settled once per pass, each row trained as often as asked; versions follow the optimizer's steps."""
    changes, passes, steps = STEPS[name]
    trainer = short_runs.trainer(tmp_path, per_device_train_batch_size=8, steps_per_generation=2, **changes)
    trainer.train()

    assert trainer.delivered == dict.fromkeys(range(short_runs.ROWS), passes)
    times = passes * changes.get("num_iterations", 1)
    assert sum(trainer.trained.values()) == times * short_runs.ROWS * short_runs.SAMPLES
    assert [step for _, step in trainer.weights] == steps
    assert max(trainer.logprob_errors) <= 1e-3


def test_evaluation_answers_the_rows_that_were_asked(tmp_path: Path) -> None:
    """In their order, with the present weights, and training goes on as if nothing had been."""
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, "eval_on_start": True}
    trainer = short_runs.trainer(tmp_path, held_out=tiny.dataset(8), **evaluation)
    trainer.evaluate()
    trainer.train()

    # the reward function has looked at their columns; the log of the one before the training is gone
    assert len([row for row in trainer.state.log_history if "eval_reward" in row]) == 1 + 3
    assert trainer.delivered == dict.fromkeys(range(short_runs.ROWS), 1)
    assert max(trainer.logprob_errors) <= 1e-3


@pytest.mark.parametrize("precision", ["float32", "bfloat16 autocast", "bfloat16"])
@pytest.mark.parametrize("architecture", ["qwen3", "cohere2", "glm4_moe"])
def test_precisions_of_architectures(architecture: str, precision: str, tmp_path: Path) -> None:
    """TRL's default is bf16=True, over weights of whatever precision the checkpoint has."""
    model = tiny.model(architecture)
    if precision == "bfloat16":
        model = model.to(torch.bfloat16)
    trainer = short_runs.trainer(tmp_path, model=model, bf16=precision != "float32", max_steps=3)
    trainer.train()

    print(f"\n{architecture} in {precision}: at most {max(trainer.logprob_errors):.1e} nats at the present weights")
    assert sum(trainer.delivered.values()) == 3 * short_runs.GROUPS
    assert trainer.resumed
    assert max(trainer.logprob_errors) <= (1e-4 if precision == "float32" else 0.1)


ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": {"target_modules": ["q_proj", "v_proj"], "lora_alpha": 16},
    "DoRA": {"target_modules": ["q_proj", "v_proj"], "use_dora": True},
    "all linear": {"target_modules": "all-linear", "modules_to_save": ["embed_tokens"]},
}


@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_peft(adapter: str, beta: float, tmp_path: Path) -> None:
    """Adapters are read in place, under gradient checkpointing too; the reference of beta switches them off and on."""
    settings = {"r": 4, "task_type": "CAUSAL_LM", "init_lora_weights": False, **ADAPTERS[adapter]}
    trainer = short_runs.trainer(
        tmp_path, peft_config=LoraConfig(**settings), beta=beta, gradient_checkpointing=True, max_steps=4
    )
    trainer.train()

    print(f"\n{adapter}, beta {beta}: at most {max(trainer.logprob_errors):.1e} nats at the present weights")
    assert trainer.resumed
    assert max(trainer.stale_differences) > 1e-3  # the adapters have moved, and the old tokens have not
    assert max(trainer.logprob_errors) <= 1e-4


# ---------------------------------------------------------------- what servers load of a PEFT model


MERGED: dict[str, dict[str, Any]] = {
    "LoRA": {"target_modules": "all-linear"},
    "DoRA": {"target_modules": ["q_proj", "v_proj"], "use_dora": True},
    "with whole layers": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}


def adapted(precision: torch.dtype = torch.float32, tied: bool = False, **settings: Any) -> Any:
    """A model whose adapters have moved."""
    model = tiny.model(tie_word_embeddings=tied).to(precision)
    made = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **settings))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "modules_to_save" in name:
                parameter.mul_(1.1)
    return made.eval()


@pytest.mark.parametrize("adapter", MERGED)
def test_merged_weights_compute_what_the_trainer_computes(adapter: str, tmp_path: Path) -> None:
    """Read back from the directory, without PEFT; the trainer's own tensors are the same, to the bit, and no copies."""
    model = adapted(**MERGED[adapter])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        expected = model(ids).logits.log_softmax(-1)
        merged_copy(model).save_pretrained(tmp_path)
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
    merged_copy(model)

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
