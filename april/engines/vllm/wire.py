"""Builds requests for vLLM's route with token ids, and parses the responses and the weight versions in them.

Whether a stream is complete is decided for all servers in ``http/response_reader.py`` and ``http/response_stream.py``.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from april.core.attachments import NO_EXTRAS, Extras, collapsed
from april.engines.http.response_reader import Parser, ResponseEnd, ResponsePart, require_prompt
from april.engines.http.sent_attachments import Urls
from april.engines.http.token_rows import InvalidRows, Routing, experts_of_npy
from april.engines.http.weight_labels import Span
from april.engines.openai.wire import STREAMED, Usage, counted, finish_of, sampling_of
from april.engines.protocol import ROUTED_EXPERTS, Request
from april.errors import RequestRefused

TOKEN_ROUTE = "/inference/v1/generate"  # noqa: S105 - a path, not a secret


def engine_id(attempt_id: str) -> str:
    """Return the id that an abort of the request must name, because vLLM silently ignores unknown ids."""
    return f"generate-tokens-{attempt_id}"


PARTS = {"image": "image_url"}
"""Part type on the token route for each kind of attachment."""
_MISSES = re.compile(r"\bCache miss for\b.*\bdata is not provided")


def misses_attachment(error: RequestRefused) -> bool:
    """Return whether the server refused an attachment that was sent by digest, because it does not have the bytes."""
    return _MISSES.search(str(error)) is not None


def request_body(
    model: str, request: Request, *, stream: bool, priority: bool, bans: bool = True, seeds: bool = True, salt: str,
    urls: Urls | None = None,
) -> bytes:  # fmt: skip
    """Return the JSON body of a request.

    Only requests with the same ``salt`` share entries of the prefix cache. ``urls`` holds the attachments whose bytes
    the server lacks. Every attachment is named by its digest, so that the server never confuses two of them.
    """
    body: dict[str, Any] = {
        "model": model, "request_id": request.attempt_id, "stream": False, "cache_salt": salt,
        "token_ids": collapsed(request.token_ids, request.attached).tolist(),
        # ``logprobs: 0`` returns the log-probability of the sampled token alone
        "sampling_params": sampling_of(request, bans=bans, seeds=seeds) | {"logprobs": 0, "ignore_eos": False},
    }  # fmt: skip
    body |= STREAMED if stream else {}
    if priority:
        body["priority"] = request.priority
    if request.attached:
        # makes the first event show the ids to which the server expanded the prompt
        body |= {"content_parts": _parts(request, urls or {}), "return_token_ids": True}
    return msgspec.json.encode(body)


def _parts(request: Request, urls: Urls) -> list[dict[str, Any]]:
    attachments = [placed.attachment for placed in request.attached]
    return [{"type": PARTS[a.kind], "url": urls.get(a.digest), "uuid": a.digest} for a in attachments]


class _TokenLogprob(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[Span] | None = None
    logprobs: _Logprobs | None = None
    routed_experts: str | None = None
    """Base64 of a numpy file with one row for each token except the conversation's last; only in the last event."""


class TokenReply(msgspec.Struct):
    """Response of the token route, or one event of its stream."""

    choices: list[_Choice] | None = None
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


_NOTHING = _Choice()


class TokenParser(Parser[TokenReply]):
    """Parser for the token route. The last event says which weights generated which tokens (``weight_versions``).

    If a prompt has images, the server must return the ids to which it expanded the prompt. ``routing`` is the shape
    that routed experts must have; None if unknown.
    """

    __slots__ = ("_prompt_due", "_routing")

    decoder, list_decoder = msgspec.json.Decoder(TokenReply), msgspec.json.Decoder(list[TokenReply])

    def __init__(self, request: Request, routing: Routing | None = None) -> None:
        super().__init__(request)
        self._routing = routing
        self._prompt_due = bool(request.attached)
        """True until the server has shown the ids of a prompt with attachments."""

    def piece(self, event: TokenReply, payload: bytes, had: int) -> ResponsePart:
        choices, usage = event.choices, event.usage
        if choices is None:
            raise self.failed(payload)
        choice = choices[0] if choices else _NOTHING
        if choice.index or len(choices) > 1:
            raise self.wrong("has a second response, but april asked for one")
        if self._prompt_due and (choice.token_ids or event.prompt_token_ids is not None):
            if event.prompt_token_ids is None:
                raise self.wrong("does not contain the ids of its expanded prompt (return_token_ids)")
            require_prompt(self, event.prompt_token_ids)
            self._prompt_due = False
        ids = choice.token_ids or []
        content = choice.logprobs.content or [] if choice.logprobs is not None else []
        if len(content) == 1:  # the usual case, for which the loops below would be slow
            named, logprobs = [content[0].token_id], [content[0].logprob]
        else:
            named, logprobs = [one.token_id for one in content], [one.logprob for one in content]
        if named != ids and len(named) == len(ids):
            raise self.wrong("has log-probabilities of tokens other than its ids")
        piece = ResponsePart(ids, logprobs)
        if choice.finish_reason is not None:
            reason = finish_of(self.attempt_id, choice.finish_reason)
            piece.end = ResponseEnd(reason, choice.stop_reason, choice.weight_versions or [], self._extras(choice))
        return piece if usage is None else counted(piece, usage)

    def _extras(self, choice: _Choice) -> Extras:
        """Return the routed experts of the conversation, or none if they were not requested but sent all the same."""
        if ROUTED_EXPERTS not in self.request.extras or choice.routed_experts is None:
            return NO_EXTRAS
        try:
            return {ROUTED_EXPERTS: experts_of_npy(choice.routed_experts, self._routing)}
        except InvalidRows as wrong:
            raise self.wrong(f"has {wrong}") from None
