"""The adapters before stand-ins of their trainers; what several stand-ins are made of."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any


def tree(values: Mapping[str, Any], changes: Mapping[str, Any]) -> SimpleNamespace:
    """Namespaces of these values at dotted paths; ``changes`` have ``__`` where a path has a dot."""
    root = SimpleNamespace()
    for path, value in {**values, **{name.replace("__", "."): value for name, value in changes.items()}}.items():
        node = root
        *parents, last = path.split(".")
        for parent in parents:
            node = vars(node).setdefault(parent, SimpleNamespace())
        setattr(node, last, value)
    return root


def modules(made: Mapping[str, Mapping[str, Any]]) -> dict[str, ModuleType]:
    """Modules by name with these attributes, and the packages above them."""
    found: dict[str, ModuleType] = {}
    for name, attributes in made.items():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            path = ".".join(parts[:count])
            module = found.setdefault(path, ModuleType(path))
            module.__path__ = []
            if count > 1:
                setattr(found[".".join(parts[: count - 1])], parts[count - 1], module)
        vars(found[name]).update(attributes)
    return found
