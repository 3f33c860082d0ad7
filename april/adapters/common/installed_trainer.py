"""Checks that an installed trainer still has the internal functions on which april's adapter relies."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from april.errors import ConfigError

RequiredFunctions = Mapping[str, tuple[str, ...]]
"""Parameter names of each function of a trainer on which an adapter relies, by ``module:path``."""


def import_trainer(package: str, needs: str, tested: str, otherwise: str = "") -> Any:
    """Import a trainer's package. If that fails, raises ConfigError with ``needs`` and ``otherwise`` in its message."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        wants = f"{needs}: pip install {package}=={tested}"
        raise ConfigError(f"{wants} (its import failed: {error}){otherwise}") from error


def version_of(package: str) -> str:
    """Return the installed version of a package, or the text ``of unknown version`` if the package has no metadata."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def require_functions(package: str, tested: str, functions: RequiredFunctions, owner: Any = None) -> None:
    """Raise ConfigError for the first function that is missing or has other parameters than in the tested version.

    If ``owner`` is given, ``functions`` names attributes of that object instead of ``module:path``.
    """
    for where, parameters in functions.items():
        found = _parameters(where, owner)
        if found != parameters:
            has = "is not there" if found is None else f"takes ({', '.join(found)})"
            path = where if owner is None else f"{owner.__name__}.{where}"
            raise ConfigError(
                f"{path} of {package} {version_of(package)} {has}, but april's adapter needs "
                f"({', '.join(parameters)}); pip install {package}=={tested}"
            )


def _parameters(where: str, owner: Any) -> tuple[str, ...] | None:
    module, _, path = where.rpartition(":")
    try:
        found: Any = owner if owner is not None else importlib.import_module(module)
        for name in path.split("."):
            found = getattr(undecorated_class(found), name)
        names: Sequence[str] = tuple(inspect.signature(inspect.unwrap(found)).parameters)
    except (ImportError, AttributeError, TypeError, ValueError):
        return None
    return tuple(name for name in names if not name.startswith("_ray_"))  # Ray adds these to actor methods


def undecorated_class(found: Any) -> Any:
    """Return the class behind a Ray actor class; any other object is returned unchanged."""
    made = getattr(getattr(found, "__ray_metadata__", None), "modified_class", None)
    return found if made is None else getattr(made, "__ray_actor_class__", made)
