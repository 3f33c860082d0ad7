"""Converts the items of a user's data set (token ids or chat messages, images, other data) to prompts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from april.core.attachments import Placed
from april.core.types import Prompt
from april.errors import ConfigError
from april.images.chat_images import extract_images
from april.text.server_text import clean

if TYPE_CHECKING:
    from april.images.image_placer import ImagePlacer

MESSAGES = (
    'give a text as messages, {"messages": [{"role": "user", "content": text}]}, with tokenizer=, or as token ids, '
    '{"token_ids": tokenizer.encode(text)} (docs/rollouts.md)'
)


def iterate(prompts: Any, where: str = "") -> Iterator[Any]:
    """Return an iterator over prompts; raises ConfigError, which begins with ``where``, if they are not iterable."""
    hint = ""
    if isinstance(prompts, Mapping):
        hint = "; give a list of prompts, or one split of a data set"
    elif hasattr(prompts, "iterrows") or hasattr(prompts, "iter_rows"):  # a DataFrame of pandas or polars
        hint = ", which iterates over its columns; give its rows as mappings"
    elif isinstance(prompts, (str, bytes, os.PathLike)):
        hint = "; april does not read files: give the rows of the file"
    else:
        try:
            return iter(prompts)
        except TypeError:
            hint = "; call the function, and give what it returns" if callable(prompts) else ""
    raise ConfigError(f"{where}prompts must be an iterable of prompts, got {type(prompts).__name__}{hint}")


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Converts items to prompts: a :class:`Prompt`, a mapping with ``token_ids``, ``input_ids`` or ``messages``, or
    token ids.

    Attributes:
        vocab_size: Size of the vocabulary; all token ids must be smaller.
        tokenizer: Tokenizer whose ``apply_chat_template`` converts ``messages`` to tokens.
        images: Reader of the prompts' images, which also converts ``messages`` to tokens; None if there are no images.
        data_alone: True if a prompt may have data without tokens, because the rollout function writes conversations.
    """

    vocab_size: int
    tokenizer: Any = None
    images: ImagePlacer | None = None
    data_alone: bool = False

    @property
    def is_slow(self) -> bool:
        """True if reading a prompt may take long, because its images are decoded."""
        return self.images is not None

    def read(self, item: Any, position: int, epoch: int = 0, *, again: bool = False) -> Prompt:
        """Convert an item to a prompt; raises ConfigError naming its position.

        ``again`` says that the prompt was drawn before and only its hash is needed, so its images are not decoded.
        """
        if isinstance(item, Prompt) and isinstance(item.token_ids, np.ndarray) and not item.token_ids.size:
            item = item.data
        if not isinstance(item, Mapping):
            return self._placed(as_prompt(item, self.vocab_size, position, epoch), (), again)
        item = dict(item)
        images = item.pop("images", None)
        if images is not None and (isinstance(images, (str, bytes, Mapping)) or not hasattr(images, "__len__")):
            raise ConfigError(f"prompt {position}: images must be a list of images, got {type(images).__name__}")
        images = [] if images is None else list(images)
        if self.data_alone and item and not images and has_no_conversation(item):
            return without_tokens(item, position, epoch)
        if item.get("messages") is not None and not {"token_ids", "input_ids"} & item.keys():
            item, images = self._of_messages(item, images, f"prompt {position}")
        return self._placed(as_prompt(item, self.vocab_size, position, epoch), images, again)

    def _of_messages(self, item: dict[str, Any], images: list[Any], where: str) -> tuple[dict[str, Any], list[Any]]:
        messages = item["messages"]
        if not _is_chat(messages):
            raise ConfigError(f"{where}: messages must be a list of chat messages, got {type(messages).__name__}")
        plain, images = extract_images(messages, images, where)
        if images and self.images is None:
            raise ConfigError(_no_processor(where))
        if self.images is not None:
            ids: Any = self.images.render(plain, item.get("tools"), where)
        elif self.tokenizer is None:
            raise ConfigError(f"{where} has messages, which only a chat template can turn into tokens; give tokenizer=")
        else:
            ids = _by_template(self.tokenizer, plain, item.get("tools"), where)
        return {**item, "messages": plain, "token_ids": ids}, images

    def _placed(self, prompt: Prompt, images: Sequence[Any], again: bool) -> Prompt:
        where = f"prompt {prompt.position}"
        if self.images is None:
            if images:
                raise ConfigError(_no_processor(where))
            return prompt
        if prompt.attached and not images:
            return prompt
        pictures = self.images.read(images, where, decode=not again)
        ids, attached = self.images.place(prompt.token_ids, pictures, where)
        return replace(prompt, token_ids=ids, attached=attached)


