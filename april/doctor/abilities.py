"""What a server can do, and what it cannot, to its user: one finding for each thing that matters.

Invariant: a limit that costs exactness is a finding that keeps the verdict from being exact.
"""

from __future__ import annotations

from april.core.sampling import LogprobKind
from april.doctor.findings import Finding, Level
from april.engine_limits import Limit, LimitCode
from april.engines.protocol import AbortMeans, Capabilities

_NO_REMEDY = "nothing gives it on a server of this kind; vLLM and SGLang servers under their own engine.kind have it"
_BY_ID = "each request by its id; its tokens are handed over"
_PAUSING = "all requests at once, by pausing the server: nobody else can use it meanwhile; tokens are handed over"
_CLOSING = "by closing the stream: what was read is kept, what the server had not sent yet is generated again"
_LOSING = "each request by its id; not all of its tokens are handed over in every case, as said below"
_LOGPROBS = {
    LogprobKind.TEMPERATURE: (Level.OK, "of log_softmax(logits / T), what a trainer recomputes, at every temperature"),
    LogprobKind.PROCESSED: (Level.OK, "of the distribution sampled from: with top_p 1 what a trainer recomputes"),
    LogprobKind.RAW: (Level.LIMITED, "of temperature 1 (raw), whatever the temperature: train with temperature 1 only"),
    LogprobKind.UNKNOWN: (Level.LIMITED, "of an unknown distribution: train with temperature 1 only"),
}

_TRAPS = {
    LimitCode.SEVERAL_COPIES: (
        "copies",
        "several data-parallel copies of the model behind this address: april sees one server, with one load and one "
        "label of weights, and was not tried with them",
        "what april sees of the server holds for each of its copies",
    ),
    LimitCode.SPECULATION: (
        "speculation",
        "the server speculates: drafts were seen to become tokens that the model gives no chance",
        "tokens and log-probabilities are those of the model",
    ),
    LimitCode.CHUNKED_PREFILL: (
        "chunks",
        "a request with a seed whose prompt is read in chunks kills this server (a CPU): april sends it no seeds, "
        "others may",
        "the server lives through the requests of others, and runs repeat",
    ),
    LimitCode.TIED_EMBEDDINGS: (
        "reload",
        "output layer and embeddings are tied: on a CPU such a model is not reloaded rightly",
        "log-probabilities are right after an update from a directory",
    ),
}
"""Limits that no capability shows: the finding's subject, its sentence, and what april does not promise then."""


def abilities(c: Capabilities, temperature: float | None = None, *, ends_given: bool = False) -> list[Finding]:
    """Findings in the order in which people ask.

    Args:
        temperature: of the training, if it is known.
        ends_given: the configuration says which ids end a response, were it none.
    """
    traps = [_limited(*_TRAPS[limit.code], limit) for limit in c.limits if limit.code in _TRAPS]
    return [
        _abort(c), _versions(c), _logprobs(c, temperature), _weights(c), _ends(c, ends_given), _streaming(c),
        _seeds(c), _size(c), *traps,
    ]  # fmt: skip


def _limited(subject: str, sentence: str, promise: str, why: Limit | None) -> Finding:
    advice, flags = (why.remedy, why.flags) if why is not None else ("", ())
    return Finding(subject, Level.LIMITED, sentence, advice or _NO_REMEDY, promise, flags)


def _abort(c: Capabilities) -> Finding:
    if not c.returns_partials:
        nothing = "an aborted request hands over nothing: no partial rollouts, N' = N"
        return _limited("abort", nothing, "responses can be cut and continued", None)
    why = c.cause("abort_means")
    if c.abort_means is AbortMeans.PAUSE:
        return _limited("abort", _PAUSING, "an abort leaves other users of the server alone", why)
    if c.abort_means is AbortMeans.CLOSE or why is not None:
        sentence = _CLOSING if c.abort_means is AbortMeans.CLOSE else _LOSING
        return _limited("abort", sentence, "an abort loses no token", why)
    return Finding("abort", Level.OK, _BY_ID)


def _logprobs(c: Capabilities, temperature: float | None) -> Finding:
    subject = "log-probabilities"
    if temperature == 1 and not c.logprob_kind.follows_temperature:
        return Finding(subject, Level.OK, "right at sampling.temperature 1, and at no other")
    level, sentence = _LOGPROBS[c.logprob_kind]
    if level is Level.OK:
        return Finding(subject, level, sentence)
    promise = "log-probabilities are right at temperatures other than 1"
    return _limited(subject, sentence, promise, c.cause("logprob_kind"))


def _versions(c: Capabilities) -> Finding:
    if not c.verifies_weights:
        sentence = (
            "known from when a request was sent; the weights have no label, so new ones are unverified, and a server "
            "that was started anew with other weights is found by the start of its process only, where it tells that"
        )
        return _limited("versions", sentence, "every restart of the server is noticed", c.cause("verifies_weights"))
    if c.version_spans:
        return Finding("versions", Level.OK, "replies say which weights made which token")
    return Finding(
        "versions", Level.OK, "known from when a request was sent: april ends all requests before weights change"
    )


def _weights(c: Capabilities) -> Finding:
    if c.updates_from_disk:
        return Finding("new weights", Level.OK, "from a directory (weight_update(path)), or from the trainer itself")
    sentence = "april cannot load them here: the trainer has to hand them over, and to have the server's cache emptied"
    return _limited("new weights", sentence, "april gives the server its new weights", c.cause("updates_from_disk"))


def _ends(c: Capabilities, given: bool) -> Finding:
    if c.eos_token_ids:
        return Finding("ends", Level.OK, f"a response ends with {_ids(c.eos_token_ids)}, or with a stop id")
    if given:
        return Finding("ends", Level.OK, "no id but a stop id ends a response, as engine.eos_token_ids says")
    sentence = (
        "not known which ids end a response, only that the server says so: one that is cut right behind its end, "
        "before that is said, would be continued"
    )
    return _limited("ends", sentence, "no response is continued behind its end", c.cause("eos_token_ids"))


def _streaming(c: Capabilities) -> Finding:
    if c.streams:
        return Finding("if it dies", Level.OK, "april can hold tokens as they are made (max_token_loss)")
    sentence = "tokens of its running requests are made again; engine.max_token_loss bounds how many"
    return Finding("if it dies", Level.REMARK, sentence)


def _seeds(c: Capabilities) -> Finding:
    if c.honours_seeds:
        return Finding("seeds", Level.OK, "the same seed gives the same tokens")
    return Finding("seeds", Level.REMARK, "not honoured: runs do not repeat; nothing else depends on them")


def _size(c: Capabilities) -> Finding:
    slots = "" if c.max_in_flight is None else f", {c.max_in_flight} requests at the same time"
    return Finding("size", Level.OK, f"context of {c.max_context} tokens, vocabulary of {c.vocab_size}{slots}")


def _ids(ids: tuple[int, ...]) -> str:
    return f"token {ids[0]}" if len(ids) == 1 else f"tokens {', '.join(map(str, ids))}"
