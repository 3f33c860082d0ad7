"""Describes what an engine can do (:class:`Capabilities`), and what april checks and reports about each ability.

Each entry of the table ``ABILITIES`` belongs to one ability: a check of the settings that need it, the messages and
remedies for engines that lack it, and what the command ``april doctor`` reports about it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from april.core.engine_limits import Limit, LimitCode
from april.core.sampling import LogprobKind
from april.core.types import GenerationMode, OnWeightUpdate

if TYPE_CHECKING:
    from april.config.settings import Config


class AbortMeans(StrEnum):
    """How ``abort`` ends requests early on this engine."""

    BY_ID = "by id"
    """Each request is aborted by its id; the answer contains its tokens."""
    PAUSE = "pause"
    """All requests are aborted at once, by pausing the server in a mode that aborts them."""
    CLOSE = "close"
    """The client closes the stream. Tokens that it has read are kept; tokens that the server has not sent are lost."""


class FirstWeights(StrEnum):
    """What a run knows about the weights of an engine when it connects, before the first weight update."""

    KNOWN = "known"
    """The engine has the weights that it was started with, or the settings say that the run begins with its weights.
    april assumes this of engines that cannot label their weights."""
    UNVERIFIED = "unverified"
    """Another program has labelled the weights, and april assumes that they are the run's first version."""
    OTHERS = "others"
    """Another run of april has loaded all or some of the weights. They belong to no version of this run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSite:
    """Which LoRA adapters an engine accepts as new policy versions."""

    max_rank: int | None = None
    """Largest rank of an adapter; None if unknown."""
    slots: int | None = None
    """Number of adapters that can serve requests at the same time, not counting the base model; None if unknown."""
    scales: bool = True
    """True if the engine supports a separate scale and rank for each layer, and rank-stabilised adapters."""
    base: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)
    """Shapes of the base model's matrices, indexed by layer name; layers of unknown shape are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The abilities of an engine. Other modules decide by these fields, never by the kind of engine."""

    logprob_kind: LogprobKind
    vocab_size: int
    """Size of the vocabulary; token ids are in [0, vocab_size)."""
    max_context: int
    """Maximum number of tokens in the prompt and the response together."""
    eos_token_ids: tuple[int, ...] = ()
    """Token ids that end every response, in addition to the stop ids of a request."""
    max_in_flight: int | None = None
    """Maximum number of requests decoded at the same time; the engine queues further requests. None if unknown or
    unbounded."""
    returns_partials: bool = True
    """True if an aborted request returns the tokens generated so far."""
    shares_weights: bool = False
    """True if the engine generates with the trainer's own parameters, so it must be idle while the optimizer runs.
    The engine then implements :class:`~april.engines.protocol.SharesModel`."""
    gathers_weights: bool = False
    """True if the parameters are sharded over ranks, so the engine generates only between ``gather`` and ``release``.
    The engine then implements :class:`~april.engines.protocol.GathersWeights`."""
    updates_from_disk: bool = False
    """True if ``update_weights`` accepts the path of a directory with the weights."""
    adapters: AdapterSite | None = None
    """Which LoRA adapters ``update_weights`` can load from a directory; None if it loads no adapters."""
    collective: tuple[str, ...] = ()
    """Back-ends ("nccl", "gloo") over which the trainer's process can send weights. Unless this is empty, the engine
    implements :class:`~april.engines.weight_transfer.ReceivesWeights`."""
    takes_tensors: bool = False
    """True if the engine copies tensors of this process (:class:`~april.engines.weight_transfer.TakesTensors`)."""
    abort_means: AbortMeans = AbortMeans.BY_ID
    """How ``abort`` ends requests on this engine."""
    version_spans: bool = True
    """True if responses say which weights made which token. If False, tokens get the version at which their request was
    sent, and april ends all requests before a weight update."""
    in_flight_updates: tuple[OnWeightUpdate, ...] = ()
    """Ways in which requests can continue after a weight update instead of being aborted; unless empty, the engine
    implements :class:`~april.engines.protocol.KeepsRequests`. Without ``streams``, the versions of a request's tokens
    arrive at its end."""
    streams: bool = True
    """True if tokens arrive while they are made. If False, all tokens of running requests are lost when the engine
    dies."""
    stop_strings: bool = False
    """True if the engine ends a request once the text that it generated contains one of ``sampling.stop``, and returns
    all tokens of that text; april searches the text again. If False, the engine is sent no stop strings."""
    remote: bool = False
    """True if the engine is a server, which may restart or get weights from others. While the engine has requests,
    april regularly checks its load and its weights."""
    own_weights: bool = False
    """True if the engine is not a server but has its own copy of the weights, into which the trainer writes. After an
    interrupted transfer, its weights are unknown."""
    verifies_weights: bool = True
    """True if the engine can show which weights it has. If False, april cannot verify that new weights were loaded."""
    first_weights: FirstWeights = FirstWeights.KNOWN
    """What april knows about the weights on connection. With OTHERS, nothing is generated before a weight update."""
    honours_seeds: bool = True
    """True if repeating a request with its seed gives the same tokens."""
    attachments: tuple[str, ...] = ()
    """Kinds of attachments ("image") that the engine accepts with a prompt."""
    extras: tuple[str, ...] = ()
    """Names of per-token arrays, such as "routed_experts", that the engine can return with generated tokens."""
    bans: bool = False
    """True if ``sampling.banned_ids`` are honoured."""
    constrains: bool = False
    """True if ``sampling.grammar`` is honoured."""
    answers_late: bool = False
    """True if the engine may answer with the late response to an earlier request of the same sample, whose stream april
    had closed. The tokens may come from older weights."""
    needs: Mapping[str, str] = field(default_factory=dict, hash=False)
    """What the user should do to get an ability that the engine lacks, indexed by the name of its field (such as
    "adapters"). Abilities that need no remedy, or have none, are missing."""
    limits: tuple[Limit, ...] = ()
    """What a user should know about this engine: the promises that april cannot keep with it, and why."""

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each limit."""
        return tuple(limit.sentence for limit in self.limits)

    def cause(self, field: str) -> Limit | None:
        """Return the limit that explains why the engine lacks the ability ``field``, or None."""
        return next((limit for code in BY_NAME[field].causes for limit in self.limits if limit.code is code), None)

    def remedy(self, field: str) -> str:
        """Return what the user should do to get the ability ``field``; empty if nothing helps."""
        cause = self.cause(field)
        return self.needs.get(field) or (BY_NAME[field].remedy if cause is None else cause.remedy)

    def lack(self, field: str) -> str:
        """Return a sentence that says why the engine lacks the ability ``field``, or how to get it."""
        cause = self.cause(field)
        return self.needs.get(field) or (BY_NAME[field].lacking if cause is None else cause.sentence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ability:
    """What april checks and reports about one field of :class:`Capabilities`."""

    name: str
    """Name of the field."""
    unfit: Callable[[Config, Sequence[str], str, Capabilities], str] = lambda config, kinds, engine, c: ""
    """Function ``(configuration, kinds of attachments in prompts, engine name, capabilities)`` that returns why the
    engine does not fit the configuration, and a remedy; empty if it fits."""
    lacking: str = "The server does not offer it"
    """Message for an engine that lacks the ability, if none of the engine's limits explains why."""
    remedy: str = ""
    """What the user should do to get the ability, unless the engine names its own remedy."""
    causes: tuple[LimitCode, ...] = ()
    """Codes of the limits that may explain why an engine lacks the ability, most likely first."""
    subject: str = ""
    """Subject under which ``april doctor`` reports the ability; empty if it does not report it."""
    shown: Callable[[Capabilities, Config | None], str | None] = lambda c, config: ""
    """Function that returns what ``april doctor`` reports if the engine has the ability: empty for nothing, None if the
    engine lacks the ability. Its second argument is None if the configuration is unknown."""
    remark: Callable[[Capabilities], str] | None = None
    """Function that returns what ``april doctor`` reports if the engine lacks the ability but results are exact all the
    same. If None, the report is the limit that explains why the ability is missing."""


