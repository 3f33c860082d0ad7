"""Defines the types of a saved core, and converts them to plain values (numbers, text, bytes, lists, dicts) and back.

Arrays of tokens and log-probabilities become little-endian bytes, or lists of such bytes; other arrays become
[number type, shape, bytes]. Empty bytes are saved as None, as ``torch.load`` cannot read empty bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self, TypeVar, get_args, get_origin

import msgspec
import numpy as np
from numpy.typing import NDArray

from april.core.attachments import NO_EXTRAS, Attachment, Extras, Placed, Rows
from april.core.ledger import Ledger, LengthLedger
from april.core.row_rewards import RowReward
from april.core.settings import CoreSettings
from april.core.state_checksum import State
from april.core.tape import Segment, content_of
from april.core.types import FinishReason, RecordedCall, SampleId, SampleState
from april.core.versions import PolicyVersion

T = TypeVar("T")
SHORT = 4096
"""Size in bytes up to which the arrays of one tape are joined into one ``bytes`` object."""


class Packed:
    """Numbers of one type in one or several arrays, which are joined only if they are short."""

    dtype: ClassVar[str]

    def __init__(self, *arrays: NDArray[Any]) -> None:
        self.arrays = list(arrays)

    def __len__(self) -> int:
        return sum(map(len, self.arrays))

    @property
    def whole(self) -> Any:
        return self.arrays[0] if len(self.arrays) == 1 else np.concatenate(self.arrays)

    def plain(self) -> bytes | list[bytes] | None:
        """Return the content as bytes, without a copy of arrays that are views of ``bytes`` objects."""
        little = [np.asarray(array, self.dtype) for array in self.arrays if len(array)]
        if len(little) > 1 and sum(array.nbytes for array in little) <= SHORT:
            return content_of(little)
        parts = [_bytes_of(array) for array in little]
        return parts if len(parts) > 1 else parts[0] if parts else None

    @classmethod
    def of_plain(cls, value: Any) -> Self:
        """Return the numbers in these bytes, without a copy; a list of bytes is first joined in place."""
        if isinstance(value, (list, tuple)):
            content = b"".join(value)
            if isinstance(value, list):  # frees the memory of the pieces
                value[:] = [content]
        elif value is None or isinstance(value, bytes):
            content = value or b""
        else:
            raise TypeError(f"expected bytes, found a {type(value).__name__}")
        return cls(np.frombuffer(content, cls.dtype).astype(cls.dtype[1:], copy=False))


class Tokens(Packed):
    """Token ids, int32."""

    dtype = "<i4"


class Logprobs(Packed):
    """Log-probabilities, float32."""

    dtype = "<f4"


class SavedChain(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """A conversation, with the calls that the restarted rollout function will repeat."""

    number: int = 0
    prompt: Tokens | None = None
    """None if it is the prompt of the group."""
    tokens: Tokens
    logprobs: Logprobs
    segments: list[Segment]
    calls: list[RecordedCall]
    open_call: int | None = None
    attached: tuple[Placed, ...] | None = None
    """None if these are the attachments of the group's prompt."""
    extras: Extras = NO_EXTRAS


