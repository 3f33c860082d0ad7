"""A trainer of a few lines that calls as TRL's GRPOTrainer does, so that the adapter is tested without the package."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from april.adapters import trl as adapter
from april.driver.user_code import is_async

from .stand_in_ranks import Meeting, RankAccelerator, on_all_ranks

VOCAB_SIZE, EOS = 97, 1
CALLS, RESULT, GO_ON = range(7, VOCAB_SIZE, 24), 8, 4
"""What the policy writes before the argument of a tool, what stands around a result, and behind all results."""
DEFAULTS: dict[str, Any] = {
    "num_generations": 2, "generation_batch_size": 4, "max_completion_length": 40, "steps_per_generation": 1,
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "generation_kwargs": None,
    "use_vllm": False, "use_transformers_continuous_batching": False, "seed": 42, "max_tool_calling_iterations": 99,
}  # fmt: skip


class Rows(list[dict[str, Any]]):
    """A data set: rows by number, with the names of its columns."""

    @property
    def column_names(self) -> list[str]:
        return list(self[0])


def prompts(count: int) -> Rows:
    return Rows({"prompt": f"{10 + i % 80} {10 + i // 80}", "answer": i} for i in range(count))


def conversations(count: int) -> Rows:
    rows = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in prompts(count)]
    return Rows(rows)


def parse_response(tokenizer: Any, ids: list[int], prefix: Any = None, tools: Any = None) -> dict[str, Any]:
    """As ``trl.chat_template_utils.parse_response``: a call of ``look`` for each mark with a token behind it."""
    said: dict[str, Any] = {"role": "assistant", "content": tokenizer.decode(ids)}
    arguments = [{"n": after} for mark, after in pairwise(ids) if mark in CALLS]
    calls = [{"type": "function", "function": {"name": "look", "arguments": a}} for a in arguments]
    return said | {"tool_calls": calls} if calls else said


def install_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of trl in which its parser is."""
    module = ModuleType("trl.chat_template_utils")
    module.parse_response = parse_response  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trl.chat_template_utils", module)


class Words:
    """A tokenizer: each token is a word, its number."""

    response_template: Any = None

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, ids))

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(row) for row in rows]


