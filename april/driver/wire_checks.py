"""Checks the responses of engines: tokens, log-probabilities, policy versions, extras and finish reasons.

``april.core.value_checks`` checks single ids and log-probabilities, also those of saved states.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from april.core.attachments import NO_EXTRAS, Rows, note_layout, wrong_rows
from april.core.tape import Int32
from april.core.types import Attempt
from april.core.value_checks import wrong_ids, wrong_logprobs
from april.core.versions import PolicyVersion
from april.engines.protocol import Chunk, EngineFinish, Request
from april.errors import EngineError, WireError
from april.text.server_text import quoted

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


class AnswerChecks:
    """Checks the response to one request, chunk by chunk and at its end.

    Args:
        eos_token_ids: Ids that end every response; if they are unknown (empty), the engine's finish reason is trusted.
        oldest: Oldest policy version that a token may have; None means any version.
        layout: Shape and type of the rows of each extra (named array with one row per token) in this run. The response
            must match the layout, and defines it for new names. None means a new layout for this response.
    """

    __slots__ = (
        "_banned", "_context", "_ends", "_eos", "_finish", "_first", "_last", "_layout", "_oldest", "_request",
        "_vocab", "aborted", "count",
    )  # fmt: skip

    def __init__(
        self, request: Request, *, vocab_size: int, max_context: int, eos_token_ids: Collection[int],
        oldest: PolicyVersion | None, layout: dict[str, Rows] | None = None,
    ) -> None:  # fmt: skip
        self._request, self._layout = request, {} if layout is None else layout
        self._banned = request.sampling.banned_ids
        self._vocab, self._context, self._oldest = vocab_size, max_context, oldest
        self._first = oldest
        self._eos = eos_token_ids
        self._ends = frozenset(eos_token_ids).union(request.sampling.stop_token_ids)
        self._finish: EngineFinish | None = None
        self._last = -1
        self.count = 0
        """Number of tokens received."""
        self.aborted = False
        """True once april has aborted the request."""

    def check_next(self, chunk: Chunk, newest: PolicyVersion) -> None:
        """Check the next chunk by itself (:func:`check_chunk`) and against earlier chunks; raises WireError."""
        if self._finish is not None:
            raise WireError(f"a chunk came after the last chunk of the stream ({self._finish})")
        check_chunk(chunk, self._vocab, self._request.sampling.max_tokens - self.count, self._oldest, newest)
        self._finish = chunk.finish
        if len(chunk.tokens):
            if not chunk.own_end:
                self._refuse_tokens_after_end(chunk.tokens)
            for token in self._banned:
                if (chunk.tokens == token).any():
                    raise WireError(
                        f"the engine returned token {token}, which was banned because it is a placeholder for "
                        "attachments"
                    )
            self._oldest, self._last = chunk.version, int(chunk.tokens[-1])
            self.count += len(chunk.tokens)
        if chunk.versions is not None:
            check_versions(chunk.versions, self.count, self._first, newest)
        if chunk.finish is not None and self._request.extras:
            self._check_rows(chunk)

    def _check_rows(self, end: Chunk) -> None:
        """Check the extras of the last chunk; a chunk without extras is left to :func:`refuse_without_extras`."""
        request = self._request
        if not end.extras:
            return
        if wrong := wrong_rows(end.extras, request.extras, request.rows_wanted(self.count), self._layout):
            raise WireError(f"{self.count} tokens came with {wrong}")
        note_layout(self._layout, end.extras, request.extras)

    def _refuse_tokens_after_end(self, tokens: Int32) -> None:
        """Raise WireError if tokens follow a token that ends responses.

        The first ``min_tokens`` tokens cannot end a response.
        """
        ends, before = self._ends, self._request.sampling.min_tokens - self.count
        ended = self._last if before < 0 and self._last in ends else None
        if len(tokens) > 1:
            inner = tokens[before if before > 0 else 0 : -1]
            for token in ends:  # usually one id, for which a loop is faster than a generator
                if (inner == token).any():
                    ended = token
        if ended is not None:
            raise WireError(
                f"tokens came after token {ended}, which ends responses; if it does not end them, remove it from "
                f"engine.eos_token_ids ({sorted(self._eos)}), otherwise make the server stop at it"
            )

    def end(self, end: Chunk, *, matched: bool = False) -> EngineFinish:
        """Check that the finish reason is plausible (:func:`check_end`), and return it.

        ``matched`` says that april found a stop string; then the finish reason is not compared with the tokens. If the
        engine reports a stop string that april did not find, the response was cut too early, and ABORT is returned.

        Raises:
            WireError: the finish reason contradicts the tokens received.
            EngineError: no token was received, and april had not aborted the request.
        """
        try:
            finish = EngineFinish(end.finish or "")
        except ValueError:
            raise WireError(f"the response ended with {end.finish!r}, which is not a finish reason") from None
        if not self.count and not (finish is EngineFinish.ABORT and self.aborted):
            raise EngineError(f"the stream ended ({finish}) without a token, although april had not asked for that")
        if finish is EngineFinish.STOP and not matched and end.stopped_at in self._request.sampling.stop:
            return EngineFinish.ABORT
        if self.count and not (matched or end.own_end):
            check_end(end, self._request, self.count, self._last, self._context, self._eos)
        return finish


def copied(chunk: Chunk, extras: Sequence[str]) -> Chunk:
    """Return a copy of the chunk with only the named ``extras``, because the engine may reuse its buffers.

    Values that are not arrays are kept as they are; later checks refuse them.
    """
    rows = {name: _copy(chunk.extras[name]) for name in extras if name in chunk.extras} if chunk.extras else NO_EXTRAS
    return Chunk(
        _copy(chunk.tokens), _copy(chunk.logprobs), chunk.version, chunk.finish, chunk.stopped_at, chunk.sure,
        chunk.versions, rows, chunk.own_end, chunk.cached_tokens,
    )  # fmt: skip


LARGE = 4096
"""Arrays of at least this many bytes are copied into a ``bytes`` object, which saved states can share without a copy.
For smaller arrays a plain copy is faster."""


def _copy(array: Any) -> Any:
    """Return a contiguous copy of an array in the machine's byte order; other values are returned unchanged."""
    if not isinstance(array, np.ndarray):
        return array
    native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    if native.nbytes < LARGE or native.dtype.hasobject:
        return native.copy()
    return np.frombuffer(native.tobytes(), native.dtype).reshape(native.shape)