def _is_continuous(config: Config) -> bool:
    return config.generation is GenerationMode.CONTINUOUS


def _abort(c: Capabilities, config: Config | None) -> str | None:
    if not c.returns_partials:
        return ""
    if c.abort_means is not AbortMeans.BY_ID or c.cause("abort_means") is not None:
        return None
    return "each request by its id; its tokens are returned"


_EXACT_LOGPROBS = {
    LogprobKind.TEMPERATURE: "those of log_softmax(logits / T), as a trainer recomputes them, at every temperature",
    LogprobKind.PROCESSED: "those of the distribution that is sampled; with top_p 1 a trainer recomputes the same",
}


def _logprobs(c: Capabilities, config: Config | None) -> str | None:
    if config is not None and config.sampling.temperature == 1 and c.logprob_kind not in _EXACT_LOGPROBS:
        return "right only at sampling.temperature 1"
    return _EXACT_LOGPROBS.get(c.logprob_kind)


def _wrong_logprobs(config: Config, kinds: Sequence[str], engine: str, c: Capabilities) -> str:
    """Return an error message if the engine's log-probabilities are not log_softmax(logits / temperature).

    The temperature is the only setting that may change the sampled distribution. So at temperature 1 all kinds of
    log-probabilities are right; at other temperatures, only the kinds that follow the temperature are.
    """
    temperature = config.sampling.temperature
    if temperature == 1 or config.allow_mismatch or c.logprob_kind.follows_temperature:
        return ""
    if c.logprob_kind is LogprobKind.RAW:
        return (
            f"engine {engine} returns log-probabilities at temperature 1 (raw), which are wrong for training with "
            f"sampling.temperature={temperature:g}; start the server with --logprobs-mode processed_logprobs (vLLM) or "
            "without SGLANG_RETURN_ORIGINAL_LOGPROB (SGLang), set temperature: 1, or allow_mismatch: true if your "
            "trainer accounts for it"
        )
    return (
        f"engine {engine} does not say whether its log-probabilities follow the temperature, which matters with "
        f"sampling.temperature={temperature:g}; set engine.logprobs if you know it (vLLM with --logprobs-mode "
        "processed_logprobs: processed), temperature: 1, or allow_mismatch: true"
    )


