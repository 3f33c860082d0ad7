"""Defines april's configuration: one frozen pydantic model, which refuses settings that contradict each other.

A configuration is made from keyword arguments, a plain mapping, an OmegaConf container or a YAML file. The names of
settings follow slime's, which users already know.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from april.config.agents import AgentsConfig
from april.config.engines import ENGINE_CONFIGS, EngineConfig, TransformersEngineConfig
from april.config.images import ImagesConfig
from april.config.mistakes import (
    NAMES_ELSEWHERE,
    UNSUPPORTED,
    Mistake,
    SettingName,
    WrongSettings,
    contradiction,
)
from april.config.values import (
    AUTO,
    Bytes,
    Model,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    OrAuto,
    PositiveInt,
    Seconds,
    Seed,
    one_or_more,
    without_contents,
)
from april.core.row_rewards import RESERVED
from april.core.sampling import SamplingParams, stop_id_of, wrong_stop_strings
from april.core.settings import LEAST_QUORUM, CoreSettings, quorum_of
from april.core.types import (
    GenerationMode,
    OnDataEnd,
    OnFailedSample,
    OnLongPrompt,
    OnStale,
    OnWeightUpdate,
    Refill,
    WeightsRoute,
    Work,
)
from april.errors import ConfigError
from april.text.install_command import install

MAX_ABORTS = 1_000_000
"""Largest number of times that the same abort may be sent."""
RETRY_PAUSE_S = 4.0
"""Seconds before a failed reward function or filter is called again; each further pause is 8 times as long."""
_WEIGHT = re.compile(r"[A-Za-z_]\w*=[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,2})?")
"""Pattern of an item of ``reward_weights``, such as ``format=0.2``."""
_ENGINES = {str(engine.model_fields["kind"].default): engine for engine in ENGINE_CONFIGS}


def _stop_strings(stop: tuple[str, ...]) -> tuple[str, ...]:
    if wrong := wrong_stop_strings(stop):
        raise ValueError(wrong)
    return stop


def _weights(given: Any) -> Any:
    """Convert a mapping of names to weights to items such as ``correct=1.0``."""
    return [f"{name}={weight}" for name, weight in given.items()] if isinstance(given, Mapping) else one_or_more(given)


def _weights_of_parts(words: tuple[str, ...]) -> tuple[str, ...]:
    names = [name for word in words if _WEIGHT.fullmatch(word) and (name := word.partition("=")[0]) not in RESERVED]
    if len({*names}) < len(words):
        raise ValueError(f"must be names of parts with weights, such as format_ok=0.2, each only once, got {words}")
    return words


def _each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not name.isidentifier() or names.count(name) > 1:
            got = without_contents(names)
            raise ValueError(f"must be names of extras such as routed_experts, each only once, got {got}")
    return names


def _stop_id(given: Any) -> Any:
    if isinstance(given, str) and not given.strip().lstrip("+-").isdigit():
        raise ValueError(f"input should be a valid integer, got {given!r}; {stop_id_of(given)}")
    return given


class SamplingConfig(Model):
    """Sampling parameters of training responses."""

    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 means greedy decoding."""
    top_p: Annotated[float, Field(gt=0, le=1), Number] = 1.0
    """Sample from the most likely tokens that together have this probability; 1 means all tokens."""
    min_tokens: NonNegativeInt = 0
    """Minimum number of tokens of a response; EOS is not allowed before."""
    stop_token_ids: Annotated[
        tuple[Annotated[NonNegativeInt, BeforeValidator(_stop_id)], ...], BeforeValidator(_stop_id)
    ] = ()
    """Ids that end a response, in addition to the engine's EOS ids."""
    stop: Annotated[tuple[str, ...], BeforeValidator(one_or_more), AfterValidator(_stop_strings)] = ()
    """Strings that end a response. The scheduler needs a tokenizer for them."""


