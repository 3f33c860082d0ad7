"""What SGLang servers say, as typed values: answers of ``/generate`` become chunks, or a sentence on what is wrong.

Invariant: ``ReplyReader.count`` tokens were handed over, each once. An answer is read from that offset on: what the
server repeats (cumulative streams, the echo of the last token at an abort) is dropped; what it takes back is an error.
"""

from __future__ import annotations

from typing import Any

import msgspec

from april.core.versions import PolicyVersion
from april.engines.http.reply_reader import AnswerReader
from april.engines.http.weight_labels import WeightLabels
from april.engines.http.wire_errors import failure_of, failure_said
from april.engines.protocol import Chunk, EngineFinish, Request
from april.errors import WireError
from april.server_text import quoted, said


class Finish(msgspec.Struct, gc=False):
    """``finish_reason``; ``matched`` is what stopped it (a string also where the model gave NaN); ``status_code`` is
    set where the server gave the request up (a time limit, for instance)."""

    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None


class Span(msgspec.Struct, gc=False):
    """Tokens [start, end) of the reply were generated under ``version``."""

    version: str
    start: int
    end: int


class Scored(msgspec.Struct, array_like=True, gc=False):
    """One token; what follows in the list (its text) is not looked at."""

    logprob: float
    token: int


class Meta(msgspec.Struct):
    """``meta_info``; replies to requests that were aborted in the queue lack many keys."""

    id: str
    finish_reason: Finish | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    weight_version: str | None = None
    weight_versions: list[Span] | None = None
    output_token_logprobs: list[Scored] = []


class Reply(msgspec.Struct):
    """One answer, or one event of a stream; errors come as events, too."""

    output_ids: list[int] = []
    meta_info: Meta | None = None


DECODER = msgspec.json.Decoder(Reply)
_LIST_DECODER = msgspec.json.Decoder(list[Reply])
_FINISHES = {"stop": EngineFinish.STOP, "length": EngineFinish.LENGTH, "abort": EngineFinish.ABORT}


def rid_of(attempt_id: str) -> str:
    """Name of an attempt at the server, which aborts all that begin alike: with its end marked, no other one does."""
    return f"{attempt_id}."


def request_body(request: Request, *, stream: bool, stream_interval: int | None, seed: int | None) -> bytes:
    """JSON for ``/generate``.

    All that changes the distribution is explicit, or the server would take its own or the model's defaults.
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        # ignore_eos would switch the stop ids off as well
        "ignore_eos": False,
    }
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if seed is not None:
        params["sampling_seed"] = seed
    if stream_interval is not None:
        params["stream_interval"] = stream_interval
    body = {
        "rid": rid_of(request.attempt_id),
        "input_ids": request.token_ids.tolist(),
        "sampling_params": params,
        "return_logprob": True,
        "stream": stream,
    }
    return msgspec.json.encode(body)


class ReplyReader(AnswerReader[Reply]):
    """Reads the answers to one request, in order.

    Args:
        attempt_id: which the answers must name.
        incremental: each event of the stream has the new tokens only; otherwise all tokens so far.
    """

    __slots__ = ("_held_ids", "_held_logprobs", "_incremental")

    def __init__(
        self, attempt_id: str, version: PolicyVersion, *, incremental: bool, labels: WeightLabels | None,
        prompt_tokens: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(attempt_id, version, labels, DECODER, _LIST_DECODER, prompt_tokens)
        self._incremental = incremental
        # tokens that came under another label than the request was sent with: the last event says whose they are.
        # They are not in ``count`` yet
        self._held_ids: list[int] = []
        self._held_logprobs: list[float] = []

    def _reply(self, reply: Reply, payload: bytes, chunks: list[Chunk]) -> None:
        meta = reply.meta_info
        if meta is None:
            raise failure_said(payload, f"attempt {self._attempt_id}")
        if meta.id != rid_of(self._attempt_id):
            raise WireError(f"attempt {self._attempt_id} got the answer of {quoted(meta.id)}")
        if self.finish is not None or self.failure is not None:
            raise WireError(f"attempt {self._attempt_id}: an answer came after the one that ended the request")
        self._check_prompt(meta.prompt_tokens)
        ids, logprobs = self._fresh(reply, meta)
        if meta.finish_reason is not None:
            self._flush(chunks)
            chunks += self._end(meta, meta.finish_reason, ids, logprobs)
        elif self._held_ids or (self._label and meta.weight_version not in (None, self._label)):
            self._held_ids += ids
            self._held_logprobs += logprobs
        else:
            self._gather(ids, logprobs)

    def _fresh(self, reply: Reply, meta: Meta) -> tuple[list[int], list[float]]:
        """Token ids and log-probabilities behind those that were read before."""
        ids, scored = reply.output_ids, meta.output_token_logprobs
        had = self.count + len(self._held_ids)
        aborted = meta.finish_reason is not None and meta.finish_reason.type == "abort"
        total = meta.completion_tokens
        if total is None:
            # old servers do not count for requests aborted in the queue, where nothing new comes; without a count
            # nobody could tell new tokens from repeated ones
            if not aborted:
                raise self._wrong("does not say how many tokens there are")
            total = had if self._incremental else len(ids)
        new = total - had
        if new < 0:
            raise self._wrong(f"had {had} tokens and now has {total}")
        if not self._incremental:
            # an event of the stream repeats everything
            ids, scored = (ids[had:], scored[had:]) if had else (ids, scored)
        if aborted and len(ids) == new + 1:
            # the abort's own event repeats the last token, or has one that nobody counted
            ids = ids[:new]
        if aborted and len(scored) > new:
            # and all log-probabilities once more, even where the stream is incremental
            scored = scored[:new]
        if len(ids) != new or len(scored) != new:
            raise self._wrong(
                f"says {total} tokens, {had} of them known, and came with {len(ids)} ids and {len(scored)} "
                "log-probabilities of new ones"
            )
        if not new:
            return [], []
        if [one.token for one in scored] != ids:
            raise self._wrong("has log-probabilities of other tokens than its ids")
        return ids, [one.logprob for one in scored]

    def _end(self, meta: Meta, finish: Finish, ids: list[int], logprobs: list[float]) -> list[Chunk]:
        """The last tokens, split by the weights that made them."""
        if self._held_ids:
            ids, logprobs = self._held_ids + ids, self._held_logprobs + logprobs
        chunks = self._by_version(meta, ids, logprobs)
        self.count += len(ids)
        if self.failure is not None:
            return chunks
        status = finish.status_code
        if finish.type == "abort" and status is not None and 400 <= status < 600:
            self.failure = failure_of(
                status, f"the server gave the request up ({status}): {said(finish.message or 'nothing')}"
            )
            return chunks
        reason = _FINISHES.get(finish.type)
        if reason is None:
            self.failure = WireError(f"attempt {self._attempt_id}: unknown finish reason {quoted(finish.type)}")
            return chunks
        matched = finish.matched
        return self._end_with(chunks, reason, None if isinstance(matched, list) else matched)

    def _by_version(self, meta: Meta, ids: list[int], logprobs: list[float]) -> list[Chunk]:
        if not ids and not self.count:
            return []
        if self._labels is not None and meta.weight_versions:
            return self._in_spans(meta.weight_versions, ids, logprobs)
        if self._labels is not None and (meta.weight_version not in (None, self._label) or self._held_ids):
            self.failure = self._foreign(meta.weight_version or "none")
            return []
        return self._whole(ids, logprobs)
