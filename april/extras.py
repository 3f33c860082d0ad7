"""The command that installs an optional part's packages, from where april itself came."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from april.errors import ConfigError

NAME = "april-rl"


def install(extra: str) -> str:
    """``pip install ...`` for one of april's extras, from its checkout, its archive or the index it came from."""
    return f"pip install {shlex.quote(_origin(extra))}"


def require(who: str, *packages: str, extra: str | None = "transformers") -> None:
    """ConfigError naming the first of ``packages`` that is not installed; no ``extra``: it is installed by itself."""
    for package in packages:
        if find_spec(package) is None:
            how = f"pip install {package}" if extra is None else install(extra)
            raise ConfigError(f"{who} needs {package}: {how}")


def _origin(extra: str) -> str:
    try:
        said = distribution(NAME).read_text("direct_url.json")
    except PackageNotFoundError:
        said = None  # it runs from its checkout
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
    checkout = Path(__file__).resolve().parent.parent
    # where the sources were deleted after the installation, the user knows where there are others
    return f"{checkout}[{extra}]" if (checkout / "pyproject.toml").is_file() else f".[{extra}]"
