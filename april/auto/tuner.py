"""Decides when a run asks for better ``auto`` settings, and whether it keeps the settings that it gets.

A change is a trial: the speeds of the batches before and after it are compared. A change for more speed is taken back
if the run is not faster, and a change for fewer stale tokens is taken back if the run is slower. This module uses no
clock and no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from april.auto.batch_windows import LATEST_BATCHES as SPEED_BATCHES
from april.auto.batch_windows import LengthWindow, Speeds
from april.auto.question import GAIN, SMALLEST_QUORUM, TuningAnswer, TuningQuestion, WorkSettings
from april.core.batch import Batch, rows_by_sample
from april.core.events import WorkChanged
from april.core.rollout_core import RolloutCore
from april.core.run_times import pace
from april.core.types import GenerationMode, Refill, Work
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.fitted_cost import FittedCost

FIRST_WAIT, LONGEST_WAIT = 2, 32
"""Number of batches before the first question; the number doubles with each question, up to the longest wait."""
SETTLING_BATCHES = 4
"""Number of batches after a change that have unusual lengths and token ages, because short responses finish first."""
LATEST_BATCHES = 2
"""Number of latest batches whose lengths are compared with the lengths in the batches before them."""
MIN_TRIAL_BATCHES, MAX_TRIAL_BATCHES = 3, 8
"""Smallest and largest number of batches in a trial, without the first batch after the change."""
MAX_STEP = 1.25
"""Largest factor by which a trial may raise the samples in flight while it is unknown how the cost grows with them."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A change of the settings whose speed is still being measured.

    Attributes:
        before: settings before the change.
        speeds: speeds of the batches before the change.
        expected: predicted speed after the change, as a multiple of the speed before.
        needed: smallest multiple of the speed before with which the change is kept.
    """

    before: WorkSettings
    speeds: Speeds
    expected: float
    needed: float

    def reached(self, now: Speeds) -> bool | None:
        """Return whether the change reached the needed speed; None while that is not clear."""
        if len(now) < MIN_TRIAL_BATCHES:
            return None
        ratio, error = now.ratio_to(self.speeds)
        if abs(ratio - self.needed) > 2.0 * error or len(now) >= MAX_TRIAL_BATCHES:
            return ratio >= self.needed
        return None


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision on a trial or an answer.

    Attributes:
        text: sentence for the log.
        change: event that changes the settings; None if they stay.
    """

    text: str
    change: WorkChanged | None = None


