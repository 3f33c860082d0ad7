"""Converts TRL's data set and reward functions to april's prompts and rewards.

Invariants: a prompt holds only its row number and its images; other columns are read from the data set when needed.
TRL trains with the same images that the responses were generated from.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from april.adapters.common.refusals import refuse
from april.adapters.common.samples import attached_pictures
from april.adapters.trl.ranks import rows_of_all_ranks
from april.config.images import ImagesConfig
from april.core.attachments import Placed
from april.core.batch import Batch
from april.core.tape import Float32
from april.driver.user_code import is_async
from april.engines.attachments import attachment_bytes
from april.errors import CheckpointError, ConfigError, RolloutError
from april.images.image_reader import ImageReader

EPSILON = 1e-4
ROW = "row"
"""Key of the row number in the train dataset, in the data of a prompt."""

Row = dict[str, Any]
Message = dict[str, Any]
Said = str | list[Message]
"""A completion in the form that TRL's reward functions take: text, or the messages of a conversation."""


class DatasetPasses:
    """Iterates over the train dataset as april's prompts; the trainer's seed decides the order of each epoch.

    Prompts are tokenized exactly as in TRL, possibly in other threads while TRL runs.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._dataset = trainer.train_dataset
        self._of_environment = {}
        for name in trainer.environment_factories or ():
            # a copy of the trainer for each environment, because TRL reads the batch's environments from the trainer
            self._of_environment[name] = copy.copy(trainer)
            self._of_environment[name]._batch_environments = [name]
        self._epoch = 0
        self._with_images = column_of(self._dataset) is not None
        self._last: tuple[Any, Row] | None = None
        """Last prompt and its row, cached for the samples of one group because tokenizing images is slow."""

    def environment_of(self, row: Mapping[str, Any]) -> Any:
        """Return the name of a row's environment if the trainer has several environments, otherwise None."""
        return row.get("environment") if getattr(self._trainer, "_multi_environment", False) else None

    def prompt_of(self, row: Mapping[str, Any]) -> Any:
        """Return a row's prompt: with environments, an empty user message if the row has none."""
        return row.get("prompt", [{"role": "user", "content": ""}]) if self._of_environment else row["prompt"]

    def tokens_of(self, row: Mapping[str, Any]) -> list[int]:
        """Return the token ids of a row's prompt. Raises ConfigError for an unknown environment."""
        name, writer = self.environment_of(row), self._trainer
        if self._of_environment:
            if name not in self._of_environment:
                raise ConfigError(
                    f"a row of the dataset has environment={name!r}, but environment_factory has "
                    f"{list(self._of_environment)}; name one of these"
                )
            writer = self._of_environment[name]
        prompt = with_images(self.prompt_of(row), images_of_row(row))
        return list(writer._tokenize_prompts([prompt])[0][0])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which decides the order of the next pass."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = np.arange(len(self._dataset))
        if self._trainer.shuffle_dataset:
            np.random.default_rng([self._trainer.args.seed, self._epoch]).shuffle(rows)
        for row in rows.tolist():
            drawn = self._dataset[row]
            prompt = {"token_ids": self.tokens_of(drawn), ROW: row}
            yield prompt | {"images": images_of_row(drawn)} if self._with_images else prompt

    def drawn(self, prompt: Any) -> Row:
        """Return a copy of the dataset row from which a prompt was made."""
        return dict(self._dataset[prompt.data[ROW]])

    def row_of(self, prompt: Any, asked: Any = None) -> Row:
        """Return a copy of a prompt's row for TRL. Raises CheckpointError if the data set has another prompt now.

        ``asked`` is the prompt after an environment has changed it; None if the prompt is unchanged.
        """
        if asked is None and self._last is not None and self._last[0] is prompt:
            return dict(self._last[1])
        row = self.drawn(prompt)
        row["prompt"] = self.prompt_of(row) if asked is None else asked
        if self._with_images:
            put_back(row, prompt.attached)
        if self.tokens_of(row) != prompt.token_ids.tolist():
            raise CheckpointError(
                f"row {prompt.data[ROW]} of train_dataset is not the prompt that was drawn before; the dataset and the "
                "chat template must be the same after a restart"
            )
        if asked is None:
            self._last = (prompt, dict(row))
        return row


