"""The OpenAI completions route with token ids: what is sent, and what the events of its stream say.

Three ways are known in which such a server hands over the ids of the tokens that it made. ``extra`` keys are refused by
TensorRT-LLM and ignored by others, so every way has a request of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from april.core.versions import PolicyVersion
from april.engines.http.server_json import NotJson, read_with
from april.engines.http.wire_arrays import chunk_of
from april.engines.http.wire_errors import failure_said
from april.engines.protocol import Chunk, EngineFinish, Int32, Request
from april.errors import EngineError, WireError
from april.server_text import quoted

ROUTE = "/v1/completions"


class TokenShape(StrEnum):
    """How the ids of generated tokens come."""

    RETURN_TOKEN_IDS = "return_token_ids"  # noqa: S105 - a name on the wire, not a secret
    """``return_token_ids: true`` (vLLM): choices have token_ids; the first event repeats the prompt's ids."""
    DETOKENIZE = "detokenize"
    """``detokenize: false`` (TensorRT-LLM): choices have token_ids in place of text."""
    STRINGS = "return_tokens_as_token_ids"
    """``return_tokens_as_token_ids: true`` (older vLLM): tokens beside log-probabilities are "token_id:400"."""


# what each way needs beside the common part. logprobs 0 is the sampled token alone; TensorRT-LLM takes 0 for none
_EXTRA: dict[TokenShape, dict[str, Any]] = {
    TokenShape.RETURN_TOKEN_IDS: {"return_token_ids": True, "logprobs": 0},
    # without include_stop_str_in_output a stop id is cut off the ids; EOS never is
    TokenShape.DETOKENIZE: {"detokenize": False, "logprobs": 1, "include_stop_str_in_output": True},
    TokenShape.STRINGS: {"return_tokens_as_token_ids": True, "logprobs": 1},
}
# spelled out, for a server may have other defaults out of the model's generation_config.json
_NEUTRAL: dict[str, Any] = {
    "n": 1,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "stream": True,
    "stream_options": {"include_usage": True},
}
_FINISHES = {
    "stop": EngineFinish.STOP,
    "length": EngineFinish.LENGTH,
    # the server ended it for reasons of its own; what came is good, and goes on elsewhere
    "abort": EngineFinish.ABORT,
    "cancelled": EngineFinish.ABORT,
    "timeout": EngineFinish.ABORT,
}
_DONE = b"[DONE]"
_ID_PREFIX = "token_id:"


def completion_body(model: str, shape: TokenShape, request: Request, **changes: Any) -> bytes:
    """The JSON of one streamed request; ``changes`` are keys that replace others."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.token_ids.tolist(),
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        **_NEUTRAL,
        **_EXTRA[shape],
    }
    if sampling.stop_token_ids:
        body["stop_token_ids"] = sampling.stop_token_ids
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    return msgspec.json.encode(body | changes)


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float] = []


class _NamedLogprobs(_Logprobs):
    tokens: list[str] = []


class _Choice(msgspec.Struct):
    index: int = 0
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None


class _NamedChoice(_Choice):
    logprobs: _NamedLogprobs | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None


class _NamedEvent(msgspec.Struct):
    choices: list[_NamedChoice] | None = None
    usage: _Usage | None = None


_DECODER = msgspec.json.Decoder(_Event)
_NAMED_DECODER = msgspec.json.Decoder(_NamedEvent)


class CompletionStream:
    """One answer, event by event. What it has read is taken as chunks; an event that cannot be true adds nothing.

    Args:
        prompt: ids that were sent, [P] int32; compared with what the server repeats, where it does.
    """

    def __init__(self, shape: TokenShape, prompt: Int32) -> None:
        self._decoder: msgspec.json.Decoder[Any] = (
            _NAMED_DECODER if shape is TokenShape.STRINGS else _DECODER
        )
        self._prompt = prompt
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self.count = 0
        """Tokens read so far."""
        self.finish: EngineFinish | None = None
        """Why generation ended, once the server has said it."""
        self.stopped_at: int | str | None = None
        """What it stopped at, where it says so."""
        self.done = False
        """The server has said that nothing more comes."""

    def read(self, payload: bytes) -> None:
        """One event.

        Raises:
            WireError: it is no such event, has numbers that cannot be true, or comes after the end.
            EngineError: the server says that it failed.
        """
        if self.done:
            raise WireError("an event came after [DONE]")
        if payload == _DONE:
            self.done = True
            return
        try:
            event = read_with(self._decoder, payload)
        except NotJson as error:
            raise WireError(f"an event of {len(payload)} bytes is no completion: {error}") from None
        if event.choices is None and event.usage is None:
            raise failure_said(payload, "the stream was broken off")
        for choice in event.choices or ():
            self._choice(choice)
        if event.usage is not None:
            self._check_usage(event.usage)

    def take(self, version: PolicyVersion) -> Chunk | None:
        """What was read since the last call, if anything."""
        if not self._tokens:
            return None
        tokens, logprobs = self._tokens, self._logprobs
        self._tokens, self._logprobs = [], []
        return chunk_of(tokens, logprobs, version)

    def _choice(self, choice: _Choice) -> None:
        tokens = _token_ids(choice)
        logprobs = choice.logprobs.token_logprobs if choice.logprobs is not None else []
        if len(tokens) != len(logprobs):
            raise WireError(f"{len(tokens)} tokens came with {len(logprobs)} log-probabilities")
        if choice.index:
            raise WireError(f"a response number {choice.index} came where one was asked for")
        if self.finish is not None and (tokens or choice.finish_reason is not None):
            again = "" if choice.finish_reason is None else "another end and "
            raise WireError(f"{again}{len(tokens)} tokens came after the finish reason {self.finish}")
        if choice.prompt_token_ids is not None and not _equal(choice.prompt_token_ids, self._prompt):
            raise WireError("the server generated from other prompt ids than it was sent")
        if tokens:
            self._tokens += tokens
            self._logprobs += logprobs
            self.count += len(tokens)
        if choice.finish_reason is not None:
            finish = _FINISHES.get(choice.finish_reason)
            if finish is None:
                raise EngineError(f"the server ended the response for the reason {quoted(choice.finish_reason)}")
            self.finish, self.stopped_at = finish, choice.stop_reason

    def _check_usage(self, usage: _Usage) -> None:
        asked, said = usage.prompt_tokens, usage.completion_tokens
        if asked is not None and asked != len(self._prompt):
            raise WireError(f"the server answers a prompt of {asked} tokens, and {len(self._prompt)} were sent")
        if said is not None and self.finish is not None and said != self.count:
            raise WireError(
                f"the server made {said} tokens and handed over {self.count}; does it keep the EOS or stop token back?"
            )


def _token_ids(choice: _Choice) -> list[int]:
    if isinstance(choice, _NamedChoice) and choice.logprobs is not None:
        return [_named_id(name) for name in choice.logprobs.tokens]
    return choice.token_ids or []


def _named_id(name: str) -> int:
    digits = name.removeprefix(_ID_PREFIX)
    if digits == name or not digits.isdecimal():
        raise WireError(f"a token must be named token_id:<number>, got {len(name)} characters of text")
    return int(digits)


def _equal(ids: Sequence[int], prompt: Int32) -> bool:
    return len(ids) == len(prompt) and bool(np.array_equal(np.asarray(ids), prompt))
