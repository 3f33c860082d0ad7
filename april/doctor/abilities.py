"""What a server's offer means to its user: one finding for each thing that matters.

Invariant: whatever the offer's notes say of lost tokens, unknown ends or copies behind one address is a finding that
keeps the verdict from being exact.
"""

from __future__ import annotations

import re

from april.core.sampling import LogprobKind
from april.doctor.advice import remedy
from april.doctor.findings import Finding, Level
from april.engines.kinds.identify import ServerKind
from april.engines.kinds.offers import Offer
from april.engines.protocol import AbortMeans, Capabilities

_BY_ID = "each request by its id; its tokens are handed over"
_PAUSING = "all requests at once, by pausing the server: nobody else can use it meanwhile; tokens are handed over"
_CLOSING = "by closing the stream: what was read is kept, what the server had not sent yet is generated again"
_LOSING = "each request by its id; not all of its tokens are handed over in every case, as said below"
_LOSES = re.compile(r"\b(?:lost|loses?)\b")
_LOGPROBS = {
    LogprobKind.TEMPERATURE: (Level.OK, "of log_softmax(logits / T), what a trainer recomputes, at every temperature"),
    LogprobKind.PROCESSED: (Level.OK, "of the distribution sampled from: with top_p 1 what a trainer recomputes"),
    LogprobKind.RAW: (Level.LIMITED, "of temperature 1 (raw), whatever the temperature: train with temperature 1 only"),
    LogprobKind.UNKNOWN: (Level.LIMITED, "of an unknown distribution: train with temperature 1 only"),
}

_TRAPS = (
    (
        "data-parallel", "copies",
        "several data-parallel copies of the model behind this address: april sees one server, with one load and one "
        "label of weights, and was not tried with them",
        "what april sees of the server holds for each of its copies",
    ),
    (
        "speculates", "speculation",
        "the server speculates: drafts were seen to become tokens that the model gives no chance",
        "tokens and log-probabilities are those of the model",
    ),
    (
        "chunked prefill", "chunks",
        "a request with a seed whose prompt is read in chunks kills this server (a CPU): april sends it no seeds, "
        "others may",
        "the server lives through the requests of others, and runs repeat",
    ),
    (
        "tied embeddings", "reload",
        "output layer and embeddings are tied: on a CPU such a model is not reloaded rightly",
        "log-probabilities are right after an update from a directory",
    ),
)
"""What words of a note mean: the finding's subject, its sentence, and what april does not promise then."""


def abilities(
    offer: Offer, kind: ServerKind, temperature: float | None = None, *, ends_given: bool = False
) -> list[Finding]:
    """Findings in the order in which people ask.

    Args:
        temperature: of the training, if it is known.
        ends_given: the configuration says which ids end a response, were it none.
    """
    c = offer.capabilities
    found = [
        _abort(c, kind),
        _versions(offer, kind),
        _logprobs(c, kind, temperature),
        _weights(c, kind),
        _ends(c, kind, ends_given),
        _streaming(c),
        _seeds(c),
        _size(c),
    ]
    found += [
        _limited(kind, subject, sentence, promise)
        for word, subject, sentence, promise in _TRAPS
        if any(word in note for note in c.notes)
    ]
    return found


def _limited(kind: ServerKind, subject: str, sentence: str, promise: str, case: str = "") -> Finding:
    return Finding(subject, Level.LIMITED, sentence, remedy(kind, case or subject), promise)


def _abort(c: Capabilities, kind: ServerKind) -> Finding:
    if not c.returns_partials:
        nothing = "an aborted request hands over nothing: no partial rollouts, N' = N"
        return _limited(kind, "abort", nothing, "responses can be cut and continued")
    case = "processes" if any("API processes" in note for note in c.notes) else "abort"
    if c.abort_means is AbortMeans.PAUSE:
        return _limited(kind, "abort", _PAUSING, "an abort leaves other users of the server alone", case)
    closing = c.abort_means is AbortMeans.CLOSE
    if closing or any(_LOSES.search(note) for note in c.notes):
        return _limited(kind, "abort", _CLOSING if closing else _LOSING, "an abort loses no token", case)
    return Finding("abort", Level.OK, _BY_ID)


def _logprobs(c: Capabilities, kind: ServerKind, temperature: float | None) -> Finding:
    subject = "log-probabilities"
    if temperature == 1 and not c.logprob_kind.follows_temperature:
        return Finding(subject, Level.OK, "right at sampling.temperature 1, and at no other")
    level, sentence = _LOGPROBS[c.logprob_kind]
    if level is Level.OK:
        return Finding(subject, level, sentence)
    return _limited(kind, subject, sentence, "log-probabilities are right at temperatures other than 1")


def _versions(offer: Offer, kind: ServerKind) -> Finding:
    if offer.weight_version is None:
        return _limited(
            kind, "versions",
            "known from when a request was sent; the weights have no label, so new ones are unverified, and a server "
            "that was started anew with other weights is found by the start of its process only, where it tells that",
            "every restart of the server is noticed",
        )  # fmt: skip
    if offer.capabilities.version_spans:
        return Finding("versions", Level.OK, "replies say which weights made which token")
    return Finding(
        "versions", Level.OK, "known from when a request was sent: april ends all requests before weights change"
    )


def _weights(c: Capabilities, kind: ServerKind) -> Finding:
    if c.updates_from_disk:
        return Finding("new weights", Level.OK, "from a directory (weight_update(path)), or from the trainer itself")
    return _limited(
        kind, "new weights",
        "april cannot load them here: the trainer has to hand them over, and to have the server's cache emptied",
        "april gives the server its new weights",
    )  # fmt: skip


def _ends(c: Capabilities, kind: ServerKind, given: bool) -> Finding:
    if c.eos_token_ids:
        return Finding("ends", Level.OK, f"a response ends with {_ids(c.eos_token_ids)}, or with a stop id")
    if given:
        return Finding("ends", Level.OK, "no id but a stop id ends a response, as engine.eos_token_ids says")
    return _limited(
        kind, "ends",
        "not known which ids end a response, only that the server says so: one that is cut right behind its end, "
        "before that is said, would be continued",
        "no response is continued behind its end",
    )  # fmt: skip


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
