"""No number from an engine is believed before it was looked at, and no end of a response.

One owner for all engines, whoever tells what they answer: streams of this process, hosts, a trainer's own workers.
Which numbers can be true at all, ``april.core.numbers`` knows, for saved states as well.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from april.core.attachments import NO_EXTRAS, Extras, wrong_rows
from april.core.numbers import wrong_ids, wrong_logprobs
from april.core.tape import Int32
from april.core.types import Attempt
from april.core.versions import PolicyVersion
from april.engines.protocol import Chunk, EngineFinish, Request
from april.errors import EngineError, WireError
from april.server_text import quoted

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


class AnswerChecks:
    """The answer to one request, looked at piece by piece and at its end.

    Args:
        request: as it was sent.
        vocab_size, max_context: of the engine.
        eos_token_ids: ids that end every response; empty: not known, and the engine's word is taken for it.
        oldest: the weights at its submission, or those of the token before; None: any.
        held: rows of the conversation that are there.
    """

    __slots__ = (
        "_banned", "_context", "_ends", "_eos", "_finish", "_first", "_held", "_last", "_oldest", "_request", "_vocab",
        "aborted", "count",
    )  # fmt: skip

    def __init__(
        self, request: Request | Attempt, *, vocab_size: int, max_context: int, eos_token_ids: Collection[int],
        oldest: PolicyVersion | None, held: Extras = NO_EXTRAS,
    ) -> None:  # fmt: skip
        self._request, self._held = request, held
        self._banned = request.sampling.banned_ids
        self._vocab, self._context, self._oldest = vocab_size, max_context, oldest
        self._first = oldest
        self._eos = eos_token_ids
        self._ends = frozenset(eos_token_ids).union(request.sampling.stop_token_ids)
        self._finish: EngineFinish | None = None
        self._last = -1
        self.count = 0
        """Tokens that came."""
        self.aborted = False
        """True once april has asked for the end."""

    def piece(self, chunk: Chunk, newest: PolicyVersion) -> None:
        """Look at the next chunk; raises WireError unless it can be true (:func:`check_chunk`) behind those before."""
        if self._finish is not None:
            raise WireError(f"a chunk came after the one that ended the stream ({self._finish})")
        check_chunk(chunk, self._vocab, self._request.sampling.max_tokens - self.count, self._oldest, newest)
        self._finish = chunk.finish
        if len(chunk.tokens):
            self._check_goes_on(chunk.tokens)
            for token in self._banned:
                if (chunk.tokens == token).any():
                    raise WireError(f"token {token} came, which was banned: it stands for what is attached to prompts")
            self._oldest, self._last = chunk.version, int(chunk.tokens[-1])
            self.count += len(chunk.tokens)
        if chunk.versions is not None:
            check_versions(chunk.versions, self.count, self._first, newest)
        if chunk.finish is not None and self._request.extras:
            self._check_rows(chunk)

    def _check_rows(self, end: Chunk) -> None:
        """The end has the rows that were asked for, or, if it is a cut, none."""
        request = self._request
        if not end.extras and (end.finish is EngineFinish.ABORT or not self.count):
            return
        wanted = len(request.token_ids) - 1 - request.extras_from + self.count
        if wrong := wrong_rows(end.extras, request.extras, wanted, self._held):
            raise WireError(f"{self.count} tokens came with {wrong}")

    def _check_goes_on(self, tokens: Int32) -> None:
        """Nothing comes after a token that ends responses; before ``min_tokens`` none does."""
        ends, before = self._ends, self._request.sampling.min_tokens - self.count
        ended = self._last if before < 0 and self._last in ends else None
        if len(tokens) > 1:
            inner = tokens[before if before > 0 else 0 : -1]
            for token in ends:  # often one: less work than a generator
                if (inner == token).any():
                    ended = token
        if ended is not None:
            raise WireError(
                f"tokens came after token {ended}, which ends responses; if it does not, leave it out of "
                f"engine.eos_token_ids ({sorted(self._eos)}), else have the server end at it"
            )

    def end(self, end: Chunk, *, matched: bool = False) -> EngineFinish:
        """The reason of the end, if it can be true (:func:`check_end`).

        ``matched``: april has found a stop string in it, so the engine's end is another one.

        Raises:
            WireError: it contradicts what came.
            EngineError: nothing came, and nobody had asked for its end.
        """
        try:
            finish = EngineFinish(end.finish or "")
        except ValueError:
            raise WireError(f"the response has ended with {end.finish!r}, which is no finish reason") from None
        if not self.count and not (finish is EngineFinish.ABORT and self.aborted):
            raise EngineError(f"the stream ended ({finish}) without a token, and april had not asked for its end")
        if self.count and not matched:
            check_end(end, self._request, self.count, self._last, self._context, self._eos)
        return finish


def check_chunk(
    chunk: Chunk, vocab_size: int, room: int, oldest: PolicyVersion | None, newest: PolicyVersion
) -> None:
    """Raise WireError unless the chunk can be true.

    Checked: int32 and float32 arrays of one length, at most ``room`` tokens, ids in [0, vocab_size), log-probabilities
    that a sampled token can have, a version between ``oldest`` (that of the tokens before; None: any) and ``newest``.
    """
    tokens, logprobs = chunk.tokens, chunk.logprobs
    for array, what, dtype in ((tokens, "tokens", _INT32), (logprobs, "log-probabilities", _FLOAT32)):
        if getattr(array, "dtype", None) != dtype or array.ndim != 1:
            raise WireError(f"{what} must be a flat array of {dtype}, got {type(array).__name__}")
    count = len(tokens)
    if len(logprobs) != count:
        raise WireError(f"{count} tokens came with {len(logprobs)} log-probabilities")
    if count > room:
        raise WireError(f"{count} tokens came where {room} were left of the budget")
    if count == 0:
        return
    if not isinstance(chunk.version, PolicyVersion):
        raise WireError(f"a version must be a PolicyVersion, got {chunk.version!r}")
    if chunk.version > newest or (oldest is not None and chunk.version < oldest):
        since = "any" if oldest is None else str(oldest)
        raise WireError(f"policy version {chunk.version} came where {since} to {newest} was possible")
    wrong = wrong_ids(tokens, vocab_size) or wrong_logprobs(logprobs)
    if wrong is not None:
        raise WireError(wrong)


def check_versions(
    versions: Sequence[tuple[PolicyVersion, int]], count: int, oldest: PolicyVersion | None, newest: PolicyVersion
) -> None:
    """Raise WireError unless these, run-length, can be those of a request's ``count`` tokens."""
    names = [version for version, _ in versions]
    within = not names or (names[-1] <= newest and (oldest is None or oldest <= names[0]))
    whole = sum(tokens for _, tokens in versions) == count and all(tokens > 0 for _, tokens in versions)
    if not (whole and within and names == sorted(names)):
        said = ", ".join(f"{tokens} of {version}" for version, tokens in versions)
        raise WireError(f"{count} tokens ended with the versions {said}, where {oldest} to {newest} were possible")


