"""Names what a trainer waits for when it has waited long for the same thing.

Invariant: nothing follows from it but a warning, and no timer is left where nothing happens any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from april.core.state import RolloutCore
from april.core.weight_updates import IDLE, Phase
from april.record.standing import EVALUATION, RESPONSES, TRAINER, Waits, waits_for, waits_of

log = logging.getLogger("april")

WARN_AFTER_S = 60.0
"""The time after which a wait for the same thing is warned of, unless the configuration says otherwise."""
TELL_AFTER_S = 6.0
"""The time after which a wait is told to those who watch the run from outside."""
What = tuple[Waits | str, Phase]
"""The thing that is waited for, and the phase of the weight update."""
CALLS = {Waits.UPDATE: "weight_update", Waits.EVALUATION: "evaluate"}
"""The call of the trainer, where it is not next_batch."""


class LongWaits:
    """Call :meth:`look` after the events of each moment.

    Args:
        core: all that is waited for is read there, but for what :meth:`on` says.
        now: the clock of the loop.
        after_s: of a wait for the same thing, until a warning names it. What was warned of once is warned of again only
            when a later wait takes twice as long: some trainers wait long in every step.
        patience_s: other times than that; None: never.
        tell: told, before a warning, for how long there has been such a wait.
    """

    def __init__(
        self, core: RolloutCore, now: Callable[[], float], after_s: float | None,
        patience_s: Mapping[Waits, float | None], tell: Callable[[float], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._core, self._now, self._after_s, self._tell = core, now, after_s, tell
        self._patience_s = {str(waits): limit for waits, limit in patience_s.items()} | {str(Waits.TRAINER): None}
        self._what: What = TRAINER, IDLE
        self._said: tuple[str, str] | None = None
        """The call and sentence of a wait that the core does not know."""
        self._since = 0.0
        self._told = False
        self._observed = 0
        self._timer: asyncio.TimerHandle | None = None
        self._warned: dict[What, float] = {}
        """The longest wait that was warned of, in seconds."""

    def look(self) -> None:
        """Look what the trainer waits for now."""
        core = self._core
        what: Waits | str = waits_of(core) if self._said is None else self._said[1]
        if what is EVALUATION and core.context.attempts.of_evaluations:
            what = RESPONSES
        phase = core.updates.phase
        if what is not self._what[0] or phase is not self._what[1]:
            self._what, self._since, self._told = (what, phase), self._now(), False
            if self._timer is None:
                self._arm()

    @contextmanager
    def on(self, call: str, sentence: str) -> Iterator[None]:
        """Say that ``call`` waits for what the sentence says, whatever the core waits for."""
        self._said = call, sentence
        self.look()
        try:
            yield
        finally:
            self._said = None
            self.look()

    @property
    def standing(self) -> str:
        """The thing that is waited for and the time so far; empty for responses or nothing."""
        if self._what[0] in (RESPONSES, TRAINER):
            return ""
        what = waits_for(self._core) if self._said is None else self._said[1]
        return f"waits for {what}, for {self.waited_s:.0f} s"

    @property
    def waited_s(self) -> float:
        """Seconds that the trainer has waited for the same thing."""
        return self._now() - self._since

    def close(self) -> None:
        """Stop warning."""
        if self._timer is not None:
            self._timer.cancel()

    def _limit_s(self, what: What) -> float | None:
        limit = self._patience_s.get(what[0], self._after_s)
        return None if limit is None else max(limit, 2 * self._warned.get(what, 0.0))

    def _arm(self) -> None:
        limit = self._limit_s(self._what)
        if limit is not None:
            self._observed = self._core.observed_tokens()
            at = self._since + (limit if self._told else min(limit, TELL_AFTER_S))
            self._timer = asyncio.get_running_loop().call_at(at, self._check)

    def _check(self) -> None:
        """Tell or warn of the wait, if it goes on and nothing has come meanwhile."""
        self._timer = None
        what = self._what
        if (limit := self._limit_s(what)) is None:
            return
        if what[0] is RESPONSES and self._core.observed_tokens() != self._observed:
            self._since = self._now()
            self._arm()
            return
        if not self._told and self._now() >= self._since + min(limit, TELL_AFTER_S):
            self._told = True
            self._tell(self.waited_s)
        if self._now() < self._since + limit:
            self._arm()
        else:
            self._warned[what] = self.waited_s
            log.warning("%s", self._sentence(what[0], self.waited_s))

    def _sentence(self, what: Waits | str, waited: float) -> str:
        core = self._core
        if self._said is not None:
            call, why = self._said
        else:
            assert isinstance(what, Waits)
            call, why = CALLS.get(what, "next_batch"), waits_for(core)
        if what is Waits.UPDATE:
            call = "load_state_dict" if core.updates.loads_a_state else call
            why = f"{core.updates.waits_for}; meanwhile nothing is generated"
        elif what is Waits.BOUND:
            why = f"{why}. {core.leases.why_full()}"
        elif what is Waits.EVALUATION:
            turn = "the end of a pause" if core.held else f"its turn: {len(core.attempts)} requests of training run"
            begun = any(e.version is not None for e in core.context.evaluations.values())
            why = "an engine, or functions of its own" if begun else turn
        elif what is Waits.ENGINES:
            remedy = core.engines.remedy(core.clock.current).rstrip(",")
            why = f"an engine: {remedy}; after outage_deadline_s the step fails"
        elif what is Waits.RESPONSES:
            of_evaluations = core.context.attempts.of_evaluations
            call = CALLS[EVALUATION] if of_evaluations else call
            requests = len(of_evaluations or core.attempts)
            why = f"responses: {requests} request{'s' * (requests != 1)} in flight, and no token of theirs has come"
        elif what is Waits.PROMPTS:
            why = "prompts: their source has not returned any, which were asked for"
        return f"{call} has waited {waited:.0f} s for {why}"
