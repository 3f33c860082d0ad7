"""Reads and writes files with april's state beside a trainer's checkpoint: MessagePack with a checksum, no pickle."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from april.core.state_checksum import FORMAT
from april.errors import CheckpointError


def pack(kind: str, content: Any) -> bytes:
    """Encode ``content`` with a checksum; arrays, tensors and numpy numbers become lists and numbers.

    Raises:
        CheckpointError: ``content`` contains a value that is not plain.
    """
    try:
        data = msgspec.msgpack.encode(content, enc_hook=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"april's state cannot be saved: {error}") from error
    head = {"april": kind, "format": FORMAT, "checksum": checksum_of(data)}
    return msgspec.msgpack.encode({**head, "content": data})


def unpack(kind: str, data: bytes, where: str) -> Any:
    """Check and decode bytes from :func:`pack`; error messages name the file ``where`` they were.

    Raises:
        CheckpointError: the bytes were changed, are of another kind, or were written by another version of april.
    """
    try:
        outer = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"april's state in {where} cannot be read: {error}") from error
    if not isinstance(outer, dict) or outer.get("format") != FORMAT or outer.get("april") != kind:
        raise CheckpointError(f"april's state in {where} was not written by this version of april")
    content = outer.get("content")
    if not isinstance(content, bytes) or checksum_of(content) != outer.get("checksum"):
        raise CheckpointError(f"april's state in {where} is damaged: its checksum does not fit its content")
    return msgspec.msgpack.decode(content)


def write_state(path: Path, kind: str, content: Any) -> None:
    """Write ``content`` to the file ``path`` atomically, readable by its owner only.

    Raises:
        CheckpointError: ``content`` contains a value that is not plain, or the file cannot be written.
    """
    data = pack(kind, content)
    try:
        write_atomic(path, data)
    except OSError as error:
        raise CheckpointError(f"april's state cannot be written to {path}: {error.strerror}") from error


def read_state(path: Path, kind: str) -> dict[str, Any]:
    """Read a file that :func:`write_state` wrote; raises CheckpointError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"april's state {path} cannot be read: {error.strerror}") from error
    content: dict[str, Any] = unpack(kind, data, str(path))
    return content


def groups_in(state: Mapping[str, Any]) -> set[int]:
    """Return the numbers of the groups in a saved state of the scheduler."""
    return {group["id"] for key in ("ready", "waiting") for group in state["core"][key]}


def checksum_of(data: bytes) -> str:
    """Return the BLAKE2b checksum of the data, 32 hex digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is not a plain value")


NO_SYNC = (errno.EINVAL, errno.ENOTSUP)
"""Errors of file systems that cannot sync a directory."""


def write_atomic(path: Path, data: bytes) -> None:
    """Replace ``path`` atomically, also if the machine crashes, by a file of mode 0600 with ``data``.

    If several processes write, the last one wins. Missing directories are made, with mode 0700. If OSError is raised,
    ``path`` is unchanged and no temporary file remains. A device or a pipe is written to directly.
    """
    make_directory(path.parent)
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    _remove_left_over(path)
    file, part = _open_part(path)
    try:
        with os.fdopen(file, "wb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(file)
            part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _open_part(path: Path) -> tuple[int, Path]:
    """Create a temporary file beside ``path``; it is locked while it is open, which marks it as being written."""
    while True:
        file, name = tempfile.mkstemp(".part", f"{path.name}.", path.parent)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return file, Path(name)
        os.close(file)  # another process took the file for a left-over one and removed it before it was locked


def _remove_left_over(path: Path) -> None:
    """Remove temporary files of writers that were killed; no process holds a lock on such files."""
    for part in path.parent.iterdir():
        if not (part.name.startswith(f"{path.name}.") and part.suffix == ".part"):
            continue
        with suppress(OSError):  # the file is being written, or another process has removed it
            file = os.open(part, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()
            finally:
                os.close(file)


def make_directory(directory: Path) -> None:
    """Make a directory of mode 0700, with missing parents, and sync each to the disk."""
    if directory.exists():
        return
    make_directory(directory.parent)
    directory.mkdir(mode=0o700, exist_ok=True)
    _sync(directory.parent)


def _sync(directory: Path) -> None:
    """Sync a directory to the disk, so that files renamed or made in it survive a crash."""
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
    finally:
        os.close(file)
