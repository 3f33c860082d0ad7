"""Log-probabilities: of the kind that the engine declares, with the values of a reference."""

from __future__ import annotations

import numpy as np

from april.core.sampling import LogprobKind
from april.engines.protocol import Float32, Int32
from april.testing.conformance.bench import Bench, Reading
from april.testing.conformance.check import Check, check
from april.testing.conformance.outcomes import Broken, NotOffered, NotTested
from april.testing.conformance.subject import Reference
from april.testing.conformance.verdicts import Figures

SAMPLES = 8
LENGTH = 48
TIE = 1e-5
"""Nuclei whose edge is nearer than this to top-p may be taken with the token at the edge or without."""


def expected(kind: LogprobKind, logits: Float32, tokens: Int32, temperature: float, top_p: float) -> Float32:
    """What ``kind`` says of ``tokens`` [T] under ``logits`` [T, V]: float32 [C, T]; per token one row must fit.

    C is 1, and 2 for ``processed`` with top-p, where rounding decides which token is the last of the nucleus.
    """
    scaled = np.asarray(logits, np.float64) / (1.0 if kind is LogprobKind.RAW else temperature)
    logs = scaled - np.logaddexp.reduce(scaled, axis=1, keepdims=True)
    rows = np.arange(len(tokens))
    own = logs[rows, tokens]
    if kind is not LogprobKind.PROCESSED or top_p >= 1.0:
        return own[None].astype(np.float32)
    mass = np.cumsum(np.sort(np.exp(logs), axis=1)[:, ::-1], axis=1)
    # the smallest set with at least top_p: everything before the edge, and the token at it
    nuclei = [mass[rows, np.argmax(mass >= min(top_p + shift, 1.0 - 1e-9), axis=1)] for shift in (-TIE, TIE)]
    return np.stack([own - np.log(nucleus) for nucleus in nuclei]).astype(np.float32)


def largest_difference(
    kind: LogprobKind, reference: Reference, reading: Reading, temperature: float, top_p: float = 1.0
) -> float:
    """Largest difference in nats between a reading and the reference."""
    if not reading.count:
        return 0.0
    tokens = reading.tokens
    logits = reference(reading.request.token_ids.tolist(), tokens.tolist())
    wanted = expected(kind, logits, tokens, temperature, top_p)
    return float(np.abs(wanted - reading.logprobs).min(axis=0).max())


def _check(name: str, promise: str, temperature: float, top_p: float) -> Check:
    async def body(bench: Bench) -> Figures:
        kind, reference = bench.engine.capabilities.logprob_kind, bench.weights.reference
        if reference is None:
            raise NotTested("no reference model was given")
        if kind is LogprobKind.UNKNOWN and (temperature != 1.0 or top_p < 1.0):
            raise NotOffered("the engine does not know of which kind its log-probabilities are")
        asked = LogprobKind.RAW if kind is LogprobKind.UNKNOWN else kind
        readings = await bench.whole(
            bench.request(i, LENGTH, forced=False, temperature=temperature, top_p=top_p) for i in range(SAMPLES)
        )
        worst = max(largest_difference(asked, reference, r, temperature, top_p) for r in readings)
        figures: Figures = {
            "kind": str(kind), "largest difference": worst, "tokens": sum(r.count for r in readings)
        }  # fmt: skip
        if not worst <= bench.subject.tolerance:
            fits = [
                str(other)
                for other in (LogprobKind.TEMPERATURE, LogprobKind.PROCESSED, LogprobKind.RAW)
                if max(largest_difference(other, reference, r, temperature, top_p) for r in readings)
                <= bench.subject.tolerance
            ]
            raise Broken(
                f"log-probabilities declared as {kind} differ from the reference by up to {worst:.3g} nats"
                + (f"; they are those of the kind {' or '.join(fits)}" if fits else "")
            )
        return figures

    body.__name__ = name
    return check(promise)(body)


logprobs = _check(
    "logprobs", "Log-probabilities are those of a full forward pass of the same model, at temperature 1.", 1.0, 1.0
)
logprobs_temperature = _check(
    "logprobs_temperature", "At temperature 0.7 they are of the kind that the engine declares.", 0.7, 1.0
)
logprobs_top_p = _check(
    "logprobs_top_p", "At temperature 0.7 with top-p 0.8 they are of the kind that the engine declares.", 0.7, 0.8
)
