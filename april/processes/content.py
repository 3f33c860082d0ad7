"""Batches, evaluations, ledgers and calls on their way between ranks and the core, in msgpack.

Tokens travel once, as 9 bytes each: int32 id, float32 log-probability, uint8 loss mask; and with them the rows that
they have. What is attached to a batch's prompts travels once, however many rows have it: its bytes, or the path of the
file that the user keeps it in.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from april.core.attachments import Attachment, Placed, before
from april.core.batch import Batch, DeliveredSample
from april.core.ledger import Ledger
from april.core.tape import Segment
from april.core.types import DropReason, FinishReason, Prompt, SampleId
from april.core.versions import PolicyVersion
from april.corrections.advantages import BatchShare
from april.driver.detokenizer import Detokenizer
from april.driver.prompt_reader import as_prompt
from april.driver.rewards import Conversation, EvaluationResult, Response
from april.driver.weight_update import absolute
from april.errors import ConfigError, RankError, RolloutError
from april.processes import rank_messages as say
from april.processes.plain_values import plain_bytes

_Place = tuple[int, int, int, tuple[int, ...]]
"""The place of an attachment among those of the message, and ``at``, ``count`` and ``stands``."""
_Rows = tuple[str, tuple[int, ...], bytes]
"""Type, shape and content of an array."""


class _Attachment(msgspec.Struct, array_like=True):
    kind: str
    digest: str
    size: int
    data: bytes | None
    path: str


class _Prompt(msgspec.Struct, array_like=True):
    tokens: bytes
    data: dict[Any, Any]
    epoch: int
    position: int
    attached: list[_Place]


class _PromptAlone(msgspec.Struct, array_like=True):
    tokens: bytes
    data: dict[Any, Any]
    attached: list[_Place]
    attachments: list[_Attachment]


class _Sample(msgspec.Struct, array_like=True):
    id: tuple[int, int]
    prompt: int
    """its place among the prompts"""
    tokens: bytes
    logprobs: bytes
    loss_mask: bytes
    segments: list[Segment]
    staleness: int
    reward: float
    cohort: tuple[tuple[int, float], ...]
    finish: FinishReason
    attempts: int
    resumes: int
    chain: int
    own_prompt: bytes | None
    """what its row begins with, where that is not the prompt at its place"""
    attached: list[_Place] | None
    """what is attached to its conversation, where that is not what is attached to the prompt at its place"""
    extras: dict[str, _Rows]


class _Batch(msgspec.Struct, array_like=True):
    id: int
    version: tuple[int, int]
    group_sizes: tuple[int, ...]
    metrics: dict[str, float]
    logprob_kind: str
    bottleneck: str
    branches: dict[int, int]
    share: BatchShare
    attachments: list[_Attachment]
    prompts: list[_Prompt]
    samples: list[_Sample]


class _Conversation(msgspec.Struct, array_like=True):
    prompt_ids: bytes
    tokens: bytes
    logprobs: bytes
    loss_mask: bytes


class _Response(msgspec.Struct, array_like=True):
    id: tuple[int, int]
    tokens: bytes
    logprobs: bytes
    loss_mask: bytes
    finish: FinishReason
    output: Any
    reward: float | None
    prompt_ids: bytes | None
    """of its first conversation, whose tokens are above; None means that it has no conversations"""
    others: list[_Conversation]


# ---------------------------------------------------------------- plain values


def refuse_not_plain(prompt: Prompt) -> None:
    """Raise RolloutError for a prompt whose data cannot go to another process."""
    try:
        plain_bytes(dict(prompt.data), "data")
    except TypeError as why:
        raise RolloutError(
            f"the data of prompt {prompt.position} cannot go to another rank: {why}; use numbers, text, bytes, lists "
            "and dicts"
        ) from None


def _plain_or_none(output: Any) -> Any:
    try:
        plain_bytes(output)
    except TypeError:
        return None
    return output


# ---------------------------------------------------------------- attachments and rows


class _Attachments:
    """The attachments of a message, each once."""

    def __init__(self) -> None:
        self.all: list[_Attachment] = []
        self._place: dict[str, int] = {}

    def places(self, attached: Iterable[Placed]) -> list[_Place]:
        """Attachments at their places, by their numbers."""
        return [(self._number(p.attachment), p.at, p.count, p.stands) for p in attached]

    def _number(self, a: Attachment) -> int:
        number = self._place.setdefault(a.digest, len(self.all))
        if number == len(self.all):
            self.all.append(_Attachment(a.kind, a.digest, a.size, a.data, a.path))
        return number


def _placed(attachments: Sequence[Attachment], places: Iterable[_Place]) -> tuple[Placed, ...]:
    return tuple(Placed(attachments[number], at, count, stands) for number, at, count, stands in places)


def _attachments(packed: Iterable[_Attachment]) -> list[Attachment]:
    return [Attachment(a.kind, a.digest, a.size, a.data, a.path) for a in packed]


def _rows(array: NDArray[Any]) -> _Rows:
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return little.dtype.str, little.shape, little.tobytes()


def _array_of(rows: _Rows) -> NDArray[Any]:
    dtype, shape, content = rows
    return np.frombuffer(content, dtype).reshape(shape).astype(np.dtype(dtype).newbyteorder("="), copy=False)


# ---------------------------------------------------------------- batches


def pack_batch(batch: Batch) -> bytes:
    """A batch or a share of one, whose prompts have plain data."""
    attachments = _Attachments()
    prompts: list[Prompt] = []
    place: dict[int, int] = {}
    for sample in batch.samples:
        if sample.id.group not in place:
            place[sample.id.group] = len(prompts)
            prompts.append(sample.prompt)

    def own_prompt(row: DeliveredSample) -> bytes | None:
        first, own = prompts[place[row.id.group]], row.prompt
        same = own.attached == first.attached and np.array_equal(own.token_ids, first.token_ids)
        return None if same else _bytes(own.token_ids)

    def own_attached(row: DeliveredSample) -> list[_Place] | None:
        return None if row.attached == prompts[place[row.id.group]].attached else attachments.places(row.attached)

    return msgspec.msgpack.encode(
        _Batch(
            id=batch.id, version=batch.version, group_sizes=batch.group_sizes, metrics=dict(batch.metrics),
            logprob_kind=batch.logprob_kind, bottleneck=batch.bottleneck, branches=dict(batch.branches),
            share=batch.share,
            attachments=attachments.all,
            prompts=[
                _Prompt(_bytes(p.token_ids), dict(p.data), p.epoch, p.position, attachments.places(p.attached))
                for p in prompts
            ],
            samples=[
                _Sample(
                    id=s.id, prompt=place[s.id.group], **_packed(s), segments=list(s.segments), staleness=s.staleness,
                    reward=s.reward, cohort=s.cohort, finish=s.finish, attempts=s.attempts, resumes=s.resumes,
                    chain=s.chain, own_prompt=own_prompt(s), attached=own_attached(s),
                    extras={name: _rows(rows) for name, rows in s.extras.items()},
                )
                for s in batch.samples
            ],
        )
    )  # fmt: skip


_PROMPT_ALONE = msgspec.msgpack.Decoder(_PromptAlone)
_BATCHES = msgspec.msgpack.Decoder(_Batch)


def unpack_batch(content: bytes) -> Batch:
    """Unpack a batch; its arrays are its own and may be written into."""
    b = _BATCHES.decode(content)
    attachments = _attachments(b.attachments)
    prompts = [
        Prompt(_array(p.tokens, np.int32), p.data, p.epoch, p.position, _placed(attachments, p.attached))
        for p in b.prompts
    ]

    def attached_of(s: _Sample) -> tuple[Placed, ...]:
        return prompts[s.prompt].attached if s.attached is None else _placed(attachments, s.attached)

    def prompt_of(s: _Sample) -> Prompt:
        prompt = prompts[s.prompt]
        if s.own_prompt is None:
            return prompt.copy()
        ids = _array(s.own_prompt, np.int32)
        return replace(prompt, token_ids=ids, attached=before(attached_of(s), len(ids)))

    return Batch(
        id=b.id, version=PolicyVersion(*b.version), group_sizes=b.group_sizes, metrics=b.metrics,
        logprob_kind=b.logprob_kind, bottleneck=b.bottleneck, branches=b.branches, _part=b.share,
        samples=tuple(
            DeliveredSample(
                id=SampleId(*s.id), prompt=prompt_of(s), **_unpacked(s), segments=tuple(s.segments),
                staleness=s.staleness, reward=s.reward, cohort=s.cohort, finish=s.finish, attempts=s.attempts,
                resumes=s.resumes, chain=s.chain, attached=attached_of(s),
                extras={name: _array_of(rows) for name, rows in s.extras.items()},
            )
            for s in b.samples
        ),
    )  # fmt: skip


def _bytes(array: NDArray[Any], dtype: type[np.generic] = np.int32) -> bytes:
    return np.ascontiguousarray(array, dtype).tobytes()


def _array(data: bytes, dtype: type[np.generic]) -> Any:
    return np.frombuffer(data, dtype).copy()


def _packed(row: DeliveredSample | Response | Conversation) -> dict[str, bytes]:
    return {name: _bytes(getattr(row, name), dtype) for name, dtype in _COLUMNS.items()}


def _unpacked(row: _Sample | _Response | _Conversation) -> dict[str, Any]:
    return {name: _array(getattr(row, name), dtype) for name, dtype in _COLUMNS.items()}


_COLUMNS: dict[str, type[np.generic]] = {"tokens": np.int32, "logprobs": np.float32, "loss_mask": np.uint8}


# ---------------------------------------------------------------- evaluations, ledgers, and what is plain already


def pack_evaluation(result: EvaluationResult) -> bytes:
    """An evaluation. What rollout functions returned goes along where it is plain, else None does."""

    def packed(r: Response) -> _Response:
        first, *others = r.conversations or (None,)
        return _Response(
            id=r.sample_id, **_packed(r), finish=r.finish, output=_plain_or_none(r.output), reward=r.reward,
            prompt_ids=None if first is None else _bytes(first.prompt_ids),
            others=[_Conversation(_bytes(c.prompt_ids), **_packed(c)) for c in others if c is not None],
        )

    return msgspec.msgpack.encode(
        ([[packed(r) for r in row] for row in result.responses], result.rewards.tobytes(), result.rewards.shape)
    )


_EVALUATIONS = msgspec.msgpack.Decoder(tuple[list[list[_Response]], bytes, tuple[int, int]])


def unpack_evaluation(content: bytes, detokenizer: Detokenizer | None) -> EvaluationResult:
    """Unpack an evaluation; responses have the text that ``detokenizer`` makes of them."""
    rows, rewards, shape = _EVALUATIONS.decode(content)

    def unpacked(r: _Response) -> Response:
        own = _unpacked(r)
        conversations = [] if r.prompt_ids is None else [Conversation(_array(r.prompt_ids, np.int32), **own)]
        conversations += [Conversation(_array(c.prompt_ids, np.int32), **_unpacked(c)) for c in r.others]
        return Response(
            SampleId(*r.id), **own, finish=r.finish, output=r.output, reward=r.reward,
            conversations=tuple(conversations), detokenizer=detokenizer,
        )

    return EvaluationResult(
        tuple(tuple(unpacked(r) for r in row) for row in rows), np.frombuffer(rewards, np.float64).reshape(shape).copy()
    )


def pack_ledgers(ledgers: dict[str, Ledger]) -> bytes:
    """The books by name."""
    plain = {n: (b.observed, b.delivered, b.held, dict(b.dropped)) for n, b in ledgers.items()}
    return msgspec.msgpack.encode(plain)


_LEDGERS = msgspec.msgpack.Decoder(dict[str, tuple[int, int, int, dict[DropReason, int]]])


def unpack_ledgers(content: bytes) -> dict[str, Ledger]:
    """Unpack the books."""
    return {n: Ledger(o, d, h, Counter(dropped)) for n, (o, d, h, dropped) in _LEDGERS.decode(content).items()}


def pack_plain(value: Any) -> bytes:
    """Numbers, text, bytes, lists and dicts."""
    return msgspec.msgpack.encode(value)


def unpack_version(content: bytes) -> PolicyVersion:
    """A policy version."""
    return PolicyVersion(*msgspec.msgpack.decode(content))


def pack_update(version: PolicyVersion, weights: bytes) -> bytes:
    """The version after a weight update, and values of rank 0's weights."""
    return msgspec.msgpack.encode((*version, weights))


