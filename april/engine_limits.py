"""Limits of an engine, as data: a code, its consequence, the remedy, and the promise that april cannot keep.

Probes make limits, ``april doctor`` prints them, the conformance suite gives them as reasons.

Invariant: code decides by :class:`LimitCode`; sentences are made in :meth:`Limit.sentence`, and nothing reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

IT = "The server"
"""Subject of a limit before its server is known."""


class Level(StrEnum):
    """Level at which an engine does one thing."""

    OK = "ok"
    REMARK = "remark"
    """Good to know; exactness does not depend on it."""
    LIMITED = "limited"
    """Works, and april does not keep one of its promises."""
    MISSING = "missing"
    """april cannot work so."""


class LimitCode(StrEnum):
    """Code of a limit."""

    PAUSED = "paused"
    NO_VERSION_SPANS = "no version spans"
    """Replies do not say which weights made which token."""
    NO_LABELS = "no labels"
    """The weights have no label that april could read or set."""
    NO_DISK_UPDATES = "no disk updates"
    NO_TRANSFERS = "no transfers"
    """Weights cannot be sent from the trainer's process."""
    ADAPTER = "adapter"
    """Requests name an adapter, which whole weights of its base would not fit."""
    ADAPTERS_ONLY = "adapters only"
    """The same, where april can load new adapters."""
    UNUSED_ADAPTERS = "unused adapters"
    """The server has adapters, and requests name their base."""
    TIED_EMBEDDINGS = "tied embeddings"
    """The model is not reloaded rightly on a CPU."""
    UPDATES_END_ALL = "updates end all"
    """A weight update ends the requests of others too."""
    UPDATES_WAIT = "updates wait"
    """A weight update waits for the requests of others."""
    NO_ABORT_BY_ID = "no abort by id"
    SEVERAL_PROCESSES = "several processes"
    """API processes behind one port, of which an abort by id reaches one."""
    CUMULATIVE_STREAMS = "cumulative streams"
    """Each event repeats the whole response, so april reads answers at their end."""
    TOKENS_AT_END = "tokens at end"
    LATE_STREAM_END = "late stream end"
    """The server notices late that a stream was closed."""
    NO_STREAM_INTERVAL = "no stream interval"
    RAW_LOGPROBS = "raw logprobs"
    UNKNOWN_LOGPROBS = "unknown logprobs"
    UNKNOWN_EOS = "unknown eos"
    UNSEEN_EOS = "unseen eos"
    """EOS is known, and the server was not seen to hand it over."""
    EARLY_STOP = "early stop"
    """Other ends than EOS may come before min_tokens."""
    NO_SEEDS = "no seeds"
    CHUNKED_PREFILL = "chunked prefill"
    """The server dies of a seed, so none is sent."""
    SPECULATION = "speculation"
    SEVERAL_COPIES = "several copies"
    NO_EXPERTS = "no experts"
    """The experts that the model chooses do not come with its tokens."""
    NO_ATTACHMENTS = "no attachments"
    """The model takes images, and its server none from april."""
    NO_LOAD = "no load"
    NO_START_TIME = "no start time"
    """The server does not say when its process began."""
    OTHER = "other"
    """A limit of an engine of your own."""


CAUSES: dict[str, tuple[LimitCode, ...]] = {
    "abort_means": (LimitCode.SEVERAL_PROCESSES, LimitCode.NO_ABORT_BY_ID, LimitCode.CUMULATIVE_STREAMS),
    "eos_token_ids": (LimitCode.UNKNOWN_EOS,),
    "honours_seeds": (LimitCode.NO_SEEDS, LimitCode.CHUNKED_PREFILL),
    "logprob_kind": (LimitCode.RAW_LOGPROBS, LimitCode.UNKNOWN_LOGPROBS),
    "updates_from_disk": (
        LimitCode.ADAPTER, LimitCode.ADAPTERS_ONLY, LimitCode.NO_DISK_UPDATES, LimitCode.TIED_EMBEDDINGS,
        LimitCode.NO_LABELS,
    ),
    "verifies_weights": (LimitCode.NO_LABELS,),
}
"""Fields of :class:`~april.engines.protocol.Capabilities`, and the codes that may be the cause of their being less than
they could be, the likeliest first."""

CUTS = (
    LimitCode.NO_VERSION_SPANS, LimitCode.NO_LABELS, LimitCode.NO_DISK_UPDATES, LimitCode.SEVERAL_PROCESSES,
    LimitCode.SEVERAL_COPIES, LimitCode.NO_ABORT_BY_ID,
)  # fmt: skip
"""Codes that may be the cause why a weight update must cut the requests in flight, though others of the kind keep
them."""

