"""Directories from which servers load weights: what must not be in them."""

from __future__ import annotations

from pathlib import Path

ADAPTER_FILE = "adapter_config.json"


def why_unloadable(path: str) -> str | None:
    """What stands against loading this directory into any engine, as far as it can be seen from here; None: nothing.

    A server that takes an adapter (LoRA) for a whole model is left with its base weights torn.
    """
    if not (Path(path) / ADAPTER_FILE).is_file():
        return None
    return (
        f"{path} has a {ADAPTER_FILE}: it is an adapter (LoRA), and loading it would break the base weights of the "
        "server; save a merged copy of the whole model, or hand the adapter over yourself with transfer="
    )
