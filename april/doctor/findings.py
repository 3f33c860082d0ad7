"""Findings of ``april doctor``: plain records, from which both the report and the JSON are made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from april.core.engine_limits import CAUSES, CUTS, Limit, LimitCode
from april.core.engine_limits import Level as Level
from april.core.sampling import LogprobKind
from april.engines.protocol import AbortMeans, Capabilities, OnWeightUpdate

CONFIGURATION = "configuration"
"""Subject of findings about the configuration."""


class Verdict(StrEnum):
    """Overall result: whether april keeps all its promises with the servers."""

    EXACT = "exact"
    """april keeps all promises: every token's version and log-probability are known, and an abort loses nothing."""
    LIMITED = "usable, with limits"
    """april keeps only some promises; the findings name the others."""
    UNUSABLE = "not usable"
    """april refuses to run with the server, or cannot reach it."""

    @property
    def usable(self) -> bool:
        """True if april can run."""
        return self is not Verdict.UNUSABLE


@dataclass(frozen=True, slots=True)
class Finding:
    """A statement about one thing that a server can or cannot do."""

    subject: str
    level: Level
    sentence: str
    advice: str = ""
    """Advice to the user; empty if there is none."""
    promise: str = ""
    """Promise that april does not keep because of this; every LIMITED finding has one."""
    flags: tuple[str, ...] = ()
    """The server's flags and environment variables (NAME=value) that change this."""


@dataclass(slots=True, kw_only=True)
class ServerReport:
    """Results of the examination of one server so far."""

    url: str
    kind: str = ""
    """The ``engine.kind`` of the server, or other words for its kind; empty if it was not reached."""
    version: str | None = None
    model: str | None = None
    findings: list[Finding] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    """Limits that the probe of the server found."""

    @property
    def verdict(self) -> Verdict:
        """The verdict by the worst finding."""
        return verdict_of(self.findings)

    @property
    def changes(self) -> list[str]:
        """One sentence for each limit."""
        return [limit.sentence for limit in self.limits]

    @property
    def flags(self) -> list[str]:
        """Flags and variables of the server that are needed for exactness."""
        return _unique(finding.flags for finding in self.findings if finding.level is Level.LIMITED)

    @property
    def optional_flags(self) -> list[str]:
        """Other flags named by ``limits``, for speed or reproducible runs."""
        return [flag for flag in _unique(limit.flags for limit in self.limits) if flag not in self.flags]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self) | {
            "verdict": self.verdict.value,
            "changes": self.changes,
            "flags": self.flags,
            "optional_flags": self.optional_flags,
        }


@dataclass(slots=True)
class Report:
    """Findings about all servers: about each, and about all together or with the configuration."""

    servers: list[ServerReport]
    together: list[Finding] = field(default_factory=list)
    engine_settings: str = ""
    """The ``engine`` section for the configuration; empty if there is none to recommend."""
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """The verdict by the worst of all findings."""
        return verdict_of(self.all)

    @property
    def all(self) -> list[Finding]:
        """All findings: those about each server, then those about all together."""
        return [f for server in self.servers for f in server.findings] + self.together

    @property
    def not_promised(self) -> list[str]:
        """The promises that april does not keep with these servers, each once."""
        return list(dict.fromkeys(f.promise for f in self.all if f.level is Level.LIMITED))

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "verdict": self.verdict.value,
            "usable": self.verdict.usable,
            "not_promised": self.not_promised,
            "servers": [server.as_dict() for server in self.servers],
            "together": [asdict(f) for f in self.together],
            "engine_settings": self.engine_settings,
            "seconds": round(self.seconds, 2),
        }


def _unique(flags: Iterable[tuple[str, ...]]) -> list[str]:
    return list(dict.fromkeys(flag for some in flags for flag in some))


def verdict_of(findings: Sequence[Finding]) -> Verdict:
    """Return the verdict by the worst level among the findings."""
    levels = {finding.level for finding in findings}
    if Level.MISSING in levels:
        return Verdict.UNUSABLE
    return Verdict.LIMITED if Level.LIMITED in levels else Verdict.EXACT


# ---------------------------------------------------------------- what a server can do

NO_REMEDY = "nothing gives it on a server of this kind; vLLM and SGLang servers under their own engine.kind have it"
_EXACT_LOGPROBS = {
    LogprobKind.TEMPERATURE: "of log_softmax(logits / T), what a trainer recomputes, at every temperature",
    LogprobKind.PROCESSED: "of the distribution sampled from: with top_p 1 what a trainer recomputes",
}
_SUBJECTS = {
    "abort_means": "abort", "verifies_weights": "versions", "logprob_kind": "log-probabilities",
    "updates_from_disk": "new weights", "eos_token_ids": "ends",
}  # fmt: skip
_OTHER_SUBJECTS = {
    LimitCode.SEVERAL_COPIES: "copies", LimitCode.SPECULATION: "speculation", LimitCode.CHUNKED_PREFILL: "chunks",
}  # fmt: skip
"""Subjects of limits that no field of the capabilities shows."""


def abilities(c: Capabilities, temperature: float | None = None, *, ends_given: bool = False) -> list[Finding]:
    """Return a finding for each ability of a server, the most asked about first, then for other limits.

    Args:
        c: capabilities of the server.
        temperature: sampling temperature of the training; None if it is unknown.
        ends_given: whether the configuration sets the ids that end a response; the empty set counts.
    """
    return [
        _abort(c), _versions(c), _logprobs(c, temperature), _weights(c), *_adapters(c), *_extras(c),
        *_attachments(c), _in_flight(c), _ends(c, ends_given), _streaming(c), _seeds(c), _size(c),
        *(_of_limit(_OTHER_SUBJECTS[x.code], x) for x in c.limits if x.code in _OTHER_SUBJECTS),
    ]  # fmt: skip


