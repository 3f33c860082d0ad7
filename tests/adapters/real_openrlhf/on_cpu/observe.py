"""What a test sees of a run: what april delivered, what the trainer then made of it, and what ran at vLLM meanwhile.

The files lie in the directory ``OBSERVED``: ``batch_<pid>_<number>.json``, ``trained_<pid>_<number>.json``,
``step_<pid>_<number>.json``, ``end_<pid>.json``, and ``requests_<pid>.jsonl``: a line per begin and end of a request.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any


def _write(kind: str, content: Any) -> None:
    (Path(os.environ["OBSERVED"]) / f"{kind}.json").write_text(json.dumps(content))


def _line(path: Path, content: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(content) + "\n")


def _cpu_s() -> float:
    """Seconds that all processors have worked, ever; all processes of the machine."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _lasting(method: Callable[..., Any], variable: str) -> Callable[..., Any]:
    """Takes at least as many seconds as an environment variable says: what it does not need, it sleeps."""
    least_s = float(os.environ.get(variable, "0"))

    def lasting(*args: Any, **kwargs: Any) -> Any:
        began = time.time()
        answer = method(*args, **kwargs)
        time.sleep(max(0.0, least_s - (time.time() - began)))
        return answer

    return lasting


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
        number, step, train = count(), module.BasePPOTrainer.train_step, module.BasePPOTrainer.ppo_train

        def stepped(self: Any, rollout_samples: Any, global_step: int) -> Any:
            began = time.time()
            answer = step(self, rollout_samples, global_step)
            _write(f"step_{me}_{next(number):03d}", {"began": began, "ended": time.time(), "cpu_s": _cpu_s()})
            return answer

        module.BasePPOTrainer.train_step = stepped
        module.BasePPOTrainer.ppo_train = _lasting(train, "OBSERVED_TRAIN_S")

        def saved(self: Any, global_step: int, *args: Any, **kwargs: Any) -> None:
            save(self, global_step, *args, **kwargs)
            if global_step == last:
                os._exit(9)

        module.BasePPOTrainer.save_logs_and_checkpoints = saved

    @after("vllm.v1.worker.gpu_worker")
    def _decodes(module: Any) -> None:
        module.Worker.execute_model = _lasting(module.Worker.execute_model, "OBSERVED_DECODE_S")

    @after("vllm.v1.engine.async_llm")
    def _requests(module: Any) -> None:
        engine, lines = module.AsyncLLM, Path(os.environ["OBSERVED"]) / f"requests_{me}.jsonl"
        generate, call, updates = engine.generate, engine.collective_rpc, count(1)
        under = 0

        async def generated(self: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
            began_under, said = under, None
            _line(lines, {"time": time.time(), "change": 1})
            try:
                async for output in generate(self, prompt, *args, **kwargs):
                    said = output.outputs[0]
                    yield output
            finally:
                tokens = [] if said is None else list(said.token_ids)
                ids = [*prompt["prompt_token_ids"], *tokens]
                _line(lines, {
                    "time": time.time(), "change": -1, "ids": ids, "tokens": len(tokens), "under": began_under,
                })  # fmt: skip

        async def called(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal under
            answer = await call(self, method, *args, **kwargs)
            if method == "update_weight" and kwargs["args"][-1]:  # the last parameter of a transfer
                under = next(updates)
            return answer

        engine.generate, engine.collective_rpc = generated, called

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