def _no_processor(where: str) -> str:
    return (
        f"{where} has images, but there is no processor for them; give processor=, the model's "
        "transformers.AutoProcessor"
    )


def _by_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Any, where: str) -> Any:
    options = {"tools": tools} if tools else {}
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **options)
        return tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # a template may raise anything, or the tokenizer has no template
        raise ConfigError(f"{where}: the chat template rejects its messages: {clean(error)}") from error


def _is_chat(item: Any) -> bool:
    return isinstance(item, Sequence) and bool(item) and isinstance(item[0], Mapping)


def has_no_conversation(item: Any) -> bool:
    """Return whether an item is a mapping with neither messages nor token ids."""
    return isinstance(item, Mapping) and item.get("messages") is None and not {"token_ids", "input_ids"} & item.keys()


def without_tokens(item: Mapping[str, Any], position: int, epoch: int = 0) -> Prompt:
    """Make a prompt that has data and no tokens."""
    none = np.empty(0, np.int32)
    none.flags.writeable = False
    return Prompt(none, item, epoch, position)


def as_prompt(item: Any, vocab_size: int, position: int, epoch: int = 0) -> Prompt:
    """Convert an item of a user's data set to a prompt; raises ConfigError naming its position."""
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
            f"prompt {position} is of type {type(item).__name__}; expected a mapping with messages or token_ids, a "
            f"list of token ids, or april.Prompt; {MESSAGES}"
        )
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError, RuntimeError):  # such as rows of different lengths, or a tensor on a GPU
        array = np.empty(0)
    if array.ndim == 2 and len(array) == 1:
        array = array[0]  # a tokenizer returned a batch of one prompt
    if array.ndim != 1 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
        shape = f" of shape {list(array.shape)}, {array.dtype}" if array.ndim and array.size else ""
        text = array.dtype.kind in "UO" or _is_chat(ids)
        what = "a list of chat messages" if _is_chat(ids) else f"{type(ids).__name__}{shape}"
        raise ConfigError(
            f"prompt {position}: token_ids must be a non-empty flat list of integers, or an array of them on the CPU, "
            f"got {what}{f'; {MESSAGES}' if text else ''}"
        )
    if array.min() < 0 or array.max() >= vocab_size:
        bad = array[(array < 0) | (array >= vocab_size)][0]
        raise ConfigError(f"prompt {position}: token id {bad} is outside the engine's vocabulary of {vocab_size}")
    # a copy, as a data loader may reuse its buffer; read-only, as engines and functions share this array
    own = np.array(array, np.int32)
    own.flags.writeable = False
    return Prompt(own, data, epoch, position, attached)


def _misnamed(item: Mapping[str, Any]) -> str:
    """Return the advice to rename a key if its value looks like messages or token ids; empty if there is none."""
    for name, value in item.items():
        if name != "messages" and _is_chat(value):
            return f"its {name!r} is a chat: give it under the key messages, with tokenizer="
        if "prompt" in str(name) and not isinstance(value, (str, bytes)) and hasattr(value, "__len__"):
            return f"if its {name!r} holds token ids, give them under the key token_ids"
    return ""


def _of_mapping(item: Mapping[str, Any], position: int) -> tuple[Any, Mapping[str, Any]]:
    """Return the token ids and the data of a mapping; the output of a tokenizer has the ids as ``input_ids``."""
    name = next((name for name in ("token_ids", "input_ids") if name in item), None)
    if name is None:
        raise ConfigError(
            f"prompt {position} has neither messages nor token_ids; its keys are {sorted(map(str, item))}; "
            f"{_misnamed(item) or f'{MESSAGES}; only a rollout= that writes its own conversations can do without both'}"
        )
    taken = {name}
    if name == "input_ids" and "attention_mask" in item:
        taken.add("attention_mask")
        whole = True
        with suppress(ValueError, TypeError, RuntimeError):  # then the ids are no array either, and are refused later
            whole = bool(np.asarray(item["attention_mask"]).all())
        if not whole:
            raise ConfigError(f"prompt {position} is padded (its attention_mask has zeros); give it without padding")
    return item[name], {k: v for k, v in item.items() if k not in taken}
