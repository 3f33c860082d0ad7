"""Reads and writes the files with april's state beside a trainer's checkpoint: MessagePack with checksums, no pickle.

A file consists of MAGIC, the long ``bytes`` values one after the other, a MessagePack map with everything else and with
references to the long values, and the length of that map. So a state is written, and read, without a second copy of its
tokens in memory.

Two checksums protect a file. A sealed state, as ``state_dict`` returns it, has its own checksum (key ``checksum``),
which ``load_state_dict`` checks; it covers the long values in the state, except those in the prompts' data (key
``data``). The file's checksum covers everything else.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from april.core.state_checksum import FORMAT
from april.errors import CheckpointError

MAGIC = b"april %d\n" % FORMAT
LONG = 1024
"""``bytes`` values of at least this length are long: they are written before the map."""
_CHECKED, _SEALED = 1, 2
"""MessagePack extension types of references to long values that the file's checksum or a sealed state's covers."""


def pack(kind: str, content: Any) -> bytes:
    """Encode ``content`` as :func:`write_state` writes it; raises CheckpointError."""
    file = io.BytesIO()
    _write(file, kind, content)
    return file.getvalue()


def unpack(kind: str, data: bytes, where: str) -> Any:
    """Decode bytes from :func:`pack`. Raises CheckpointError, whose message names ``where`` the bytes come from."""
    return _read(io.BytesIO(data), kind, where)


def write_state(path: Path, kind: str, content: Any) -> None:
    """Write ``content`` to the file ``path`` atomically, readable by its owner only.

    Arrays, tensors and numpy numbers become lists and numbers.

    Raises:
        CheckpointError: ``content`` contains a value of another type, or the file cannot be written.
    """
    try:
        with atomic_file(path) as file:
            _write(file, kind, content)
    except OSError as error:
        raise CheckpointError(f"april's state cannot be written to {path}: {error.strerror}") from error


def read_state(path: Path, kind: str) -> dict[str, Any]:
    """Read a file that :func:`write_state` wrote.

    Raises:
        CheckpointError: the file was changed, is of another kind, or was written by another version of april.
    """
    try:
        with path.open("rb") as file:
            content: dict[str, Any] = _read(file, kind, str(path))
            return content
    except OSError as error:
        raise CheckpointError(f"april's state {path} cannot be read: {error.strerror}") from error


def _write(file: BinaryIO, kind: str, content: Any) -> None:
    file.write(MAGIC)
    writer = _Writer(file)
    try:
        writer.add(content)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"april's state cannot be saved: {error}") from error
    long_values, data = writer.digest.digest(), bytes(writer.plain)
    end = msgspec.msgpack.encode(_Head(kind, checksum_of(data + long_values), long_values, data))
    file.write(end)
    file.write(len(end).to_bytes(8, "big"))


class _Head(msgspec.Struct):
    """The map at the end of a file. ``april`` is the kind of state, ``checksum`` that of ``content`` and ``long``."""

    april: str
    checksum: str
    long: bytes
    """Digest of the long values that are not covered by the checksum of a sealed state."""
    content: bytes
    """MessagePack of everything except the long values."""


_decode_head = msgspec.msgpack.Decoder(_Head).decode


class _Writer:
    """Writes long values to a file, and collects the MessagePack of everything else in ``plain``."""

    def __init__(self, file: BinaryIO) -> None:
        self.plain = bytearray()
        self.digest = hashlib.blake2b(digest_size=16)
        """Digest of the long values that are not covered by the checksum of a sealed state."""
        self._file = file

    def add(self, value: Any, *, sealed: bool | None = None) -> None:
        """Add a value; ``sealed`` is None outside sealed states, True inside one, False in its prompts' ``data``."""
        if isinstance(value, dict):
            self.plain += b"\xdf" + len(value).to_bytes(4, "big")
            if sealed is None and value.keys() >= {"april", "format", "checksum"}:
                sealed = True
            for key, item in value.items():
                self.plain += _encode(key)
                self.add(item, sealed=False if sealed and key == "data" else sealed)
        elif isinstance(value, (list, tuple)):
            self.plain += b"\xdd" + len(value).to_bytes(4, "big")
            for item in value:
                self.add(item, sealed=sealed)
        elif isinstance(value, bytes) and len(value) >= LONG:
            self._file.write(value)
            if not sealed:
                self.digest.update(value)
            length = len(value).to_bytes(8, "big")
            self.plain += _encode(msgspec.msgpack.Ext(_SEALED if sealed else _CHECKED, length))
        else:
            self.plain += _encode(value)


def _read(file: BinaryIO, kind: str, where: str) -> Any:
    other = CheckpointError(f"april's state in {where} was not written by this version of april")
    if (begin := file.read(len(MAGIC))) != MAGIC:
        raise CheckpointError(f"april's state in {where} is cut short") if MAGIC.startswith(begin) else other
    damaged = CheckpointError(f"april's state in {where} is damaged: its checksum does not fit its content")
    digest = hashlib.blake2b(digest_size=16)

    def long_value(code: int, length: memoryview) -> bytes:
        value = file.read(int.from_bytes(length, "big"))
        if code == _CHECKED:
            digest.update(value)
        return value

    try:
        file.seek(-8, os.SEEK_END)
        end = file.tell() - int.from_bytes(file.read(8), "big")
        file.seek(end)
        head = _decode_head(file.read()[:-8])
        if head.april != kind:
            raise other
        if checksum_of(head.content + head.long) != head.checksum:
            raise damaged
        file.seek(len(MAGIC))
        found = msgspec.msgpack.decode(head.content, ext_hook=long_value)
    except CheckpointError:
        raise
    except (OSError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"april's state in {where} cannot be read: {error}") from error
    if digest.digest() != head.long:
        raise damaged
    return found


def checksum_of(data: bytes) -> str:
    """Return the BLAKE2b checksum of the data, 32 hex digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is not a plain value")


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
NO_SYNC = (errno.EINVAL, errno.ENOTSUP)
"""Errors of file systems that cannot sync a directory."""


def write_atomic(path: Path, data: bytes) -> None:
    """Replace ``path`` by a file with ``data``, as :func:`atomic_file` does."""
    with atomic_file(path) as file:
        file.write(data)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file (mode 0600) that replaces ``path`` atomically after the ``with`` block, even if the machine crashes.

    If several processes write, the last one wins. Missing directories are made, with mode 0700. If OSError is raised,
    ``path`` is unchanged and no temporary file remains. A device or a pipe is written to directly.
    """
    make_directory(path.parent)
    if path.exists() and not path.is_file():
        with path.open("wb") as opened:
            yield opened
        return
    _remove_left_over(path)
    number, part = _open_part(path)
    try:
        with os.fdopen(number, "wb") as opened:
            yield opened
            opened.flush()
            os.fsync(number)
            part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _open_part(path: Path) -> tuple[int, Path]:
    """Create a temporary file beside ``path``; while the file is being written, it is open and locked."""
    while True:
        file, name = tempfile.mkstemp(".part", f"{path.name}.", path.parent)
        with suppress(OSError):  # on file systems without locks, _remove_left_over removes nothing
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