class GRPOTrainer:
    """Generates, scores, and calls ``optimizer_step`` once per generation batch."""

    def __init__(
        self, model: Any, rollout_func: Any, train_dataset: Any, accelerator: Any = None, reward_funcs: Any = (),
        scale_rewards: str = "group", tools: Any = (), environment_factory: Any = None,
        multi_objective_aggregation: str = "sum_then_normalize", sees: bool = False,
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
        self.tools = self._standalone_tools = list(tools)
        self.environment_factories, self._multi_environment = None, isinstance(environment_factory, dict)
        if environment_factory is not None:
            self.environment_factories = environment_factory if self._multi_environment else {None: environment_factory}
            self._env_tools = {name: [factory().look] for name, factory in self.environment_factories.items()}
            self.tools = self.tools + [tool for tools in self._env_tools.values() for tool in tools]
        self.max_tool_calling_iterations = self.args.max_tool_calling_iterations
        self.max_completion_length = self.args.max_completion_length
        if self.tools:
            self.processing_class.response_template = "of the stand-in"
        self.shuffle_dataset, self._is_vlm, self.num_iterations = True, sees, 1
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
        ids, tokenizer = output["completion_ids"], self.processing_class
        output["completions"] = tokenizer.batch_decode(ids)
        if not isinstance(inputs[0]["prompt"], str):
            output["completions"] = [[{"role": "assistant", "content": text}] for text in output["completions"]]
        if self.tools:
            loop = self._tool_call_loop(
                [row["prompt"] for row in inputs], output["prompt_ids"], ids, output["completions"],
                output["logprobs"], None, {},
            )  # fmt: skip
            output |= dict(zip(("tool_mask", "completions", "completion_ids", "logprobs"), loop, strict=False))
            output["calls"] = loop[4:6]
        width = max(map(len, output["logprobs"]))
        logprobs = torch.zeros(len(inputs), width)
        for i, row in enumerate(output["logprobs"]):
            logprobs[i, : len(row)] = torch.tensor(row)
        self.scored.append(inputs)
        return output | {"sampling_per_token_logps": logprobs, "advantages": self._advantages(inputs, output)}

    def _advantages(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> torch.Tensor:
        """By the place in the batch, and what TRL logs of rewards."""
        completions, ids = output["completions"], output["completion_ids"]
        rewards = self._calculate_rewards(inputs, [row["prompt"] for row in inputs], completions, ids).nansum(1)
        first = self.accelerator.process_index * len(inputs)
        groups = rewards.view(-1, self.args.num_generations)
        advantages = (groups - groups.mean(1, keepdim=True)).flatten()
        if self.model.training:
            self._metrics["train"]["reward"].append(float(rewards.mean()))
            self._metrics["train"]["frac_reward_zero_std"].append(float((groups.std(1) == 0).float().mean()))
            self._logs["advantages"].extend(advantages.tolist())
        return advantages[first : first + len(inputs)]

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        texts = [p if isinstance(p, str) else " ".join(said["content"] for said in p) for p in prompts]
        return [[int(word) for word in text.split()] for text in texts], None, {}

    def _tool_call_loop(
        self, prompts: Any, prompt_ids: Any, completion_ids: Any, completions: Any, logprobs: Any, images: Any,
        multimodal_fields: Any,
    ) -> Any:  # fmt: skip
        raise NotImplementedError("it generates")

    def _get_tool_suffix_ids(self, tool_messages: list[dict[str, Any]]) -> list[int]:
        """The numbers of each result between two marks (an error may have none), and where the policy goes on."""
        results = [[int(word) for word in said["content"].split() if word.isdigit()] for said in tool_messages]
        return [*(token for result in results for token in (RESULT, *result, RESULT)), GO_ON]

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        """By row, then by function, of all ranks."""
        columns = {key: [row[key] for row in inputs] for key in inputs[0] if key != "prompt"}
        found = torch.zeros(len(inputs), len(self.reward_funcs))
        for i, function in enumerate(self.reward_funcs):
            if not (is_async(function) or hasattr(function, "parameters")):
                called = function(prompts=prompts, completions=completions, completion_ids=completion_ids_list,
                                  log_metric=print, log_extra=lambda *values: None, **columns)  # fmt: skip
                found[:, i] = torch.tensor([torch.nan if value is None else value for value in called])
        return self.accelerator.gather(found)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.folder)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if not self.accelerator.is_main_process:
            return
        assert (Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}").is_dir()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        pass


PARTIALS: dict[str, Any] = {"over_sampling_batch_size": 6, "engine": {"kind": "transformers", "stream_interval": 4}}


def train(
    steps: int, *, kind: type[GRPOTrainer] = GRPOTrainer, model: Callable[[], Any] = tiny_model, ranks: int = 1,
    settings: dict[str, Any] | None = None, data: Callable[[], Any] = lambda: prompts(12), filter: Any = None,
    folder: Path | None = None, resume: Path | None = None, prepare: Callable[[Any], None] = lambda made: None,
    weights_dir: Path | None = None, **args: Any,
) -> list[Any]:  # fmt: skip
    """The trainers of all ranks, trained to ``steps`` on batches of six rows; ``prepare`` is called on each before.

    ``settings`` are april's, beside those of partials; ``args`` are the trainer's.
    """
    models = [model() for _ in range(ranks)]

    def run(rank: int, meeting: Meeting) -> Any:
        rollouts = adapter.rollout(PARTIALS | (settings or {}), filter=filter, weights_dir=weights_dir)
        of_batch = {"num_generations": 2, "generation_batch_size": 6}
        made: Any = adapter.april_trainer(kind)(
            models[rank], rollouts, data(), accelerator=RankAccelerator(meeting, rank), **of_batch | args
        )
        made.folder = folder
        prepare(made)
        made.train(steps, None if resume is None else str(resume))
        return made

    return on_all_ranks(ranks, run)


def evaluated_alike(train: Callable[..., list[Any]], rows: list[dict[str, Any]]) -> Any:
    """On two ranks these rows are answered as in one process, whose trainer this is."""

    def evaluate(made: Any) -> None:
        rank, count = made.accelerator.process_index, len(rows) // made.accelerator.num_processes
        mine = rows[rank * count :][:count]
        made.optimizer_step = lambda output: setattr(made, "evaluated", made.evaluate(mine))

    (alone,), (one, other) = (train(1, ranks=ranks, prepare=evaluate) for ranks in (1, 2))
    for key in ("prompt_ids", "completion_ids"):
        assert one.evaluated[key] + other.evaluated[key] == alone.evaluated[key]
        assert len(one.evaluated[key]) == len(rows) / 2
    return alone
