"""What vLLM servers are sent and say: the token route with version spans, and the completions route without.

Invariant: ``ReplyReader.count`` tokens were handed over, each once, under weights that the server confirms where it
has a word for them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from april.core.versions import PolicyVersion
from april.engines.http.reply_reader import AnswerReader
from april.engines.http.weight_labels import WeightLabels
from april.engines.http.wire_errors import failure_said
from april.engines.protocol import Chunk, EngineFinish, Request
from april.errors import EngineError
from april.server_text import quoted

TOKEN_ROUTE = "/inference/v1/generate"  # noqa: S105 - a path, not a secret
COMPLETIONS_ROUTE = "/v1/completions"
_FINISHES = {"stop": EngineFinish.STOP, "length": EngineFinish.LENGTH, "abort": EngineFinish.ABORT}


def engine_id(route: str, attempt_id: str) -> str:
    """The id under which the engine behind a route knows a request; an abort of any other is silently ignored."""
    return f"generate-tokens-{attempt_id}" if route == TOKEN_ROUTE else f"cmpl-{attempt_id}-0"


def request_body(
    route: str, model: str, request: Request, *, stream: bool, priority: bool, seeds: bool = True
) -> bytes:
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
    if sampling.seed is not None and seeds:
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
    index: int = 0
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[_Span] | None = None


class _TokenChoice(_Choice):
    logprobs: _TokenLogprobs | None = None


class _TextChoice(_Choice):
    logprobs: _TextLogprobs | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
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


class ReplyReader(AnswerReader[_TokenReply | _TextReply]):
    """Reads the answer to one request of either route; version spans come with the last event."""

    __slots__ = ()

    def __init__(
        self, route: str, attempt_id: str, version: PolicyVersion, *, labels: WeightLabels | None,
        prompt_tokens: int | None = None,
    ) -> None:  # fmt: skip
        decoder: msgspec.json.Decoder[Any] = TOKEN_DECODER if route == TOKEN_ROUTE else _TEXT_DECODER
        together: msgspec.json.Decoder[Any] = _TOKEN_LIST_DECODER if route == TOKEN_ROUTE else _TEXT_LIST_DECODER
        super().__init__(attempt_id, version, labels, decoder, together, prompt_tokens)

    def _reply(self, reply: _TokenReply | _TextReply, payload: bytes, chunks: list[Chunk]) -> None:
        if reply.choices is None:
            raise failure_said(payload, f"attempt {self._attempt_id}")
        for choice in reply.choices:
            self._choice(choice, chunks)
        if reply.usage is not None:
            self._check_prompt(reply.usage.prompt_tokens)
            said = reply.usage.completion_tokens
            if said is not None and self.finish is not None and self.failure is None and said != self.count:
                raise self._wrong(f"says {said} tokens and came with {self.count}")

    def _choice(self, choice: _TokenChoice | _TextChoice, chunks: list[Chunk]) -> None:
        ids = choice.token_ids or []
        if choice.index:
            raise self._wrong(f"has a response number {choice.index}, and one was asked for")
        if self.finish is not None and (ids or choice.finish_reason is not None):
            again = "" if choice.finish_reason is None else "another end and "
            raise self._wrong(f"has {again}{len(ids)} tokens more after it ended")
        logprobs = self._logprobs(choice, ids)
        if choice.finish_reason is None:
            self._gather(ids, logprobs)
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

    def _end(self, choice: _Choice, ids: list[int], logprobs: list[float]) -> list[Chunk]:
        finish = _FINISHES.get(choice.finish_reason or "")
        spans = choice.weight_versions or []
        chunks = self._whole(ids, logprobs) if self._labels is None else self._in_spans(spans, ids, logprobs)
        self.count += len(ids)
        if self.failure is not None:
            return chunks
        if finish is None:
            self.failure = EngineError(
                f"attempt {self._attempt_id}: the server ended the response for the reason "
                f"{quoted(choice.finish_reason)}"
            )
            return chunks
        return self._end_with(chunks, finish, choice.stop_reason)
