"""Builds requests for ``/generate`` of SGLang servers, and parses the responses into typed values.

Events may repeat tokens of earlier events: all tokens in a cumulative stream, the last one at an abort. Such tokens are
dropped. An event that counts fewer tokens than were received is an error.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from april.core.attachments import NO_EXTRAS, Extras, collapsed
from april.engines.http.response_reader import Parser, ResponseEnd, ResponsePart, require_prompt
from april.engines.http.sent_attachments import Urls
from april.engines.http.token_rows import InvalidRows, Routing, experts_of_numbers
from april.engines.http.weight_labels import Span
from april.engines.http.wire import NotJson, failure_of, read_json
from april.engines.openai.wire import bias_of
from april.engines.protocol import ROUTED_EXPERTS, EngineFinish, Request
from april.errors import EngineError, WireError
from april.text.server_text import clean, quoted


class Finish(msgspec.Struct, gc=False):
    """``finish_reason`` of a response. ``matched`` is the stop token or stop string, or some text if the model returned
    NaN. ``status_code`` is set if the server gave up the request, for example because of a time limit."""

    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None


class TokenLogprob(msgspec.Struct, array_like=True, gc=False):
    """A token with its log-probability. On the wire this is a list; its third item, the token's text, is ignored."""

    logprob: float
    token: int


class Meta(msgspec.Struct):
    """``meta_info`` of a response; if a request was aborted in the queue, many keys are missing."""

    id: str
    finish_reason: Finish | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    weight_version: str | None = None
    weight_versions: list[Span] | None = None
    output_token_logprobs: list[TokenLogprob] = []
    routed_experts: str | None = None
    """Base64 of int32 rows, one for each token except the last one of the conversation; only in the last event."""


class Reply(msgspec.Struct):
    """Response, or one event of a stream; an error is sent as an event, too."""

    output_ids: list[int] = []
    meta_info: Meta | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    """Prompt ids, repeated in every event; empty unless they were requested."""


_FINISHES = {"stop": EngineFinish.STOP, "length": EngineFinish.LENGTH, "abort": EngineFinish.ABORT}


def rid_of(attempt_id: str) -> str:
    """Return the attempt's id at the server. It ends with a dot, because SGLang aborts all ids with a given prefix."""
    return f"{attempt_id}."


MAX_STOPS = 32
"""Maximum number of stop strings that SGLang accepts; if there are more, april finds all of them itself."""
FIELDS = {"image": "image_data"}
"""Request field for each kind of attachment."""


