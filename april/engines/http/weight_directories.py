"""Directories from which engines load weights: what must not be in them, and whether they still hold what they held."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

ADAPTER_FILE = "adapter_config.json"
SAMPLES, SAMPLE_BYTES = 16, 4096
"""Samples of each file, spread over all of it; a file that is no longer is read whole."""
MOST_FILES = 1_000
WEIGHTS = ".safetensors"
"""The way in which the names of files with weights end; a directory without any has them in all its files."""


def is_adapter(path: str) -> bool:
    """Return whether a directory has an adapter (LoRA), which servers load beside their model and not over it."""
    return (Path(path) / ADAPTER_FILE).is_file()


def content_of(path: str) -> str:
    """Stands for what a directory holds: another text once any file in it was written, replaced, added or removed.

    Its first half stands for the weights alone and is the same on every machine: made from names below ``path``, sizes
    and samples of the bytes. The second one is this machine's: whole names, times. Empty: it cannot be read here, or
    has no files.
    """
    weights, files = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    try:
        names = sorted(_files(path))
        if not 0 < len(names) <= MOST_FILES:
            return ""
        # beside them may be what each machine has of its own: logs, states of optimizers
        weighty = {name for name in names if name.endswith(WEIGHTS)} or set(names)
        for name in names:
            with open(name, "rb") as file:  # on a network, times are those of the server only after it was opened
                stat = os.fstat(file.fileno())
                told = name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
                files.update(_text(told))
                last = max(0, stat.st_size - SAMPLE_BYTES)
                read = hashlib.blake2b()
                for i in range(SAMPLES if last else 1):
                    file.seek(last * i // (SAMPLES - 1))
                    read.update(file.read(SAMPLE_BYTES))
                files.update(read.digest())
                if name in weighty:
                    weights.update(_text((os.path.relpath(name, path), stat.st_size)) + read.digest())
    except OSError:
        return ""
    return weights.hexdigest() + files.hexdigest()


def _text(told: object) -> bytes:
    return repr(told).encode("utf-8", "surrogateescape")


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
