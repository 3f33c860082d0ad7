"""Prompts of what a user's data set yields: token ids, or chats, and what comes with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from april.core.attachments import Placed
from april.core.types import Prompt
from april.errors import ConfigError
from april.images.chats import taken_out
from april.server_text import clean

if TYPE_CHECKING:
    from april.images.placing import Images

TEMPLATE = (
    "make token ids of text and chats first: tokenizer.apply_chat_template(messages, add_generation_prompt=True, "
    'return_dict=True)["input_ids"] (docs/rollouts.md)'
)


class PromptReader:
    """Makes prompts of :class:`Prompt`, mappings with ``token_ids``, ``input_ids`` or ``messages``, or token ids.

    Args:
        vocab_size: token ids must be below.
        tokenizer: writes ``messages`` as tokens by its ``apply_chat_template``.
        images: reads the images of prompts, and writes ``messages`` that have some.
    """

    def __init__(self, vocab_size: int, tokenizer: Any = None, images: Images | None = None) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._images = images

    @property
    def is_slow(self) -> bool:
        """True if to read a prompt may take long."""
        return self._images is not None

    def read(self, item: Any, position: int, epoch: int = 0, *, again: bool = False) -> Prompt:
        """Make a prompt; raises ConfigError naming its position.

        ``again``: it was drawn before, and its hash is compared, so its images are not decoded.
        """
        if not isinstance(item, Mapping):
            return self._placed(as_prompt(item, self._vocab_size, position, epoch), (), again)
        item = dict(item)
        images = item.pop("images", None)
        if images is not None and (isinstance(images, (str, bytes, Mapping)) or not hasattr(images, "__len__")):
            raise ConfigError(f"prompt {position}: images must be a list of images, got {type(images).__name__}")
        images = [] if images is None else list(images)
        if item.get("messages") is not None and not {"token_ids", "input_ids"} & item.keys():
            item, images = self._of_messages(item, images, f"prompt {position}")
        return self._placed(as_prompt(item, self._vocab_size, position, epoch), images, again)

    def _of_messages(self, item: dict[str, Any], images: list[Any], where: str) -> tuple[dict[str, Any], list[Any]]:
        messages = item["messages"]
        if not _is_chat(messages):
            raise ConfigError(f"{where}: messages must be a list of chat messages, got {type(messages).__name__}")
        plain, images = taken_out(messages, images, where)
        if images and self._images is None:
            raise ConfigError(_no_processor(where))
        if self._images is not None:
            ids: Any = self._images.render(plain, item.get("tools"), where)
        elif self._tokenizer is None:
            raise ConfigError(f"{where} has messages, which are written by a chat template; give tokenizer=")
        else:
            ids = _by_template(self._tokenizer, plain, item.get("tools"), where)
        return {**item, "messages": plain, "token_ids": ids}, images

    def _placed(self, prompt: Prompt, images: Sequence[Any], again: bool) -> Prompt:
        where = f"prompt {prompt.position}"
        if self._images is None:
            if images:
                raise ConfigError(_no_processor(where))
            return prompt
        if prompt.attached and not images:
            return prompt
        pictures = self._images.read(images, where, decode=not again)
        ids, attached = self._images.place(prompt.token_ids, pictures, where)
        return replace(prompt, token_ids=ids, attached=attached)


def _no_processor(where: str) -> str:
    return (
        f"{where} has images, and there is no processor to place them; give processor=, the model's "
        "transformers.AutoProcessor"
    )


def _by_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Any, where: str) -> Any:
    options = {"tools": tools} if tools else {}
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **options)
        return tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # whatever a template raises, or a tokenizer without one
        raise ConfigError(f"{where}: the chat template does not take its messages: {clean(error)}") from error


def _is_chat(item: Any) -> bool:
    return isinstance(item, Sequence) and bool(item) and isinstance(item[0], Mapping)


def as_prompt(item: Any, vocab_size: int, position: int, epoch: int = 0) -> Prompt:
    """Make a prompt of what a user's data set yields; raises ConfigError naming its position."""
    ids: Any
    data: Mapping[str, Any] = {}
    attached: tuple[Placed, ...] = ()
    if isinstance(item, Prompt):
        ids, data, attached = item.token_ids, item.data, item.attached
    elif isinstance(item, Mapping):
        ids, data = _of_mapping(item, position)
    elif (isinstance(item, Sequence) or hasattr(item, "__array__")) and not isinstance(item, (str, bytes)):
        ids = item
    else:
        raise ConfigError(
            f"prompt {position} is of type {type(item).__name__}; expected token ids, a mapping with token_ids or "
            f"input_ids, or april.Prompt; {TEMPLATE}"
        )
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError, RuntimeError):  # rows of different lengths, a tensor on a GPU
        array = np.empty(0)
    if array.ndim == 2 and len(array) == 1:
        array = array[0]  # a tokenizer's batch of one
    if array.ndim != 1 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
        shape = f" of shape {list(array.shape)}, {array.dtype}" if array.ndim and array.size else ""
        text = array.dtype.kind == "U" or _is_chat(ids)
        what = "a list of chat messages" if _is_chat(ids) else f"{type(ids).__name__}{shape}"
        raise ConfigError(
            f"prompt {position}: token_ids must be a non-empty flat list of integers, or an array of them on the CPU, "
            f"got {what}{f'; {TEMPLATE}' if text else ''}"
        )
    if array.min() < 0 or array.max() >= vocab_size:
        bad = array[(array < 0) | (array >= vocab_size)][0]
        raise ConfigError(f"prompt {position}: token id {bad} is outside the engine's vocabulary of {vocab_size}")
    # a copy: a data loader may use its buffer again
    return Prompt(np.array(array, np.int32), data, epoch, position, attached)


def _of_mapping(item: Mapping[str, Any], position: int) -> tuple[Any, Mapping[str, Any]]:
    """Token ids and data of a mapping; what a tokenizer returns is one, under a name of its own."""
    name = next((name for name in ("token_ids", "input_ids") if name in item), None)
    if name is None:
        raise ConfigError(
            f"prompt {position} has neither token_ids nor input_ids; its keys are {sorted(map(str, item))}; {TEMPLATE}"
        )
    taken = {name}
    if name == "input_ids" and "attention_mask" in item:
        taken.add("attention_mask")
        whole = True
        with suppress(ValueError, TypeError, RuntimeError):  # the ids are no array either, and refused as such
            whole = bool(np.asarray(item["attention_mask"]).all())
        if not whole:
            raise ConfigError(f"prompt {position} is padded (its attention_mask has zeros); give it without padding")
    return item[name], {k: v for k, v in item.items() if k not in taken}
