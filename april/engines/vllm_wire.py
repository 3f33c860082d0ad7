"""What vLLM servers are sent and say: the token route with version spans, and the completions route without.

Invariant: ``ReplyReader.count`` tokens were handed over, each once, under weights that the server confirms where it
has a word for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from april.core.versions import PolicyVersion
from april.engines.protocol import Chunk, EngineFinish, Request
from april.engines.weight_labels import WeightLabels, cover, foreign_weights
from april.engines.wire_arrays import chunk_of, empty_chunk
from april.engines.wire_errors import failure_said
from april.errors import EngineError, WireError

TOKEN_ROUTE = "/inference/v1/generate"  # noqa: S105 - a path, not a secret
COMPLETIONS_ROUTE = "/v1/completions"
_FINISHES = {"stop": EngineFinish.STOP, "length": EngineFinish.LENGTH, "abort": EngineFinish.ABORT}


def engine_id(route: str, attempt_id: str) -> str:
    """The id under which the engine behind a route knows a request; an abort of any other is silently ignored."""
    return f"generate-tokens-{attempt_id}" if route == TOKEN_ROUTE else f"cmpl-{attempt_id}-0"


def request_body(route: str, model: str, request: Request, *, stream: bool, priority: bool) -> bytes:
    """JSON for either route.

    Everything that changes the distribution is explicit, or the server would take the model's own defaults;
    ``logprobs`` 0 is the sampled token alone.
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 0,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "ignore_eos": False,
    }
    if sampling.stop_token_ids:
        params["stop_token_ids"] = sampling.stop_token_ids
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    body: dict[str, Any] = {"model": model, "request_id": request.attempt_id, "stream": stream}
    if priority:
        body["priority"] = request.priority
    if stream:
        body["stream_options"] = {"include_usage": True}
    if route == TOKEN_ROUTE:
        body |= {"token_ids": request.token_ids.tolist(), "sampling_params": params}
    else:
        body |= {"prompt": request.token_ids.tolist(), "return_token_ids": True, **params}
    return msgspec.json.encode(body)


