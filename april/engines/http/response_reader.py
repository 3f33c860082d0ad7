"""Reads the response to one request: checks every event, and assigns each token the policy version that made it.

It reads whole responses and streams alike. Each kind of server has a :class:`Parser` that turns its events into
:class:`ResponsePart` objects. When several events are read together, those before an invalid one still count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import numpy as np

from april.core.attachments import NO_EXTRAS, Extras, wrong_rows
from april.core.versions import PolicyVersion
from april.engines.http.weight_labels import Span, WeightLabels, foreign_weights, spans_cover
from april.engines.http.wire import NotJson, failure_said, float32_array, int32_array, read_with
from april.engines.protocol import Chunk, EngineFinish, Request
from april.errors import EngineError, WireError

E = TypeVar("E")
"""Decoded event of a stream, or a decoded whole response."""
_DONE = b"[DONE]"


class ResponseEnd(msgspec.Struct, gc=False):
    """The end of a response. An EngineError as ``reason`` is raised after the tokens are handed over."""

    reason: EngineFinish | EngineError
    stopped_at: int | str | None = None
    spans: Sequence[Span] | None = None
    """Weight labels of all tokens of the response; if None, each part's own ``label`` holds for its tokens."""
    extras: Extras = NO_EXTRAS
    """Rows per token, such as routed experts, from row ``extras_from`` of the conversation on."""
    extras_from: int = 0


class ResponsePart(msgspec.Struct, gc=False):
    """Content of one stream event, or of one whole response."""

    ids: list[int]
    """Token ids that no earlier part contained."""
    logprobs: list[float]
    end: ResponseEnd | None = None
    label: str | None = None
    """Label of the weights that made the ids; None if the server does not report it."""
    prompt_tokens: int | None = None
    total: int | None = None
    """Number of tokens in the whole response, as counted by the server."""
    cached_tokens: int | None = None
    """Number of prompt tokens that the server found in its cache; None if it does not say."""


class Parser(Generic[E]):
    """Turns the events of one kind of server into :class:`ResponsePart` objects, for one request."""

    __slots__ = ("attempt_id", "request")

    decoder: ClassVar[msgspec.json.Decoder[Any]]
    list_decoder: ClassVar[msgspec.json.Decoder[Any]]
    count_may_follow = True
    """True if events without tokens, such as the server's token count, may follow the end."""

    def __init__(self, request: Request) -> None:
        self.request, self.attempt_id = request, request.attempt_id

    def piece(self, event: E, payload: bytes, had: int) -> ResponsePart:
        """Return the content of one event. ``payload`` is its raw JSON, ``had`` the number of tokens before it.

        Raises WireError for an invalid event, or the error that the server reports in it.
        """
        raise NotImplementedError

    def wrong(self, what: str) -> WireError:
        return WireError(f"attempt {self.attempt_id}: the server's answer {what}")

    def failed(self, payload: bytes) -> EngineError:
        """Return the error that the server reports in an event without tokens."""
        return failure_said(payload, f"attempt {self.attempt_id}")


class ReadProgress(StrEnum):
    """Stage that the reading of a response has reached."""

    TOKENS = "tokens"
    ENDED = "ended"
    """The server has given the finish reason."""
    DONE = "done"
    """The server has given the finish reason and sent [DONE], the end mark of the stream."""
    WRONG = "wrong"
    """Reading has stopped at an error, which is in ``failure``."""


_TOKENS = ReadProgress.TOKENS
OTHER_PROCESSOR = (
    "does the server's processor split images as the one here does (same files, min_pixels and max_pixels), and does "
    "the prompt have the tokens that its model expects around an image?"
)
"""Hint at the end of errors about a prompt with images that the server has expanded to other token ids than april."""


