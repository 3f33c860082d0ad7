"""Errors that april raises on purpose. Each message says what is wrong, where, and what to do."""

from __future__ import annotations


class AprilError(Exception):
    """Base of all errors raised by april."""


class ConfigError(AprilError, ValueError):
    """The configuration or an argument is wrong; raised before anything starts."""


class RecordError(AprilError, ValueError):
    """A record of a run cannot be replayed, or its replay decides differently from the run."""


class EngineError(AprilError, RuntimeError):
    """An engine broke its contract or died; tokens that were received before the error are kept."""


class WireError(EngineError):
    """An engine sent numbers that cannot be true (NaN log-probability, wrong length, unknown token id)."""


class EngineUnreachable(EngineError):
    """The engine could not be reached, or the connection broke before an answer; the request may have taken effect."""

    def __init__(self, message: str, *, why: str = "") -> None:
        super().__init__(message)
        self.why = why
        """Reason in a few words; empty after a timeout."""


class EngineBusy(EngineError):
    """The engine refuses requests for now (HTTP 429 or 503) and has not started this one."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Seconds that the engine asked to wait (Retry-After); None if it did not say."""


class WeightsGone(EngineError):
    """The weights that an engine should load do not exist any more; it stays unused until the next weight update."""


class RequestRefused(EngineError):
    """The engine rejects this request as wrong (HTTP 4xx); it would reject the same request again."""


class AttachmentError(RequestRefused):
    """An image or another attachment of a prompt cannot be read, or has changed."""


class WeightsInUse(EngineError):
    """Weights were written, or were about to be, while an engine was generating with them."""

    def __init__(self, message: str, unsound: int = 0) -> None:
        super().__init__(message)
        self.unsound = unsound
        """Number of tokens that were dropped because they were sampled while the weights changed."""


class ModelBroken(WeightsInUse):
    """A call of the trainer's model failed and would fail again; generation stops until the next weight update."""


class RolloutError(AprilError, RuntimeError):
    """A rollout or reward function failed; the sample is named in the message."""


class UsageError(RolloutError, ValueError):
    """A rollout or reward function passed or returned an invalid value; a retry would fail in the same way."""


class InvariantError(AprilError, AssertionError):
    """april's own state is inconsistent, which is a bug; the message has the history of the sample concerned."""


class SchedulerClosed(AprilError, RuntimeError):
    """The scheduler was closed, or its background loop died; the cause is chained."""


class DataExhausted(AprilError, LookupError):
    """The prompt source ended before a batch could be filled."""


class LinkError(AprilError, RuntimeError):
    """Two processes of april cannot connect, one refuses the other, or one sent data that cannot be decoded."""


class RankError(AprilError, RuntimeError):
    """A trainer's ranks did not make the same call together: one is gone, is late, has failed, or made another call."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
        """Numbers of the ranks that caused the error; empty if they are unknown."""


class OffPolicyError(AprilError, RuntimeError):
    """A batch is more off-policy than the trainer allows; the batch was not changed."""

    def __init__(self, message: str, report: dict[str, float]) -> None:
        super().__init__(message)
        self.report = report
        """Report that ``off_policy_report`` would have returned."""


class CheckpointError(AprilError, ValueError):
    """A state cannot be saved, or a saved state cannot be loaded."""
