"""Hints of what to install work wherever april came from."""

from __future__ import annotations

import shlex
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from typer.testing import CliRunner

import april
from april.cli import app
from april.text import install_command

ROOT = Path(__file__).resolve().parent.parent


def test_the_command_keeps_the_april_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip adds what an extra lacks to april from an index, an archive or a repository; else april is in a checkout."""
    assert shlex.split(install_command.install("yaml")) == ["pip", "install", "april-rl[yaml]"]

    def no_distribution(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", no_distribution)
    assert shlex.split(install_command.install("yaml")) == ["pip", "install", f"{ROOT}[yaml]"]


def test_the_command_line_tells_its_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"april {april.__version__}\n")
