"""Gives the code that executes the core's commands a read-only view of the core: its version and a few settings."""

from __future__ import annotations

from april.core.attachments import Rows
from april.core.rollout_core import RolloutCore
from april.core.row_rewards import RewardLayout
from april.core.types import Sample
from april.core.versions import PolicyVersion


class CoreView:
    """Read-only view of a core: its current policy version, limits of its engines, and a few settings."""

    __slots__ = ("_core", "abort_deadline_s", "abort_resend_s")

    def __init__(self, core: RolloutCore) -> None:
        self._core = core
        self.abort_resend_s = core.settings.abort_resend_s
        self.abort_deadline_s = core.settings.abort_deadline_s

    @property
    def current(self) -> PolicyVersion:
        """Current policy version."""
        return self._core.clock.current

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Token ids that end every response (EOS); empty if they are unknown."""
        return self._core.engines.eos_token_ids

    @property
    def max_context(self) -> int:
        """Maximum number of tokens, prompt and response together, that every engine can hold."""
        return self._core.engines.max_context

    @property
    def row_layout(self) -> dict[str, Rows]:
        """Shape and type of the rows of each extra, as recorded by :func:`april.core.attachments.note_layout`."""
        return self._core.engines.row_layout

    @property
    def reward_layout(self) -> RewardLayout:
        """Names and shapes that all rewards of the run have, as recorded by :func:`wrong_row_rewards`."""
        return self._core.context.reward_layout

    def room(self, sample: Sample) -> int:
        """Return the maximum length of the sample's response, tokens of the environment included."""
        return self._core.context.attempts.room(sample.chains[0])
