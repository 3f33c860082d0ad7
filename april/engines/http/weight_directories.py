"""Finds out whether a directory that engines load weights from holds an adapter, and whether its content changed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

ADAPTER_FILE = "adapter_config.json"
SAMPLES, SAMPLE_BYTES = 16, 4096
"""Number of evenly spaced samples per file, and bytes per sample; a file of at most SAMPLE_BYTES is read whole."""
MOST_FILES = 1_000
LOAD_WEIGHTS_S = 3600.0
"""Seconds for a server to load weights."""
WEIGHTS = ".safetensors"
"""Suffix of weight files. In a directory without such files, all files count as weights."""


def is_adapter(path: str) -> bool:
    """Return whether a directory holds an adapter (LoRA), which servers load in addition to their model."""
    return (Path(path) / ADAPTER_FILE).is_file()


def content_of(path: str) -> str:
    """Return a fingerprint of a directory, which changes when a file is written, replaced, added or removed.

    The first half covers only the weight files, by their names below ``path``, sizes and samples of their bytes, so it
    is the same on every machine. The second half covers all files, also by full names and times on this machine. Empty
    if the directory cannot be read here, has no files, or has more than MOST_FILES.
    """
    weights, files = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    try:
        names = sorted(_files(path))
        if not 0 < len(names) <= MOST_FILES:
            return ""
        # other files, such as logs and optimizer states, may differ between machines
        weight_files = {name for name in names if name.endswith(WEIGHTS)} or set(names)
        for name in names:
            with open(name, "rb") as file:  # network file systems refresh times only on open
                stat = os.fstat(file.fileno())
                files.update(_encoded((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)))
                last = max(0, stat.st_size - SAMPLE_BYTES)
                read = hashlib.blake2b()
                for i in range(SAMPLES if last else 1):
                    file.seek(last * i // (SAMPLES - 1))
                    read.update(file.read(SAMPLE_BYTES))
                files.update(read.digest())
                if name in weight_files:
                    weights.update(_encoded((os.path.relpath(name, path), stat.st_size)) + read.digest())
    except OSError:
        return ""
    return weights.hexdigest() + files.hexdigest()


def _encoded(facts: object) -> bytes:
    return repr(facts).encode("utf-8", "surrogateescape")


def _files(path: str) -> list[str]:
    """Return all files except hidden ones, which file systems and editors create and remove on their own."""
    if os.path.isfile(path):
        return [path]
    found: list[str] = []
    for folder, folders, files in os.walk(path, followlinks=False):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += (os.path.join(folder, name) for name in files if not name.startswith("."))
        if len(found) > MOST_FILES:
            break
    return found
