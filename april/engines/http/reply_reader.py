"""What the readers of servers' answers have in common: tokens are gathered, split by weights, and handed over once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import msgspec

from april.core.versions import PolicyVersion
from april.engines.http.server_json import NotJson, read_with
from april.engines.http.weight_labels import Span, WeightLabels, cover, foreign_weights
from april.engines.http.wire_arrays import chunk_of, empty_chunk
from april.engines.protocol import Chunk, EngineFinish
from april.errors import EngineError, WireError

R = TypeVar("R")
"""One answer, or one event of a stream."""


class AnswerReader(Generic[R]):
    """Reads the answer to one request, whole or event by event. Subclasses say what an event means.

    Args:
        version: of the weights when the request was sent.
        labels: of the engine, where the server says which weights made which token; otherwise all tokens are
            ``version``'s.
        decoder: of one event; ``together``: of a list of them.
        prompt_tokens: how many were sent; compared with what the server says of them. None: not looked at.
    """

    __slots__ = (
        "_attempt_id", "_decoder", "_ids", "_label", "_labels", "_list_decoder", "_prompt_tokens", "_scores",
        "_version", "count", "failure", "finish",
    )  # fmt: skip

    def __init__(
        self, attempt_id: str, version: PolicyVersion, labels: WeightLabels | None, decoder: msgspec.json.Decoder[Any],
        together: msgspec.json.Decoder[Any], prompt_tokens: int | None = None,
    ) -> None:  # fmt: skip
        self._attempt_id = attempt_id
        self._version = version
        self._labels = labels
        self._label = labels.of(version) if labels is not None else ""
        self._decoder = decoder
        self._list_decoder = together
        self._prompt_tokens = prompt_tokens
        # tokens that are no chunk yet; nothing outside of a call sees any
        self._ids: list[int] = []
        self._scores: list[float] = []
        self.count = 0
        """Tokens handed over."""
        self.finish: EngineFinish | None = None
        """Why generation ended, once the server has said it."""
        self.failure: EngineError | None = None
        """To be raised once the chunks that came with it are handed over."""

    def _reply(self, reply: R, payload: bytes, chunks: list[Chunk]) -> None:
        """Take in one event: its tokens by :meth:`_gather`, those of the last one by :meth:`_end_with`.

        Raises:
            WireError: the answer cannot be true.
            RequestRefused, EngineBusy, EngineError: the server says that it failed.
        """
        raise NotImplementedError

    # ---------------------------------------------------------------- for whoever reads

    def read_all(self, payloads: list[bytes]) -> list[Chunk]:
        """:meth:`read` of several; where one is wrong, those before it count, and ``failure`` says what is wrong."""
        chunks: list[Chunk] = []
        try:
            for payload, reply in zip(payloads, self._decoded(payloads), strict=False):
                self._reply(reply, payload, chunks)
                if self.failure is not None:
                    break
        except EngineError as error:
            self.failure = self.failure or error
        self._flush(chunks)
        return chunks

    def read(self, payload: bytes) -> list[Chunk]:
        """The chunks of one answer or event; the last of a request has its finish.

        Raises:
            WireError: the answer cannot be true.
            RequestRefused, EngineBusy, EngineError: the server says that it failed.
        """
        chunks: list[Chunk] = []
        self._reply(self._decode(payload), payload, chunks)
        self._flush(chunks)
        return chunks

    def _decoded(self, payloads: list[bytes]) -> Iterable[R]:
        """Many small answers cost less in one go; if one of them cannot be read, each has its own turn."""
        if len(payloads) > 1:
            try:
                replies: list[R] = read_with(self._list_decoder, b"[%b]" % b",".join(payloads))
            except NotJson:
                replies = []
            if len(replies) == len(payloads):  # a broken one may be two values, or half of one
                return replies
        return map(self._decode, payloads)

    def _decode(self, payload: bytes) -> R:
        try:
            reply: R = read_with(self._decoder, payload)
        except NotJson as error:
            raise WireError(f"attempt {self._attempt_id}: the server's answer cannot be read: {error}") from None
        return reply

    # ---------------------------------------------------------------- for subclasses

    def _gather(self, ids: list[int], logprobs: list[float]) -> None:
        """Tokens of several events are one chunk."""
        self.count += len(ids)
        self._ids += ids
        self._scores += logprobs

    def _flush(self, chunks: list[Chunk]) -> None:
        if self._ids:
            ids, logprobs = self._ids, self._scores
            self._ids, self._scores = [], []
            chunks.append(chunk_of(ids, logprobs, self._version))

    def _whole(self, ids: list[int], logprobs: list[float]) -> list[Chunk]:
        """All of them under the version at submission."""
        return [chunk_of(ids, logprobs, self._version)] if ids else []

    def _in_spans(self, spans: Sequence[Span], ids: list[int], logprobs: list[float]) -> list[Chunk]:
        """The last tokens, split by the weights that made them; those before must be of the version at submission."""
        total = self.count + len(ids)
        if not cover(spans, total):
            raise self._wrong(f"has version spans that do not cover its {total} tokens one after the other")
        assert self._labels is not None
        chunks: list[Chunk] = []
        for span in spans:
            start, end = max(span.start - self.count, 0), span.end - self.count
            known = span.version == self._label
            version = self._version if known else self._labels.version_of(span.version, self._version)
            if version is None or (span.start < self.count and version != self._version and span.end > span.start):
                self.failure = self._foreign(span.version, too_late=span.start < self.count)
                return chunks
            if ids and end - start == len(ids):
                chunks.append(chunk_of(ids, logprobs, version))
            elif end > start:
                chunks.append(chunk_of(ids[start:end], logprobs[start:end], version))
        return chunks

    def _end_with(self, chunks: list[Chunk], finish: EngineFinish, stopped_at: int | str | None = None) -> list[Chunk]:
        """The same chunks, the last of them with the finish."""
        self.finish = finish
        last = chunks[-1] if chunks else empty_chunk(self._version, finish)
        return [*chunks[:-1], replace(last, finish=finish, stopped_at=stopped_at)]

    def _check_prompt(self, said: int | None) -> None:
        """Servers that shorten a prompt, or put a token before it, go on from something else than was asked."""
        if said is not None and self._prompt_tokens is not None and said != self._prompt_tokens:
            raise self._wrong(f"is to a prompt of {said} tokens, and {self._prompt_tokens} were sent")

    def _foreign(self, label: str, *, too_late: bool = False) -> EngineError:
        return foreign_weights(self._attempt_id, self._label, label, too_late=too_late)

    def _wrong(self, what: str) -> WireError:
        return WireError(f"attempt {self._attempt_id}: the server's answer {what}")
