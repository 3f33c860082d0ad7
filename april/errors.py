"""Every error april raises on purpose. Each message says what is wrong, where, and what to do."""

from __future__ import annotations


class AprilError(Exception):
    """Base of all errors raised by april."""


class ConfigError(AprilError, ValueError):
    """The configuration is wrong; raised before anything starts."""


class RecordError(AprilError, ValueError):
    """A record of a run cannot be replayed, or not to the same decisions."""


class EngineError(AprilError, RuntimeError):
    """An engine broke its contract or died; the tokens seen before it are kept."""


class WireError(EngineError):
    """An engine sent numbers that cannot be true (NaN log-probability, wrong length, unknown token id)."""


class EngineUnreachable(EngineError):
    """No connection, or one that broke before anything came back; what the engine made of the request is unknown."""

    def __init__(self, message: str, *, why: str = "", distrusted: str = "") -> None:
        super().__init__(message)
        self.why = why
        """The reason in a few words; empty means that nothing came in time."""
        self.distrusted = distrusted
        """The error in the server's certificate; empty if that was not the reason."""


class EngineBusy(EngineError):
    """The engine refuses requests for now (HTTP 429 or 503); nothing was begun."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Seconds that the engine asked to wait, as it said them."""


class WeightsGone(EngineError):
    """The weights that an engine should have are nowhere any more, and it was given none: it waits for others."""


class RequestRefused(EngineError):
    """The engine says that this request is wrong (HTTP 4xx); the same one would be refused again."""


class AttachmentError(RequestRefused):
    """An image, or whatever else comes with a prompt, cannot be had, or is not what it was."""


class WeightsInUse(EngineError):
    """The weights that an engine generates with were written meanwhile, or were about to be."""

    def __init__(self, message: str, unsound: int = 0) -> None:
        super().__init__(message)
        self.unsound = unsound
        """Tokens of the request that were sampled while the weights changed, and were dropped."""


class RolloutError(AprilError, RuntimeError):
    """A rollout or reward function failed; the sample is named in the message."""


class UsageError(RolloutError, ValueError):
    """A rollout or reward function asks april for what cannot be, or returns it; it would do so again."""


class InvariantError(AprilError, AssertionError):
    """april's own books do not balance; carries the story of the sample concerned."""


class SchedulerClosed(AprilError, RuntimeError):
    """The scheduler was closed, or its background loop died; the cause is chained."""


class DataExhausted(AprilError, LookupError):
    """The prompt source ended before a batch could be filled."""


class LinkError(AprilError, RuntimeError):
    """Two processes of april cannot be connected, or one refuses the other."""


class RankError(AprilError, RuntimeError):
    """The ranks of a trainer do not go on together: one is gone, late, has failed, or calls something else."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
        """The ranks that caused it, as far as they are known."""


class OffPolicyError(AprilError, RuntimeError):
    """A batch is further from the trained weights than the trainer allows; nothing has happened to it."""

    def __init__(self, message: str, report: dict[str, float]) -> None:
        super().__init__(message)
        self.report = report
        """The report that ``off_policy_report`` would have returned."""


class CheckpointError(AprilError, ValueError):
    """A saved state cannot be taken or loaded here."""
