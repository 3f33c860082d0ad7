"""Events as JSON can have them, and back: ids, states, counts, versions. No text of anybody's, and no token.

Made from the fields of the dataclasses, so that a new event needs nothing here. Text is left out unless its field is
known to hold a name of april's own: what is not known to be harmless does not get into a file that is passed on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar

import msgspec
import numpy as np

from april.core.types import GenerateCall, Group, Sample

NAMES = frozenset({"attempt_id", "attempt_ids", "engine", "engines", "id", "logprob_kind", "name"})
"""Fields whose text is a name: of an attempt, an engine, a kind."""
LEFT_OUT = frozenset({"data", "end_ids", "eos_token_ids", "metrics", "stop", "stop_token_ids", "tape"})
"""Fields with content of the user's or ids of tokens, or with what follows from the rest."""
LEFT_OUT_TEXT = "(left out)"
_WHAT_RAISED = re.compile(r"(?:^|: )([A-Za-z_]\w{0,60}(?:Error|Exception|Timeout|Interrupt|Exit))(?=: |$)")

T = TypeVar("T")


def no_text(text: str) -> str:
    """Whether there is any."""
    return LEFT_OUT_TEXT if text else ""


def what_raised(text: str) -> str:
    """The name of the exception that a message of an error is about."""
    found = _WHAT_RAISED.search(text)
    return found[1] if found else LEFT_OUT_TEXT if text else ""


def plain(value: Any, of: Callable[[str], str] = no_text, *, named: bool = False) -> Any:
    """``value`` without what is left out; arrays are their lengths (masks: their sums), samples and groups their ids.

    ``of`` is what becomes of text, where it is not ``named``. Raises TypeError for a value of unknown kind.
    """
    if value is None or type(value) in (int, bool, float):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return value if named else of(value)
    if isinstance(value, (Sample, Group)):
        return value.id
    if isinstance(value, GenerateCall):
        return value.owner
    if isinstance(value, np.ndarray):
        return int(value.sum()) if value.dtype == np.uint8 else {"length": len(value)}
    if isinstance(value, np.generic):
        return value.item()
    if is_dataclass(value) and not isinstance(value, type):
        parts = {}
        for name, default in _parts(type(value)):
            part = getattr(value, name)
            if part is not default and not (type(part) is type(default) and _is_equal(part, default)):
                parts[name] = plain(part, of, named=name in NAMES)
        return parts
    if isinstance(value, Mapping):
        return {str(key): plain(item, of, named=named) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None)
        return [plain(item, of, named=names[i] in NAMES if names else named) for i, item in enumerate(value)]
    raise TypeError(f"a {type(value).__name__} has no plain form")


def back(parts: Any, kind: type[T]) -> T:
    """What :func:`plain` was given, tokens and log-probabilities all 0, the tokens from ``differs_at`` on 1.

    Raises:
        ValueError: it is none of this kind.
    """
    return msgspec.convert(parts, kind, dec_hook=_array)


def bare(state: Any) -> Any:
    """A snapshot without prompts, tokens and data."""
    if isinstance(state, bytes):
        return {"length": len(state) // 4}
    if isinstance(state, Mapping):
        return {key: None if key in ("data", "unchecked") else bare(item) for key, item in state.items()}
    return [bare(item) for item in state] if isinstance(state, (list, tuple)) else state


def filled(state: Any) -> Any:
    """A snapshot again, all tokens and log-probabilities 0."""
    if isinstance(state, dict):
        if state.keys() == {"length"}:
            return bytes(4 * state["length"])
        return {key: {} if key == "data" else filled(item) for key, item in state.items()}
    return [filled(item) for item in state] if isinstance(state, list) else state


def _array(kind: Any, parts: Any) -> Any:
    length = parts["length"]
    array = np.zeros(length, np.int32)
    array[parts.get("differs_at", length) :] = 1
    return array


@cache
def _parts(kind: Any) -> list[tuple[str, Any]]:
    return [(f.name, f.default) for f in fields(kind) if f.name not in LEFT_OUT]


def _is_equal(part: Any, default: Any) -> bool:
    return default is not MISSING and bool(part == default)
