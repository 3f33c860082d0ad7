"""GRPO with AReaL 1.0.4 on problems with answers, with april's rollouts; see README.md.

DATA is a file of lines ``{"prompt": text, "label": answer}``; ROLLOUT=own takes AReaL's own rollouts instead.
"""

from __future__ import annotations

import os
import sys
from typing import Any

MODES = ("april", "own")


def rows_of(path: str) -> Any:
    """The data set: for each problem the messages that a workflow shows, and what the reward compares with."""
    from datasets import load_dataset

    rows = load_dataset("json", data_files=path, split="train")
    return rows.map(
        lambda row: {"messages": [{"role": "user", "content": row["prompt"]}], "answer": str(row["label"])},
        remove_columns=rows.column_names,
    )


def main(words: list[str]) -> None:
    """``words``: AReaL's command line."""
    mode = os.environ.get("ROLLOUT", "april")
    if mode not in MODES:
        raise SystemExit(f"train.py: ROLLOUT={mode} must be one of {', '.join(MODES)}")
    from areal.api.cli_args import PPOConfig, load_expr_config

    config, _ = load_expr_config(words, PPOConfig)
    if mode == "own":
        from areal import PPOTrainer
    else:
        from april.adapters.areal import PPOTrainer  # type: ignore[no-redef]
    workflow = {"reward_fn": "areal.reward.gsm8k.gsm8k_reward_fn", "gconfig": config.gconfig,
                "tokenizer": config.tokenizer_path}  # fmt: skip
    with PPOTrainer(config, train_dataset=rows_of(os.environ["DATA"])) as trainer:
        trainer.train(workflow="areal.workflow.rlvr.RLVRWorkflow", workflow_kwargs=workflow)


if __name__ == "__main__":
    main(sys.argv[1:])
