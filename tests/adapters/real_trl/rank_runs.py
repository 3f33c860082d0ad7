"""What each rank does, started by torchrun: ``rank_runs.py FOLDER PART``; writes what it has seen."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import images
import short_runs
import tiny
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import april
from april.adapters.trl import rollout

sys.path.insert(0, str(Path(__file__).parents[2]))

from models_that_see import tiny_processor, tiny_vision_model
from rank_ends import end_rank

GROUPS, ROWS = 3, 24
"""3 groups of 4: each of two ranks trains 6 rows, half of the second group."""
SETTINGS: dict[str, Any] = {**short_runs.SETTINGS, "over_sampling_batch_size": 6}
HALVES: dict[str, Any] = {
    "per_device_train_batch_size": 3, "steps_per_generation": 2, "gradient_accumulation_steps": 1,
    "lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 1,
}  # fmt: skip
"""Two optimizer steps per generation batch: every second checkpoint is in the middle of one."""


class Noted(short_runs.Watched):
    """What was delivered to this rank, response by response."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.responses: list[list[Any]] = []
        self.updates = 0
        """Weight updates before the last batch."""
        self.generated = 0
        """Tokens that the engine of this rank has generated for them, and for those that are unfinished."""

    def _note(self, batch: Any, output: Any) -> None:
        super()._note(batch, output)
        self.responses += [[s.prompt.data["row"], s.id.group, s.id.index, s.tokens.tolist()] for s in batch.samples]
        self.updates = batch.version.n
        engines = self.rollout_func.scheduler.engines
        self.generated = sum(engine.stats.generated_tokens for engine in engines if hasattr(engine, "stats"))


class NotedSeeing(Noted, images.Seeing):
    """And which image reached the loss with it."""


def trainer(
    folder: Path, settings: dict[str, Any] | None = None, reward: Any = short_runs.reward,
    weights_dir: Path | None = None, filter: Any = None, **changes: Any,
) -> Noted:  # fmt: skip
    """This rank's."""
    rollouts = rollout(settings or SETTINGS, weights_dir=weights_dir, filter=filter)
    made: Noted = short_runs.trainer(
        folder, rollouts, reward, held_out=tiny.dataset(5), kind=Noted, **HALVES | changes
    )
    return made


def seen(made: Noted) -> dict[str, Any]:
    """For the test, as plain values."""
    ledger = made.rollout_func.ledger
    return {
        "ranks": made.accelerator.num_processes,
        "steps": made.state.global_step,
        "responses": made.responses,
        "trained": [[list(tokens), times] for tokens, times in made.trained.items()],
        "resumed": made.resumed,
        "stale_tokens": made.stale_tokens,
        "tokens": made.tokens,
        "generated": made.generated,
        "updates": made.updates,
        "largest_error": max(made.logprob_errors, default=0.0),
        "largest_stale_difference": max(made.stale_differences, default=0.0),
        "delivered_prompts": ledger["prompts"].delivered if ledger else None,
        "token_ledger_balances": ledger["tokens"].balanced if ledger else None,
        "evaluations": sum("eval_reward" in row for row in made.state.log_history),
        "weights": torch.cat([_whole(p) for p in made.model.parameters() if p.requires_grad]).tolist(),
    }


def _whole(weights: torch.Tensor) -> torch.Tensor:
    """Flat; of all ranks, where each has a piece."""
    return (weights.full_tensor() if isinstance(weights, DTensor) else weights).detach().flatten()