def unpack_update(content: bytes) -> tuple[PolicyVersion, bytes]:
    """Unpack an update; of a plain version the weights are empty."""
    incarnation, n, *weights = msgspec.msgpack.decode(content)
    return PolicyVersion(incarnation, n), weights[0] if weights else b""


unpack_plain: Callable[[bytes], Any] = msgspec.msgpack.decode


LOOKS: dict[str, tuple[Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "state_dict": (pack_plain, unpack_plain),
    "version": (pack_plain, unpack_version),
    "ledger": (pack_ledgers, unpack_ledgers),
    "held_groups": (lambda groups: pack_plain(sorted(groups)), lambda packed: frozenset(unpack_plain(packed))),
    "validate": (pack_plain, unpack_plain),
    "story": (pack_plain, unpack_plain),
}
"""The looks at a scheduler that its ranks may take: how a result is packed, and unpacked."""
METHODS = frozenset(
    {"next_batch", "weight_update", "commit", "lower_staleness", "evaluate", "extend", "load_state_dict"}
)
"""The methods that ranks may have the scheduler call."""
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
        arguments[0] = [_as_ext(_as_plain_prompt(method, prompt, i)) for i, prompt in enumerate(prompts)]
    if (at := _PATHS.get(method)) is not None and isinstance(arguments[at], (str, os.PathLike)):
        arguments[at] = absolute(arguments[at])  # the actor runs in another directory
    try:
        return msgspec.msgpack.encode((method, arguments, dict(named)), enc_hook=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{method}: an argument cannot go to the core's actor: {error}") from None


def _as_plain_prompt(method: str, item: Any, number: int) -> Prompt:
    chat = isinstance(item, Mapping) and item.get("messages") and not {"token_ids", "input_ids"} & item.keys()
    if chat or (isinstance(item, Mapping) and item.get("images")):
        raise ConfigError(
            f"{method}: prompt {number} is a chat or has images, which are read where the scheduler is; give them "
            "among its prompts, or give token ids here"
        )
    return as_prompt(item, _NO_BOUND, number)


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
        p = _PROMPT_ALONE.decode(data)
        return Prompt(_array(p.tokens, np.int32), p.data, attached=_placed(_attachments(p.attachments), p.attached))

    method, arguments, named = msgspec.msgpack.decode(content, ext_hook=made)
    if method == _FAILED:
        raise say.error_of(tuple(arguments))
    if method not in METHODS:
        raise RankError(f"a rank asks for {method!r}, which is no call of the ranks", (0,))
    return method, arguments, named


def _as_ext(prompt: Prompt) -> msgspec.msgpack.Ext:
    refuse_not_plain(prompt)
    attachments = _Attachments()
    places = attachments.places(prompt.attached)
    alone = _PromptAlone(_bytes(prompt.token_ids), dict(prompt.data), places, attachments.all)
    return msgspec.msgpack.Ext(_PROMPT, msgspec.msgpack.encode(alone))


def _plain(value: Any) -> Any:
    if callable(value):
        return msgspec.msgpack.Ext(_TRANSFER, b"")
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"it is a {type(value).__name__}")
