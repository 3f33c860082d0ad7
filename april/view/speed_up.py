"""Estimates how fast a recorded run would have been with synchronous steps on the same engines.

A synchronous step generates only the ``rollout_batch_size`` groups of its batch, and waits for all of them. Groups are
taken in the order in which they were drawn, up to the first unfinished group; in the order of delivery, the first steps
would get the short responses. Engines are simulated with the cost that was fitted to their requests
(:mod:`april.engines.simulated.fitted_cost`); training takes as long as in the record.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from april.core.partial_buffer import IdleCause
from april.core.run_times import pace
from april.core.types import GenerationMode, Refill
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.decoder_model import SimulatedDecoder
from april.view.run_data import RunData, RunDistance

MAX_RESPONSES = 40_000
"""Largest number of responses that are simulated, as each takes at least 10 us; if there are more, only evenly spaced
steps are simulated."""
MIN_STEPS = 2
"""Smallest number of synchronous steps from which an estimate is made."""
MAX_FUNCTION_IDLE = 0.1
"""Largest share of place-seconds (request slots x time) that may be idle because of functions or prompts; beyond it, no
estimate is made, as it would not include their times."""
MAX_UNKNOWN_LENGTHS = 0.02
"""Largest share of responses that may be given up before their end, so that their lengths are unknown; beyond it, no
estimate is made."""


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Speed of a run, and speed of the same responses with simulated synchronous steps.

    Attributes:
        real, sync: trained tokens per second of the run, and with synchronous steps.
        steps: number of synchronous steps that were simulated.
        synchronous: True if the run itself had synchronous steps.
        doubt: reason why no estimate is possible; empty if there is an estimate. With a doubt, all figures are 0.
    """

    real: float = 0.0
    sync: float = 0.0
    steps: int = 0
    synchronous: bool = False
    doubt: str = ""

    @property
    def factor(self) -> float:
        """Speed of the run divided by the speed with synchronous steps."""
        return self.real / self.sync


def speed_up_of(run: RunData, limit: RunDistance | None) -> SpeedUp:
    """Compare a run with synchronous steps; ``limit`` is the result of :func:`.run_data.limit_distance_of`."""
    settings = run.settings
    if (
        settings.generation is GenerationMode.STEPWISE
        and settings.refill is Refill.NONE
        and settings.over_sampling_batch_size == settings.rollout_batch_size
        and not settings.auto
    ):
        return SpeedUp(synchronous=True)
    if limit is None or (cost := run.cost) is None:
        return SpeedUp(doubt="too few requests, or too few batches, to know what the engines cost")
    if doubt := limit.doubt or _why_unknown(run):
        return SpeedUp(doubt=doubt)
    steps = _steps(run)
    if len(steps) < MIN_STEPS:
        return SpeedUp(doubt="too few groups were finished in the order in which they were drawn")
    n = settings.rollout_batch_size * settings.n_samples_per_prompt
    shown = steps[:: math.ceil(len(steps) * n / MAX_RESPONSES)]
    metrics = [batch.metrics for batch in run.batches[1:]]
    trains_s, _ = pace(metrics)
    sync_s = sum(_step_s(run, cost, lengths) for lengths in shown) + len(shown) * trains_s
    real_s = run.batches[-1].time_s - run.batches[0].time_s
    trained = sum(m["trained_tokens"] for m in metrics)
    return SpeedUp(trained / real_s, sum(int(lengths.sum()) for lengths in shown) / sync_s, len(shown))


def _why_unknown(run: RunData) -> str:
    """Return why the record does not show how long synchronous steps would have taken; empty if it does."""
    metrics = [batch.metrics for batch in run.batches[1:]]
    if run.settings.has_filter:
        return "a filter rejected groups, and a synchronous run would have drawn others in their place"
    if (unknown := metrics[-1].get("length_unknown", 0.0)) > MAX_UNKNOWN_LENGTHS:
        return f"{unknown:.0%} of the responses were given up before their end, and how long they are is unknown"
    total = sum(m["step_s"] for m in metrics)
    waited = sum(m["step_s"] * (m[f"idle_{IdleCause.FUNCTIONS}"] + m[f"idle_{IdleCause.PROMPTS}"]) for m in metrics)
    if waited > MAX_FUNCTION_IDLE * total:
        return "places waited for functions and prompts, whose times are not those of the engines"
    return ""


def _steps(run: RunData) -> list[NDArray[np.int64]]:
    """Return the response lengths of each synchronous step; groups are in drawn order, up to the first unfinished."""
    settings = run.settings
    n = settings.n_samples_per_prompt
    by_group: dict[int, list[int]] = {}
    for group, length in zip(run.finished_group.tolist(), run.finished.tolist(), strict=True):
        if group >= 0:  # negative numbers are evaluations
            by_group.setdefault(group, []).append(length)
    whole: list[list[int]] = []
    for group in range(min(by_group, default=0), max(by_group, default=-1) + 1):
        lengths = by_group.get(group, [])
        if len(lengths) < n:
            break
        whole.append(lengths[-n:])  # there are more than n if a lost rollout function ran again and returned twice
    size = settings.rollout_batch_size
    return [np.array(whole[i : i + size], np.int64).ravel() for i in range(0, len(whole) - size + 1, size)]


def _step_s(run: RunData, cost: DecodeCost, lengths: NDArray[np.int64]) -> float:
    """Return the seconds that the engines need to generate responses of these lengths, all requested at once."""
    engines = run.engine_count
    places = max(1, run.engine_history.at(run.batches[-1].time_s)[1] // engines)
    decoders = [SimulatedDecoder(cost, places) for _ in range(engines)]
    waiting = deque((str(i), int(length)) for i, length in enumerate(lengths) if length > 0)
    context, now = run.prompt_len, 0.0
    while True:
        while waiting and (free := min(decoders, key=_busy)) and _busy(free) < places:
            free.add(waiting[0][0], context, waiting.popleft()[1])
        at = min(decoder.next_event_time() for decoder in decoders)
        if math.isinf(at):
            return now
        now = at
        for decoder in decoders:
            decoder.advance(now)


def _busy(decoder: SimulatedDecoder) -> int:
    return decoder.running + decoder.waiting