def _of_limit(subject: str, why: Limit) -> Finding:
    return Finding(subject, Level.LIMITED, why.of("It").statement, why.remedy or NO_REMEDY, why.promise, why.flags)


def _restricted_finding(c: Capabilities, field: str) -> Finding:
    """Return the finding for a capability that is restricted, with the limit that causes this as the reason."""
    why = c.cause(field)
    return _of_limit(_SUBJECTS[field], why or Limit(CAUSES[field][-1], "The server does not offer it"))


def _ok(subject: str, sentence: str) -> Finding:
    return Finding(subject, Level.OK, sentence)


def _abort(c: Capabilities) -> Finding:
    if not c.returns_partials:
        nothing = "an aborted request hands over nothing: no partial rollouts, N' = N"
        return Finding("abort", Level.LIMITED, nothing, NO_REMEDY, "responses can be cut and continued")
    if c.abort_means is not AbortMeans.BY_ID or c.cause("abort_means") is not None:
        return _restricted_finding(c, "abort_means")
    return _ok("abort", "each request by its id; its tokens are handed over")


def _versions(c: Capabilities) -> Finding:
    if not c.verifies_weights:
        return _restricted_finding(c, "verifies_weights")
    if c.version_spans:
        return _ok("versions", "replies say which weights made which token")
    return _ok("versions", "known from when a request was sent: april ends all requests before weights change")


def _logprobs(c: Capabilities, temperature: float | None) -> Finding:
    if (sentence := _EXACT_LOGPROBS.get(c.logprob_kind)) is not None:
        return _ok("log-probabilities", sentence)
    if temperature == 1:
        return _ok("log-probabilities", "right at sampling.temperature 1, and at no other")
    return _restricted_finding(c, "logprob_kind")


def _weights(c: Capabilities) -> Finding:
    if c.updates_from_disk:
        sent = f" or sent from the trainer over {' or '.join(c.collective)} (weights)," if c.collective else ""
        return _ok("new weights", f"from a directory (weight_update(path)),{sent} or by a transfer of your own")
    cause = c.cause("updates_from_disk")
    if cause is not None and cause.code is LimitCode.ADAPTERS_ONLY:
        return _ok("new weights", "adapters (LoRA) from a directory; whole weights not, as requests name an adapter")
    return _restricted_finding(c, "updates_from_disk")


def _in_flight(c: Capabilities) -> Finding:
    """Return a finding on what on_weight_update can be, and on what would allow more."""
    if c.in_flight_updates:
        return _ok("in flight", f"on_weight_update: {', '.join([OnWeightUpdate.RESUBMIT, *c.in_flight_updates])}")
    why = next((limit for code in CUTS for limit in c.limits if limit.code is code), None)
    remedy = "" if why is None or not why.remedy else f"; to keep them over an update, {why.remedy}"
    cut = f"requests are cut at a weight update (on_weight_update: resubmit){remedy}"
    return Finding("in flight", Level.REMARK, cut)


def _adapters(c: Capabilities) -> list[Finding]:
    """Return a finding on adapters (LoRA), if the server accepts them or could be made to."""
    if c.adapters is not None:
        rank = "" if c.adapters.max_rank is None else f" up to rank {c.adapters.max_rank}"
        slots = "" if c.adapters.slots is None else f", {c.adapters.slots} at the same time"
        return [_ok("adapters", f"LoRA policies are loaded as such{rank}{slots}, from a directory and beside requests")]
    if not c.adapters_need:
        return []
    taken = f"none are taken; a LoRA policy is sent merged, as a whole model; for adapters {c.adapters_need}"
    return [Finding("adapters", Level.REMARK, taken)]


def _extras(c: Capabilities) -> list[Finding]:
    """Return a finding on extras, such as routed experts, if the server returns any with its tokens."""
    return [_ok("extras", f"{', '.join(c.extras)}: rows come with the tokens, for extras")] if c.extras else []


def _attachments(c: Capabilities) -> list[Finding]:
    """Return a finding on images and other attachments, if the server's model accepts any."""
    if c.attachments:
        bans = "and what stands for them is never generated" if c.bans else "and what stands for them may be generated"
        return [_ok("images", f"{', '.join(c.attachments)}: they come with prompts that have some, {bans}")]
    if not c.attachments_need:
        return []
    sentence = f"none are taken, though its model takes some; for prompts that have some, {c.attachments_need}"
    return [Finding("images", Level.REMARK, sentence)]


def _ends(c: Capabilities, given: bool) -> Finding:
    if c.eos_token_ids:
        ids = ", ".join(map(str, c.eos_token_ids))
        return _ok("ends", f"a response ends with token{'s' * (len(c.eos_token_ids) > 1)} {ids}, or with a stop id")
    if given:
        return _ok("ends", "no id but a stop id ends a response, as engine.eos_token_ids says")
    return _restricted_finding(c, "eos_token_ids")


def _streaming(c: Capabilities) -> Finding:
    if c.streams:
        return _ok("if it dies", "april can hold tokens as they are made (max_token_loss)")
    sentence = "tokens of its running requests are made again; engine.max_token_loss bounds how many"
    return Finding("if it dies", Level.REMARK, sentence)


def _seeds(c: Capabilities) -> Finding:
    if c.honours_seeds:
        return _ok("seeds", "the same seed gives the same tokens")
    return Finding("seeds", Level.REMARK, "not honoured: runs do not repeat; nothing else depends on them")


def _size(c: Capabilities) -> Finding:
    slots = "" if c.max_in_flight is None else f", {c.max_in_flight} requests at the same time"
    return _ok("size", f"context of {c.max_context} tokens, vocabulary of {c.vocab_size}{slots}")
