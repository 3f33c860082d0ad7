"""What an engine's capabilities mean to its user: one finding for each thing that matters."""

from __future__ import annotations

from april.doctor.findings import Finding, Level
from april.engines.protocol import AbortMeans, Capabilities, LogprobKind

_ABORT = {
    AbortMeans.BY_ID: (Level.OK, "each request by its id; its tokens are handed over"),
    AbortMeans.PAUSE: (
        Level.LIMITED,
        "all requests at once, by pausing the server: nobody else can use it meanwhile; tokens are handed over",
    ),
    AbortMeans.CLOSE: (
        Level.LIMITED,
        "by closing the stream: what was read is kept, what the server had not sent yet is generated again",
    ),
}
_LOGPROBS = {
    LogprobKind.TEMPERATURE: (Level.OK, "of log_softmax(logits / T), what a trainer recomputes, at every temperature"),
    LogprobKind.PROCESSED: (Level.OK, "of the distribution sampled from: with top_p 1 what a trainer recomputes"),
    LogprobKind.RAW: (Level.LIMITED, "of temperature 1 (raw), whatever the temperature: train with temperature 1 only"),
    LogprobKind.UNKNOWN: (Level.LIMITED, "of an unknown distribution: train with temperature 1 only"),
}


def abilities(c: Capabilities, temperature: float | None = None) -> list[Finding]:
    """Findings in the order in which people ask; ``temperature`` of the training, if it is known."""
    return [
        _abort(c),
        _versions(c),
        _logprobs(c, temperature),
        _weights(c),
        _streaming(c),
        _seeds(c),
        _size(c),
    ]


def _abort(c: Capabilities) -> Finding:
    if not c.returns_partials:
        return Finding("abort", Level.LIMITED, "an aborted request hands over nothing: no partial rollouts, N' = N")
    return Finding("abort", *_ABORT[c.abort_means])


def _logprobs(c: Capabilities, temperature: float | None) -> Finding:
    if temperature == 1 and not c.logprob_kind.follows_temperature:
        return Finding("log-probabilities", Level.OK, "right at sampling.temperature 1, and at no other")
    return Finding("log-probabilities", *_LOGPROBS[c.logprob_kind])


def _versions(c: Capabilities) -> Finding:
    if c.version_spans:
        return Finding("versions", Level.OK, "replies say which weights made which token")
    return Finding(
        "versions", Level.OK, "known from when a request was sent: april ends all requests before weights change"
    )


def _weights(c: Capabilities) -> Finding:
    if c.updates_from_disk:
        return Finding("new weights", Level.OK, "from a directory (weight_update(path)), or from the trainer itself")
    return Finding("new weights", Level.LIMITED, "april cannot load them here: the trainer has to hand them over")


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
    eos = f", ended by {_ids(c.eos_token_ids)}" if c.eos_token_ids else ""
    return Finding(
        "size", Level.OK, f"context of {c.max_context} tokens, vocabulary of {c.vocab_size}{eos}{slots}"
    )  # fmt: skip


def _ids(ids: tuple[int, ...]) -> str:
    return f"token {ids[0]}" if len(ids) == 1 else f"tokens {', '.join(map(str, ids))}"