def _weights(c: Capabilities, config: Config | None) -> str | None:
    if c.updates_from_disk:
        sent = f" or sent from the trainer over {' or '.join(c.collective)} (weights)," if c.collective else ""
        return f"from a directory (weight_update(path)),{sent} or by a transfer of your own"
    cause = c.cause("updates_from_disk")
    if cause is not None and cause.code is LimitCode.ADAPTERS_ONLY:
        return "adapters (LoRA) from a directory, but no full weights, because requests use an adapter"
    return None


def _adapters(c: Capabilities, config: Config | None) -> str | None:
    if c.adapters is None:
        return None if c.needs.get("adapters") else ""
    rank = "" if c.adapters.max_rank is None else f" up to rank {c.adapters.max_rank}"
    slots = "" if c.adapters.slots is None else f", {c.adapters.slots} at the same time"
    return f"LoRA policies are loaded as adapters{rank}{slots}, from a directory and alongside requests"


def _extras_missing(config: Config, kinds: Sequence[str], engine: str, c: Capabilities) -> str:
    missing = ", ".join(extra for extra in config.extras if extra not in c.extras)
    remedy = f"it returns {', '.join(c.extras)}" if c.extras else c.remedy("extras")
    return missing and (
        f"engine {engine} does not return {missing} with its tokens, which the setting extras asks for; {remedy}"
    )


def _images(c: Capabilities, config: Config | None) -> str | None:
    if not c.attachments:
        return None if c.needs.get("attachments") else ""
    bans = (
        "and the model never generates their placeholders"
    ) if c.bans else "and the model may generate their placeholders"
    return f"{', '.join(c.attachments)}: accepted with prompts, {bans}"


