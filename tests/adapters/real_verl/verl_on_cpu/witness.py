"""A callback of a user's, beside april's: writes down what was trained, with the trainer's log-probabilities."""

from __future__ import annotations

import json
import os
from typing import Any

import transfer_queue as tq

from april.adapters.verl import Checkpoints, advantages
from april.adapters.verl.settings import ESTIMATOR

FIELDS = [
    "prompts", "responses", "rollout_log_probs", "old_log_probs", "response_mask", "extra_fields", "extra_info",
    "rm_scores", "advantages",
]  # fmt: skip


def note(trainer: Any, step: int) -> None:
    """The batch of this step is still in verl's queue, and its prompts are not (with a quorum, some are)."""
    labels = (tq.kv_list("train") or {}).get("train", {})
    open_prompts = {key for key, tag in labels.items() if tag.get("is_prompt")}
    keys = [k for k, t in labels.items() if not t.get("is_prompt") and k.split("_")[0] not in open_prompts]
    if trainer.config.algorithm.adv_estimator == ESTIMATOR:
        keys = [k for k in labels if k.rpartition("_")[0] in advantages._given]
    keys = [k for k in keys if not labels[k].get("is_padding", False)]
    if not keys:
        return
    data = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=FIELDS)
    rows = []
    for i, key in enumerate(keys):
        extra, info = data["extra_fields"][i], data["extra_info"][i]
        extra, info = getattr(extra, "data", extra), getattr(info, "data", info)
        rows.append(
            {
                "key": key,
                "row": int(info["index"]),
                "prompt": data["prompts"][i].tolist(),
                "response": data["responses"][i].tolist(),
                "mask": data["response_mask"][i].tolist(),
                "rollout": data["rollout_log_probs"][i].tolist(),
                "old": data["old_log_probs"][i].tolist(),
                "reward": float(data["rm_scores"][i].sum()),
                "advantages": data["advantages"][i].tolist(),
                "spans": extra.get("april_spans"),
                "resumes": extra.get("april_resumes"),
                "oldest": extra.get("min_global_steps"),
                "newest": extra.get("max_global_steps"),
            }
        )
    drawn = trainer.train_dataloader.state_dict()["_num_yielded"]  # one prompt at a time
    line = {"step": step, "drawn": drawn, "open_prompts": len(open_prompts), "rows": rows}
    with open(os.environ["VERL_ON_CPU_WITNESS"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


class Witness(Checkpoints):  # type: ignore[misc]
    def on_save(self, trainer: Any, global_step: int, **kwargs: Any) -> None:
        super().on_save(trainer=trainer, global_step=global_step, **kwargs)
        note(trainer, global_step)
