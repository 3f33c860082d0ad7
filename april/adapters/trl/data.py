"""TRL's data set as april's prompts, and TRL's reward functions as april's, for a filter or a quorum.

Invariant: a prompt carries the number of its row and nothing else, so april's state stays small and plain, and every
column comes from the data set itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from april.core.batch import Batch
from april.core.tape import Float32
from april.driver.user_code import is_async
from april.errors import CheckpointError, RolloutError

ROW = "row"
"""Key of a prompt's data: its row in the train dataset."""


class DatasetPasses:
    """The train dataset as april's prompts, each pass in an order of its own that follows from the trainer's seed."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._dataset = trainer.train_dataset
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called before each pass."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = np.arange(len(self._dataset))
        if self._trainer.shuffle_dataset:
            np.random.default_rng([self._trainer.args.seed, self._epoch]).shuffle(rows)
        for row in rows.tolist():
            yield {"token_ids": self._tokens(self._dataset[row]), ROW: row}

    def row_of(self, prompt: Any) -> dict[str, Any]:
        """Return a copy of the prompt's row, which TRL may write into; CheckpointError if it is another prompt now."""
        number = prompt.data[ROW]
        row = dict(self._dataset[number])
        if self._tokens(row) != prompt.token_ids.tolist():
            raise CheckpointError(
                f"row {number} of train_dataset is another prompt now than when it was drawn; the dataset and the "
                "chat template must be the same after a restart"
            )
        return row

    def _tokens(self, row: Mapping[str, Any]) -> list[int]:
        return list(self._trainer._tokenize_prompts([row["prompt"]])[0][0])


def group_reward(trainer: Any) -> Callable[[Any, Sequence[Any]], list[float]]:
    """april's ``group_reward``, for a filter of whole groups: the trainer's reward functions are asked about one group.

    A response that no function scores counts 0, as for TRL's own sums.
    """
    ask = _questions(trainer)
    return lambda prompt, responses: [0.0 if math.isnan(value) else value for value in ask(prompt, responses)]


def sample_reward(trainer: Any) -> Callable[[Any, Any], float]:
    """april's ``reward``, for a quorum: the trainer's reward functions are asked about one response.

    Raises RolloutError for a response that no function scores: baselines are made of rewards.
    """
    ask = _questions(trainer)

    def reward(prompt: Any, response: Any) -> float:
        (value,) = ask(prompt, [response])
        if math.isnan(value):
            raise RolloutError(
                f"every reward function returned None or NaN for a response to row {prompt.data[ROW]} of the dataset, "
                "and with group_quorum below 1 the advantages of its siblings are made of its reward; return a number"
            )
        return value

    return reward


def _questions(trainer: Any) -> Callable[[Any, Sequence[Any]], list[float]]:
    """Weighted sums of the trainer's reward functions for responses to one prompt; NaN where none scores a response.

    They are called as TRL calls them, with the prompt's own columns, from a thread of april's; what they log is
    dropped, as TRL asks them again about what is trained.
    """
    passes, weights = DatasetPasses(trainer), [float(weight) for weight in trainer.reward_weights]

    def ask(prompt: Any, responses: Sequence[Any]) -> list[float]:
        count = len(responses)
        if ROW not in prompt.data:  # of an evaluation, which TRL scores alone
            return [0.0] * count
        row = passes.row_of(prompt)
        ids = [response.tokens.tolist() for response in responses]
        completions = trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
        if not isinstance(row["prompt"], str):
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        arguments = {
            **{key: [value] * count for key, value in row.items() if key not in ("prompt", "completion")},
            "prompts": [row["prompt"]] * count,
            "completions": completions,
            "completion_ids": ids,
            "trainer_state": trainer.state,
            "log_extra": lambda *values: None,
            "log_metric": lambda *values: None,
        }
        sums = [math.nan] * count
        for function, weight in zip(trainer.reward_funcs, weights, strict=True):
            values = function(**arguments)
            for i, value in enumerate(asyncio.run(values) if is_async(function) else values):
                if value is not None and not math.isnan(value):
                    sums[i] = weight * float(value) + (0.0 if math.isnan(sums[i]) else sums[i])
        return sums

    return ask


log = logging.getLogger("april")
EPSILON = 1e-4


def put_advantages(trainer: Any, batch: Batch, output: dict[str, Any]) -> None:
    """Into what the loss gets, TRL's table of completions, and its share of responses that teach nothing.

    ``batch``: this rank's part; the table and the share are of all ranks, as TRL's are.
    """
    everywhere, like = trainer.accelerator.gather, output["advantages"]
    found = like.new_tensor(advantages_of(batch, trainer.scale_rewards, everywhere(like.new_tensor(batch.rewards))))
    output["advantages"] = found
    trainer._logs["advantages"].extend(everywhere(found).tolist())  # holds one batch: those of TRL are gone
    if trainer.scale_rewards != "batch":
        alike = [bool((sample.baseline_rewards == np.float32(sample.reward)).all()) for sample in batch.samples]
        trainer._metrics["train"]["frac_reward_zero_std"][-1] = float(everywhere(like.new_tensor(alike)).mean())


def advantages_of(batch: Batch, scale_rewards: str, rewards: Any) -> Float32:
    """float32 [B], as GRPOConfig says: ``group``, ``batch`` or ``none``; ``rewards``: those of all ranks."""
    if scale_rewards == "group":
        return batch.advantages("grpo", epsilon=EPSILON, ddof=1)
    centred = batch.advantages("dr_grpo")
    return centred / np.float32(float(rewards.std()) + EPSILON) if scale_rewards == "batch" else centred


def warn_of_other_rewards(trainer: Any, batch: Batch) -> bool:
    """Return whether TRL, which asks about a batch, got other rewards than april, which asked about each response."""
    theirs, ours = trainer._metrics["train"]["reward"][-1], batch.metrics["reward_mean"]
    if np.isclose(theirs, ours, rtol=1e-4, atol=1e-4):
        return False
    log.warning(
        "batch %d has a mean reward of %g where TRL logs %g: a reward function gives other values when it is asked "
        "once more, about a whole batch. Advantages are made of the former, for which each response was alone; with "
        "group_quorum below 1 reward functions must not compare responses with each other",
        batch.id, ours, theirs,
    )  # fmt: skip
    return True