PROMISES: dict[LimitCode, str] = {
    LimitCode.SEVERAL_PROCESSES: "an abort loses no token, and leaves other users of the server alone",
    LimitCode.NO_ABORT_BY_ID: "an abort loses no token",
    LimitCode.CUMULATIVE_STREAMS: "an abort loses no token",
    LimitCode.NO_LABELS: "every restart of the server is noticed",
    LimitCode.RAW_LOGPROBS: "log-probabilities are right at temperatures other than 1",
    LimitCode.UNKNOWN_LOGPROBS: "log-probabilities are right at temperatures other than 1",
    LimitCode.NO_DISK_UPDATES: "april gives the server its new weights",
    LimitCode.ADAPTER: "april gives the server its new weights",
    LimitCode.TIED_EMBEDDINGS: "april gives the server its new weights",
    LimitCode.UNKNOWN_EOS: "no response is continued behind its end",
    LimitCode.SEVERAL_COPIES: "what april sees of the server holds for each of its copies",
    LimitCode.SPECULATION: "tokens and log-probabilities are those of the model",
    LimitCode.CHUNKED_PREFILL: "the server lives through the requests of others, and runs repeat",
}
"""Promises that april does not keep with an engine that has such a limit; other limits cost none."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A thing that an engine cannot do."""

    code: LimitCode
    consequence: str
    """The consequence, a sentence without its full stop; begins with the verb where ``server`` is its subject."""
    remedy: str = ""
    """The remedy; empty if there is none."""
    flags: tuple[str, ...] = ()
    """Flags and variables (NAME=value) of the server that change it."""
    server: str = ""
    """Subject of the sentence, which the consequence then lacks: the address of the server, or words for it."""

    @property
    def promise(self) -> str:
        """The promise that april does not keep because of it, in words that end "april does not promise that"."""
        return PROMISES.get(self.code, "")

    @property
    def level(self) -> Level:
        """LIMITED if it costs a promise."""
        return Level.LIMITED if self.promise else Level.REMARK

    @property
    def statement(self) -> str:
        """The consequence with its subject, without the remedy."""
        return f"{self.server} {self.consequence}" if self.server else self.consequence

    @property
    def sentence(self) -> str:
        """The consequence and the remedy, for people."""
        return f"{self.statement}{'; ' if self.remedy else ''}{self.remedy}."

    def of(self, server: str) -> Limit:
        """Return the limit with another name for the server, if the server is its subject."""
        return replace(self, server=server) if self.server else self


# ---------------------------------------------------------------- what engines of several kinds cannot do

UNKNOWN_LOGPROBS = Limit(
    LimitCode.UNKNOWN_LOGPROBS,
    "Of which distribution the log-probabilities are could not be seen",
    "say so with engine.logprobs, or train with temperature 1 and without top-p",
)


def raw_logprobs(remedy: str, *flags: str) -> Limit:
    """The log-probabilities are those of temperature 1."""
    consequence = (
        "Log-probabilities are those of the raw logits, whatever the temperature: right at temperature 1 only, without "
        "top_p and the like"
    )
    return Limit(LimitCode.RAW_LOGPROBS, consequence, remedy, flags)


def no_experts(remedy: str, *flags: str) -> Limit:
    """A model with experts is served by a server that keeps back which ones it chose."""
    consequence = "The experts that the model chooses do not come with its tokens (extras: routed_experts)"
    return Limit(LimitCode.NO_EXPERTS, consequence, remedy, flags)


def unknown_eos(
    consequence: str = "The ids that end a response are not known, as the model's files are not on this machine or "
    "name none: april takes the server's word for it",
) -> Limit:
    """The ids that end a response are unknown."""
    remedy = "set engine.eos_token_ids (eos_token_id of the model's generation_config.json)"
    return Limit(LimitCode.UNKNOWN_EOS, consequence, remedy)


def tied_embeddings(where: str = "The server runs on a CPU:") -> Limit:
    """vLLM on a CPU would load other weights than those in the directory."""
    return Limit(
        LimitCode.TIED_EMBEDDINGS,
        f"{where} vLLM does not reload a model with tied embeddings rightly there (log-probabilities were wrong by "
        "0.35 to 1.2 nats after an update of its weights)",
        "save the model with tie_word_embeddings false and start with that, or do not update its weights",
    )
