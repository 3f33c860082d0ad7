"""Describes what engines lack: each limit has a code, a consequence, a remedy, and the promise that april cannot keep.

Probes of engines create limits, ``april doctor`` prints them, and the conformance suite skips checks because of them.

Invariant: code branches only on :class:`LimitCode`; the sentences of :meth:`Limit.sentence` are for people.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Level(StrEnum):
    """How well an engine supports one feature."""

    OK = "ok"
    REMARK = "remark"
    """The feature has a limit that is worth knowing; results are still exact."""
    LIMITED = "limited"
    """The feature works, but april cannot keep one of its promises."""
    MISSING = "missing"
    """The engine lacks the feature, and april cannot work without it."""


class LimitCode(StrEnum):
    """Code of a limit; ``promise`` is what april cannot promise because of the limit, or empty if all promises hold."""

    promise: str

    def __new__(cls, value: str, promise: str = "") -> LimitCode:
        """Make a member that equals the text ``value``."""
        code = str.__new__(cls, value)
        code._value_, code.promise = value, promise
        return code

    PAUSED = "paused"
    NO_LABELS = "no labels", "every restart of the server is noticed"
    """The server's weights have no label (version name) that april could read or set."""
    NO_DISK_UPDATES = "no disk updates", "april gives the server its new weights"
    NO_TRANSFERS = "no transfers"
    """Weights cannot be sent from the trainer's process."""
    ADAPTER = "adapter", "april gives the server its new weights"
    """Requests use an adapter, which would not fit updated weights of its base model."""
    ADAPTERS_ONLY = "adapters only"
    """Requests use an adapter, and april can load new adapters but not new full weights."""
    UNUSED_ADAPTERS = "unused adapters"
    """The server has adapters, but requests use the base model."""
    TIED_EMBEDDINGS = "tied embeddings", "april gives the server its new weights"
    """On a CPU, vLLM reloads a model with tied embeddings incorrectly."""
    UPDATES_END_ALL = "updates end all"
    """A weight update aborts the requests of other clients too."""
    NO_PARTIALS = "no partials", "responses can be cut and continued"
    NO_ABORT_BY_ID = "no abort by id", "an abort loses no token"
    CUMULATIVE_STREAMS = "cumulative streams", "an abort loses no token"
    """Each event repeats the whole response, so april reads responses only at their end."""
    TOKENS_AT_END = "tokens at end"
    LATE_STREAM_END = "late stream end"
    """The server notices late that the client has closed a stream."""
    RAW_LOGPROBS = "raw logprobs", "log-probabilities are right at temperatures other than 1"
    UNKNOWN_LOGPROBS = "unknown logprobs", "log-probabilities are right at temperatures other than 1"
    UNKNOWN_EOS = "unknown eos", "april stops each response at its end"
    EARLY_STOP = "early stop"
    """Stop tokens other than EOS may end a response before min_tokens."""
    NO_SEEDS = "no seeds"
    CHUNKED_PREFILL = "chunked prefill", "the server survives the requests of other clients, and runs are reproducible"
    """A request with a seed crashes the server, so april sends no seeds."""
    SPECULATION = "speculation", "tokens and log-probabilities come from the model itself"
    SEVERAL_COPIES = "several copies", "what april learns about the server holds for each of its copies"
    NO_EXPERTS = "no experts"
    """The server does not return the experts that the model chose for each token."""
    NO_ATTACHMENTS = "no attachments"
    """The model reads images, but april cannot send any to its server."""
    NO_START_TIME = "no start time"
    """The server does not say when its process began."""
    OTHER = "other"
    """A limit that a user's own engine class reports."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A feature that an engine lacks, with its consequence and remedy."""

    code: LimitCode
    consequence: str
    """Consequence as a sentence without full stop; it begins with the verb if ``server`` is its subject."""
    remedy: str = ""
    """Remedy; empty if there is none."""
    flags: tuple[str, ...] = ()
    """Flags and environment variables (NAME=value) of the server that remove the limit."""
    server: str = ""
    """Subject of the sentence, such as the address of the server; empty if the consequence has its own subject."""

    @property
    def promise(self) -> str:
        """Promise that april cannot keep because of the limit, as a clause after "april does not promise that"."""
        return self.code.promise

    @property
    def level(self) -> Level:
        """LIMITED if april cannot keep a promise because of the limit, REMARK otherwise."""
        return Level.LIMITED if self.promise else Level.REMARK

    @property
    def statement(self) -> str:
        """Consequence with its subject, without the remedy."""
        return f"{self.server} {self.consequence}" if self.server else self.consequence

    @property
    def sentence(self) -> str:
        """Consequence and remedy as one sentence, for people."""
        return f"{self.statement}{'; ' if self.remedy else ''}{self.remedy}."

    def of(self, server: str) -> Limit:
        """Return the limit with another name for the server, if the server is its subject."""
        return replace(self, server=server) if self.server else self


UNKNOWN_LOGPROBS = Limit(
    LimitCode.UNKNOWN_LOGPROBS,
    "april could not find out from which distribution the log-probabilities come",
    "set engine.logprobs, or train with temperature 1 and without top_p",
)


def raw_logprobs(remedy: str, *flags: str) -> Limit:
    """Return the limit that the server's log-probabilities are always those of temperature 1."""
    consequence = (
        "Log-probabilities are always those of the raw logits, which is right only at temperature 1, and without top_p "
        "and similar settings"
    )
    return Limit(LimitCode.RAW_LOGPROBS, consequence, remedy, flags)


def no_experts(remedy: str, *flags: str) -> Limit:
    consequence = "The server does not return which experts the model chose for each token (extras: routed_experts)"
    return Limit(LimitCode.NO_EXPERTS, consequence, remedy, flags)


def unknown_eos(
    consequence: str = (
        "The ids that end a response are unknown, because the model's files are not on this machine or do not name "
        "them: april relies on the server to end responses"
    ),
) -> Limit:
    remedy = "set engine.eos_token_ids (eos_token_id of the model's generation_config.json)"
    return Limit(LimitCode.UNKNOWN_EOS, consequence, remedy)


def tied_embeddings(where: str = "The server runs on a CPU:") -> Limit:
    """Return the limit that vLLM on a CPU does not load the weights of a directory correctly."""
    return Limit(
        LimitCode.TIED_EMBEDDINGS,
        f"{where} vLLM does not reload a model with tied embeddings correctly there (log-probabilities were wrong by "
        "0.35 to 1.2 nats after a weight update)",
        "save the model with tie_word_embeddings false and start the server with that model, or do not update its "
        "weights",
    )