def refuse_without_extras(attempt: Attempt, finish: EngineFinish) -> None:
    """Raise WireError for a response without the requested extras, unless it was aborted.

    In both cases the tokens of the response are dropped, and counted as ``no_extras``."""
    if attempt.tape.bare and finish is not EngineFinish.ABORT:
        raise WireError(f"{attempt.tape.bare} tokens came without the rows of {', '.join(attempt.request.extras)}")


def check_chunk(
    chunk: Chunk, vocab_size: int, room: int, oldest: PolicyVersion | None, newest: PolicyVersion
) -> None:
    """Raise WireError unless the chunk is valid.

    It must have int32 and float32 arrays of equal length, at most ``room`` tokens, ids in [0, vocab_size),
    log-probabilities that sampled tokens can have, and a version between ``oldest`` (None means any) and ``newest``.
    """
    tokens, logprobs = chunk.tokens, chunk.logprobs
    for array, what, dtype in ((tokens, "tokens", _INT32), (logprobs, "log-probabilities", _FLOAT32)):
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            shape = f" of {array.dtype}, shape {array.shape}" if isinstance(array, np.ndarray) else ""
            raise WireError(f"{what} must be a flat array of {dtype}, got {type(array).__name__}{shape}")
    count = len(tokens)
    if len(logprobs) != count:
        raise WireError(f"{count} tokens came with {len(logprobs)} log-probabilities")
    if count > room:
        raise WireError(f"{count} tokens came, but only {room} were left of the budget")
    if count == 0:
        return
    if not isinstance(chunk.version, PolicyVersion):
        raise WireError(f"a version must be a PolicyVersion, got {chunk.version!r}")
    if chunk.version > newest or (oldest is not None and chunk.version < oldest):
        since = "any" if oldest is None else str(oldest)
        raise WireError(f"policy version {chunk.version} came, but only {since} to {newest} are possible")
    wrong = wrong_ids(tokens, vocab_size) or wrong_logprobs(logprobs)
    if wrong is not None:
        raise WireError(wrong)


def check_versions(
    versions: Sequence[tuple[PolicyVersion, int]], count: int, oldest: PolicyVersion | None, newest: PolicyVersion
) -> None:
    """Raise WireError unless these run-length encoded versions are possible for a request's ``count`` tokens.

    They must cover all tokens, never decrease, and lie between ``oldest`` (None means any) and ``newest``."""
    names = [version for version, _ in versions]
    within = not names or (names[-1] <= newest and (oldest is None or oldest <= names[0]))
    whole = sum(tokens for _, tokens in versions) == count and all(tokens > 0 for _, tokens in versions)
    if not (whole and within and names == sorted(names)):
        said = ", ".join(f"{tokens} of {version}" for version, tokens in versions)
        raise WireError(f"{count} tokens ended with the versions {said}, but only {oldest} to {newest} are possible")


def check_end(
    end: Chunk, request: Request, count: int, last_token: int, max_context: int,
    eos_token_ids: Collection[int],
) -> None:  # fmt: skip
    """Raise WireError unless the finish reason of a response is plausible.

    LENGTH requires that the budget or the engine's context is used up; otherwise something else cut the response, or
    tokens were lost. STOP requires a last token that ends responses, and at least ``min_tokens`` tokens. ABORT is
    accepted even if april did not abort the request; the response is continued then.

    ``end`` is the last chunk, ``count`` the number of tokens received, at least 1. If ``eos_token_ids`` is empty, the
    ids that end responses are unknown, and the engine's finish reason is trusted.
    """
    sampling = request.sampling
    if end.finish == EngineFinish.LENGTH:
        if count < sampling.max_tokens and len(request.token_ids) + count < max_context:
            raise WireError(
                f'the response ended for lack of room ("length") after {count} of {sampling.max_tokens} tokens; if the '
                f"engine's context is smaller than {max_context}, set engine.max_len to the value with which the "
                "server was started; if the server obeys max_new_tokens of the model's generation_config.json (as vLLM "
                "does unless started with --generation-config vllm), set max_response_len to that number"
            )
    elif end.finish == EngineFinish.STOP:
        said = end.stopped_at
        if isinstance(said, str):
            raise WireError(f"the response stopped at the text {quoted(said)}, although april had not asked for that")
        if said is not None and said != last_token:
            raise WireError(f"the response stopped at token {said}, but its last token is {last_token}")
        if eos_token_ids and last_token not in eos_token_ids and last_token not in sampling.stop_token_ids:
            raise WireError(
                f"the response stopped, but its last token ({last_token}) is neither EOS nor a stop token; if that "
                f"token ends responses, add it to engine.eos_token_ids ({sorted(eos_token_ids)}), or, if the trainer "
                "starts the servers, to eos_token_id in the model's generation_config.json"
            )
        if count < sampling.min_tokens:
            raise WireError(f"the response stopped after {count} tokens, but min_tokens is {sampling.min_tokens}")