def _attachments_missing(config: Config, kinds: Sequence[str], engine: str, c: Capabilities) -> str:
    missing = " and ".join(f"{kind}s" for kind in kinds if kind not in c.attachments)
    return missing and (
        f"engine {engine} accepts no {missing}, but processor= is for prompts with {missing}; "
        f"{c.remedy('attachments')}; for text alone give tokenizer= instead"
    )


def _offers(c: Capabilities) -> str:
    return ", ".join([OnWeightUpdate.RESUBMIT, *c.in_flight_updates])


def _cut(c: Capabilities) -> str:
    remedy = c.remedy("in_flight_updates")
    cut = "april aborts and resubmits requests at a weight update (on_weight_update: resubmit)"
    return f"{cut}; to keep them over an update, {remedy}" if remedy else cut


def _wrong_update(config: Config, kinds: Sequence[str], engine: str, c: Capabilities) -> str:
    how = config.on_weight_update
    if how in (OnWeightUpdate.RESUBMIT, *c.in_flight_updates):
        return ""
    remedy = c.remedy("in_flight_updates")
    return (
        f"engine {engine} does not support on_weight_update: {how}, only {_offers(c)}; set a value that all engines "
        "support"
        + (f", or {remedy}" if remedy else "")
    )


def _ends(c: Capabilities, config: Config | None) -> str | None:
    if c.eos_token_ids:
        ids = ", ".join(map(str, c.eos_token_ids))
        return f"a response ends with token{'s' * (len(c.eos_token_ids) > 1)} {ids}, or with a stop id"
    if config is not None and getattr(config.engine, "eos_token_ids", None) is not None:
        return "only a stop id ends a response, as engine.eos_token_ids says"
    return None


