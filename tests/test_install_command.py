"""Hints of what to install work where april came from: a checkout, an archive, a repository or an index."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import april
from april.cli import app
from april.text import install_command

ROOT = Path(__file__).resolve().parent.parent


class Installed:
    """A distribution that pip has installed from somewhere."""

    def __init__(self, origin: dict[str, Any] | None) -> None:
        self._origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self._origin is None else json.dumps(self._origin)


def hint(monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | type[Exception] | None) -> str:
    def distribution(name: str) -> Installed:
        assert name == "april-rl"
        if isinstance(origin, type):
            raise origin
        return Installed(origin)

    monkeypatch.setattr("importlib.metadata.distribution", distribution)
    words = shlex.split(install_command.install("yaml"))
    assert words[:2] == ["pip", "install"]
    (what,) = words[2:]
    return what


def test_where_april_came_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The whole command can be pasted, with spaces in paths too."""
    checkout, wheel = tmp_path / "my april", tmp_path / "april_rl-0.1.0-py3-none-any.whl"
    checkout.mkdir()
    wheel.touch()
    repository = {"url": "https://example.org/april.git", "vcs_info": {"vcs": "git", "commit_id": "0"}}
    for origin, expected in (
        ({"url": checkout.as_uri(), "dir_info": {}}, f"{checkout}[yaml]"),
        ({"url": wheel.as_uri(), "archive_info": {}}, f"{wheel}[yaml]"),
        (repository, "april-rl[yaml] @ git+https://example.org/april.git"),
        ({"url": "https://example.org/a.whl", "archive_info": {}}, "april-rl[yaml] @ https://example.org/a.whl"),
        (None, "april-rl[yaml]"),
        (PackageNotFoundError, f"{ROOT}[yaml]"),
    ):
        assert hint(monkeypatch, origin) == expected


def test_sources_that_are_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in an image whose build deleted them: the README's words, to be typed in a checkout."""
    gone = {"url": (tmp_path / "gone").as_uri(), "dir_info": {}}
    module = tmp_path / "site-packages" / "april" / "text" / "install_command.py"
    monkeypatch.setattr(install_command, "__file__", str(module))
    assert hint(monkeypatch, gone) == ".[yaml]"


def test_the_command_line_tells_its_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"april {april.__version__}\n")
