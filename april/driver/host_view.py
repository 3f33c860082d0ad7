"""The part of the core that carrying out commands needs: the present version, and a few settings."""

from __future__ import annotations

from typing import Protocol

from april.core.state import RolloutCore
from april.core.types import Sample
from april.core.versions import PolicyVersion


class HostView(Protocol):
    """The core that decides, as a host knows it; it may be in another process."""

    @property
    def current(self) -> PolicyVersion:
        """The present policy version."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Token ids that end a response by themselves."""

    @property
    def abort_resend_s(self) -> float:
        ...

    @property
    def abort_deadline_s(self) -> float:
        ...

    @property
    def max_context(self) -> int:
        """Tokens of prompt and response that all engines have room for."""

    def room(self, sample: Sample) -> int:
        """Tokens that its response may have at most, tokens of the environment included."""


class CoreView:
    """The view in the core's own process."""

    __slots__ = ("_core", "abort_deadline_s", "abort_resend_s")

    def __init__(self, core: RolloutCore) -> None:
        self._core = core
        self.abort_resend_s = core.settings.abort_resend_s
        self.abort_deadline_s = core.settings.abort_deadline_s

    @property
    def current(self) -> PolicyVersion:
        """The present policy version."""
        return self._core.clock.current

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Token ids that end a response by themselves."""
        return self._core.engines.eos_token_ids

    @property
    def max_context(self) -> int:
        """Tokens of prompt and response that all engines have room for."""
        return self._core.engines.max_context

    def room(self, sample: Sample) -> int:
        """Tokens that its response may have at most, tokens of the environment included."""
        return self._core.context.attempts.room(sample.chains[0])
