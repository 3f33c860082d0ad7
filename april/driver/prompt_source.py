"""Where prompts come from: any iterable of prompts, pass after pass, drawn one by one and checked as they are drawn.

A draw may run in a thread (``fetch``) while its loop goes on; what it found counts as drawn once it is handed over.
Invariant: a prompt is named by (epoch, position); each is handed over once, also across a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from april.core.types import Prompt
from april.driver.user_code import describe
from april.errors import CheckpointError, ConfigError

log = logging.getLogger("april")


QUICK_DRAW_S = 0.25
"""Time that the loop has for waiting for draws; after the first that takes longer than what is left, it has none."""
DRAW_ALLOWANCE_S = 0.005
"""Gained with each draw, so that quick ones can go on for ever."""


class DrawPatience:
    """How long the loop waits for a draw in a thread beside it."""

    def __init__(self) -> None:
        self.left_s = QUICK_DRAW_S

    def waited(self, seconds: float, *, found: bool) -> None:
        """It has waited, and there were prompts or not: slow draws use up what is left, each of them once."""
        left_s = min(QUICK_DRAW_S, self.left_s + DRAW_ALLOWANCE_S - seconds) if found and self.left_s else 0.0
        self.left_s = max(0.0, left_s)


class Draw(NamedTuple):
    """What one draw has found; ``stand`` is where the source stood after it."""

    prompts: list[Prompt]
    exhausted: bool
    error: str | None
    stand: tuple[int, int]


class PromptSource:
    """Draws from an iterable of :class:`Prompt`, mappings with ``token_ids``, or sequences of token ids.

    Args:
        prompts: iterated once per epoch. If it has ``set_epoch(epoch)``, as samplers that shuffle have, that is called
            before each pass.
        vocab_size: token ids must be below.
        epochs: passes over the prompts; None: for ever.

    Raises:
        ConfigError: no iterable, or one that can be iterated only once where several passes are wanted.
    """

    def __init__(self, prompts: Iterable[Any], vocab_size: int, epochs: int | None = 1) -> None:
        self._vocab_size = vocab_size
        self._epochs = epochs
        self._prompts = prompts
        self._error: str | None = None
        self._bad = 0
        """1 while the prompt at ``position`` is unusable and nobody was told; it counts as drawn from then on."""
        self.epoch = 0
        """Passes that are complete."""
        self.position = 0
        """Prompts drawn in the present pass."""
        self._to_skip = 0
        self._stand = (0, 0)
        """Epoch and position of what was handed over."""
        self._more: list[Iterator[Any]] = []
        """What extend gave and no draw has reached."""
        self.is_slow = not isinstance(prompts, Sequence)
        """It may do what takes long (read files, ask a server) when it is drawn from."""
        self._iterator = self._begin(prompts, 0)
        if epochs != 1 and self._iterator is prompts:
            raise ConfigError(
                f"prompts can be iterated only once ({type(prompts).__name__}), and several epochs are wanted; give a "
                "list or a data set, or an object whose __iter__ begins anew"
            )

    def _begin(self, prompts: Iterable[Any], epoch: int) -> Iterator[Any]:
        if isinstance(prompts, (str, bytes, Mapping)):
            raise ConfigError(f"prompts must be an iterable of prompts, got {type(prompts).__name__}")
        set_epoch = getattr(prompts, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        try:
            return iter(prompts)
        except TypeError:
            raise ConfigError(f"prompts must be an iterable of prompts, got {type(prompts).__name__}") from None

    def extend(self, prompts: Iterable[Any]) -> None:
        """More prompts after those of the last pass.

        Raises:
            ConfigError: not an iterable, or the last pass has not begun.
        """
        if self._epochs is None or self.epoch + 1 < self._epochs:
            raise ConfigError(
                f"extend: epoch {self.epoch} of {self._epochs or 'endless'} is being drawn, and the prompts must be "
                "the same in every pass; give more in the last one"
            )
        # a draw may be using the iterator at this moment
        self._more.append(self._begin(prompts, self.epoch))
        self.is_slow |= not isinstance(prompts, Sequence)

    # ---------------------------------------------------------------- drawing

    def draw(self, count: int) -> tuple[list[Prompt], bool, str | None]:
        """Up to ``count`` prompts, whether the source has ended, and what was wrong with the next prompt if any."""
        return self.hand_over(self.fetch(count))

    def hand_over(self, draw: Draw) -> tuple[list[Prompt], bool, str | None]:
        """What was fetched counts as drawn from now on; more prompts may have come meanwhile."""
        self._stand = draw.stand
        return draw.prompts, draw.exhausted and not self._more, draw.error

    def fetch(self, count: int) -> Draw:
        """The work of one draw, one at a time; nothing else of the source changes meanwhile."""
        prompts, exhausted, error = self._fetch(count)
        return Draw(prompts, exhausted, error, (self.epoch, self.position))

    def _fetch(self, count: int) -> tuple[list[Prompt], bool, str | None]:
        prompts: list[Prompt] = []
        while len(prompts) < count:
            if self._error is not None:
                # good prompts drawn before a bad one are handed over first
                if prompts:
                    break
                error, self._error = self._error, None
                self.position += self._bad
                self._bad = 0
                return [], False, error
            try:
                self._skip()
                item = next(self._iterator)
            except StopIteration:
                if self._more:
                    self._iterator = self._more.pop(0)
                    continue
                try:
                    if not self._next_epoch():
                        return prompts, True, None
                except (Exception, SystemExit) as error:
                    log.warning("epoch %d could not begin", self.epoch + 1, exc_info=error)
                    self._error = f"the prompt source failed to begin epoch {self.epoch + 1}: {describe(error)}"
                continue
            except (Exception, SystemExit) as error:
                log.warning("the prompt source failed at prompt %d", self.position, exc_info=error)
                self._error = f"the prompt source failed at prompt {self.position}: {describe(error)}"
                continue
            try:
                prompts.append(as_prompt(item, self._vocab_size, self.position, self.epoch))
                self.position += 1
            except ConfigError as error:
                self._error, self._bad = str(error), 1
        return prompts, False, None

    def _next_epoch(self) -> bool:
        """Begin the next pass; False after the last one."""
        last = self._epochs is not None and self.epoch + 1 >= self._epochs
        if self._to_skip or not (last or self.position):
            drawn = self.position - self._to_skip
            self._error = (
                f"the prompts ended after {drawn} of epoch {self.epoch}, where {self.position or 'some'} had been "
                "drawn before; they must be the same in every pass, and after a restart"
                if self._to_skip or self.epoch
                else "there are no prompts"
            )
            return True
        if last:
            return False
        self._iterator = self._begin(self._prompts, self.epoch + 1)
        self.epoch += 1
        self.position = 0
        return True

    # ---------------------------------------------------------------- restarts

    def state_dict(self) -> dict[str, int]:
        """Where it stands, without what is being drawn."""
        epoch, position = self._stand
        return {"epoch": epoch, "position": position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where another source over the same prompts stood; what was drawn is skipped when the next is drawn.

        Raises:
            CheckpointError: it stood in an epoch that this source does not have, or the state is damaged. Nothing has
                changed then.
        """
        try:
            epoch, position = int(state["epoch"]), int(state["position"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the state is damaged: {type(error).__name__}: {error}") from error
        if epoch < 0 or position < 0:
            raise CheckpointError(f"the state is damaged: prompt {position} of epoch {epoch}")
        if self._epochs is not None and epoch >= self._epochs:
            raise CheckpointError(f"the state was saved in epoch {epoch}, the configuration has epochs={self._epochs}")
        if epoch != self.epoch:
            self._iterator = self._begin(self._prompts, epoch)
            self.epoch = epoch
        self.position = self._to_skip = position
        self._stand = (epoch, position)

    def _skip(self) -> None:
        """Pass over what was drawn before the restart; raises StopIteration where prompts have ended meanwhile."""
        while self._to_skip:
            next(self._iterator)
            self._to_skip -= 1


def as_prompt(item: Any, vocab_size: int, position: int, epoch: int = 0) -> Prompt:
    """One prompt from what a user's data set yields; raises ConfigError naming its position."""
    ids: Any
    data: Mapping[str, Any] = {}
    if isinstance(item, Prompt):
        ids, data = item.token_ids, item.data
    elif isinstance(item, Mapping):
        if "token_ids" not in item:
            raise ConfigError(f"prompt {position} has no token_ids; its keys are {sorted(map(str, item))}")
        ids, data = item["token_ids"], {k: v for k, v in item.items() if k != "token_ids"}
    elif (isinstance(item, Sequence) or hasattr(item, "__array__")) and not isinstance(item, (str, bytes)):
        ids = item
    else:
        raise ConfigError(
            f"prompt {position} is of type {type(item).__name__}; expected token ids, a mapping with token_ids, "
            "or april.Prompt (apply your chat template and tokenizer first)"
        )
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError, RuntimeError):  # rows of different lengths, a tensor on a GPU
        array = np.empty(0)
    if array.ndim != 1 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
        raise ConfigError(
            f"prompt {position}: token_ids must be a non-empty flat list of integers, or an array of them on the CPU"
        )
    if array.min() < 0 or array.max() >= vocab_size:
        bad = array[(array < 0) | (array >= vocab_size)][0]
        raise ConfigError(f"prompt {position}: token id {bad} is outside the engine's vocabulary of {vocab_size}")
    # a copy: a data loader may use its buffer again
    return Prompt(np.array(array, np.int32), data, epoch, position)
