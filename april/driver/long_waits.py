"""Warns when the trainer has waited long for the same reason, and names the reason.

Invariant: this module does not affect the run, and sets no timer between a warning and the start of the next wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from april.core.rollout_core import RolloutCore
from april.core.weight_updates import IDLE, Phase
from april.record.run_status import EVALUATION, RESPONSES, TRAINER, WaitReason, wait_reason, wait_text

log = logging.getLogger("april")

WARN_AFTER_S = 60.0
"""Seconds of waiting for one reason before a warning, if the configuration sets no other limit."""
REPORT_AFTER_S = 6.0
"""Seconds of waiting before the wait is written to the run's record, for ``april watch``."""
What = tuple[WaitReason | str, Phase]
"""A reason for waiting, and the phase of the current weight update."""
CALLS = {WaitReason.UPDATE: "weight_update", WaitReason.EVALUATION: "evaluate"}
"""Name of the trainer's call that waits, by reason; for all other reasons it is next_batch."""


class LongWaits:
    """Watches what the trainer waits for; :meth:`update` must be called after each event.

    Args:
        core: Core from which the reason for waiting is read, unless :meth:`waiting_for` gives another reason.
        now: Clock of the event loop, in seconds.
        after_s: Seconds of waiting for one reason before a warning; None means never. A further warning for the same
            reason needs a wait twice as long, since some trainers wait long in every step.
        patience_s: Limits in seconds, by reason, that replace ``after_s``; None means never.
        tell: Callback that records the seconds waited; called once per wait, after ``REPORT_AFTER_S`` or at the limit.
    """

    def __init__(
        self, core: RolloutCore, now: Callable[[], float], after_s: float | None,
        patience_s: Mapping[WaitReason, float | None], tell: Callable[[float], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._core, self._now, self._after_s, self._report = core, now, after_s, tell
        # never warn while the trainer trains, nor while it waits for functions: user_calls.py names slow functions
        never = dict.fromkeys((str(WaitReason.TRAINER), str(WaitReason.FUNCTIONS)))
        self._patience_s = {str(waits): limit for waits, limit in patience_s.items()} | never
        self._reason: What = TRAINER, IDLE
        self._given_reason: tuple[str, str] | None = None
        """Call and reason given by :meth:`waiting_for`, for a wait that the core does not see."""
        self._since: float | None = None
        """Time at which the current wait began; None before the first :meth:`update`."""
        self._reported = False
        self._observed_tokens = 0
        self._timer: asyncio.TimerHandle | None = None
        self._warned: dict[What, float] = {}
        """Longest wait in seconds for which a warning was logged, by reason."""

    def update(self) -> None:
        """Update the reason for waiting; a change of the reason starts a new wait."""
        core = self._core
        what: WaitReason | str = wait_reason(core) if self._given_reason is None else self._given_reason[1]
        if what is EVALUATION and core.context.attempts.of_evaluations:
            what = RESPONSES
        phase = core.updates.phase
        if self._since is None:
            self._since = self._now()
        if what is not self._reason[0] or phase is not self._reason[1]:
            self._reason, self._reported = (what, phase), False
            self._begin()

    @contextmanager
    def waiting_for(self, call: str, sentence: str) -> Iterator[None]:
        """Inside the block, report that ``call`` waits for ``sentence``, and ignore the reason that the core gives."""
        self._given_reason = call, sentence
        self.update()
        try:
            yield
        finally:
            self._given_reason = None
            self.update()

    @property
    def current_wait(self) -> str:
        """Text that says how long the trainer has waited and why; empty if it waits for responses or not at all."""
        if self._reason[0] in (RESPONSES, TRAINER):
            return ""
        what = wait_text(self._core) if self._given_reason is None else self._given_reason[1]
        return f"has waited {self.waited_s:.0f} s for {what}"

    @property
    def waited_s(self) -> float:
        """Seconds that the trainer has waited for the current reason."""
        return 0.0 if self._since is None else self._now() - self._since

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _limit_s(self, what: What) -> float | None:
        limit = self._patience_s.get(what[0], self._after_s)
        return None if limit is None else max(limit, 2 * self._warned.get(what, 0.0))

    def _begin(self) -> None:
        self._since = self._now()
        if self._reason[0] is RESPONSES:
            self._observed_tokens = self._core.observed_tokens()
        self._arm()

    def _arm(self) -> None:
        """Set the timer for the next limit of the current wait, unless an earlier timer is set already."""
        if (limit := self._limit_s(self._reason)) is None:
            return
        assert self._since is not None
        at = self._since + (limit if self._reported else min(limit, REPORT_AFTER_S))
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._check)

    def _check(self) -> None:
        """Report the current wait, or warn of it, once it is long enough. New tokens of responses start a new wait."""
        self._timer = None
        what = self._reason
        if (limit := self._limit_s(what)) is None:
            return
        if what[0] is RESPONSES and self._core.observed_tokens() != self._observed_tokens:
            self._begin()
            return
        since, now = self._since, self._now()
        assert since is not None
        # compare sums, as _arm does: now - since is rounded differently, so the timer could fire again and again
        if not self._reported and now >= since + min(limit, REPORT_AFTER_S):
            self._reported = True
            self._report(self.waited_s)
        if now < since + limit:
            self._arm()
        else:
            self._warned[what] = self.waited_s
            log.warning("%s", self._sentence(what[0], self.waited_s))

    def _sentence(self, what: WaitReason | str, waited: float) -> str:
        core = self._core
        if self._given_reason is not None:
            call, why = self._given_reason
        else:
            assert isinstance(what, WaitReason)
            call, why = CALLS.get(what, "next_batch"), wait_text(core)
        if what is WaitReason.UPDATE:
            call = "load_state_dict" if core.updates.loads_a_state else call
            why = f"{core.updates.waits_for}; nothing is generated until then"
        elif what is WaitReason.BOUND:
            why = f"{why}. {core.leases.why_full()}"
        elif what is WaitReason.EVALUATION:
            before_start = f"{len(core.attempts)} training requests to end, after which it starts"
            before_start = "the end of a pause" if core.pause_held else before_start
            begun = any(e.version is not None for e in core.context.evaluations.values())
            why = "an engine, or for functions of the evaluation" if begun else before_start
        elif what is WaitReason.ENGINES:
            remedy = core.engines.remedy(core.clock.current).rstrip(",")
            why = f"a healthy engine: {remedy}; after outage_deadline_s the step fails"
        elif what is WaitReason.RESPONSES:
            of_evaluations = core.context.attempts.of_evaluations
            call = CALLS[EVALUATION] if of_evaluations else call
            requests = len(of_evaluations or core.attempts)
            why = f"responses: {requests} request{'s' * (requests != 1)} in flight, but no new tokens"
        elif what is WaitReason.PROMPTS:
            why = "prompts: the prompt source has not returned the next ones"
        return f"{call} has waited {waited:.0f} s for {why}"
