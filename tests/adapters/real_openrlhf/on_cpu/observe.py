"""What a test sees of a run: what april delivered, and what the trainer then made of it.

The files lie in the directory ``OBSERVED``: ``batch_<pid>_<number>.json``, ``trained_<pid>_<number>.json`` and
``end_<pid>.json``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any


def _write(kind: str, content: Any) -> None:
    (Path(os.environ["OBSERVED"]) / f"{kind}.json").write_text(json.dumps(content))


def watch(after: Callable[[str], Callable[[Callable[[Any], None]], None]]) -> None:
    """Wrap one method of april's and one of the trainer's, where they are imported."""
    me = os.getpid()

    @after("april.adapters.openrlhf.rollouts")
    def _batches(module: Any) -> None:
        number, take, close = count(), module.OpenRLHFRollouts.next, module.OpenRLHFRollouts.close

        def taken(self: Any, rows: Any) -> Any:
            answer = take(self, rows)
            self.scheduler.validate()
            if answer[0]:
                batch = self.batch
                samples = [
                    {
                        "label": s.prompt.data["label"], "tokens": s.tokens.tolist(), "logprobs": s.logprobs.tolist(),
                        "versions": s.versions.tolist(), "resumes": s.resumes, "attempts": s.attempts,
                        "prompt": s.prompt.token_ids.tolist(),
                    }
                    for s in batch.samples
                ]  # fmt: skip
                _write(
                    f"batch_{me}_{next(number):03d}",
                    {"version": list(batch.version), "metrics": dict(batch.metrics), "samples": samples},
                )
            return answer

        def closed(self: Any) -> None:
            close(self)
            _write(
                f"end_{me}",
                {
                    name: {"observed": b.observed, "delivered": b.delivered, "held": b.held,
                           "dropped": {str(k): v for k, v in b.dropped.items()}}
                    for name, b in self.ledger.items()
                },
            )  # fmt: skip

        module.OpenRLHFRollouts.next, module.OpenRLHFRollouts.close = taken, closed

    @after("openrlhf.trainer.ppo_trainer")
    def _steps(module: Any) -> None:
        last, save = int(os.environ["OBSERVED_UNTIL"]), module.BasePPOTrainer.save_logs_and_checkpoints

        def saved(self: Any, global_step: int, *args: Any, **kwargs: Any) -> None:
            save(self, global_step, *args, **kwargs)
            if global_step == last:
                os._exit(9)

        module.BasePPOTrainer.save_logs_and_checkpoints = saved

    @after("openrlhf.trainer.ppo_utils.experience_maker")
    def _trained(module: Any) -> None:
        number, make = count(), module.RemoteExperienceMaker.make_experience_batch

        def made(self: Any, rollout_samples: Any) -> Any:
            experiences = make(self, rollout_samples)
            rows = [
                {
                    "sequence": e.sequences[i][e.attention_mask[i].bool()].tolist(),
                    "mask": e.action_mask[i].tolist(),
                    "rollout": e.rollout_log_probs[i].tolist(),
                    "recomputed": e.action_log_probs[i].float().tolist(),
                    "label": e.labels[i],
                    "info": {k: float(v[i]) for k, v in e.info.items()},
                }
                for e in experiences
                for i in range(len(e.sequences))
            ]
            _write(f"trained_{me}_{next(number):03d}", rows)
            return experiences

        module.RemoteExperienceMaker.make_experience_batch = made