class SavedSample(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """A response; it has no chains if it was dropped, or delivered and will not be delivered again (``settled``)."""

    settled: SampleState | None = None
    finished: bool = False
    chains: list[SavedChain] = []
    finish: FinishReason | None = None
    reward: float = 0.0
    row_rewards: tuple[RowReward, ...] = ()
    attempts: int = 0
    resumes: int = 0
    failures: int = 0
    restarts: int = 0


class SavedGroup(msgspec.Struct, kw_only=True, gc=False):
    """A prompt with its samples; ``unchecked`` names the entries of the user's ``data`` that have no checksum."""

    id: int
    epoch: int
    position: int
    prompt: Tokens
    attached: tuple[Placed, ...]
    data: Any = {}
    unchecked: list[str] = []
    drawn_under: PolicyVersion
    bound: int
    samples: list[SavedSample]
    finishers: list[int]
    cohort: tuple[tuple[int, float], ...]
    cohort_values: Mapping[str, Any]
    """Values of :attr:`Group.cohort_values` as lists of numbers by name, with None for NaN."""


class SavedCore(msgspec.Struct, kw_only=True, gc=False):
    """Everything that a core holds; ``ready`` has the groups to be delivered, in order, ``waiting`` the others."""

    settings: CoreSettings
    max_context: int
    logprob_kind: str
    version: PolicyVersion
    branches: dict[int, int]
    groups_drawn: int
    batches: int
    staleness_bound: int
    counters: dict[str, int]
    aside: list[int]
    unbegun: list[int]
    long_round: list[int]
    tokens: Ledger
    prompts: Ledger
    lengths: LengthLedger
    """Lengths of responses; ``generated`` is recounted when the core is restored."""
    attachments: list[Attachment]
    """All attachments with their contents; prompts and chains refer to these by digest."""
    ready: list[SavedGroup]
    waiting: list[SavedGroup]
    order: list[SampleId]
    """Complete samples in the order in which they will be delivered."""


def to_state(saved: SavedCore) -> State:
    """Return the saved core as plain values; the users' data of prompts is not converted."""
    groups = {
        part: [{**_builtins(msgspec.structs.replace(group, data=None)), "data": group.data} for group in of]
        for part, of in (("ready", saved.ready), ("waiting", saved.waiting))
    }
    rest = msgspec.structs.replace(saved, ready=[], waiting=[])
    return {**_builtins(rest), **groups}


def _builtins(value: Any) -> State:
    state: State = _with_lists(msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=_plain))
    return state


def _with_lists(value: Any) -> Any:
    """Replace all tuples by lists, so that a state equals itself after it was written and read back."""
    if isinstance(value, dict):
        return {name: _with_lists(part) for name, part in value.items()}
    return [_with_lists(part) for part in value] if isinstance(value, (list, tuple)) else value


def from_state(state: Any, kind: type[T]) -> T:
    """Return the value that :func:`to_state` converted; raises ValueError or TypeError if ``state`` does not fit."""
    return msgspec.convert(state, kind, dec_hook=_typed, str_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Packed):
        return value.plain()
    if isinstance(value, np.ndarray):
        return rows_out(value)
    if isinstance(value, np.generic):  # an engine object counted by NumPy
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be saved")


def _typed(kind: Any, value: Any) -> Any:
    base = get_origin(kind) or kind
    if base is Counter:
        return Counter(msgspec.convert(value, dict[get_args(kind)[0], int]))  # type: ignore[misc]
    if issubclass(base, Packed):
        return base.of_plain(value)
    if base is np.ndarray:
        return rows_in(value)
    raise ValueError(f"a {base.__name__} cannot be restored")


def rows_out(rows: Rows) -> list[Any]:
    """Return an array as plain values: [number type, shape, bytes]."""
    little = rows.astype(rows.dtype.newbyteorder("<"), copy=False)
    return [little.dtype.str, list(little.shape), _bytes_of(little) or None]


def rows_in(state: Sequence[Any]) -> Rows:
    """Return the array of :func:`rows_out`; raises ValueError if its elements are no numbers."""
    name, shape, data = state
    kind = np.dtype(name)
    if kind.kind not in "iuf":
        raise ValueError("rows that are no numbers")
    return np.frombuffer(data or b"", kind).reshape(shape).astype(kind.newbyteorder("="), copy=False)


def _bytes_of(array: NDArray[Any]) -> bytes:
    """Return the content of an array: the ``bytes`` object behind it if that has just this content, else a copy."""
    base: object = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    shared = isinstance(base, bytes) and len(base) == array.nbytes and array.flags.c_contiguous
    return base if isinstance(base, bytes) and shared else array.tobytes()


def values_out(values: Extras) -> dict[str, Any]:
    """Return :attr:`Group.cohort_values` as lists of numbers, with None for NaN."""
    return {name: np.where(np.isnan(table), np.array(None), table).tolist() for name, table in values.items()}


def values_in(values: Mapping[str, Any]) -> Extras:
    return {name: np.array(table, np.float32) for name, table in values.items()}


def bare(attached: Iterable[Placed]) -> tuple[Placed, ...]:
    return tuple(replace(p, attachment=replace(p.attachment, data=None, path="")) for p in attached)
