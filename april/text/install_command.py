"""Builds the ``pip install`` command for april's optional packages, for the source that april was installed from."""

from __future__ import annotations

import json
import shlex
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from april.errors import ConfigError

NAME = "april-rl"


def install(extra: str) -> str:
    """Return the ``pip install`` command for one of april's extras, from its checkout, archive or package index."""
    return f"pip install {shlex.quote(_origin(extra))}"


def require(who: str, *packages: str, extra: str | None = "transformers") -> None:
    """Raise ConfigError for the first of ``packages`` that is missing; ``extra`` (or None) of april includes them."""
    for package in packages:
        if find_spec(package) is None:
            how = f"pip install {package}" if extra is None else install(extra)
            raise ConfigError(f"{who} needs {package}: {how}")


def _origin(extra: str) -> str:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        said = distribution(NAME).read_text("direct_url.json")
    except PackageNotFoundError:
        said = None  # april runs from a checkout
    else:
        if said is None:
            return f"{NAME}[{extra}]"  # from an index
    if said is not None:
        origin = json.loads(said)
        url = urlsplit(origin["url"])
        if url.scheme != "file":
            version_control = origin.get("vcs_info", {}).get("vcs")
            return f"{NAME}[{extra}] @ {version_control + '+' if version_control else ''}{origin['url']}"
        path = Path(unquote(url.path))
        if path.exists():
            return f"{path}[{extra}]"
    checkout = Path(__file__).resolve().parents[2]
    # if the sources were deleted after the installation, assume the user's current directory
    return f"{checkout}[{extra}]" if (checkout / "pyproject.toml").is_file() else f".[{extra}]"