class _Span(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class _Scored(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _TokenLogprobs(msgspec.Struct):
    content: list[_Scored] | None = None


class _TextLogprobs(msgspec.Struct):
    token_logprobs: list[float] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _TokenChoice(_Choice):
    logprobs: _TokenLogprobs | None = None


class _TextChoice(_Choice):
    logprobs: _TextLogprobs | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _TokenReply(msgspec.Struct):
    choices: list[_TokenChoice] | None = None
    usage: _Usage | None = None


class _TextReply(msgspec.Struct):
    choices: list[_TextChoice] | None = None
    usage: _Usage | None = None


TOKEN_DECODER = msgspec.json.Decoder(_TokenReply)
_TOKEN_LIST_DECODER = msgspec.json.Decoder(list[_TokenReply])
_TEXT_DECODER = msgspec.json.Decoder(_TextReply)
_TEXT_LIST_DECODER = msgspec.json.Decoder(list[_TextReply])


class ReplyReader:
    """Reads the answer to one request, whole or event by event.

    Args:
        version: of the weights when the request was sent.
        labels: of the engine, where the server says at the end which weights made which token; otherwise all tokens
            are ``version``'s.
    """

    def __init__(self, route: str, attempt_id: str, version: PolicyVersion, *, labels: WeightLabels | None) -> None:
        self._decoder: msgspec.json.Decoder[_TokenReply] | msgspec.json.Decoder[_TextReply] = (
            TOKEN_DECODER if route == TOKEN_ROUTE else _TEXT_DECODER
        )
        self._list_decoder: msgspec.json.Decoder[list[_TokenReply]] | msgspec.json.Decoder[list[_TextReply]] = (
            _TOKEN_LIST_DECODER if route == TOKEN_ROUTE else _TEXT_LIST_DECODER
        )
        self._attempt_id = attempt_id
        self._version = version
        self._labels = labels
        # tokens that are no chunk yet; nothing outside of a call sees any
        self._ids: list[int] = []
        self._scores: list[float] = []
        self.count = 0
        """Tokens handed over."""
        self.finish: EngineFinish | None = None
        """Why generation ended, once the server has said it."""
        self.failure: EngineError | None = None
        """To be raised once the chunks that came with it are handed over."""

    def read_all(self, payloads: list[bytes]) -> list[Chunk]:
        """:meth:`read` of several; where one is wrong, those before it count, and ``failure`` says what is wrong."""
        chunks: list[Chunk] = []
        try:
            for payload, reply in zip(payloads, self._decoded(payloads), strict=False):
                self._reply(reply, payload, chunks)
                if self.failure is not None:
                    break
        except EngineError as error:
            self.failure = error
        self._flush(chunks)
        return chunks

    def _decoded(self, payloads: list[bytes]) -> Iterable[_TokenReply | _TextReply]:
        """Many small answers cost less in one go; if one of them cannot be read, each has its own turn."""
        if len(payloads) > 1:
            try:
                replies = self._list_decoder.decode(b"[%b]" % b",".join(payloads))
            except (msgspec.DecodeError, UnicodeDecodeError):
                replies = []
            if len(replies) == len(payloads):  # a broken one may be two values, or half of one
                return replies
        return map(self._decode, payloads)

    def _decode(self, payload: bytes) -> _TokenReply | _TextReply:
        try:
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WireError(f"attempt {self._attempt_id}: the server's answer cannot be read: {error}") from None

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

    def _reply(self, reply: _TokenReply | _TextReply, payload: bytes, chunks: list[Chunk]) -> None:
        if reply.choices is None:
            raise failure_said(payload, f"attempt {self._attempt_id}")
        for choice in reply.choices:
            self._choice(choice, chunks)
        if reply.usage is not None:
            said = reply.usage.completion_tokens
            if said is not None and self.finish is not None and self.failure is None and said != self.count:
                raise self._wrong(f"says {said} tokens and came with {self.count}")

    def _choice(self, choice: _TokenChoice | _TextChoice, chunks: list[Chunk]) -> None:
        ids = choice.token_ids or []
        if ids and self.finish is not None:
            raise self._wrong(f"has {len(ids)} tokens more after it ended")
        logprobs = self._logprobs(choice, ids)
        if choice.finish_reason is None:
            self.count += len(ids)
            self._ids += ids
            self._scores += logprobs
        else:
            self._flush(chunks)
            chunks += self._end(choice, ids, logprobs)

    def _logprobs(self, choice: _TokenChoice | _TextChoice, ids: list[int]) -> list[float]:
        """Of these ids; none where the server has sent none."""
        said = choice.logprobs
        if isinstance(said, _TokenLogprobs):
            content = said.content or []
            if len(content) == len(ids) and [scored.token_id for scored in content] != ids:
                raise self._wrong("has log-probabilities of other tokens than its ids")
            logprobs = [scored.logprob for scored in content]
        else:
            logprobs = (said.token_logprobs if said is not None else None) or []
        if len(ids) != len(logprobs):
            raise self._wrong(f"has {len(ids)} tokens with {len(logprobs)} log-probabilities")
        return logprobs

    def _flush(self, chunks: list[Chunk]) -> None:
        """Tokens of several events are one chunk."""
        if self._ids:
            ids, scores = self._ids, self._scores
            self._ids, self._scores = [], []
            chunks.append(chunk_of(ids, scores, self._version))

    def _end(self, choice: _Choice, ids: list[int], logprobs: list[float]) -> list[Chunk]:
        finish = _FINISHES.get(choice.finish_reason or "")
        chunks = self._by_version(choice.weight_versions or [], ids, logprobs)
        self.count += len(ids)
        if self.failure is not None:
            return chunks
        if finish is None:
            self.failure = EngineError(
                f"attempt {self._attempt_id}: the server ended the response for the reason {choice.finish_reason!r}"
            )
            return chunks
        self.finish = finish
        if not chunks:
            return [empty_chunk(self._version, finish)]
        last = chunks[-1]
        return [*chunks[:-1], Chunk(last.tokens, last.logprobs, last.version, finish)]

    def _by_version(self, spans: list[_Span], ids: list[int], logprobs: list[float]) -> list[Chunk]:
        """The last tokens, split by the weights that made them; those before must be of the version at submission."""
        total = self.count + len(ids)
        if self._labels is None:
            return [chunk_of(ids, logprobs, self._version)] if ids else []
        if not cover(spans, total):
            raise self._wrong(f"has version spans that do not cover its {total} tokens one after the other")
        chunks: list[Chunk] = []
        for span in spans:
            version = self._labels.version_of(span.version, self._version)
            if version is None or (span.start < self.count and version != self._version):
                self.failure = foreign_weights(self._attempt_id, self._labels.of(self._version), span.version)
                return chunks
            start, end = max(span.start - self.count, 0), span.end - self.count
            if ids and end - start == len(ids):
                chunks.append(chunk_of(ids, logprobs, version))
            elif end > start:
                chunks.append(chunk_of(ids[start:end], logprobs[start:end], version))
        return chunks

    def _wrong(self, what: str) -> WireError:
        return WireError(f"attempt {self._attempt_id}: the server's answer {what}")

