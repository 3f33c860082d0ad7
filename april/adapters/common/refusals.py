"""Raises errors for settings that a trainer cannot use; each message names the reason and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from april.errors import ConfigError

Refusal = tuple[Any, str, str, str]
"""Check of a setting: (true if it is refused, name of the setting, reason, remedy)."""
NULL_MEANS_NO_LIMIT = ("function_timeout_s", "stall_timeout_s")
"""Settings that have a limit by default. For all other settings that may be None, None is the default."""
_RECOMPUTED = "that the trainer recomputes (log_softmax(logits / temperature))"


def refuse(rows: Iterable[Refusal]) -> None:
    """Raise ConfigError, in one sentence, for the first row whose condition is true."""
    for applies, setting, why, what_to_do in rows:
        if applies:
            raise ConfigError(f"{setting}: {why}; {what_to_do}")


def mapping_of(settings: Any, where: str) -> dict[str, Any]:
    """Return ``settings`` as a dict, empty for None. Raises ConfigError if they are not a mapping."""
    if settings is None:
        return {}
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{where}: expected a mapping of settings, got {type(settings).__name__}")
    return {str(name): value for name, value in settings.items()}


def own_settings(
    settings: Any, trainer: str, decided: Mapping[str, str], *, where: str = "april", pattern: str = "april.{}"
) -> dict[str, Any]:
    """Return the settings that a user has given for april: those that are not None, or for which None means no limit.

    Raises ConfigError for a setting that the trainer decides; ``decided`` maps it to the trainer's name for it. In
    messages, ``where`` says where the settings come from, and ``pattern`` is the format of a setting's name.
    """
    given = mapping_of(settings, where)
    own = {name: value for name, value in given.items() if value is not None or name in NULL_MEANS_NO_LIMIT}
    refuse((flag, pattern.format(name), f"{trainer}'s {flag} decides this", "leave it out")
           for name in own for flag in [decided.get(name.partition(".")[0])])  # fmt: skip
    refuse(agents_sampling(own, trainer, pattern))
    return own


def distorting(settings: Mapping[str, Any], instead: str = "") -> Iterator[Refusal]:
    """Yield refusals of sampling settings (name: True if used) that the trainer's log-probabilities do not include."""
    for setting, applies in settings.items():
        why = f"this is not part of the log-probabilities {_RECOMPUTED}, so its ratios would be wrong"
        yield applies, setting, why, f"leave it out{instead}"


def greedy(applies: Any, setting: str, instead: str = "") -> Refusal:
    """Return the refusal of temperature 0, for :func:`refuse`; ``applies`` is true if the temperature is 0."""
    why = "greedy samples of a group are all equal, and the trainer recomputes log_softmax(logits / temperature)"
    return applies, setting, why, f"use a positive temperature{instead}"


def agents_sampling(own: Mapping[str, Any], trainer: str, pattern: str = "april.{}") -> Iterator[Refusal]:
    """Yield refusals of agent settings with which each row would need its own temperature or token mask in the loss."""
    setting = pattern.format("sampling_of_clients")
    why = f"rows would have temperatures of their own, but {trainer} divides all logits by the same temperature"
    yield own.get("sampling_of_clients") == "client", f"{setting}=client", why, "leave it out"
    yield from distorting({f"{pattern.format('constraints')}=enforce": own.get("constraints") == "enforce"})


def divided_groups(own: Mapping[str, Any], trainer: str, samples: str, pattern: str = "april.{}") -> Iterator[Refusal]:
    """Yield refusals of settings that allow incomplete groups, for trainers that find groups by position in a batch."""
    quorum, by_place = own.get("group_quorum"), f"of {samples} by their place in the batch"
    # fmt: off
    yield (quorum not in (None, 1), f"{pattern.format('group_quorum')}={quorum}",
           f"{trainer} takes rewards over whole groups {by_place}, so groups are delivered whole", "leave it out")
    yield (own.get("on_failed_sample") == "shrink", f"{pattern.format('on_failed_sample')}=shrink",
           f"{trainer} takes rewards over groups {by_place}, so none may have fewer", "use replace")
