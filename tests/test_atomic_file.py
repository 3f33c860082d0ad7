"""Files with prompts and responses: whole or as they were, for their owner only, on the disk when the call returns."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from april.serialization.state_file import write_atomic


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_modes(tmp_path: Path) -> None:
    """0600 for files, 0700 for each directory that is made; those that are there stay as they are."""
    tmp_path.chmod(0o755)
    before = os.umask(0)
    try:
        write_atomic(tmp_path / "a" / "b" / "state", b"1")
    finally:
        os.umask(before)
    assert [mode(tmp_path / p) for p in (".", "a", "a/b", "a/b/state")] == [0o755, 0o700, 0o700, 0o600]


def test_what_is_written_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's content before it gets its name, and its directory after that."""
    steps: list[str] = []
    sync, replace = os.fsync, Path.replace

    def fsync(file: int) -> None:
        steps.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}")))
        sync(file)

    def renamed(part: Path, path: Path) -> Path:
        steps.append("renamed")
        return replace(part, path)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", renamed)
    write_atomic(tmp_path / "made" / "state", b"1")
    assert steps[0] == tmp_path.name
    assert steps[1].startswith("state.")
    assert steps[2:] == ["renamed", "made"]


def test_a_write_that_fails_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: the old content stays, and no part is left over."""
    path = tmp_path / "state"
    write_atomic(path, b"old")

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    """And nothing else: neither a link that somebody has planted there, nor what is behind it."""
    path, victim = tmp_path / "state", tmp_path / "victim"
    victim.write_bytes(b"v")
    (tmp_path / "state.abc.part").write_bytes(b"half")
    (tmp_path / "state.link.part").symlink_to(victim)
    (tmp_path / "other.abc.part").write_bytes(b"half of another")
    write_atomic(path, b"new")
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["other.abc.part", "state", "state.link.part", "victim"]
    assert (path.read_bytes(), victim.read_bytes()) == (b"new", b"v")


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written as elsewhere; only what killed writers left is not removed."""
    part = tmp_path / "state.x.part"
    part.write_bytes(b"half")

    def flock(file: int, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    write_atomic(tmp_path / "state", b"1")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"state": b"1", part.name: b"half"}


def test_two_writers_of_one_file(tmp_path: Path) -> None:
    """Neither fails, and what is there is of one of them, whole."""
    path, errors = tmp_path / "race", []

    def write(content: bytes) -> None:
        try:
            for _ in range(50):
                write_atomic(path, content)
        except OSError as error:
            errors.append(error)

    writers = [threading.Thread(target=write, args=(letter * 5000,)) for letter in (b"a", b"b")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert not errors
    assert path.read_bytes() in (b"a" * 5000, b"b" * 5000)
    assert list(tmp_path.iterdir()) == [path]