class AutoTuner:
    """Collects measurements of one run, asks questions about its settings and decides on the answers.

    Args:
        core: core of the run whose settings are changed.
    """

    def __init__(self, core: RolloutCore) -> None:
        self._core, self._max_off_policy_share = core, core.settings.max_off_policy_share
        self._lengths = LengthWindow()
        self._prompts: deque[float] = deque(maxlen=16)
        self._steps: deque[Mapping[str, float]] = deque(maxlen=16)
        self._shares: deque[tuple[float, int]] = deque(maxlen=16)
        """(off-policy share, trained tokens) of batches with the current settings."""
        self._speeds = Speeds()
        """Speeds of batches with the current settings."""
        self._held_tokens = 0.0
        self._trial: Trial | None = None
        self._speeds_before_trial: Speeds | None = None
        """Speeds from before a trial that was taken back; the same settings should reach them again."""
        self._in_flight_bound: int | None = None
        """Exclusive bound of samples in flight in trials, since more brought no gain; None means no bound."""
        self._rejected: set[WorkSettings] = set()
        """Settings that were tried and taken back."""
        self._wait, self._since_asked, self._since_changed = FIRST_WAIT, 0, SETTLING_BATCHES
        self._answer: TuningAnswer | None = None
        self._nothing_better = False
        """True if too many tokens were stale, but the latest answer had nothing better: asking early is useless."""
        self._changes = self._taken_back = 0

    def add_batch(self, batch: Batch) -> Decision | None:
        """Add a batch with all its metrics; if it ends a trial, return the decision."""
        samples = rows_by_sample(batch.samples)
        self._lengths.add((rows[0].id.group, sum(len(row.tokens) for row in rows)) for rows in samples)
        self._prompts.append(float(np.mean([len(rows[0].prompt.token_ids) for rows in samples])))
        self._since_asked += 1
        self._since_changed += 1
        if batch.id:  # before batch 0 the trainer had nothing to train
            self._steps.append(batch.metrics)
            if self._since_changed > 1:  # the first batch after a change may have begun before it
                self._speeds.add(batch.metrics, self._held_tokens)
        self._held_tokens = batch.metrics["held_tokens"]
        if self._since_changed > SETTLING_BATCHES:
            self._shares.append((batch.off_policy_share, int(batch.metrics["trained_tokens"])))
            if self._since_changed > SETTLING_BATCHES + LATEST_BATCHES and self._lengths.changed(LATEST_BATCHES):
                self._lengths.forget_before(LATEST_BATCHES)
                self._reset()
        if self._trial is not None:
            return self._decide_trial(self._trial)
        earlier = self._speeds_before_trial if len(self._speeds) == SPEED_BATCHES else None
        if self._speeds.changed or (earlier is not None and self._speeds.differs_from(earlier)):
            self._reset()
        return None

    def _reset(self) -> None:
        """Forget the results of trials, because response lengths or speeds have changed for another reason."""
        self._speeds.forget_old()
        self._wait, self._nothing_better = FIRST_WAIT, False
        self._trial = self._in_flight_bound = None
        self._rejected.clear()

    def _decide_trial(self, trial: Trial) -> Decision | None:
        if (holds := trial.reached(self._speeds)) is None:
            return None
        self._trial = None
        ratio, error = self._speeds.ratio_to(trial.speeds)
        outcome = f"the speed rose by a factor of {ratio:.2f} (+-{error:.2f}), and {trial.expected:.2f} was expected"
        now, before = WorkSettings.of(self._core.settings), trial.before
        if holds:
            return Decision(f"{now} stays: {outcome}")
        self._rejected.add(now)
        if now.max_in_flight > before.max_in_flight:
            self._in_flight_bound = (now.max_in_flight + before.max_in_flight) // 2 + 1
        self._taken_back += 1
        change = self._apply(before)
        self._speeds_before_trial = trial.speeds
        return Decision(f"back to {before} from {now}: {outcome}", change)

    def _apply(self, to: WorkSettings) -> WorkChanged:
        self._speeds, self._speeds_before_trial = Speeds(), None
        self._changes += 1
        self._since_changed = 0
        self._shares.clear()
        return to.change_event(self._core.settings)

    @property
    def question_due(self) -> bool:
        """True if it is time to ask: after a number of batches, or earlier if too many tokens are stale."""
        if self._trial is not None:
            return False
        if self._since_asked >= self._wait:
            return True
        return self._since_asked >= FIRST_WAIT and not self._nothing_better and self._too_off_policy

    def question(self, costs: Iterable[FittedCost]) -> TuningQuestion | None:
        """Return a question about the run, given the fitted costs of its engines; None while no cost is known."""
        found = list(costs)
        if not found or not self._prompts:
            return None
        core, s = self._core, self._core.settings
        slope_known = all(fitted.slope_known for fitted in found)
        self._since_asked, self._wait = 0, min(2 * self._wait, LONGEST_WAIT)
        limits = [state.limits.max_in_flight for state in core.engines.states.values()]
        slots = sum(limit for limit in limits if limit) if all(limits) else 1 << 30
        train_s, ahead = pace(self._steps)
        limit = self._max_off_policy_share
        return TuningQuestion(
            groups=s.rollout_batch_size, samples=s.n_samples_per_prompt, max_response_len=s.max_response_len,
            prompt_len=max(1, round(float(np.mean(self._prompts)))),
            max_staleness=min(core.leases.bound, s.max_age), on_stale=s.on_stale,
            max_off_policy_share=limit * self._share_correction if limit < 1.0 else 1.0,
            continuous=s.generation is GenerationMode.CONTINUOUS,
            train_s=train_s, fetch_ahead=ahead if train_s else 0,
            engines=len(core.engines.states), lengths=self._lengths.rows,
            cost=DecodeCost.mean(fitted.cost if slope_known else fitted.at_best for fitted in found), places=slots,
            below=self._in_flight_limit(slope_known), slope_known=slope_known, free=s.auto, now=WorkSettings.of(s),
        )  # fmt: skip

    def _in_flight_limit(self, slope_known: bool) -> int | None:
        """Return the exclusive bound of samples in flight for the next trial; None means no bound."""
        if slope_known:
            return self._in_flight_bound
        s = self._core.settings
        step = max(int(MAX_STEP * s.max_in_flight), s.max_in_flight + s.n_samples_per_prompt) + 1
        return step if self._in_flight_bound is None else min(step, self._in_flight_bound)

    def decide(self, question: TuningQuestion, answer: TuningAnswer) -> Decision | None:
        """Return the decision on an answer; None if the settings stay."""
        self._answer, settings = answer, self._core.settings
        now = WorkSettings.of(settings)
        # a quorum from an older checkpoint may be smaller than SMALLEST_QUORUM
        forced = self._too_off_policy or (Work.QUORUM in settings.auto and now.group_quorum < SMALLEST_QUORUM)
        self._nothing_better = answer.best == now and forced
        if answer.best == now or (answer.best in self._rejected and not forced):
            return None
        gains = answer.speed_up >= 1.0 + GAIN
        if answer.share_now <= question.max_off_policy_share and not forced and self._speeds.tokens_per_s > 0.0:
            if gains and answer.speed_up < 1.0 + self._speeds.error(self._speeds, MAX_TRIAL_BATCHES):
                return None
            needed = 1.0 + GAIN / 2 if gains else 1.0 - GAIN
            self._trial = Trial(now, self._speeds, answer.speed_up, needed)
        why = ""
        if not question.slope_known:
            why = ", because the data do not show what more samples in flight cost"
        return Decision(
            f"{answer.best} from now on, after {now}: {answer.speed_up:.2f} times the speed is expected, with "
            f"{100.0 * answer.off_policy_share:.0f}% of the trained tokens from older weights{why}",
            self._apply(answer.best),
        )  # fmt: skip

    def metrics(self) -> dict[str, float]:
        """Return the ``auto`` settings, the number of changes and the latest answer's predictions as metrics."""
        s = self._core.settings
        found = {f"auto_{name}": float(getattr(s, name)) for name in s.auto if name is not Work.REFILL}
        if Work.REFILL in s.auto:
            found["auto_refills"] = float(s.refill is not Refill.NONE)
        found["auto_changes"], found["auto_taken_back"] = float(self._changes), float(self._taken_back)
        if self._answer is not None:
            found["auto_expected_tokens_per_s"] = self._answer.tokens_per_s
            found["auto_expected_off_policy_share"] = self._answer.off_policy_share
        return found

    @property
    def _too_off_policy(self) -> bool:
        """True if the share of trained tokens from older weights exceeds its limit by over two standard errors."""
        share, error = self._measured_share
        return share - 2.0 * error > self._max_off_policy_share

    @property
    def _share_correction(self) -> float:
        """Factor on the off-policy limit of a question, below 1 if the last answer predicted too small a share."""
        if self._answer is None or self._answer.off_policy_share <= 0.0:
            return 1.0
        share, error = self._measured_share
        return self._answer.off_policy_share / max(self._answer.off_policy_share, share - error)

    @property
    def _measured_share(self) -> tuple[float, float]:
        """(off-policy share since the latest change, its standard error); zeros while there are too few batches."""
        tokens = sum(count for _, count in self._shares)
        if len(self._shares) < SETTLING_BATCHES or not tokens:
            return 0.0, 0.0
        share = sum(share * count for share, count in self._shares) / tokens
        return share, float(np.std([share for share, _ in self._shares], ddof=1)) / len(self._shares) ** 0.5
