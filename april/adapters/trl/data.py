"""TRL's data set as april's prompts, and TRL's reward functions as april's, for a filter, a quorum or an environment.

Invariant: a prompt carries the number of its row, its images and nothing else, so april's state stays small and plain,
and every other column comes from the data set itself. What TRL trains are the images that were generated from.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from april.adapters.trl import images
from april.core.batch import Batch
from april.core.tape import Float32
from april.driver.user_code import is_async
from april.errors import CheckpointError, ConfigError, RolloutError

ROW = "row"
"""Key of a prompt's data: its row in the train dataset."""


Row = dict[str, Any]
Message = dict[str, Any]
Said = str | list[Message]
"""A completion as TRL's reward functions see it; of a conversation, its messages."""


class Templates:
    """The tokens of prompts, as TRL writes them; may be used beside it, by other threads."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._of_environment = {}
        for name in trainer.environment_factories or ():
            # TRL keeps the environments of the batch that it works on in the trainer
            self._of_environment[name] = copy.copy(trainer)
            self._of_environment[name]._batch_environments = [name]

    def environment_of(self, row: Mapping[str, Any]) -> Any:
        """The name of a row's environment; None where there is one for all, or none at all."""
        return row.get("environment") if getattr(self._trainer, "_multi_environment", False) else None

    def prompt_of(self, row: Mapping[str, Any]) -> Any:
        """A row's prompt, which an environment may bring alone."""
        return row.get("prompt", [{"role": "user", "content": ""}]) if self._of_environment else row["prompt"]

    def tokens_of(self, row: Mapping[str, Any]) -> list[int]:
        """The token ids of a row's prompt; raises ConfigError for an environment that is not there."""
        name, writer = self.environment_of(row), self._trainer
        if self._of_environment:
            if name not in self._of_environment:
                raise ConfigError(
                    f"a row of the dataset has environment={name!r}, and environment_factory has "
                    f"{list(self._of_environment)}; name one of them"
                )
            writer = self._of_environment[name]
        prompt = images.shown(self.prompt_of(row), images.of_row(row))
        return list(writer._tokenize_prompts([prompt])[0][0])


class DatasetPasses:
    """The train dataset as april's prompts, each pass in an order of its own that follows from the trainer's seed."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._dataset = trainer.train_dataset
        self.templates = Templates(trainer)
        self._epoch = 0
        self._with_images = images.column_of(self._dataset) is not None
        self._last: tuple[Any, Row] | None = None
        """A prompt and its row: samples of a group follow each other, and to write images as tokens takes long."""

    def set_epoch(self, epoch: int) -> None:
        """Called before each pass."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = np.arange(len(self._dataset))
        if self._trainer.shuffle_dataset:
            np.random.default_rng([self._trainer.args.seed, self._epoch]).shuffle(rows)
        for row in rows.tolist():
            drawn = self._dataset[row]
            prompt = {"token_ids": self.templates.tokens_of(drawn), ROW: row}
            yield prompt | {"images": images.of_row(drawn)} if self._with_images else prompt

    def drawn(self, prompt: Any) -> Row:
        """Return a copy of the row that a prompt was made of."""
        return dict(self._dataset[prompt.data[ROW]])

    def row_of(self, prompt: Any, asked: Any = None) -> Row:
        """Return a copy of the prompt's row, which TRL may write into; CheckpointError if it is another prompt now.

        ``asked``: the prompt as an environment has changed it.
        """
        if asked is None and self._last is not None and self._last[0] is prompt:
            return dict(self._last[1])
        row = self.drawn(prompt)
        row["prompt"] = self.templates.prompt_of(row) if asked is None else asked
        if self._with_images:
            images.put_back(row, prompt.attached)
        if self.templates.tokens_of(row) != prompt.token_ids.tolist():
            raise CheckpointError(
                f"row {prompt.data[ROW]} of train_dataset is another prompt now than when it was drawn; the dataset "
                "and the chat template must be the same after a restart"
            )
        if asked is None:
            self._last = (prompt, dict(row))
        return row


