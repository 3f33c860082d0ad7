"""TRL's GRPOTrainer with april on a tiny language model, on a CPU: nothing is downloaded, two to four minutes.

    python -m benchmarks.trl_demo                     # N' = 2N
    python -m benchmarks.trl_demo --mode constant     # a constant number of samples in flight
    python -m benchmarks.trl_demo --mode trl          # without april, to compare

The task is that of ``make demo``, with longer answers: count down from a number. Needs ``pip install trl==1.16.0``
beside april.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from april.adapters.trl import AprilGRPOTrainer, rollout
from benchmarks.study import countdown as task
from benchmarks.study.warmup import STEPS, build_model, imitate

GROUPS, SAMPLES = 8, 8
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "over-sampling": {"over_sampling_batch_size": 2 * GROUPS, "max_in_flight": GROUPS * SAMPLES},
    "constant": {"refill": "sample", "max_in_flight": GROUPS * SAMPLES},
}


def tokenizer() -> Any:
    """Each token of the task is a word: its number."""
    words = Tokenizer(models.WordLevel({str(i): i for i in range(task.VOCAB_SIZE)}, str(task.PAD_ID)))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ids = {"bos_token": task.BOS_ID, "eos_token": task.EOS_ID, "pad_token": task.PAD_ID}
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=words, **{name: str(i) for name, i in ids.items()})


def questions(count: int, held_out: bool = False) -> Dataset:
    """Prompts of the task, as text."""
    prompts = [task.prompt_ids(seed=0, index=i, held_out=held_out) for i in range(count)]
    return Dataset.from_dict({"prompt": [" ".join(map(str, p)) for p in prompts]})


def right_answer(prompts: Sequence[str], completion_ids: Sequence[Any], **columns: Any) -> list[float]:
    """1 for a right answer; an ordinary reward function of TRL, which may use all columns of the data set."""
    asked = [np.array(prompt.split(), np.int32) for prompt in prompts]
    return [task.reward(p, np.array(c, np.int32)) for p, c in zip(asked, completion_ids, strict=True)]


class Figures(TrainerCallback):
    """Decode steps and tokens of the training's rollouts."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.decode_steps = self.tokens = self.stale = 0.0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        """Once per optimizer step."""
        if "completions/mean_length" not in logs:
            return
        tokens = float(logs["completions/mean_length"]) * GROUPS * SAMPLES
        self.tokens += tokens
        if isinstance(self.trainer, AprilGRPOTrainer):
            (engine,) = self.trainer.rollout_func.scheduler.engines
            self.decode_steps = engine.stats.decode_steps + engine.stats.prefill_batches
            self.stale += tokens * float(logs["april/off_policy_share"])
        else:
            # generate() decodes until the longest response of the batch has ended
            self.decode_steps += float(logs["completions/max_length"])


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["trl", *MODES], default="over-sampling")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up-steps", type=int, default=STEPS)
    parser.add_argument("--held-out", type=int, default=512)
    parser.add_argument("--seed", type=int, default=42, help="of the order of the prompts and of sampling")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is marked as experimental
    figures, model = Figures(), build_model(0)
    imitate(model, 0, task.demonstration, options.warm_up_steps)
    config = GRPOConfig(
        output_dir=str(options.out or tempfile.mkdtemp()),
        per_device_train_batch_size=GROUPS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=task.RESPONSE_CAP,
        max_steps=options.steps,
        seed=options.seed,
        learning_rate=1e-3,
        loss_type="grpo",
        num_generations_eval=1,
        per_device_eval_batch_size=64,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    with_april: dict[str, Any] = {} if options.mode == "trl" else {"rollout_func": rollout(**MODES[options.mode])}
    trainer: Any = (AprilGRPOTrainer if with_april else GRPOTrainer)(
        model=model,
        reward_funcs=right_answer,
        args=config,
        train_dataset=questions(2000),
        eval_dataset=questions(options.held_out, held_out=True),
        processing_class=tokenizer(),
        callbacks=[figures],
        **with_april,
    )
    figures.trainer = trainer
    start = trainer.evaluate()["eval_reward"]
    cpu = time.process_time()
    trainer.train()
    cpu = time.process_time() - cpu
    result = {
        "decode steps per 1000 trained tokens": 1000 * figures.decode_steps / figures.tokens,
        "off-policy share": figures.stale / figures.tokens,
        "held-out reward at the start": start,
        "held-out reward at the end": trainer.evaluate()["eval_reward"],
        "trained tokens": figures.tokens,
        "CPU seconds of training": cpu,
    }
    print(options.mode + ":", ", ".join(f"{name} {value:.3f}" for name, value in result.items()))
    return result


if __name__ == "__main__":
    main()