class Config(Model):
    """All settings of april.

    Raises:
        ConfigError: a key is unknown, a value is out of range, or settings contradict each other; one sentence each.
    """

    rollout_batch_size: PositiveInt
    """N: prompt groups per batch."""
    n_samples_per_prompt: Annotated[PositiveInt, Field(le=65_536)] = 8
    """n: responses per prompt."""
    over_sampling_batch_size: OrAuto[PositiveInt] | None = None
    """N': number of groups in progress at the same time. None means N. If it is below N, groups are started in portions
    of this size until at least N are in progress."""
    partial_rollout: bool = True
    """Keep unfinished responses and continue them in the next step. False with N' > N means tail batching: unfinished
    prompts begin again in rounds of their own, and max_staleness is 0."""
    group_quorum: OrAuto[Annotated[float, Field(gt=0, le=1), Number]] = 1.0
    """Share of a group's responses that must be finished before any of them is delivered. Below 1, or with auto, a
    batch has N * n responses, and the remaining responses of a group are delivered later."""
    on_failed_sample: OnFailedSample = OnFailedSample.DROP_GROUP
    """What happens when a response fails for good: its group is dropped (drop_group), another response replaces it
    (replace), or the group continues without it (shrink)."""
    min_group_size: PositiveInt | None = None
    """Minimum number of responses of a group with on_failed_sample: shrink. None means half of n_samples_per_prompt."""
    max_response_len: PositiveInt
    """Maximum number of tokens of a response in all its turns together, tool results included. If a sample has several
    conversations, the limit holds for each of them."""
    max_sample_tokens: PositiveInt | None = None
    """Maximum number of tokens that a sample may generate in all its conversations together. Each of several requests
    that run at the same time gets the number that was left when it started."""
    max_chains: PositiveInt = 64
    """Maximum number of conversations of a sample. A sample that starts another one fails."""
    generation: GenerationMode = GenerationMode.STEPWISE
    """When engines generate: only between the request for a batch and its delivery (stepwise), or always, for engines
    with GPUs of their own (continuous)."""
    on_weight_update: OnWeightUpdate = OnWeightUpdate.RESUBMIT
    """What happens to requests in flight at a weight update if generation is continuous: april aborts and resubmits
    them (resubmit), or the engine continues them with the old KV cache (keep) or a recomputed one (recompute)."""
    refill: Refill = Refill.NONE
    """When new work starts between two deliveries: only at the beginning (none), after each finished group (group), or
    after each finished sample (sample). With generation: continuous the default is sample."""
    max_in_flight: OrAuto[PositiveInt] | None = None
    """Maximum number of samples that all engines together generate at the same time. None means max(N, N') * n, limited
    by the engines' slots. If both this setting and over_sampling_batch_size are auto, april also chooses refill."""
    evaluation_share: Annotated[float, Field(gt=0, le=1), Number] = 0.5
    """Number of requests reserved for evaluations during continuous training, as a share of max_in_flight and in
    addition to it. If the engines are full, training gives way until evaluations have this share of all requests."""
    sampling: SamplingConfig = SamplingConfig()
    max_staleness: NonNegativeInt = 5
    """Maximum number of weight updates between the generation of a token and the training of its batch. Also the
    maximum number of delivered batches that may wait for their training at the same time."""
    max_off_policy_share: Annotated[float, Field(gt=0, le=1), Number] = 1.0
    """Largest share of trained tokens from older weights that april accepts when it chooses a setting that is auto."""
    on_stale: OnStale = OnStale.FINISH
    """What happens to a sample that is older than max_staleness. With all choices but drop, steps wait for samples that
    are close to the limit."""
    max_age: PositiveInt | None = None
    """Number of weight updates after which a group is generated before all others and the step waits for it. None means
    4 * (max_staleness + 1)."""
    max_resumes: PositiveInt = 100
    """Number of continuations of one response after which its group is generated before all others and the step waits
    for it, unless on_stale is finish."""
    on_long_prompt: OnLongPrompt = OnLongPrompt.ERROR
    """What happens to a prompt that leaves no room for a response: the step fails (error), or the prompt is skipped and
    counted (skip)."""
    epochs: PositiveInt = 1
    """Number of passes over the prompts."""
    on_data_end: OnDataEnd = OnDataEnd.SHORT
    """What happens to the last groups if they are fewer than N: they form a shorter batch (short), they wait for more
    prompts (wait), or the prompts start again, without end (wrap)."""
    max_filtered_groups: PositiveInt = 1000
    """Number of consecutive groups rejected by the filter at which the step fails."""
    reward_weights: Annotated[tuple[str, ...], BeforeValidator(_weights), AfterValidator(_weights_of_parts)] = ()
    """Weights for the sum of the named parts that a reward function returns, such as correct=1.0 format=0.2; in files
    and in Python also a mapping, {correct: 1.0, format: 0.2}. Empty means that reward functions return a number, or
    parts with a total."""
    extras: Annotated[tuple[str, ...], BeforeValidator(one_or_more), AfterValidator(_each_once)] = ()
    """Names of additional data that engines return with every trained token, such as routed_experts for trainers that
    replay the routing."""
    max_held_tokens: PositiveInt | None = None
    """Number of tokens in undelivered samples at which april stops drawing prompts beyond those that the step needs.
    None means no limit."""
    max_extras_bytes: Bytes = 8 << 30
    """Size in bytes of the extras of undelivered samples at which april stops drawing prompts beyond those that the
    step needs."""
    max_attempt_failures: PositiveInt = 3
    """Number of failures of a sample (engine, rollout or reward) after which on_failed_sample applies."""
    max_failed_groups: PositiveInt = 8
    """Number of consecutive groups dropped because of failures at which the step fails."""
    function_timeout_s: Seconds | None = 600.0
    """Longest time that a reward function or filter may take. For a rollout function, the limit holds for each period
    between calls of llm.generate. None means no limit."""
    abort_deadline_s: Seconds = 30.0
    """Longest wait for an aborted request to end before its engine is quarantined. Also the longest wait for an engine
    to pause, resume or close."""
    abort_resend_s: Seconds = 1.0
    """Time after which the same abort is sent again."""
    stall_timeout_s: Seconds | None = 1800.0
    """Longest wait for a new token of a request, or for the response if the engine does not stream. After that, april
    ends the request and continues it elsewhere. None means no limit."""
    warn_after_s: Seconds | None = None
    """Wait for the same thing after which a warning says what april waits for. None means 60 s, or outage_deadline_s if
    that is less."""
    outage_deadline_s: Seconds = 600.0
    """Longest wait while no engine is healthy, and for an engine to load weights or receive a part of them. A transfer
    function of your own may take twice as long."""
    weights: WeightsRoute = WeightsRoute.AUTO
    """How new weights get to the servers if an adapter for a trainer sends them: through a directory (disk), from the
    trainer's process (collective), or from the process if all servers support that (auto)."""
    adapters_dir: str | None = None
    """Directory that all servers can read, in which weight_update(weights=model) writes adapters (LoRA). None means a
    temporary directory on this machine."""
    allow_mismatch: bool = False
    """Accept sampling parameters under which a trainer's recomputed log-probabilities cannot match."""
    sampling_of_clients: Literal["plan", "client"] = "plan"
    """Temperature and top_p used in training if an agent's client asks for other values: the configured ones (plan), or
    the client's (client). With client, divide the logits by the batch's `temperatures`. Evaluations always use those of
    evaluate()."""
    constraints: Literal["enforce", "hint", "refuse"] = "hint"
    """What happens if an agent's client demands a tool call or JSON: the engine may sample nothing else (enforce), the
    model samples freely and the metric broken_constraints counts other answers (hint), or the request is refused
    (refuse). enforce changes log-probabilities, so it needs allow_mismatch."""
    seed: Seed = 0
    """Seed of all sampling. april derives the seed of each attempt from it."""
    relax_gc: bool = True
    """Let Python's garbage collector run less often in this process while the scheduler is open (thresholds 5,000, 2
    and 200,000). april then collects new objects often, and all objects when memory without the run's samples has
    grown by a quarter and by 1 GiB, or after half an hour. A collector that the program has disabled or relaxed
    further is left alone."""
    images: ImagesConfig = ImagesConfig()
    agents: AgentsConfig = AgentsConfig()
    engine: EngineConfig = TransformersEngineConfig()

    def __init__(self, **values: Any) -> None:
        if values.get("generation") == GenerationMode.CONTINUOUS:
            values.setdefault("refill", Refill.SAMPLE)
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise WrongSettings(map(_mistake, error.errors(include_url=False))) from None

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        if self.tail_batching and not self.model_fields_set & {"max_staleness"}:
            self.__dict__["max_staleness"] = 0
        for wrong, template in self._contradictions():
            if wrong:
                raise contradiction(self, template)
        return self

    def _contradictions(self) -> Iterator[tuple[bool, str]]:
        """Yield (is wrong, sentence) for each check. A check may assume that all earlier ones found nothing wrong."""
        n, over = self.rollout_batch_size, self._number(self.over_sampling_batch_size) or self.rollout_batch_size
        yield from self._wrong_auto()
        yield self.tail_batching and self.max_staleness > 0, (
            "{max_staleness=} lets tokens become older than their weights, but {partial_rollout=} with "
            "{over_sampling_batch_size=} trains every batch with the weights that generated it; leave out "
            "{max_staleness}, or set {partial_rollout: true}"
        )
        yield self.tail_batching and self.on_stale not in (OnStale.FINISH, OnStale.RESTART), (
            "{on_stale=} has no effect with {partial_rollout=} and {over_sampling_batch_size=}, where nothing gets "
            "old; leave it out"
        )
        yield self.tail_batching and self.delivers_parts, (
            "{group_quorum=} delivers the rest of a group in a later batch, but {partial_rollout=} with "
            "{over_sampling_batch_size=} keeps no responses for one; leave out {group_quorum}, or set "
            "{partial_rollout: true}"
        )
        quorum = quorum_of(self._number(self.group_quorum) or 1.0, self.n_samples_per_prompt)
        yield self.delivers_parts and quorum < LEAST_QUORUM, (
            f"{{group_quorum=}} delivers groups of {{n_samples_per_prompt=}} from {quorum} finished responses on, but "
            f"a baseline needs {LEAST_QUORUM}; raise one of the two settings"
        )
        yield (self.min_group_size or 1) > self.n_samples_per_prompt, (
            "{min_group_size=} must not be more than {n_samples_per_prompt=}"
        )
        yield self.min_group_size is not None and self.on_failed_sample is not OnFailedSample.SHRINK, (
            "{min_group_size=} has no effect with {on_failed_sample=}; leave it out, or set {on_failed_sample: shrink}"
        )
        bound = min(self.max_staleness, self.age_limit)
        which = "max_staleness" if bound == self.max_staleness else "max_age"
        yield self.on_stale is OnStale.FINISH and over > (bound + 1) * n and not self.tail_batching, (
            f"{{over_sampling_batch_size=}} is too large: with {{{which}=}} april can deliver {(bound + 1) * n} groups "
            f"in time; raise {{{which}}} or set {{on_stale}}"
        )
        yield self.epochs > 1 and self.on_data_end is OnDataEnd.WRAP, (
            "{epochs=} limits the passes over the prompts, and {on_data_end=} repeats them without end; leave out one "
            "of the two"
        )
        yield self.generation is GenerationMode.CONTINUOUS and not self.partial_rollout, (
            "{generation=} leaves unfinished responses at each weight update, and {partial_rollout=} would throw them "
            "away; set {partial_rollout: true}"
        )
        cut = self.on_weight_update is OnWeightUpdate.RESUBMIT
        yield not cut and self.generation is not GenerationMode.CONTINUOUS, (
            "{on_weight_update=} lets requests run through weight updates, but with {generation=} no request runs "
            "during an update; set {generation: continuous}, or leave out {on_weight_update}"
        )
        yield self.refill is not Refill.NONE and not self.partial_rollout, (
            "{refill=} leaves unfinished responses at the end of a step, and {partial_rollout=} would throw them away; "
            "set {partial_rollout: true} or {refill: none}"
        )
        yield self.sampling.min_tokens >= self.max_response_len, (
            "{sampling.min_tokens=} must be below {max_response_len=}"
        )
        yield self.sampling.min_tokens >= (self.max_sample_tokens or self.max_response_len), (
            "{sampling.min_tokens=} must be below {max_sample_tokens=}"
        )
        yield self.abort_resend_s > self.abort_deadline_s, "{abort_resend_s=} is longer than {abort_deadline_s=}"
        times = self.abort_deadline_s / self.abort_resend_s
        yield times > MAX_ABORTS, (
            f"{{abort_resend_s=}} would send the same abort {times:.0e} times within {{abort_deadline_s=}}; the most "
            f"is {MAX_ABORTS:,} times"
        )
        if self.allow_mismatch:
            return
        yield self.constraints == "enforce", (
            "{constraints=} lets a grammar decide which tokens are sampled, which a trainer's recomputed "
            "log-probabilities do not take into account; set {constraints: hint}, or {allow_mismatch: true} if your "
            "trainer accounts for it"
        )
        yield self.sampling.top_p < 1, (
            "{sampling.top_p=} is not part of the log-probabilities that a trainer recomputes (log_softmax(logits / "
            "T)), so its ratios would be wrong; set {sampling.top_p: 1}, or {allow_mismatch: true} if your trainer "
            "accounts for it"
        )
        yield self.sampling.min_tokens > 0, (
            "{sampling.min_tokens=} forbids EOS at the start of a response, which a trainer's recomputed "
            "log-probabilities do not take into account; set {sampling.min_tokens: 0}, or {allow_mismatch: true}"
        )
        yield self.sampling.temperature == 0, (
            "{sampling.temperature=} makes all samples of a group equal and gives no log-probabilities to train on; "
            "set a positive temperature, or {allow_mismatch: true}"
        )

    def _wrong_auto(self) -> Iterator[tuple[bool, str]]:
        """Yield (is wrong, sentence) for each check of the settings that are auto."""
        chosen = next((name for name in Work if getattr(self, name) == AUTO), None)
        yield chosen is None and self.max_off_policy_share < 1, (
            "{max_off_policy_share=} limits what april chooses, but no setting is auto; set {over_sampling_batch_size: "
            "auto}, or leave out {max_off_policy_share}"
        )
        yield chosen is not None and not self.partial_rollout, (
            f"{{{chosen}=}} chooses how much is left over for the next step, but {{partial_rollout=}} would throw "
            "those tokens away; set {partial_rollout: true}"
        )
        over, refills = self.over_sampling_batch_size == AUTO, self.refill is not Refill.NONE
        yield chosen is not None and self.refill is Refill.GROUP, (
            f"{{{chosen}=}} only works with {{refill: none}} and {{refill: sample}}, not with {{refill=}}"
        )
        both = over and self.max_in_flight == AUTO
        yield over and (refills if not both else self.generation is GenerationMode.CONTINUOUS), (
            "{over_sampling_batch_size=} has no effect with {refill=}, where {max_in_flight} decides; leave it out and "
            "set {max_in_flight: auto}"
        )
        yield self.max_in_flight == AUTO and not over and not refills, (
            "{max_in_flight=} has no effect with {refill=}, where the number of groups in work decides; set {refill: "
            "sample}, or set {over_sampling_batch_size: auto} as well, so that april also chooses the refill"
        )

    @staticmethod
    def _number(value: Any) -> Any:
        return None if value == AUTO else value

    @property
    def auto(self) -> tuple[Work, ...]:
        """The settings that april changes during the run."""
        found = {name for name in Work if getattr(self, name) == AUTO}
        if Work.OVER_SAMPLING in found:
            if Work.IN_FLIGHT in found:
                found.add(Work.REFILL)
            if self.max_in_flight is None:  # the default depends on N'
                found.add(Work.IN_FLIGHT)
        return tuple(name for name in Work if name in found)

    @property
    def delivers_parts(self) -> bool:
        """True if a batch may contain only some responses of a group."""
        return self.group_quorum != 1

    @property
    def tail_batching(self) -> bool:
        """True if prompts that a step with N' > N groups did not finish begin again in a later step."""
        return not self.partial_rollout and self.groups_in_work > self.rollout_batch_size

    @property
    def groups_in_work(self) -> int:
        """N', or N if N' is None or auto. At least N without partial_rollout, as portions of N' groups add up to N."""
        n, given = self.rollout_batch_size, self._number(self.over_sampling_batch_size)
        return (given or n) if self.partial_rollout else max(given or n, n)

    @property
    def leaves_partials(self) -> bool:
        """True if steps or weight updates may leave unfinished responses."""
        if self.generation is GenerationMode.CONTINUOUS or self.auto:
            return True
        if self.tail_batching:
            return False
        return self.groups_in_work not in (1, self.rollout_batch_size) or self.refill is not Refill.NONE

    @property
    def age_limit(self) -> int:
        """max_age, or 4 * (max_staleness + 1) if it is None."""
        return self.max_age or 4 * (self.max_staleness + 1)

    @property
    def warned_after_s(self) -> float:
        """warn_after_s, or the smaller of 60 s and outage_deadline_s if it is None."""
        return self.warn_after_s or min(60.0, self.outage_deadline_s)

    @property
    def passes(self) -> int | None:
        """Number of passes over the prompts; None means no limit."""
        return None if self.on_data_end is OnDataEnd.WRAP else self.epochs

    @property
    def samples_in_flight(self) -> int:
        """max_in_flight, or max(N, N') * n if it is None or auto. If N' < N, N is rounded up to a multiple of N'."""
        n, over = self.rollout_batch_size, self.groups_in_work
        groups = over if over >= n else -(-n // over) * over
        return self._number(self.max_in_flight) or groups * self.n_samples_per_prompt

    @classmethod
    def from_mapping(cls, values: Any) -> Self:
        """Make a configuration from a plain mapping or an OmegaConf container, which is resolved."""
        if "omegaconf" in sys.modules:
            omegaconf = sys.modules["omegaconf"]
            if isinstance(values, omegaconf.Container):
                try:
                    values = omegaconf.OmegaConf.to_container(values, resolve=True, throw_on_missing=True)
                except omegaconf.errors.OmegaConfBaseException as error:
                    raise ConfigError(" ".join(str(error).split())) from None
        if not isinstance(values, Mapping):
            hint = "; Config.from_yaml reads files" if isinstance(values, (str, os.PathLike)) else ""
            raise ConfigError(f"expected a mapping of settings, got {type(values).__name__}{hint}")
        return cls(**{str(key): value for key, value in values.items()})

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Make a configuration from a YAML file."""
        values = read_yaml(path)
        try:
            return cls.from_mapping(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def to_mapping(self, *, defaults: bool = True) -> dict[str, Any]:
        """Return plain values for :meth:`from_mapping`, without ``engine.api_key``, and with or without defaults."""
        out = self.model_dump(mode="json", exclude={"engine": {"api_key"}}, exclude_defaults=not defaults)
        if self.generation is GenerationMode.CONTINUOUS:  # which has a default of its own for refill
            out["refill"] = self.refill.value
        if (engine := out.get("engine")) is not None:
            out["engine"] = {"kind": self.engine.kind, **engine}
        return out

    def core_settings(
        self, *, has_reward: bool, group_reward: bool, run_id: int, has_filter: bool = False,
        attachments: tuple[str, ...] = (),
    ) -> CoreSettings:  # fmt: skip
        """Return the settings of the scheduler's core: those with the same name, and those derived from others.

        ``attachments`` are the kinds of attachments that prompts may have.
        """
        same = {f.name: getattr(self, f.name) for f in fields(CoreSettings) if f.name in type(self).model_fields}
        return CoreSettings(**same | {
            "over_sampling_batch_size": self.groups_in_work,
            "max_in_flight": self.samples_in_flight,
            "group_quorum": self._number(self.group_quorum) or 1.0,
            "min_group_size": self.min_group_size or -(-self.n_samples_per_prompt // 2),
            "max_age": self.age_limit,
            "auto": self.auto,
            "on_stale": OnStale.RESTART if self.tail_batching else self.on_stale,
            "has_reward": has_reward,
            "group_reward": group_reward,
            "has_filter": has_filter,
            "attachments": attachments,
            "retry_pause_s": RETRY_PAUSE_S,
            "run_seed": self.seed,
            "run_id": run_id,
        })  # fmt: skip

    @property
    def weights_of_parts(self) -> dict[str, float]:
        """The weights of :attr:`reward_weights` by name."""
        return {name: float(weight) for name, _, weight in (word.partition("=") for word in self.reward_weights)}

    def sampling_params(self, banned_ids: tuple[int, ...] = ()) -> SamplingParams:
        """Return the sampling parameters of a whole response, without a seed, which is set for each attempt."""
        return SamplingParams(max_tokens=self.max_response_len, banned_ids=banned_ids, **self.sampling.model_dump())


def read_yaml(path: str | Path) -> Any:
    """Return the values in a YAML file. Raises ConfigError if it cannot be read."""
    try:
        import yaml
    except ImportError:
        raise ConfigError(f"reading YAML needs PyYAML: {install('yaml')}") from None
    try:
        return yaml.safe_load(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {_why_no_yaml(error)}") from None


def _why_no_yaml(error: Exception) -> str:
    """Return the mistake and its line number. The line itself is not shown, because it may contain a key."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    return " ".join(f"{getattr(error, 'problem', None)} in line {mark.line + 1}".split())


def _mistake(item: Any) -> Mistake:
    """Convert an error of pydantic to a sentence that names the setting and shows no secrets."""
    loc, kind = item["loc"], None
    if loc[:1] == ("engine",) and len(loc) > 1 and loc[1] in _ENGINES:
        kind, loc = str(loc[1]), ("engine", *loc[2:])
    where = SettingName(".".join(str(part) for part in loc))
    secret = loc[-1:] in (("api_key",), ("api_key_env",))  # a key may have been written where its variable belongs
    got = "" if secret else f", got {without_contents(item.get('input'))}"
    match item["type"]:
        case "extra_forbidden":
            return _why_unknown(where, kind, item["input"])
        case "missing" | "too_short" if kind is not None:
            return Mistake(where, " is required for ", _KIND, f" {kind}: {_REQUIRED}")
        case "missing":
            return Mistake(where, ": is required")
        case "union_tag_invalid":
            tag, known = item["ctx"]["tag"], item["ctx"]["expected_tags"]
            return Mistake(_KIND, f": april has no engine {without_contents(str(tag))}; it has {known}")
        case "model_attributes_type" | "model_type" | "dict_type":
            hint = f"; write engine: {{kind: {item['input']}}}" if str(item["input"]) in _ENGINES else ""
            return Mistake(where, f": expected a mapping of settings{got}{hint}")
        case "union_tag_not_found":
            return Mistake(_KIND, ": is required")
        case "value_error":
            error = item["ctx"]["error"]
            return error if isinstance(error, Mistake) else Mistake(where, f": {error}")
        case _:
            return Mistake(where, f": {item['msg'][0].lower()}{item['msg'][1:]}{got}")


_KIND = SettingName("engine.kind")
_REQUIRED = "the addresses of the servers, such as http://127.0.0.1:8000"
"""Description of ``engine.urls``. No other setting of any engine is required."""


def _why_unknown(where: SettingName, kind: str | None, value: Any) -> Mistake:
    """Return a mistake that suggests a name for an unknown setting; ``kind`` is None outside of ``engine``."""
    name = where.path.rpartition(".")[2]
    if kind is not None:
        return _why_unknown_in_engine(where, name, kind)
    inside = [f"{parent}{key}" for key in value for parent in ("", f"{name}.")] if isinstance(value, Mapping) else []
    near = next(filter(None, map(NAMES_ELSEWHERE.get, [name, *inside])), None)  # also names inside a trainer's section
    if near is None and (reason := UNSUPPORTED.get(name)):
        return Mistake(where, f": {reason}")
    engines = {field for engine in ENGINE_CONFIGS for field in engine.model_fields}
    sections = {"": Config.model_fields, "sampling.": SamplingConfig.model_fields, "engine.": engines}
    known = [section + field for section, fields in sections.items() for field in fields]
    same = [path for path in known if path.rpartition(".")[2] == name]
    # suggests a path, not a flag: argparse refuses unknown flags, so the unknown name is from a file or from Python
    near = near or next(iter(same or difflib.get_close_matches(where.path, known, 1, 0.75)), None)
    return Mistake(where, f": unknown setting; {f'do you mean {near}?' if near else 'see april.Config for the names'}")


def _why_unknown_in_engine(where: SettingName, name: str, kind: str) -> Mistake:
    others = [other for other, engine in _ENGINES.items() if name in engine.model_fields]
    if others:
        return Mistake(where, " belongs to ", _KIND, f" {' or '.join(others)}, not to {kind}")
    known = [field for field in _ENGINES[kind].model_fields if field != "kind"]
    if near := difflib.get_close_matches(name, known, 1, 0.7):
        return Mistake(where, f": unknown setting; do you mean engine.{near[0]}?")
    return Mistake(where, ": unknown setting; ", _KIND, f" {kind} has {', '.join(known)}")
