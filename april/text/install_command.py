"""Builds the ``pip install`` command for april's optional packages."""

from __future__ import annotations

import shlex
from importlib.util import find_spec
from pathlib import Path

from april.errors import ConfigError

NAME = "april-rl"


def install(extra: str) -> str:
    """Return the ``pip install`` command that adds one of april's pip extras to the april that runs."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        name = distribution(NAME).name
    except PackageNotFoundError:
        name = str(Path(__file__).resolve().parents[2])  # april runs from a checkout
    return f"pip install {shlex.quote(f'{name}[{extra}]')}"


def require(who: str, *packages: str, extra: str | None = "transformers") -> None:
    """Raise ConfigError for the first missing one of ``packages``; ``extra`` is april's pip extra with them, if any."""
    for package in packages:
        if find_spec(package) is None:
            how = f"pip install {package}" if extra is None else install(extra)
            raise ConfigError(f"{who} needs {package}: {how}")