def message_of(trainer: Any, ids: list[int], prefix: list[int], tools: Sequence[Any]) -> Message:
    """What the policy wrote, as the message that TRL reads in it; ``prefix``: the tokens before it."""
    tokenizer = images.tokenizer_of(trainer)
    if any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema")):
        from trl.chat_template_utils import parse_response

        return dict(parse_response(tokenizer, ids, prefix=prefix, tools=list(tools)))
    return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}


def scores(
    trainer: Any, row: Row, completions: Sequence[Said], ids: Sequence[list[int]], **more: Any
) -> list[list[float]]:
    """By completion, then by reward function: what the trainer's functions give for completions of one row, or NaN.

    They are called as TRL calls them, with the prompt's own columns, from a thread of april's.
    """
    count = len(completions)
    arguments = {
        **{key: [value] * count for key, value in row.items() if key not in ("prompt", "completion")},
        "prompts": [images.shown(row["prompt"], images.of_row(row))] * count,
        "completions": completions,
        "completion_ids": ids,
        "trainer_state": trainer.state,
        "log_extra": lambda *values: None,
        "log_metric": lambda *values: None,
        **more,
    }
    columns = []
    for function in trainer.reward_funcs:
        values = function(**arguments)
        if is_async(function):
            loop = getattr(trainer, "async_loop", None)  # what the function holds may belong to it
            values = asyncio.run(values) if loop is None else asyncio.run_coroutine_threadsafe(values, loop).result()
        columns.append([math.nan if value is None else float(value) for value in values])
    return [list(of_one) for of_one in zip(*columns, strict=True)]


def weighted(trainer: Any, values: Sequence[float]) -> float:
    """The weighted sum of what the reward functions give for one response; NaN where none scores it."""
    found = [float(w) * v for w, v in zip(trainer.reward_weights, values, strict=True) if not math.isnan(v)]
    return sum(found) if found else math.nan


Ask = Callable[[Any, Sequence[Any]], list[float]]
"""Rewards of responses to one prompt; NaN where no function scores one."""


def asking(trainer: Any, said_of: Callable[[Any], list[Message] | None]) -> Ask:
    """The trainer's reward functions; what they log is dropped, as TRL asks them again about what is trained.

    ``said_of``: the messages of a response of several turns.
    """
    passes = DatasetPasses(trainer)

    def ask(prompt: Any, responses: Sequence[Any]) -> list[float]:
        if ROW not in prompt.data:  # of an evaluation, which TRL scores alone
            return [0.0] * len(responses)
        row = passes.row_of(prompt)
        ids = [response.tokens.tolist() for response in responses]
        before = prompt.token_ids.tolist()
        completions: list[Said] = trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
        if not isinstance(row["prompt"], str):
            completions = [
                said_of(response) or [message_of(trainer, of_one, before, ())]
                for response, of_one in zip(responses, ids, strict=True)
            ]
        return [weighted(trainer, values) for values in scores(trainer, row, completions, ids)]

    return ask


def group_reward(ask: Ask) -> Callable[[Any, Sequence[Any]], list[float]]:
    """april's ``group_reward``, for a filter of whole groups.

    A response that no function scores counts 0, as for TRL's own sums.
    """
    return lambda prompt, responses: [0.0 if math.isnan(value) else value for value in ask(prompt, responses)]


def sample_reward(ask: Ask) -> Callable[[Any, Any], float]:
    """april's ``reward``, for a quorum: about one response.

    Raises RolloutError for a response that no function scores: baselines are made of rewards.
    """

    def reward(prompt: Any, response: Any) -> float:
        (value,) = ask(prompt, [response])
        return scored(prompt, value)

    return reward


def scored(prompt: Any, value: float) -> float:
    """A reward that is there; raises RolloutError for NaN."""
    if math.isnan(value):
        raise RolloutError(
            f"every reward function returned None or NaN for a response to row {prompt.data[ROW]} of the dataset, "
            "and with group_quorum below 1 the advantages of its siblings are made of its reward; return a number"
        )
    return value


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