def message_of(trainer: Any, ids: list[int], prefix: list[int], tools: Sequence[Any]) -> Message:
    """Parse generated tokens ``ids``, which follow the tokens ``prefix``, into a message as TRL does."""
    tokenizer = tokenizer_of(trainer)
    if any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema")):
        from trl.chat_template_utils import parse_response

        return dict(parse_response(tokenizer, ids, prefix=prefix, tools=list(tools)))
    return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}


def scores(
    trainer: Any, row: Row, completions: Sequence[Said], ids: Sequence[list[int]], **more: Any
) -> list[list[float]]:
    """Return a list of rewards for each completion, one per reward function; NaN if a function gives none.

    The functions get the same arguments as from TRL, such as the columns of the row, but run in april's threads.
    """
    count = len(completions)
    arguments = {
        **{key: [value] * count for key, value in row.items() if key not in ("prompt", "completion")},
        "prompts": [with_images(row["prompt"], images_of_row(row))] * count,
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
            loop = getattr(trainer, "async_loop", None)  # the function may hold objects bound to this loop
            values = asyncio.run(values) if loop is None else asyncio.run_coroutine_threadsafe(values, loop).result()
        columns.append([math.nan if value is None else float(value) for value in values])
    return [list(of_one) for of_one in zip(*columns, strict=True)]


def weighted(trainer: Any, values: Sequence[float]) -> float:
    """Return the weighted sum of one response's rewards, or NaN if no function scored it."""
    found = [float(w) * v for w, v in zip(trainer.reward_weights, values, strict=True) if not math.isnan(v)]
    return sum(found) if found else math.nan


Scorer = Callable[[Any, Sequence[Any]], list[float]]
"""Function of a prompt and its responses; returns their rewards, NaN for a response that no function scores."""


def scorer_of(trainer: Any, said_of: Callable[[Any], list[Message] | None]) -> Scorer:
    """Wrap the trainer's reward functions for april, and drop what they log: TRL calls them again for trained rows.

    ``said_of`` returns the messages of a multi-turn response, or None for a single turn.
    """
    passes = DatasetPasses(trainer)

    def ask(prompt: Any, responses: Sequence[Any]) -> list[float]:
        if ROW not in prompt.data:  # TRL scores evaluations itself
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


def group_reward(ask: Scorer) -> Callable[[Any, Sequence[Any]], list[float]]:
    """Make april's ``group_reward``, which group filters need. A response that no function scores gets 0, as in TRL."""
    return lambda prompt, responses: [0.0 if math.isnan(value) else value for value in ask(prompt, responses)]


def sample_reward(ask: Scorer) -> Callable[[Any, Any], float]:
    """Make april's ``reward``, which ``group_quorum`` below 1 needs, because single samples are then delivered.

    The reward raises RolloutError for a response that no function scores.
    """

    def reward(prompt: Any, response: Any) -> float:
        (value,) = ask(prompt, [response])
        return scored(prompt, value)

    return reward


def scored(prompt: Any, value: float) -> float:
    """Return the reward ``value``, or raise RolloutError if it is NaN."""
    if math.isnan(value):
        raise RolloutError(
            f"every reward function returned None or NaN for a response to row {prompt.data[ROW]} of the dataset, but "
            "here the advantages of its siblings need its reward; return a number"
        )
    return value


def put_advantages(trainer: Any, batch: Batch, output: dict[str, Any]) -> None:
    """Write april's advantages into ``output``, the input of TRL's loss, and into TRL's logs for all ranks.

    ``batch`` is this rank's part of the delivered batch.
    """
    everywhere, like = trainer.accelerator.gather, output["advantages"]
    found = like.new_tensor(advantages_of(batch, trainer.scale_rewards, everywhere(like.new_tensor(batch.rewards))))
    output["advantages"] = found
    # this deque has room for one batch, so april's values push out TRL's
    trainer._logs["advantages"].extend(everywhere(found).tolist())
    if trainer.scale_rewards != "batch":
        alike = [bool((sample.baseline_rewards == np.float32(sample.reward)).all()) for sample in batch.samples]
        trainer._metrics["train"]["frac_reward_zero_std"][-1] = float(everywhere(like.new_tensor(alike)).mean())


def advantages_of(batch: Batch, scale_rewards: str, rewards: Any) -> Float32:
    """Return advantages, float32 [B], scaled by GRPOConfig.scale_rewards; ``rewards`` are those of all ranks."""
    if scale_rewards == "group":
        return batch.advantages("grpo", epsilon=EPSILON, ddof=1)
    centred = batch.advantages("dr_grpo")
    return centred / np.float32(float(rewards.std()) + EPSILON) if scale_rewards == "batch" else centred


# ---------------------------------------------------------------- images

COLUMNS = ("images", "image")
"""Names of image columns, in the order in which TRL looks for them."""


def column_of(dataset: Any) -> str | None:
    """Return the name of a data set's image column, or None if it has none."""
    names = getattr(dataset, "column_names", None) or ()
    return next((name for name in COLUMNS if name in names), None)


def tokenizer_of(trainer: Any) -> Any:
    """Return the trainer's tokenizer; if its processing class is a multimodal processor, the tokenizer inside it."""
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


def images_of_row(row: Mapping[str, Any]) -> list[Any]:
    """Return the images in a dataset row, in order; empty if there are none."""
    if "images" in row:
        return list(row["images"] or ())
    return [] if row.get("image") is None else [row["image"]]


def with_images(prompt: Any, images: Sequence[Any]) -> Any:
    """Return a prompt with images in its messages, as TRL passes it to reward functions and chat templates."""
    require_trainable(prompt, images)
    if not images:
        return prompt
    from trl.data_utils import prepare_multimodal_messages

    return prepare_multimodal_messages(prompt, images=list(images))


def require_trainable(prompt: Any, images: Sequence[Any]) -> None:
    """Raise ConfigError if TRL cannot train on a prompt in this form together with its images."""
    plain = isinstance(prompt, str)
    parts = () if plain else (p for m in prompt if isinstance(m.get("content"), list) for p in m["content"])
    # fmt: off
    refuse([
        (plain and images, "train_dataset has images and a prompt of plain text", "TRL needs messages then",
         "give messages"),
        (any(part.get("type") == "image" and part.get("image") is not None for part in parts),
         "a prompt of train_dataset has an image in its messages",
         "TRL leaves it out of its loss where a rollout_func generates",
         "move it to a column image or images, and leave {'type': 'image'} in its place"),
    ])
    # fmt: on


def put_back(row: dict[str, Any], attached: Sequence[Placed]) -> None:
    """Replace a row's images by those that april read and from which the responses were generated."""
    if not attached:
        return
    opened = attached_pictures(attached, None)
    if "images" in row:
        row["images"] = opened
    else:
        row["image"] = opened[0]


def evaluation_prompts(trainer: Any, rows: list[list[int]], images: Sequence[list[Any] | None]) -> list[dict[str, Any]]:
    """Return the evaluation prompts of all ranks with their images. Must be called on every rank.

    ``rows`` are the token ids of all ranks' prompts, ``images`` the images of this rank's rows.
    """
    reader = ImageReader(ImagesConfig())
    read = [
        [reader.read(image, f"row {i}, image {j}").attachment for j, image in enumerate(of_one or (), 1)]
        for i, of_one in enumerate(images)
    ]
    everywhere = rows_of_all_ranks(trainer, [[attachment_bytes(attachment) for attachment in row] for row in read])
    return [{"token_ids": ids, "images": images} for ids, images in zip(rows, everywhere, strict=True)]
