"""Builds requests for the OpenAI completions route with token ids, and parses the events of its stream.

Servers return the ids of generated tokens if a request has ``return_token_ids: true`` (the first event then repeats the
prompt's ids), and TensorRT-LLM if it has ``detokenize: false``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from april.engines.http.response_reader import Parser, ResponseEnd, ResponsePart
from april.engines.http.weight_labels import Span
from april.engines.protocol import EngineFinish, Request
from april.errors import EngineError
from april.text.server_text import quoted

ROUTE = "/v1/completions"
# set explicitly, because a server may take other defaults from the model's generation_config.json
_NEUTRAL: dict[str, Any] = {
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
_FINISHES = {
    "stop": EngineFinish.STOP,
    "length": EngineFinish.LENGTH,
    # the server ended the request for its own reasons; the tokens are valid, and april sends the rest as a new request
    "abort": EngineFinish.ABORT,
    "cancelled": EngineFinish.ABORT,
    "timeout": EngineFinish.ABORT,
}
_TRTLLM: dict[str, Any] = {
    "detokenize": False,
    "logprobs": 1,  # 0 would return no log-probabilities
    "include_stop_str_in_output": True,  # otherwise the ids lack the stop id at which a response ended
}
"""Request keys for token ids from TensorRT-LLM, which refuses unknown keys such as ``return_token_ids``."""


def completion_body(
    model: str, request: Request, *, is_trtllm: bool = False, bans: bool = False, seeds: bool = True, salt: str = "",
) -> bytes:  # fmt: skip
    """Return the JSON body of one streamed request.

    Only requests with the same ``salt`` share entries of the prefix cache. TensorRT-LLM accepts no salts on this route.
    """
    params = sampling_of(request, bans=bans, seeds=seeds)
    asked = _TRTLLM if is_trtllm else {
        "return_token_ids": True,
        "logprobs": 0,  # the log-probability of the sampled token alone
        "return_weight_versions": True,  # returned at the end of a response by vLLM 0.33 and later
        **({"cache_salt": salt} if salt else {}),
    }  # fmt: skip
    body = {"model": model, "prompt": request.token_ids.tolist(), "n": 1, **params, **STREAMED, **asked}
    return msgspec.json.encode(body)


NEVER = -100.0
"""Logit bias that prevents a token from being sampled; the strongest that servers accept."""


def bias_of(banned_ids: Sequence[int]) -> dict[str, float]:
    """Return the ``logit_bias`` that bans these ids."""
    return {str(token): NEVER for token in banned_ids}


def sampling_of(request: Request, *, bans: bool, seeds: bool) -> dict[str, Any]:
    """Return the sampling settings of a request as JSON keys, with everything explicit that affects the distribution.

    ``bans`` is True if the server supports banned ids, ``seeds`` if a seed does not crash the server.
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        **_NEUTRAL,
    }
    if sampling.stop_token_ids:
        params["stop_token_ids"] = sampling.stop_token_ids
    if sampling.stop:  # april finds stop strings in text that includes special tokens, so the server must, too
        params |= {"stop": sampling.stop, "skip_special_tokens": False}
    if seeds and sampling.seed is not None:
        params["seed"] = sampling.seed
    if bans and sampling.banned_ids:
        params["logit_bias"] = bias_of(sampling.banned_ids)
    if sampling.grammar:
        params["structured_outputs"] = structured_outputs_of(*sampling.demanded_form)
    return params


def structured_outputs_of(name: str, value: Any) -> dict[str, Any]:
    """Return vLLM's ``structured_outputs`` for the grammar that a response must follow."""
    return {"json": value} if name == "json_schema" else {name: msgspec.json.encode(value).decode()}


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    weight_versions: list[Span] | None = None


class _PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts reported by the server."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptTokensDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Usage | None = None


_NOTHING = _Choice()


def counted(piece: ResponsePart, usage: Usage) -> ResponsePart:
    """Store the server's token counts in the piece, and return it."""
    piece.prompt_tokens, piece.total = usage.prompt_tokens, usage.completion_tokens
    if usage.prompt_tokens_details is not None:
        piece.cached_tokens = usage.prompt_tokens_details.cached_tokens
    return piece


def finish_of(attempt_id: str, reason: str) -> EngineFinish | EngineError:
    """Return the finish reason, or an error if april does not know it."""
    known = _FINISHES.get(reason)
    if known is None:
        return EngineError(f"attempt {attempt_id}: the server ended the response for the reason {quoted(reason)}")
    return known


class CompletionParser(Parser[_Event]):
    """Parser for the completions route."""

    __slots__ = ()

    decoder, list_decoder = msgspec.json.Decoder(_Event), msgspec.json.Decoder(list[_Event])

    def piece(self, event: _Event, payload: bytes, had: int) -> ResponsePart:
        choices, usage = event.choices, event.usage
        if choices is None and usage is None:
            raise self.failed(payload)
        choice = choices[0] if choices else _NOTHING
        if choice.index or (choices and len(choices) > 1):
            raise self.wrong("has a second response, but april asked for one")
        said = choice.prompt_token_ids
        if said is not None and not np.array_equal(said, self.request.token_ids):
            raise self.wrong("belongs to other prompt ids than were sent")
        logprobs = choice.logprobs.token_logprobs or [] if choice.logprobs is not None else []
        piece = ResponsePart(choice.token_ids or [], logprobs)
        if choice.finish_reason is not None:
            reason = finish_of(self.attempt_id, choice.finish_reason)
            piece.end = ResponseEnd(reason, choice.stop_reason, choice.weight_versions)
        return piece if usage is None else counted(piece, usage)
