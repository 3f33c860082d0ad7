"""When a run asks for better settings, what it tells of itself, and whether it takes them over. No clock, no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np

from april.auto.length_window import LengthWindow
from april.auto.question import Answer, InWork, Question
from april.core.batch import Batch
from april.core.events import WorkChanged
from april.core.run_times import pace
from april.core.state import RolloutCore
from april.core.types import GenerationMode, Refill, Work
from april.engines.simulated.decode_cost import DecodeCost

FIRST, MOST = 2, 32
"""Batches before the first question; afterwards twice as many each time, up to the most."""
SETTLING = 4
"""Batches after a change whose lengths and ages say little: what is short comes first."""
LATEST = 2
"""Batches that are compared with those before them."""


class AutoWork:
    """Of one run.

    Args:
        core: whose settings change; some of them are ``auto``.
    """

    def __init__(self, core: RolloutCore) -> None:
        self._core, self._most = core, core.settings.max_off_policy_share
        self._lengths = LengthWindow()
        self._prompts: deque[float] = deque(maxlen=16)
        self._steps: deque[Mapping[str, float]] = deque(maxlen=16)
        self._shares: deque[tuple[float, int]] = deque(maxlen=16)
        """Off-policy share and tokens of batches that were made as it is now."""
        self._wait, self._since_asked, self._since_changed = FIRST, 0, SETTLING
        self._answer: Answer | None = None
        self._nothing_better = False
        """There was none the last time that too much was old: whether there is one now is asked in its turn."""
        self._changes = 0

    def delivered(self, batch: Batch) -> None:
        """A batch with all its metrics."""
        self._lengths.add((sample.id.group, len(sample.tokens)) for sample in batch.samples)
        self._prompts.append(float(np.mean([len(sample.prompt.token_ids) for sample in batch.samples])))
        if batch.id:  # before the first one was asked for, the trainer did not train
            self._steps.append(batch.metrics)
        self._since_asked += 1
        self._since_changed += 1
        if self._since_changed > SETTLING:
            self._shares.append((batch.off_policy_share, int(batch.metrics["trained_tokens"])))
            if self._since_changed > SETTLING + LATEST and self._lengths.changed(LATEST):
                self._lengths.forget_before(LATEST)
                self._wait, self._nothing_better = FIRST, False

    @property
    def asks(self) -> bool:
        """It is time for a question."""
        if self._since_asked >= self._wait:
            return True
        return self._since_asked >= FIRST and not self._nothing_better and self._too_old

    def question(self, costs: Iterable[DecodeCost]) -> Question | None:
        """What to ask now, with the cost of each engine; None while those are not known."""
        known = [(c.base_s, c.per_sequence_s, c.per_kv_token_s, c.per_prefill_token_s) for c in costs]
        if not known or not self._prompts:
            return None
        core, s = self._core, self._core.settings
        self._since_asked, self._wait = 0, min(2 * self._wait, MOST)
        limits = [state.limits.max_in_flight for state in core.engines.states.values()]
        slots = sum(limit for limit in limits if limit) if all(limits) else 1 << 30
        train_s, ahead = pace(self._steps)
        base, sequence, token, prefill = (float(value) for value in np.mean(known, axis=0))
        return Question(
            groups=s.rollout_batch_size, samples=s.n_samples_per_prompt, max_response_len=s.max_response_len,
            prompt_len=max(1, round(float(np.mean(self._prompts)))),
            max_staleness=min(core.leases.bound, s.max_age), on_stale=s.on_stale,
            max_off_policy_share=self._most * self._off_by if self._most < 1.0 else 1.0,
            continuous=s.generation is GenerationMode.CONTINUOUS,
            train_s=train_s, fetch_ahead=ahead if train_s else 0,
            engines=len(core.engines.states), cost=(base, sequence, token, prefill), lengths=self._lengths.rows,
            places=slots, free=s.auto, now=InWork.of(s),
        )  # fmt: skip

    def answered(self, answer: Answer) -> WorkChanged | None:
        """What to change; None where it stays as it is."""
        self._answer, settings = answer, self._core.settings
        self._nothing_better = answer.best == InWork.of(settings) and self._too_old
        if answer.best == InWork.of(settings):
            return None
        self._changes += 1
        self._since_changed = 0
        self._shares.clear()
        return answer.best.change(settings)

    def metrics(self) -> dict[str, float]:
        """How much is in work, and what was expected of the best at the latest answer."""
        s = self._core.settings
        found = {f"auto_{name}": float(getattr(s, name)) for name in s.auto if name is not Work.REFILL}
        if Work.REFILL in s.auto:
            found["auto_refills"] = float(s.refill is not Refill.NONE)
        found["auto_changes"] = float(self._changes)
        if self._answer is not None:
            found["auto_expected_tokens_per_s"] = self._answer.tokens_per_s
            found["auto_expected_off_policy_share"] = self._answer.off_policy_share
        return found

    @property
    def _too_old(self) -> bool:
        """More is old than the limit allows, and not by chance."""
        share, error = self._seen_share
        return share - 2.0 * error > self._most

    @property
    def _off_by(self) -> float:
        """Expected over seen off-policy share of what is in work; at most 1, and what chance may do is left out."""
        if self._answer is None or self._answer.off_policy_share <= 0.0:
            return 1.0
        share, error = self._seen_share
        return self._answer.off_policy_share / max(self._answer.off_policy_share, share - error)

    @property
    def _seen_share(self) -> tuple[float, float]:
        """Off-policy share of what was trained since the latest change and its standard error; 0 if that is little."""
        tokens = sum(count for _, count in self._shares)
        if len(self._shares) < SETTLING or not tokens:
            return 0.0, 0.0
        share = sum(share * count for share, count in self._shares) / tokens
        return share, float(np.std([share for share, _ in self._shares], ddof=1)) / len(self._shares) ** 0.5
