"""Where prompts come from: any iterable of prompts, drawn one by one and checked as they are drawn."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from april.core.types import Prompt
from april.driver.user_code import describe
from april.errors import ConfigError

log = logging.getLogger("april")


class PromptSource:
    """Draws from an iterable of :class:`Prompt`, mappings with ``token_ids``, or sequences of token ids."""

    def __init__(self, prompts: Iterable[Any], vocab_size: int) -> None:
        if isinstance(prompts, (str, bytes, Mapping)):
            raise ConfigError(f"prompts must be an iterable of prompts, got {type(prompts).__name__}")
        try:
            self._iterator = iter(prompts)
        except TypeError:
            raise ConfigError(f"prompts must be an iterable of prompts, got {type(prompts).__name__}") from None
        self._vocab_size = vocab_size
        self._error: str | None = None
        self.position = 0
        """Prompts drawn so far."""

    def draw(self, count: int) -> tuple[list[Prompt], bool, str | None]:
        """Up to ``count`` prompts, whether the source has ended, and what was wrong with the next prompt if any."""
        prompts: list[Prompt] = []
        while len(prompts) < count:
            if self._error is not None:
                # good prompts drawn before a bad one are handed over first
                if prompts:
                    break
                error, self._error = self._error, None
                return [], False, error
            try:
                item = next(self._iterator)
            except StopIteration:
                return prompts, True, None
            except Exception as error:
                log.warning("the prompt source failed at prompt %d", self.position, exc_info=error)
                self._error = f"the prompt source failed at prompt {self.position}: {describe(error)}"
                continue
            try:
                prompts.append(as_prompt(item, self._vocab_size, self.position))
            except ConfigError as error:
                self._error = str(error)
            self.position += 1
        return prompts, False, None


def as_prompt(item: Any, vocab_size: int, position: int) -> Prompt:
    """One prompt from what a user's data set yields; raises ConfigError naming its position."""
    ids: Any
    data: Mapping[str, Any] = {}
    if isinstance(item, Prompt):
        ids, data = item.token_ids, item.data
    elif isinstance(item, Mapping):
        if "token_ids" not in item:
            raise ConfigError(f"prompt {position} has no token_ids; its keys are {sorted(map(str, item))}")
        ids, data = item["token_ids"], {k: v for k, v in item.items() if k != "token_ids"}
    elif isinstance(item, (Sequence, np.ndarray)) and not isinstance(item, (str, bytes)):
        ids = item
    else:
        raise ConfigError(
            f"prompt {position} is a {type(item).__name__}; expected token ids, a mapping with token_ids, "
            "or april.Prompt (apply your chat template and tokenizer first)"
        )
    try:
        array = np.asarray(ids)
    except ValueError:  # rows of different lengths
        array = np.empty(0)
    if array.ndim != 1 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
        raise ConfigError(f"prompt {position}: token_ids must be a non-empty flat list of integers")
    if array.min() < 0 or array.max() >= vocab_size:
        bad = array[(array < 0) | (array >= vocab_size)][0]
        raise ConfigError(f"prompt {position}: token id {bad} is outside the engine's vocabulary of {vocab_size}")
    # a copy: a data loader may use its buffer again
    return Prompt(np.array(array, np.int32), data)
