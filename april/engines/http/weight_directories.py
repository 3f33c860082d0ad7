"""Directories from which engines load weights: what must not be in them, and whether they still hold what they held."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

ADAPTER_FILE = "adapter_config.json"
SAMPLES, SAMPLE_BYTES = 16, 4096
"""Of each file, spread over all of it; what is no longer than that is read whole."""
MOST_FILES = 1_000


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


def content_of(path: str) -> str:
    """Stands for what a directory holds: another text once any file in it was written, replaced, added or removed.

    Made from names, sizes, times and samples of the bytes. Empty: it cannot be read here, or has no files.
    """
    found = hashlib.blake2b(digest_size=16)
    try:
        files = sorted(_files(path))
        if not 0 < len(files) <= MOST_FILES:
            return ""
        for name in files:
            with open(name, "rb") as file:  # on a network, times are those of the server only after it was opened
                stat = os.fstat(file.fileno())
                told = name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
                found.update(repr(told).encode("utf-8", "surrogateescape"))
                last = max(0, stat.st_size - SAMPLE_BYTES)
                for i in range(SAMPLES if last else 1):
                    file.seek(last * i // (SAMPLES - 1))
                    found.update(file.read(SAMPLE_BYTES))
    except OSError:
        return ""
    return found.hexdigest()


def _files(path: str) -> list[str]:
    """All but hidden ones, which file systems and editors make and remove."""
    if os.path.isfile(path):
        return [path]
    found: list[str] = []
    for folder, folders, files in os.walk(path, followlinks=False):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += (os.path.join(folder, name) for name in files if not name.startswith("."))
        if len(found) > MOST_FILES:
            break
    return found
