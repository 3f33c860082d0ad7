"""Files with april's state beside a trainer's checkpoint: sealed bytes in msgpack, never executed."""

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

from april.core.sealed import FORMAT
from april.errors import CheckpointError


def pack(kind: str, content: Any) -> bytes:
    """``content`` as sealed bytes; arrays, tensors and numbers of numpy become lists and numbers.

    Raises:
        CheckpointError: it holds something that is no plain value.
    """
    try:
        data = msgspec.msgpack.encode(content, enc_hook=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"april's state cannot be saved: {error}") from error
    head = {"april": kind, "format": FORMAT, "checksum": checksum_of(data)}
    return msgspec.msgpack.encode({**head, "content": data})


def unpack(kind: str, data: bytes, where: str) -> Any:
    """Return what was packed; the message of an error names ``where`` it was found.

    Raises:
        CheckpointError: it was changed, is of another kind, or another version of april wrote it.
    """
    try:
        outer = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"april's state in {where} cannot be read: {error}") from error
    if not isinstance(outer, dict) or outer.get("format") != FORMAT or outer.get("april") != kind:
        raise CheckpointError(f"april's state in {where} was written by another version of april, or is none")
    content = outer.get("content")
    if not isinstance(content, bytes) or checksum_of(content) != outer.get("checksum"):
        raise CheckpointError(f"april's state in {where} is damaged: its checksum does not fit its content")
    return msgspec.msgpack.decode(content)


def write_state(path: Path, kind: str, content: Any) -> None:
    """Write ``content`` to ``path``, whole or not at all, readable by its owner only.

    Raises:
        CheckpointError: it holds something that is no plain value, or the file cannot be written.
    """
    data = pack(kind, content)
    try:
        write_atomic(path, data)
    except OSError as error:
        raise CheckpointError(f"april's state cannot be written to {path}: {error.strerror}") from error


def read_state(path: Path, kind: str) -> dict[str, Any]:
    """Read what :func:`write_state` wrote; raises CheckpointError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"april's state {path} cannot be read: {error.strerror}") from error
    content: dict[str, Any] = unpack(kind, data, str(path))
    return content


def groups_in(state: Mapping[str, Any]) -> set[int]:
    """The numbers of the groups that a state of the scheduler holds."""
    return {group["id"] for key in ("ready", "waiting") for group in state["core"][key]}


def checksum_of(data: bytes) -> str:
    """32 hex digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no plain value")


NO_SYNC = (errno.EINVAL, errno.ENOTSUP)
"""Errors of file systems that cannot sync a directory."""


def write_atomic(path: Path, data: bytes) -> None:
    """Replace ``path`` by a file of mode 0600 with ``data``, also after a crash of the machine; the last writer wins.

    Missing directories are made, with mode 0700. Raises OSError; then ``path`` is as it was, and nothing is left over.
    A device or a pipe is written to.
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
    """A new file beside ``path``, locked as long as it is open: somebody is writing it."""
    while True:
        file, name = tempfile.mkstemp(".part", f"{path.name}.", path.parent)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return file, Path(name)
        os.close(file)  # taken for left over, in the moment before it was locked


def _remove_left_over(path: Path) -> None:
    """Parts of writers that were killed: nobody holds their lock."""
    for part in path.parent.iterdir():
        if not (part.name.startswith(f"{path.name}.") and part.suffix == ".part"):
            continue
        with suppress(OSError):  # it is being written, or gone by now
            file = os.open(part, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()
            finally:
                os.close(file)


def make_directory(directory: Path) -> None:
    """Make a directory of mode 0700, and those above it that are missing."""
    if directory.exists():
        return
    make_directory(directory.parent)
    directory.mkdir(mode=0o700, exist_ok=True)
    _sync(directory.parent)


def _sync(directory: Path) -> None:
    """Write to the disk what was renamed or made in a directory."""
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
    finally:
        os.close(file)
