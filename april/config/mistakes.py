"""Mistakes in the configuration as data: sentences with places for settings, which each reader fills with own names.

A file and keyword arguments have names (``sampling.top_p=0.5``), a command line has flags (``--sampling-top-p 0.5``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from string import Formatter

from april.config.values import shown
from april.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Named:
    """A setting in a sentence."""

    path: str
    """Where it is in the configuration: ``sampling.top_p``."""
    value: str | None = None
    """None: only its name stands there."""
    advised: bool = False
    """The value is one to give it, and not the one that it has."""

    def __str__(self) -> str:
        if self.value is None:
            return self.path
        return f"{self.path.rpartition('.')[2]}: {self.value}" if self.advised else f"{self.path}={self.value}"


class Mistake(ValueError):
    """One sentence; as text with the names of a file."""

    def __init__(self, *parts: str | Named) -> None:
        super().__init__("".join(map(str, parts)))
        self.parts = parts

    def sentence(self, name: Callable[[Named], str]) -> str:
        """The sentence with other names."""
        return "".join(part if isinstance(part, str) else name(part) for part in self.parts)


class WrongSettings(ConfigError):
    """All mistakes of one configuration."""

    def __init__(self, mistakes: Iterable[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__(self.sentence(str))

    def sentence(self, name: Callable[[Named], str]) -> str:
        """All sentences with other names."""
        return "; ".join(mistake.sentence(name) for mistake in self.mistakes)


def contradiction(settings: object, template: str) -> Mistake:
    """A mistake in ``settings``.

    Args:
        template: with ``{max_staleness=}`` for a setting and the value that it has, ``{max_staleness}`` for its name,
            ``{partial_rollout: true}`` for a value to give it.
    """
    parts: list[str | Named] = []
    for text, field, advice, _ in Formatter().parse(template):
        parts.append(text)
        if field is not None:
            path = field.removesuffix("=")
            value = shown(attrgetter(path)(settings)) if path != field else (advice or "").strip() or None
            parts.append(Named(path, value, advised=path == field))
    return Mistake(*parts)