def require_prompt(parser: Parser[Any], said: Sequence[int]) -> None:
    """Raise WireError unless the server has expanded the prompt to the same ids as april."""
    sent = parser.request.token_ids
    if len(said) != len(sent):
        raise parser.wrong(f"belongs to a prompt of {len(said)} tokens, but {len(sent)} were sent; {OTHER_PROCESSOR}")
    if not np.array_equal(np.asarray(said), sent):
        raise parser.wrong(f"belongs to other prompt ids than were sent; {OTHER_PROCESSOR}")


class ResponseReader:
    """Reads the response to one request and turns it into chunks.

    Args:
        version: Policy version of the weights when the request was sent.
        labels: Weight labels of the engine, if the server reports which weights made which token; None means that every
            token gets ``version``.
        base: Version of the base model if the request uses an adapter. The label is then that of the base model under
            every version, and another label means that somebody has changed the base model.
    """

    __slots__ = (
        "_base", "_cached_tokens", "_extras", "_guess", "_held_ids", "_held_logprobs", "_ids", "_label", "_last",
        "_logprobs", "_parser", "_runs", "_stopped_at", "_sure_tokens", "_version", "_versions", "count", "failure",
        "finish", "labels", "progress",
    )  # fmt: skip

    def __init__(
        self, parser: Parser[Any], version: PolicyVersion, labels: WeightLabels | None = None,
        base: PolicyVersion | None = None,
    ) -> None:  # fmt: skip
        self._parser = parser
        self._extras: Extras = NO_EXTRAS
        self._version = self._guess = version
        self._sure_tokens: int | None = None
        """Number of tokens made before the first weight change during this request; None if there was none. Later
        tokens count as made by version ``_guess``, until the last event names the versions of all tokens."""
        self._runs: list[tuple[list[int], list[float], PolicyVersion]] = []
        """Tokens that were made before the latest weight change and not handed over yet: (ids, log-probabilities,
        version that is assumed for them)."""
        self._versions: list[tuple[PolicyVersion, int]] | None = None
        """Versions of all tokens, as (version, number of tokens), from the last event; None without a weight change."""
        self.labels, self._base = labels, base
        self._label = labels.of(version if base is None else base) if labels is not None else ""
        # tokens not handed over yet: _ids came before the end, _last came with the end and is split by version
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._last: list[tuple[list[int], list[float], PolicyVersion]] = []
        # tokens with another label than at submission; only the spans at the end tell which version made them
        self._held_ids: list[int] = []
        self._held_logprobs: list[float] = []
        self.progress = ReadProgress.TOKENS
        self.count = 0
        """Number of tokens whose weights are known."""
        self.finish: EngineFinish | None = None
        """Finish reason, once the server has given it."""
        self._stopped_at: int | str | None = None
        self._cached_tokens: int | None = None
        self.failure: EngineError | None = None
        """Error to raise after the chunks read before it are handed over."""

    def read(self, payloads: list[bytes]) -> None:
        """Read several events in order, or one whole response. An error is stored in ``failure`` and not raised."""
        if self.progress is ReadProgress.WRONG or not payloads:
            return
        try:
            if self.progress is ReadProgress.DONE:
                raise self._parser.wrong("continues after [DONE]")
            done = payloads[-1] == _DONE
            if done:
                payloads = payloads[:-1]
            parse, add, held = self._parser.piece, self._add, self._held_ids
            for payload, event in zip(payloads, self._decoded(payloads), strict=False):
                add(parse(event, payload, self.count + len(held)))
            if done:
                self.progress = ReadProgress.DONE
        except EngineError as error:
            self.fail(error)

    def set_version(self, version: PolicyVersion) -> None:
        """Assume ``version`` for later tokens until the last event names the true ones: a paused server got weights."""
        if version != self._guess:
            if self._ids:
                self._runs.append((self._ids, self._logprobs, self._guess))
                self._ids, self._logprobs = [], []
            self._sure_tokens = self.count if self._sure_tokens is None else self._sure_tokens
            self._guess = version

    def take(self, *, last: bool = False) -> list[Chunk]:
        """Return the chunks read since the last call; ``last`` means that nothing more arrives.

        Then the last chunk carries the finish reason. Without ``last``, tokens that arrived with the finish reason are
        kept back, because the server's token count in a later event may still contradict them.
        """
        chunks: list[Chunk] = []
        runs, self._runs = self._runs, []
        if self._ids:
            runs.append((self._ids, self._logprobs, self._guess))
            self._ids, self._logprobs = [], []
        if last or self.progress is not ReadProgress.ENDED:
            runs += self._last
            self._last = []
        ends = last and self.failure is None
        if ends and not runs:
            runs.append(([], [], self._guess))
        try:
            for run in runs:
                chunks.append(self._chunk(*run, ends=ends and run is runs[-1]))
        except WireError as error:
            self.fail(error)
        return chunks

    def fail(self, error: EngineError) -> None:
        """Stop reading because of an error. Earlier tokens still count, and the first error is kept."""
        self.progress, self.failure = ReadProgress.WRONG, self.failure or error

    def cut(self) -> None:
        """End the response here with the finish ABORT, because april has closed its stream."""
        self.progress, self.finish = ReadProgress.DONE, EngineFinish.ABORT

    # ---------------------------------------------------------------- inside

    def _chunk(self, ids: list[int], logprobs: list[float], version: PolicyVersion, *, ends: bool) -> Chunk:
        """Return the chunk of one run of tokens; ``ends`` means that it is the response's last and carries its end."""
        tokens, scored = int32_array(ids), float32_array(logprobs)
        sure = self._sure_tokens is None or version == self._version or not ids
        if not ends:
            return Chunk(tokens, scored, version, sure=sure)
        return Chunk(
            tokens, scored, version, self.finish, self._stopped_at, sure, self._versions, self._extras,
            cached_tokens=self._cached_tokens,
        )  # fmt: skip

    def _decoded(self, payloads: list[bytes]) -> Iterable[Any]:
        """Decode all payloads at once, which is faster for small events; if that fails, decode each by itself."""
        if len(payloads) > 1:
            try:
                events: list[Any] = read_with(self._parser.list_decoder, b"[%b]" % b",".join(payloads))
            except NotJson:
                events = []
            if len(events) == len(payloads):  # a broken payload may have parsed as two values, or as half of one
                return events
        return map(self._decode, payloads)

    def _decode(self, payload: bytes) -> Any:
        try:
            return read_with(self._parser.decoder, payload)
        except NotJson as error:
            raise self._parser.wrong(f"cannot be read: {error}") from None

    def _add(self, piece: ResponsePart) -> None:
        ids, logprobs = piece.ids, piece.logprobs
        count = len(ids)
        if self.progress is not _TOKENS:
            self._require_no_tokens(piece)
        if count != len(logprobs):
            raise self._parser.wrong(f"has {count} tokens but {len(logprobs)} log-probabilities")
        if piece.prompt_tokens is not None and piece.prompt_tokens != (sent := len(self._parser.request.token_ids)):
            # the server has shortened the prompt or put a token before it: the response continues something else
            why = f"; {OTHER_PROCESSOR}" if self._parser.request.attached else ""
            raise self._parser.wrong(f"belongs to a prompt of {piece.prompt_tokens} tokens, but {sent} were sent{why}")
        if piece.cached_tokens is not None:
            self._cached_tokens = piece.cached_tokens
        if piece.end is not None:
            self._end(piece, piece.end)
        elif self._held_ids or (self._label and piece.label not in (None, self._label)):
            self._held_ids += ids
            self._held_logprobs += logprobs
        else:
            self.count += count
            self._ids += ids
            self._logprobs += logprobs
        total = piece.total
        if total is not None and self.finish is not None and total != self.count:
            if total < self.count:
                self._last = []  # the server counts fewer tokens than it sent, so drop the last ones
            raise self._parser.wrong(
                f"reports {total} tokens but contains {self.count}; does the server leave out the EOS or stop token?"
            )

    def _require_no_tokens(self, piece: ResponsePart) -> None:
        if not self._parser.count_may_follow:
            raise self._parser.wrong("continues after the event that ended it")
        if piece.ids or piece.end is not None:
            again = "" if piece.end is None else "another end and "
            raise self._parser.wrong(f"has {again}{len(piece.ids)} more tokens after it ended")

    def _end(self, piece: ResponsePart, end: ResponseEnd) -> None:
        ids, logprobs = self._held_ids + piece.ids, self._held_logprobs + piece.logprobs
        labels, total = self.labels, self.count + len(ids)
        if labels is None and end.spans:  # april gave no labels here, but the weights must still not have changed
            first = end.spans[0].version
            for span in end.spans:
                if span.version != first:
                    raise foreign_weights(self._parser.attempt_id, first, span.version, too_late=True)
        if labels is not None and total and end.spans is not None:
            if not spans_cover(end.spans, total):
                raise self._parser.wrong(f"has version spans that do not cover its {total} tokens without gaps")
            if self._sure_tokens is None:
                self._add_spans(end.spans, ids, logprobs)
            else:
                self._versions = self._all_versions(end.spans, self._sure_tokens)
                self._last += [(ids, logprobs, self._guess)] if ids else []
        elif labels is not None and total and (self._held_ids or piece.label not in (None, self._label)):
            raise self._foreign_weights(piece.label or "none")
        elif ids:
            self._last.append((ids, logprobs, self._guess))
        self.count = total
        if isinstance(end.reason, EngineError):
            raise end.reason
        if self._parser.request.extras and total:
            self._extras = self._rows(self._parser.request, end, total)
        self.finish, self._stopped_at, self.progress = end.reason, end.stopped_at, ReadProgress.ENDED

    def _rows(self, request: Request, end: ResponseEnd, total: int) -> Extras:
        """Return the requested extras (rows per token), out of the rows that the server sent.

        Empty if the server aborted a preempted request without rows, because its tokens are generated again.
        """
        if not end.extras and end.reason is EngineFinish.ABORT:
            return NO_EXTRAS
        before = request.extras_from - end.extras_from
        rows = {name: end.extras[name][max(before, 0) :] for name in request.extras if name in end.extras}
        wrong = wrong_rows(rows, request.extras, request.rows_wanted(total))
        if wrong is not None:
            raise self._parser.wrong(f"has {wrong}")
        return rows

    def _version_of(self, label: str) -> PolicyVersion | None:
        """Return the version of tokens under this weight label; None if april has not named these weights."""
        if label == self._label:
            return self._version
        return self.labels.version_of(label, self._version) if self.labels is not None and self._base is None else None

    def _add_spans(self, spans: Sequence[Span], ids: list[int], logprobs: list[float]) -> None:
        """Split the last tokens by ``spans``. Tokens handed over earlier must have the version at submission."""
        had = self.count
        for span in spans:
            version = self._version_of(span.version)
            if version is None or (span.start < had and version != self._version and span.end > span.start):
                raise self._foreign_weights(span.version, too_late=span.start < had)
            start, end = max(span.start - had, 0), span.end - had
            if end > start:
                self._last.append((ids[start:end], logprobs[start:end], version))

    def _all_versions(self, spans: Sequence[Span], sure: int) -> list[tuple[PolicyVersion, int]]:
        """Return the versions of all tokens of a response during which the weights changed, as (version, tokens).

        Raises EngineError unless the first ``sure`` tokens, from before the change, have the version at submission.
        """
        found: list[tuple[PolicyVersion, int]] = []
        for span in spans:
            version = self._version_of(span.version)
            if span.end > span.start:
                if version is None or (span.start < sure and version != self._version):
                    raise self._foreign_weights(span.version, too_late=True)
                found.append((version, span.end - span.start))
        return found

    def _foreign_weights(self, label: str, *, too_late: bool = False) -> EngineError:
        return foreign_weights(self._parser.attempt_id, self._label, label, too_late=too_late)
