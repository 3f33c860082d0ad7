"""A trainer of a few lines that calls as TRL's GRPOTrainer does, so that the adapter is tested without the package."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from april.driver.user_code import is_async

from .stand_in_ranks import Meeting, RankAccelerator

VOCAB_SIZE, EOS = 97, 1
DEFAULTS: dict[str, Any] = {
    "num_generations": 2, "generation_batch_size": 4, "max_completion_length": 40, "steps_per_generation": 1,
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "generation_kwargs": None,
    "use_vllm": False, "use_transformers_continuous_batching": False, "seed": 42,
}  # fmt: skip


class Rows(list[dict[str, Any]]):
    """A data set: rows by number, with the names of its columns."""

    @property
    def column_names(self) -> list[str]:
        return list(self[0])


def prompts(count: int) -> Rows:
    return Rows({"prompt": f"{10 + i % 80} {10 + i // 80}", "answer": i} for i in range(count))


class Words:
    """A tokenizer: each token is a word, its number."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, ids))

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(row) for row in rows]


class GRPOTrainer:
    """Generates, scores, and calls ``optimizer_step`` once per generation batch."""

    def __init__(
        self, model: Any, rollout_func: Any, train_dataset: Any, accelerator: Any = None, reward_funcs: Any = (),
        scale_rewards: str = "group", tools: Any = (), multi_objective_aggregation: str = "sum_then_normalize",
        **args: Any,
    ) -> None:  # fmt: skip
        self.args = SimpleNamespace(**(DEFAULTS | args))
        self.model, self.rollout_func, self.train_dataset = model, rollout_func, train_dataset
        self.accelerator = RankAccelerator(Meeting(1), 0) if accelerator is None else accelerator
        self.state = SimpleNamespace(global_step=0, num_train_epochs=1)
        self.eos_token_ids, self.processing_class = [EOS], Words()
        self.reward_funcs, self.reward_weights = list(reward_funcs), torch.ones(len(reward_funcs))
        self.scale_rewards, self.multi_objective_aggregation = scale_rewards, multi_objective_aggregation
        self._logs: Any = {"advantages": deque(maxlen=self.args.generation_batch_size)}
        self.tools = list(tools)
        self.environment_factories, self.shuffle_dataset, self._is_vlm, self.num_iterations = None, True, False, 1
        self._metrics: Any = {"train": defaultdict(list)}
        self._step, self._buffered_inputs = 0, None
        self.optimizer_step: Callable[[Any], None] = lambda output: None
        self.folder: Path | None = None
        self.scored: list[list[dict[str, Any]]] = []
        self.outputs: list[dict[str, Any]] = []

    def train(self, steps: int, resume_from_checkpoint: str | None = None) -> None:
        if resume_from_checkpoint is not None:
            self.state.global_step = int(resume_from_checkpoint.rpartition("-")[2])
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        while self.state.global_step < steps:
            # the sampler's choice; the adapter goes by their number only
            asked = [dict(self.train_dataset[0]) for _ in range(self._rows)]
            self.outputs.append(self._generate_and_score_completions(asked))
            self.optimizer_step(self.outputs[-1])
            self._step += 1
            self.state.global_step += 1
            if self.folder is not None:
                self._save_checkpoint(self.model, None)

    @property
    def _rows(self) -> int:
        """Of this rank in a generation batch."""
        return int(self.args.generation_batch_size) // int(self.accelerator.num_processes)

    def evaluate(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        self.model.eval()
        try:
            return self._generate_and_score_completions(rows)
        finally:
            self.model.train()

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = self.rollout_func([row["prompt"] for row in inputs], self)
        width = max(map(len, output["logprobs"]))
        logprobs = torch.zeros(len(inputs), width)
        for i, row in enumerate(output["logprobs"]):
            logprobs[i, : len(row)] = torch.tensor(row)
        self.scored.append(inputs)
        return output | {"sampling_per_token_logps": logprobs, "advantages": self._advantages(inputs, output)}

    def _advantages(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> torch.Tensor:
        """By the place in the batch, and what TRL logs of rewards."""
        rewards = torch.zeros(len(inputs))
        for function in self.reward_funcs:
            if not (is_async(function) or hasattr(function, "parameters")):
                columns = {"answer": [row["answer"] for row in inputs], "completion_ids": output["completion_ids"]}
                texts = self.processing_class.batch_decode(output["completion_ids"])
                called = function(prompts=[row["prompt"] for row in inputs], completions=texts, log_metric=print,
                                  log_extra=lambda *values: None, **columns)  # fmt: skip
                rewards += torch.tensor([value or 0.0 for value in called])
        rewards, first = self.accelerator.gather(rewards), self.accelerator.process_index * len(inputs)
        groups = rewards.view(-1, self.args.num_generations)
        advantages = (groups - groups.mean(1, keepdim=True)).flatten()
        if self.model.training:
            self._metrics["train"]["reward"].append(float(rewards.mean()))
            self._metrics["train"]["frac_reward_zero_std"].append(float((groups.std(1) == 0).float().mean()))
            self._logs["advantages"].extend(advantages.tolist())
        return advantages[first : first + len(inputs)]

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        return [[int(word) for word in prompt.split()] for prompt in prompts], None, {}

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.folder)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if not self.accelerator.is_main_process:
            return
        assert (Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}").is_dir()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        pass


def ints(rows: Any) -> list[list[int]]:
    return [np.asarray(row).tolist() for row in rows]
