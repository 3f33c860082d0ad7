"""TRL's data set as april's prompts, and TRL's reward functions as april's, where a filter wants rewards early.

Invariant: a prompt carries the number of its row and nothing else, so april's state stays small and plain, and every
column comes from the data set itself.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from april.driver.user_code import is_async
from april.errors import CheckpointError

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
        """A copy of the prompt's row, which TRL may write into.

        Raises:
            CheckpointError: it is another prompt now.
        """
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
    """april's ``group_reward``, which asks the trainer's reward functions about one group.

    They are called as TRL calls them, with the prompt's own columns, from a thread of april's; what they log is
    dropped, as TRL asks them again about what is trained.
    """
    passes, weights = DatasetPasses(trainer), [float(weight) for weight in trainer.reward_weights]

    def rewards(prompt: Any, responses: Sequence[Any]) -> list[float]:
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
        sums = [0.0] * count
        for function, weight in zip(trainer.reward_funcs, weights, strict=True):
            values = function(**arguments)
            for i, value in enumerate(asyncio.run(values) if is_async(function) else values):
                if value is not None and not math.isnan(value):
                    sums[i] += weight * float(value)
        return sums

    return rewards