def resumed(folder: Path) -> dict[str, Any]:
    """One pass without a cut, and from two of its checkpoints: between two generation batches, and in one.

    Then a few steps with LoRA, and under FSDP2, with a cut.
    """
    whole = trainer(folder / "whole", eval_strategy="steps", eval_steps=8, per_device_eval_batch_size=2)
    whole.train()
    found = {"whole": seen(whole)}
    for step in (8, 9):
        after = trainer(folder / f"from{step}")
        after.train(resume_from_checkpoint=str(folder / "whole" / f"checkpoint-{step}"))
        found[f"from{step}"] = seen(after)
    lora = LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, target_modules="all-linear")
    adapters = trainer(folder / "adapters", peft_config=lora, max_steps=8, save_strategy="no")
    adapters.train()
    found["adapters"] = seen(adapters)
    found["at once"] = everything_at_once(folder / "at once")
    offer_fsdp2()
    untied = {"tie_word_embeddings": False}
    sharded = trainer(folder / "sharded", model=tiny.model(**untied), max_steps=8, save_steps=5)
    sharded.train()
    found["sharded"] = seen(sharded) | {"pieces": isinstance(next(sharded.model.parameters()), DTensor)}
    after = trainer(folder / "sharded after", model=tiny.model(**untied), max_steps=8, save_strategy="no")
    after.train(resume_from_checkpoint=str(folder / "sharded" / "checkpoint-5"))
    return found | {"sharded from5": seen(after)}


def everything_at_once(folder: Path) -> dict[str, Any]:
    """What shifts steps against generation batches, and the end in the middle of one."""
    made = trainer(
        folder, {**SETTINGS, "on_data_end": "wrap"}, filter=april.rewards_differ, num_iterations=2,
        gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=2, max_steps=7,
        save_strategy="no",
    )  # fmt: skip
    made.train()
    return seen(made)


def offer_fsdp2() -> None:
    """accelerate shards the models of GPUs only: from here on it takes these CPUs for some."""
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    os.environ |= {
        "ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3DecoderLayer",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    }  # fmt: skip


def seeing(folder: Path) -> dict[str, Any]:
    """A model that sees, and a column of images; with evaluations."""
    made = short_runs.trainer(
        folder / "training", rollout(SETTINGS), images.reward, images.data(rows=12), images.data(rows=5),
        tiny_vision_model(), processing_class=tiny_processor(), kind=NotedSeeing,
        **HALVES | {"save_strategy": "no", "eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 2},
    )  # fmt: skip
    made.train()
    return seen(made) | {"right": made.right, "without": made.without}


def fails(folder: Path) -> dict[str, Any]:
    """A reward function raises on rank 1."""
    calls = iter(range(99))

    def brittle(**columns: Any) -> list[float]:
        if os.environ["RANK"] == "1" and next(calls) == 2:
            raise RuntimeError("planted")
        return short_runs.reward(**columns)

    trainer(folder, reward=brittle, save_strategy="no").train()
    return {}


def servers(folder: Path) -> dict[str, Any]:
    """A server generates: ``folder`` has its ``url`` and its ``model``.

    It gets whole models through a directory and from this process, those with LoRA merged, and those that FSDP2 has
    spread over the ranks from this process.
    """
    engine = {"kind": "vllm", "urls": [(folder / "url").read_text("utf-8")]}
    # without early ends, random weights would make all responses as long as they may be
    settings = {"engine": engine, "over_sampling_batch_size": 6, "sampling": {"stop_token_ids": list(range(300, 320))}}
    lora = LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, target_modules="all-linear")
    found = {}
    for name, route, peft_config in (
        ("whole", "disk", None), ("adapters", "auto", lora), ("sent", "collective", None), ("sharded", "auto", None),
    ):  # fmt: skip
        if name == "sharded":
            offer_fsdp2()
        made = trainer(
            folder / name, settings | {"weights": route}, peft_config=peft_config,
            weights_dir=folder / f"weights of {name}" if route == "disk" or peft_config is not None else None,
            model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(folder / "model"),
            reward=lambda completion_ids, **columns: [sum(t % 2 for t in ids) / len(ids) for ids in completion_ids],
            max_steps=12, save_strategy="no",
        )  # fmt: skip
        made.train()
        found[name] = seen(made)
    return found


if __name__ == "__main__":
    where, part = Path(sys.argv[1]), sys.argv[2]
    report = {"resumed": resumed, "fails": fails, "servers": servers, "seeing": seeing}[part](where)
    (where / f"rank{os.environ['RANK']}.json").write_text(json.dumps(report), "utf-8")
    torch.distributed.destroy_process_group()
    end_rank()
