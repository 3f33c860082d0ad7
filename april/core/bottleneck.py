"""Which side a step waited for, how long and why, and what to change: one sentence, from the times of the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from april.core.idle import Idle
from april.core.run_times import TrainerTime
from april.core.settings import CoreSettings
from april.core.types import GenerationMode

LITTLE = 0.1
"""Share of a step below which waiting is not worth a word."""
TURNS = 0.25
"""Share for which each side must wait for the other to say that they take turns."""
PARTS = {
    "update_stop_s": "until nothing was in flight",
    "update_pause_s": "to pause the engines",
    "update_transfer_s": "for the transfer",
    "update_load_s": "to load",
    "update_resume_s": "to resume the engines",
}
"""Of a weight update."""


Fits = Callable[..., bool]
"""Whether settings (by name, with a value to try) may be changed so, where the run is."""


def bottleneck(times: Mapping[str, float], settings: CoreSettings, fits: Fits | None = None, blocking: str = "") -> str:
    """``times``: of :class:`.run_times.RunTimes`, or of several steps (``whole``). Empty if they took no time.

    ``fits``: nothing that it refuses is advised; None: what the engines allow is not known. ``blocking``: the function
    that blocked the loop for most of ``loop_blocked_s``.
    """
    step = times["step_s"]
    if step <= 0.0:
        return ""
    blocked = times.get("loop_blocked_s", 0.0)
    if blocked >= TURNS * step:
        return (
            f"{blocking or 'a function (its name is in the log)'} is the bottleneck: it blocked april's event loop for "
            f"{_of(min(blocked, step), step)}; make it a plain def, which april runs in a thread, or await what it "
            "waits for"
        )
    waited, ahead = times[TrainerTime.WAITS], times[TrainerTime.AHEAD]
    stepwise = settings.generation is GenerationMode.STEPWISE
    if ahead > waited:  # what it does meanwhile nobody knows; but no batch has waited for it
        starved = times[TrainerTime.TRAINS] < LITTLE * step
    else:  # stepwise, one waits while the other works
        starved = waited >= (0.5 if stepwise else LITTLE) * step
    # where updates or evaluations took longer, faster engines would not help
    starved = starved and max(waited, ahead) >= max(times[TrainerTime.UPDATES], times[TrainerTime.EVALUATES])
    turns = times["idle_trainer"] + times["idle_update"]
    if stepwise and min(waited / step, turns) >= TURNS:
        side = f"trainer and engines take turns: the trainer waited {_of(waited, step)} for rollouts"
    elif not starved:
        side = _trainer_side(times)
    elif ahead > waited:
        side = (
            f"generation is the bottleneck: a batch was asked for ahead of training for {_of(ahead, step)}, and none "
            "was there before"
        )
    else:
        side = f"generation is the bottleneck: the trainer waited {_of(waited, step)} for rollouts"
    return f"{side}; {_engines(times, _Advice(settings, fits), starved=starved)}"


def _trainer_side(times: Mapping[str, float]) -> str:
    step = times["step_s"]
    own = (TrainerTime.TRAINS, TrainerTime.UPDATES, TrainerTime.EVALUATES, TrainerTime.OTHER)
    longest = max(own, key=lambda name: times[name])
    took = _of(times[longest], step)
    waited = f"the trainer waited {_seconds(times[TrainerTime.WAITS], step)} s for rollouts"
    if longest is TrainerTime.UPDATES:
        part = max(PARTS, key=lambda name: times[name])
        of_it = f"{_seconds(times[part], step)} s of it {PARTS[part]}"
        return f"the weight update is the bottleneck: it took {took}, {of_it}; {waited}"
    what = {
        TrainerTime.TRAINS: "training is the bottleneck: it took",
        TrainerTime.EVALUATES: "evaluation is the bottleneck: it took",
        TrainerTime.OTHER: "the trainer is the bottleneck: it had nothing to train and asked for nothing for",
    }[longest]
    return f"{what} {took}; {waited}"


class _Advice(NamedTuple):
    """What may be changed."""

    settings: CoreSettings
    fits: Fits | None

    def of(self, words: str, *, known: bool = False, **change: object) -> str:
        """``words``, if the change would be taken (``known``: only engines tell), and is not of what april chooses."""
        refused = known if self.fits is None else not self.fits(**change)
        return "" if refused or change.keys() & set(self.settings.auto) else words


def _engines(times: Mapping[str, float], advice: _Advice, *, starved: bool) -> str:
    """``starved``: the trainer waits for them, so what keeps them idle is worth a change."""
    idle = {cause: times[f"idle_{cause}"] for cause in Idle}
    total = sum(idle.values())
    cause = max(idle, key=lambda c: idle[c])
    if total < LITTLE:
        busy = f"engines were busy {times['engines_busy']:.0%} of the time"
        return busy + ("; only more or faster ones would help" if starved else "")
    others = "" if idle[cause] > 0.9 * total else f", {idle[cause]:.0%}"
    because, change = _reason(cause, advice)
    if cause is Idle.BOUND and not starved:
        change = "" if advice.settings.generation is GenerationMode.STEPWISE else "fewer engines would do"
    said = f"engines stood idle {total:.0%} of the time{others} because {because}"
    return f"{said}; {change}" if change else said


def _reason(cause: Idle, advice: _Advice) -> tuple[str, str]:
    """Why places stood empty, and what to change, if anything can be said."""
    s, more = advice.settings, advice.of
    held = s.max_held_tokens
    return {
        Idle.UPDATE: ("weights were updated", ""),
        Idle.PAUSE: ("generation was paused", ""),
        Idle.EVALUATION: ("of an evaluation", ""),
        Idle.TRAINER: (
            "no batch was asked for",
            "with GPUs of their own they could go on (generation: continuous)"
            if s.generation is GenerationMode.STEPWISE and more("yes", known=True, generation="continuous") else "",
        ),
        Idle.BOUND: (
            f"max_staleness {s.max_staleness} admits no more",
            " or ".join(filter(None, (more("raise it", max_staleness=s.max_staleness + 1), "train faster"))),
        ),
        Idle.STOP: ("requests that were cut took long to end", ""),
        Idle.ENGINES: ("no engine took the work that waits", "see engine/NAME/cap and the log"),
        Idle.FUNCTIONS: ("only functions ran (rollout, reward, filter)", "make them faster"),
        Idle.PROMPTS: ("prompts were being drawn or have ended", ""),
        Idle.HELD: (
            "as much is held as may be held",
            "" if held is None else more("raise max_held_tokens", max_held_tokens=2 * held),
        ),
        Idle.OVER_SAMPLING: (
            f"{s.groups_wanted} groups are in work and refill: {s.refill} adds none",
            " or ".join(filter(None, (
                more("raise over_sampling_batch_size", over_sampling_batch_size=2 * s.groups_wanted),
                more("set refill: sample", refill="sample"),
            ))),
        ),
    }[cause]  # fmt: skip


def _of(seconds: float, step: float) -> str:
    return f"{_seconds(seconds, step)} of {_seconds(step, step)} s"


def _seconds(seconds: float, step: float) -> str:
    """With as many digits as the step deserves."""
    return f"{seconds:.{0 if step >= 100 else 1 if step >= 10 else 2 if step >= 1 else 4}f}"