def request_body(
    request: Request, *, stream: bool, stream_interval: int | None, seed: int | None, adapter: str | None = None,
    urls: Urls | None = None, label: str = "", salt: str,
) -> bytes:  # fmt: skip
    """Return the JSON body for ``/generate``, with every sampling setting explicit.

    ``adapter`` is None for the model itself, ``urls`` holds all attachments, ``label`` names the weights. Only requests
    with the same ``salt`` share entries of the prefix cache.
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
        # ignore_eos would also disable the stop ids
        "ignore_eos": False,
    }
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if 0 < len(sampling.stop) <= MAX_STOPS:
        params["stop"] = list(sampling.stop)
    if seed is not None:
        params["sampling_seed"] = seed
    if stream_interval is not None:
        params["stream_interval"] = stream_interval
    if sampling.banned_ids:
        params["logit_bias"] = bias_of(sampling.banned_ids)
    if sampling.grammar:
        # ``name`` (json_schema or structural_tag) is also a parameter of SGLang, which takes JSON text
        name, form = sampling.demanded_form
        params[name] = msgspec.json.encode(form).decode()
    body: dict[str, Any] = {
        "rid": rid_of(request.attempt_id),
        "input_ids": collapsed(request.token_ids, request.attached).tolist(),
        "sampling_params": params,
        "return_logprob": True,
        "stream": stream,
        # used instead of cache_salt, which a router does not pass on
        "extra_key": salt,
    }
    if adapter is not None:
        body["lora_path"] = adapter
    if ROUTED_EXPERTS in request.extras:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.extras_from}
    if request.attached:
        attachments = [placed.attachment for placed in request.attached]
        for kind, field in FIELDS.items():
            body[field] = [(urls or {})[a.digest] for a in attachments if a.kind == kind]
        body["mm_hashes"] = [name_under(label, a.digest) for a in attachments]
        # some image processors decode the ids to text and encode the text again, which may silently change the ids
        body["return_prompt_token_ids"] = True
    return msgspec.json.encode(body)


def name_under(label: str, digest: str) -> str:
    """Return the name that the server gets for an attachment under the weights ``label``.

    SGLang caches encoded images by this name and empties that cache neither when weights are loaded nor when other
    caches are flushed. If the name did not depend on the weights, images encoded by old weights would be reused.
    """
    return hashlib.sha256(f"{label} {digest}".encode()).hexdigest()


class ReplyParser(Parser[Reply]):
    """Parser for ``/generate``. With ``incremental``, events contain only new tokens, otherwise all tokens so far.

    ``routing`` is the shape of routed experts; None if the server returns none. If a prompt has images, the ids that
    the server reports must be those to which april has expanded the prompt.
    """

    __slots__ = ("_incremental", "_prompt_due", "_rid", "_routing")

    decoder, list_decoder = msgspec.json.Decoder(Reply), msgspec.json.Decoder(list[Reply])
    count_may_follow = False

    def __init__(self, request: Request, *, incremental: bool, routing: Routing | None = None) -> None:
        super().__init__(request)
        self._incremental, self._routing = incremental, routing
        self._rid = rid_of(request.attempt_id)
        self._prompt_due = bool(request.attached)

    def piece(self, event: Reply, payload: bytes, had: int) -> ResponsePart:
        meta = event.meta_info
        if meta is None:
            raise self.failed(payload)
        if meta.id != self._rid:
            raise WireError(f"attempt {self.attempt_id} got the answer of {quoted(meta.id)}")
        if self._prompt_due and (said := bytes(event.prompt_token_ids)):
            self._require_prompt(said)
            self._prompt_due = False
        ids, logprobs = self._new_tokens(event, meta, had)
        end = None if meta.finish_reason is None else self._end(meta.finish_reason, meta)
        return ResponsePart(
            ids, logprobs, end, meta.weight_version, meta.prompt_tokens, cached_tokens=meta.cached_tokens
        )

    def _require_prompt(self, said: bytes) -> None:
        try:
            ids = read_json(said, list[int] | None)
        except NotJson as error:
            raise self.wrong(f"has prompt ids that cannot be read: {error}") from None
        if ids is not None:
            require_prompt(self, ids)

    def _new_tokens(self, reply: Reply, meta: Meta, had: int) -> tuple[list[int], list[float]]:
        """Return the ids and log-probabilities of the tokens that follow the ``had`` tokens of earlier events."""
        ids, scored = reply.output_ids, meta.output_token_logprobs
        aborted = meta.finish_reason is not None and meta.finish_reason.type == "abort"
        total = meta.completion_tokens
        if total is None:  # new and repeated tokens could not be told apart
            raise self.wrong("does not report how many tokens there are")
        new = total - had
        if new < 0:
            raise self.wrong(f"had {had} tokens and now has {total}")
        if not self._incremental:
            # every event repeats all tokens
            ids, scored = (ids[had:], scored[had:]) if had else (ids, scored)
        if aborted and len(ids) == new + 1:
            # the abort event repeats the last token, or contains one that is not counted
            ids = ids[:new]
        if aborted and len(scored) > new:
            # the abort event also repeats all log-probabilities, even in an incremental stream
            scored = scored[:new]
        if len(ids) != new or len(scored) != new:
            raise self.wrong(
                f"reports {total} tokens, {had} of them known, but contains {len(ids)} ids and {len(scored)} "
                "log-probabilities of new tokens"
            )
        if not new:
            return [], []
        if [one.token for one in scored] != ids:
            raise self.wrong("has log-probabilities of tokens other than its ids")
        return ids, [one.logprob for one in scored]

    def _extras(self, meta: Meta) -> Extras:
        if self._routing is None or not self.request.extras or meta.routed_experts is None:
            return NO_EXTRAS
        try:
            return {ROUTED_EXPERTS: experts_of_numbers(meta.routed_experts, self._routing)}
        except InvalidRows as wrong:
            raise self.wrong(f"has {wrong}") from None

    def _end(self, finish: Finish, meta: Meta) -> ResponseEnd:
        status, matched = finish.status_code, finish.matched
        reason: EngineFinish | EngineError | None = _FINISHES.get(finish.type)
        if finish.type == "abort" and status is not None and 400 <= status < 600:
            reason = failure_of(
                status, f"the server gave up the request ({status}): {clean(finish.message or 'nothing')}"
            )
        elif reason is None:
            reason = WireError(f"attempt {self.attempt_id}: unknown finish reason {quoted(finish.type)}")
        return ResponseEnd(
            reason, None if isinstance(matched, list) else matched, meta.weight_versions or None, self._extras(meta),
            self.request.extras_from,
        )  # fmt: skip