def check_end(
    end: Chunk, request: Request | Attempt, count: int, last_token: int, max_context: int,
    eos_token_ids: Collection[int],
) -> None:  # fmt: skip
    """Raise WireError unless a response can have ended as its engine says.

    LENGTH needs the budget, or the engine's context, used up: what is shorter was cut off by something else, or tokens
    got lost on the way. STOP needs a last token that ends responses, and no fewer than ``min_tokens``. An ABORT that
    nobody asked for is a cut like any other.

    Args:
        end: the chunk that ended it.
        request: as it was sent; without stop strings, which engines never see.
        count: tokens that came, at least 1; ``last_token`` is the last of them.
        max_context: of the engine.
        eos_token_ids: ids that end every response; empty: not known, and the engine's word is taken for it.
    """
    sampling = request.sampling
    if end.finish == EngineFinish.LENGTH:
        if count < sampling.max_tokens and len(request.token_ids) + count < max_context:
            raise WireError(
                f'the response has ended for want of room ("length") after {count} of {sampling.max_tokens} tokens; if '
                f"the engine's context is smaller than {max_context}, set engine.max_len to what it was started with; "
                "if it keeps to max_new_tokens of the model's generation_config.json (vLLM: unless it was started with "
                "--generation-config vllm), set max_response_len to that"
            )
    elif end.finish == EngineFinish.STOP:
        said = end.stopped_at
        if isinstance(said, str):
            raise WireError(f"the response has stopped at the text {quoted(said)}, and april had not asked for that")
        if said is not None and said != last_token:
            raise WireError(f"the response has stopped at token {said}, and its last token is {last_token}")
        if eos_token_ids and last_token not in eos_token_ids and last_token not in sampling.stop_token_ids:
            raise WireError(
                f"the response has stopped, but its last token ({last_token}) is neither EOS nor a stop token; if it "
                f"ends responses, add it to engine.eos_token_ids ({sorted(eos_token_ids)}), or where the trainer has "
                "the servers to eos_token_id of the model's generation_config.json"
            )
        if count < sampling.min_tokens:
            raise WireError(f"the response has stopped after {count} tokens where min_tokens is {sampling.min_tokens}")
