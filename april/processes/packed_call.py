"""A call of the scheduler on its way from rank 0 to the core's actor: msgpack, prompts and weights named for what they
are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from april.core.types import Prompt
from april.driver.prompt_source import as_prompt
from april.driver.weight_update import absolute
from april.errors import ConfigError, RankError
from april.processes import rank_messages as say
from april.processes.content import refuse_not_plain

METHODS = frozenset(
    {"next_batch", "weight_update", "commit", "lower_staleness", "evaluate", "extend", "load_state_dict"}
)
"""What ranks may have the scheduler do."""
_WITH_PROMPTS = {"evaluate", "extend"}
_PATHS = {"weight_update": 0, "load_state_dict": 1}
"""Which argument is a directory."""
_FAILED = ""
"""In place of a method."""
_TRANSFER, _PROMPT = 1, 2
_NO_BOUND = 1 << 31
"""Token ids are below it; the core knows the vocabulary."""


def pack_call(method: str, arguments: Iterable[Any], named: Mapping[str, Any]) -> bytes:
    """A call for :func:`unpack_call`; raises ConfigError for what cannot go to another process."""
    arguments = list(arguments)
    if method in _WITH_PROMPTS:
        prompts = arguments[0]
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
            raise ConfigError(f"{method}: prompts must be an iterable of prompts, got {type(prompts).__name__}")
        arguments[0] = [_as_ext(as_prompt(prompt, _NO_BOUND, i)) for i, prompt in enumerate(prompts)]
    if (at := _PATHS.get(method)) is not None and isinstance(arguments[at], (str, os.PathLike)):
        arguments[at] = absolute(arguments[at])  # the actor runs in another directory
    try:
        return msgspec.msgpack.encode((method, arguments, dict(named)), enc_hook=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{method}: an argument cannot go to the core's actor: {error}") from None


def pack_failure(error: Exception) -> bytes:
    """In place of a call that :func:`pack_call` could not pack: all ranks are told why."""
    return msgspec.msgpack.encode((_FAILED, say.told(error), {}))


def unpack_call(content: bytes, transfer: Callable[[], None]) -> tuple[str, list[Any], dict[str, Any]]:
    """Method and arguments; ``transfer`` has all ranks hand weights over.

    Raises RankError for any other method, and what :func:`pack_failure` was given.
    """

    def made(code: int, data: memoryview) -> Any:
        if code == _TRANSFER:
            return transfer
        ids, extras = msgspec.msgpack.decode(data)
        return Prompt(np.frombuffer(ids, np.int32).copy(), extras)

    method, arguments, named = msgspec.msgpack.decode(content, ext_hook=made)
    if method == _FAILED:
        raise say.error_of(tuple(arguments))
    if method not in METHODS:
        raise RankError(f"a rank asks for {method!r}, which is no call of the ranks", (0,))
    return method, arguments, named


def _as_ext(prompt: Prompt) -> msgspec.msgpack.Ext:
    refuse_not_plain(prompt)
    return msgspec.msgpack.Ext(_PROMPT, msgspec.msgpack.encode((prompt.token_ids.tobytes(), dict(prompt.data))))


def _plain(value: Any) -> Any:
    if callable(value):
        return msgspec.msgpack.Ext(_TRANSFER, b"")
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"it is a {type(value).__name__}")