ABILITIES = (
    Ability(
        name="returns_partials", causes=(LimitCode.NO_PARTIALS,), subject="abort",
        unfit=lambda config, kinds, engine, c: "" if c.returns_partials or not config.leaves_partials else (
            f"engine {engine} returns no tokens of an aborted request, so partial rollouts would lose them; set "
            f"{'generation: stepwise, ' if _is_continuous(config) else ''}over_sampling_batch_size to "
            "rollout_batch_size, and refill: none"
        ),
        lacking="an aborted request returns nothing, so partial rollouts are impossible: N' = N",
        shown=lambda c, config: "" if c.returns_partials else None,
    ),
    Ability(
        name="abort_means", subject="abort", shown=_abort,
        causes=(LimitCode.NO_ABORT_BY_ID, LimitCode.CUMULATIVE_STREAMS),
    ),
    Ability(
        name="verifies_weights", causes=(LimitCode.NO_LABELS,), subject="versions",
        shown=lambda c, config: None if not c.verifies_weights else (
            "replies say which weights made which token" if c.version_spans
            else "derived from when a request was sent: april ends all requests before weights change"
        ),
    ),
    Ability(name="version_spans"),
    Ability(
        name="logprob_kind", unfit=_wrong_logprobs, causes=(LimitCode.RAW_LOGPROBS, LimitCode.UNKNOWN_LOGPROBS),
        subject="log-probabilities", shown=_logprobs,
    ),
    Ability(
        name="updates_from_disk", lacking="the engine does not load weights from disk",
        causes=(
            LimitCode.ADAPTER, LimitCode.ADAPTERS_ONLY, LimitCode.NO_DISK_UPDATES, LimitCode.TIED_EMBEDDINGS,
            LimitCode.NO_LABELS,
        ),
        subject="new weights", shown=_weights,
    ),
    Ability(name="collective", lacking="no weights can be sent to the engine from the trainer's process"),
    Ability(
        name="adapters", lacking="the engine accepts no adapters", remedy="use servers that accept adapters",
        subject="adapters", shown=_adapters,
        remark=lambda c: (
            f"not supported; a LoRA policy is sent merged, as a full model; for adapters {c.remedy('adapters')}"
        ),
    ),
    Ability(
        name="extras", unfit=_extras_missing, lacking="the engine returns no rows with its tokens",
        remedy="leave extras out, or use another engine", subject="extras",
        shown=lambda c, config: (
            f"{', '.join(c.extras)}: the server returns these rows with the tokens, for extras"
        ) if c.extras else "",
    ),
    Ability(
        name="attachments", unfit=_attachments_missing, lacking="the engine takes no attachments",
        remedy="use an engine and a model that accept them", subject="images", shown=_images,
        remark=lambda c: (
            f"not accepted, though its model supports some; for prompts that have some, {c.remedy('attachments')}"
        ),
    ),
    Ability(
        name="bans", lacking="bans is False: ids that stand for attachments may come, and then the response ends there",
    ),
    Ability(
        name="constrains", lacking="the engine cannot restrict its tokens to a grammar",
        unfit=lambda config, kinds, engine, c: "" if c.constrains or config.constraints != "enforce" else (
            f"engine {engine} cannot restrict its tokens to a grammar, which constraints: enforce needs; use servers "
            "of vLLM, or of SGLang with a grammar back-end and a tokenizer, or set constraints: hint"
        ),
    ),
    Ability(
        name="in_flight_updates", unfit=_wrong_update, lacking="requests are cut at a weight update",
        causes=(
            LimitCode.NO_LABELS, LimitCode.NO_DISK_UPDATES, LimitCode.SEVERAL_COPIES, LimitCode.NO_ABORT_BY_ID,
        ),
        subject="in flight", remark=_cut,
        shown=lambda c, config: f"on_weight_update: {_offers(c)}" if c.in_flight_updates else None,
    ),
    Ability(name="eos_token_ids", causes=(LimitCode.UNKNOWN_EOS,), subject="ends", shown=_ends),
    Ability(
        name="streams", subject="if it dies",
        shown=lambda c, config: "april can receive tokens while they are made (max_token_loss)" if c.streams else None,
        remark=lambda c: (
            "april generates the tokens of its running requests again; engine.max_token_loss limits how many"
        ),
    ),
    Ability(
        name="honours_seeds", lacking="honours_seeds is False",
        causes=(LimitCode.NO_SEEDS, LimitCode.CHUNKED_PREFILL), subject="seeds",
        shown=lambda c, config: "the same seed gives the same tokens" if c.honours_seeds else None,
        remark=lambda c: "seeds have no effect, so runs cannot be repeated; nothing else depends on them",
    ),
    Ability(
        name="shares_weights",
        unfit=lambda config, kinds, engine, c: "" if not (c.shares_weights and _is_continuous(config)) else (
            f"engine {engine} generates with the trainer's own model object, which therefore cannot be trained during "
            "generation; set generation: stepwise, or give the engine a copy of the model (a server, or a GPU of its "
            "own)"
        ),
    ),
    Ability(
        name="max_context",
        unfit=lambda config, kinds, engine, c: "" if config.max_response_len < c.max_context else (
            f"max_response_len={config.max_response_len} leaves no room for a prompt: the context of engine {engine} "
            f"holds {c.max_context} tokens; lower max_response_len, or give the engine a longer context by "
            "engine.max_len or by a server's own flags"
        ),
        subject="size",
        shown=lambda c, config: f"context of {c.max_context} tokens, vocabulary of {c.vocab_size}" + (
            "" if c.max_in_flight is None else f", {c.max_in_flight} requests at the same time"
        ),
    ),
    Ability(
        name="vocab_size",
        unfit=lambda config, kinds, engine, c: next((
            f"sampling.stop_token_ids: {i} is outside the vocabulary of {c.vocab_size} of engine {engine}"
            for i in config.sampling.stop_token_ids if i >= c.vocab_size
        ), ""),
    ),
)  # fmt: skip
"""All abilities that april checks or reports, in the order in which ``april doctor`` reports them."""
OF_THE_MODEL = ("vocab_size", "eos_token_ids", "logprob_kind")
"""Names of the fields that decide what token ids and log-probabilities mean; a restart must not change them."""
BY_NAME = {ability.name: ability for ability in ABILITIES}
"""The abilities, indexed by name."""
