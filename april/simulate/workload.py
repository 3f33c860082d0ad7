"""Defines the workload of a simulation: the model and its engines, the batch, the response lengths.

Invariant: every :class:`Workload` that can be constructed can be simulated; its constructor finds wrong arguments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april.config.settings import Config
from april.core.settings import CoreSettings
from april.core.types import GenerationMode, OnStale, OnWeightUpdate, Refill
from april.engines.simulated.decode_cost import DecodeCost, in_flight_that_fits, limit_s, limit_tokens_per_s, roofline
from april.engines.simulated.response_lengths import LognormalLengths, ResponseLengths, TraceLengths
from april.errors import ConfigError
from april.simulate import Placement as Placement

MEDIAN_LEN, SIGMA_BETWEEN, SIGMA_WITHIN = 2500.0, 0.62, 0.51
"""Defaults of lognormal lengths: median in tokens, sigma between prompts, sigma within a prompt (0.8 in total)."""
LENGTH_SAMPLES = 50_000
"""Number of responses drawn to estimate the distribution of lengths."""
MOST_IN_FLIGHT = 100_000
MOST_TRAIN_S = 10 * 365 * 86_400.0
BOUNDS = (1, 2, 4, 8)
"""Values of max_staleness for which the continuous mode is simulated."""


@dataclass(frozen=True)
class Schedule:
    """A way to schedule the samples of a workload.

    Attributes:
        over: over_sampling_batch_size (N'), the number of groups in progress.
        refill: policy that says when new work starts inside a step.
        in_flight: largest number of samples in flight, which is the number of decode slots.
        continuous: if generation goes on during training, its max_staleness; None means stepwise generation, with
            ``Workload.max_staleness``.
        quorum: share of a group's samples that must be finished before any of them is delivered.
        tail_batching: whether unfinished prompts begin again in rounds of their own (partial_rollout: false).
    """

    over: int
    refill: Refill
    in_flight: int
    continuous: int | None = None
    quorum: float = 1.0
    tail_batching: bool = False


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A job to simulate. The defaults are those of the paper's scripts (arXiv 2509.18521), on H100 GPUs.

    Each workload is simulated in several modes (:attr:`modes`): ``sync`` starts as many groups as a batch needs;
    ``april`` starts more groups at the beginning of each step, as in the paper; ``refill`` replaces each finished
    sample at once; ``continuous`` also generates while the trainer trains.

    Attributes:
        model, gpu, tensor_parallel: description of one engine, see
            :func:`april.engines.simulated.decode_cost.roofline`.
        engines: number of engines.
        groups, samples: number of groups (prompts) per batch, and of responses per group.
        over: number of groups in progress in the april mode; None means twice ``groups``.
        in_flight: samples in flight in the refill mode; None means ``groups`` times ``samples``, as in the sync mode.
        max_response_len, prompt_len: lengths in tokens.
        max_staleness, on_stale: bound on the age of tokens in weight updates, and what happens to older samples.
        group_quorum: share of a group that must be finished before any of it is delivered. If it is below 1, the modes
            april and refill are simulated with and without it, the continuous mode only with it.
        train_time: time to train a batch: seconds ("40"), or a multiple of the time that the engines need for a batch
            at their maximum throughput ("0.5x"); None means that training takes no time.
        placement: placement of the trainer, if training takes time; None means separate.
        fetch_ahead: number of batches that a trainer on its own GPUs requests while it trains a batch.
        tail_batching: N' of an additional mode with tail batching; None means no such mode.
        lengths_file: JSONL file of lengths (see :meth:`TraceLengths.from_jsonl`); None means lognormal lengths.
        median_len, sigma_between, sigma_within: parameters of the lognormal lengths; None means the defaults above.
        steps, ramp: number of simulated steps, and of first steps that are left out of the figures.
        seed: seed of the lengths.
        measured_cost: cost of one engine; None means an estimate for ``model`` on ``gpu``.
        speculative: speed-up by speculative decoding, as SEQUENCES:FACTOR points ("8:2,64:1"), see
            :attr:`april.engines.simulated.decode_cost.DecodeCost.speed_up`; None means that of ``measured_cost``.
        measured_lengths: lengths to use; None means those of ``lengths_file`` or the lognormal distribution.
        settings: configuration of a recorded run; schedules and the other attributes take precedence over it.
        slots: largest number of samples in flight on one engine, used by ``april plan``; None means no limit.
        whole_groups: whether only finished groups may be delivered.
        filtered: whether the recorded run had a filter, which is not simulated.
        doubts: sentences that say why lengths or cost of a recorded run may be wrong.

    Raises:
        ValueError: an argument is unknown, out of range or contradicts another; the message is one sentence.
    """

    model: str = "qwen3-4b"
    gpu: str = "h100"
    tensor_parallel: int = 2
    engines: int = 4
    groups: int = 32
    samples: int = 8
    over: int | None = None
    in_flight: int | None = None
    max_response_len: int = 16_384
    prompt_len: int = 128
    max_staleness: int = 5
    on_stale: OnStale = OnStale.FINISH
    group_quorum: float = 1.0
    train_time: str | None = None
    placement: Placement | None = None
    fetch_ahead: int = 0
    tail_batching: int | None = None
    lengths_file: Path | None = None
    median_len: float | None = None
    sigma_between: float | None = None
    sigma_within: float | None = None
    steps: int = 50
    ramp: int = 10
    seed: int = 0
    measured_cost: DecodeCost | None = None
    speculative: str | None = None
    measured_lengths: ResponseLengths | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    slots: int | None = None
    whole_groups: bool = False
    filtered: bool = False
    doubts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.ramp < self.steps:
            raise ValueError(f"ramp={self.ramp} leaves nothing to measure of steps={self.steps}; give more steps")
        if self.engines < 1 or self.prompt_len < 1:
            raise ValueError(f"engines={self.engines} and prompt_len={self.prompt_len} must be at least 1")
        for name in ("median_len", "sigma_between", "sigma_within"):
            if not math.isfinite(getattr(self, name) or 0.0):
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number")
        if self.train_time is None and (self.placement is not None or self.fetch_ahead):
            raise ValueError("placement and fetch_ahead have no meaning where training takes no time; give train_time")
        if self.placement is Placement.COLOCATED and self.fetch_ahead:
            raise ValueError(
                f"fetch_ahead={self.fetch_ahead} asks for batches while the trainer trains, and colocated engines "
                "stand still meanwhile; leave it out"
            )
        if self.tail_batching is not None and self.tail_batching <= self.groups:
            raise ValueError(f"tail_batching={self.tail_batching} is N', which must be more than groups={self.groups}")
        assert self.train_s >= 0.0  # computed now, because a wrong train_time raises ValueError
        capacity, context = self.cost.kv_capacity_tokens, self.prompt_len + self.max_response_len
        if capacity is not None and context > capacity:
            raise ValueError(
                f"a response of {self.max_response_len:,} tokens after a prompt of {self.prompt_len:,} does not fit "
                f"into the {capacity:,} tokens of KV cache of one engine; shorten it or raise tensor_parallel"
            )
        for schedule in self.modes.values():
            self.core_settings(schedule)
            if schedule.in_flight > MOST_IN_FLIGHT:
                raise ValueError(
                    f"{schedule.in_flight:,} samples in flight are more than the {MOST_IN_FLIGHT:,} that can be "
                    "simulated in reasonable time; use fewer groups or samples"
                )
            if schedule.in_flight < self.engines:
                raise ValueError(
                    f"{schedule.in_flight} samples in flight leave some of {self.engines} engines empty for ever; "
                    "use fewer engines or more samples"
                )
        assert self.lengths is not None  # read now, because a wrong file raises ValueError

    # -- the engines and the lengths ---------------------------------------------------------------------------------

    @cached_property
    def cost(self) -> DecodeCost:
        """The decode cost of one engine."""
        cost = self.measured_cost or roofline(self.model, self.gpu, self.tensor_parallel)
        return cost if self.speculative is None else replace(cost, speed_up=_points(self.speculative))

    @property
    def without_speculation(self) -> Workload:
        """The same workload on engines without speculative decoding."""
        return replace(self, measured_cost=replace(self.cost, speed_up=()), speculative=None)

    @cached_property
    def lengths(self) -> ResponseLengths:
        """Full response lengths, not cut at max_response_len."""
        if self.measured_lengths is not None:
            return self.measured_lengths
        shape = (self.median_len, self.sigma_between, self.sigma_within)
        if self.lengths_file is None:
            median, between, within = (
                default if given is None else given
                for given, default in zip(shape, (MEDIAN_LEN, SIGMA_BETWEEN, SIGMA_WITHIN), strict=True)
            )
            return LognormalLengths(median, between, within, seed=self.seed)
        if any(given is not None for given in shape):
            raise ValueError(
                f"the lengths come from {self.lengths_file}, so median_len, sigma_between and sigma_within have no "
                "meaning; leave them out"
            )
        return read_lengths(self.lengths_file, self.seed)

    @cached_property
    def length_sample(self) -> NDArray[np.int64]:
        """Lengths int64[groups, n] of the first groups, at least LENGTH_SAMPLES in total, cut at max_response_len."""
        groups = max(self.groups, -(-LENGTH_SAMPLES // self.samples))
        rows = np.stack([self.lengths.group(group, self.samples) for group in range(groups)])
        return np.minimum(rows, self.max_response_len).astype(np.int64)

    def limit_s(self, lengths: list[int], in_flight: int) -> float:
        """Return the seconds that all engines need for these lengths if ``in_flight`` samples are always running."""
        if not lengths:
            return 0.0
        return limit_s(self.cost, lengths, in_flight / self.engines, self.prompt_len) / self.engines

    def long_run_limit(self, in_flight: int) -> float:
        """Return the tokens per second of all engines in the long run if ``in_flight`` samples are always running."""
        lengths = self.length_sample.ravel()
        return self.engines * limit_tokens_per_s(self.cost, lengths, in_flight / self.engines, self.prompt_len)

    @cached_property
    def batch_s(self) -> float:
        """Seconds in which all engines together make a batch if they always run at their maximum throughput.

        As many samples are in flight as in the refill mode.
        """
        in_flight = self._in_flight
        return self.groups * self.samples * float(self.length_sample.mean()) / self.long_run_limit(in_flight)

    @cached_property
    def train_s(self) -> float:
        """Seconds that training a batch takes."""
        if self.train_time is None:
            return 0.0
        given = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(x|s)?", self.train_time.strip())
        if given is None:
            raise ValueError(
                f"train_time={self.train_time!r} is no time: give seconds (40), or batch times, each the time of a "
                "batch at the engines' limit (0.5x)"
            )
        seconds = float(given[1]) * (self.batch_s if given[2] == "x" else 1.0)
        if seconds > MOST_TRAIN_S:
            raise ValueError(f"train_time={self.train_time[:40]!r} is more than the {MOST_TRAIN_S:,.0f} s of ten years")
        return seconds

    @property
    def separate(self) -> bool:
        """True if training takes time and the trainer has its own GPUs."""
        return self.train_time is not None and self.placement is not Placement.COLOCATED

    @cached_property
    def fits(self) -> float:
        """Average number of samples whose KV cache fits into all engines together."""
        return self.engines * in_flight_that_fits(self.cost, self.length_sample.ravel(), self.prompt_len)

    # -- the schedules -----------------------------------------------------------------------------------------------

    @cached_property
    def modes(self) -> dict[str, Schedule]:
        """Schedules to compare, by the name of the mode; see :class:`Workload`.

        The continuous mode is simulated only if ``separate``; it has one schedule for each value of max_staleness.
        """
        n = self.groups
        over = 2 * n if self.over is None else self.over
        modes = {
            "sync": Schedule(n, Refill.NONE, n * self.samples),
            "april": self.one_shot(over),
            "refill": Schedule(n, Refill.SAMPLE, self._in_flight),
        }
        if self.tail_batching is not None:
            modes["tail"] = replace(self.one_shot(self.tail_batching), tail_batching=True)
        quorum = self.group_quorum
        if quorum != 1.0:
            modes |= {with_quorum(name, quorum): replace(modes[name], quorum=quorum) for name in ("april", "refill")}
        if self.separate:
            refill = replace(modes["refill"], quorum=quorum)
            modes |= {f"continuous {bound}": replace(refill, continuous=bound) for bound in BOUNDS}
        return modes

    @property
    def _in_flight(self) -> int:
        return self.groups * self.samples if self.in_flight is None else self.in_flight

    def max_staleness_of(self, schedule: Schedule) -> int:
        """Return max_staleness of one mode."""
        bound = self.max_staleness if schedule.continuous is None else schedule.continuous
        return 0 if schedule.tail_batching else bound

    def one_shot(self, over: int) -> Schedule:
        """Return a schedule that starts ``over`` groups at the beginning of a step, and no group later in the step."""
        return Schedule(over, Refill.NONE, max(over, self.groups) * self.samples)

    def core_settings(self, schedule: Schedule) -> CoreSettings:
        """Return the core's settings for a schedule, checked by :class:`april.config.Config`."""
        return self.config(schedule).core_settings(has_reward=False, group_reward=False, run_id=0)

    def config(self, schedule: Schedule) -> Config:
        """Return the configuration of a run with this schedule. Raises ValueError if ``Config`` refuses it."""
        scheduled = {
            "rollout_batch_size": self.groups,
            "n_samples_per_prompt": self.samples,
            "over_sampling_batch_size": schedule.over,
            "partial_rollout": not schedule.tail_batching,
            "max_response_len": self.max_response_len,
            "generation": GenerationMode.STEPWISE if schedule.continuous is None else GenerationMode.CONTINUOUS,
            "on_weight_update": OnWeightUpdate.RESUBMIT,
            "refill": schedule.refill,
            "group_quorum": schedule.quorum,
            "max_in_flight": schedule.in_flight,
            "max_staleness": self.max_staleness_of(schedule),
            "max_off_policy_share": 1.0,  # Config refuses a lower value, because no setting is ``auto``
            "on_stale": OnStale.FINISH if schedule.tail_batching else self.on_stale,
        }
        try:
            return Config.from_mapping({**self.settings, **scheduled})
        except ConfigError as error:
            raise ValueError(str(error)) from None


def _points(text: str) -> tuple[tuple[int, float], ...]:
    """Return the points of ``speculative``; raises ValueError with one sentence."""
    try:
        points = [point.split(":") for point in text.split(",")]
        return tuple((int(number), float(factor)) for number, factor in points)
    except ValueError:
        raise ValueError(
            f"speculative={text[:40]!r} is no list of SEQUENCES:FACTOR points, such as 8:2,64:1 for twice the speed up "
            "to 8 sequences per engine and no gain from 64 on"
        ) from None


def with_quorum(mode: str, quorum: float) -> str:
    """Return the name of a mode when it is simulated with a group quorum."""
    return mode if quorum == 1.0 else f"{mode} q={quorum:g}"


def read_lengths(path: Path, seed: int) -> TraceLengths:
    """Read lengths from a JSONL file. Raises ValueError that names the file and the line."""
    try:
        return TraceLengths.from_jsonl(path, seed=seed)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text (byte {error.start}); give one JSON value per line") from None
