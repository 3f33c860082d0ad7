"""Environments of the clients below ``.venv``, made once: those of Python by pip, those of JavaScript by npm."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.real_engines.environments import ROOT, CannotInstall, Recipe, run

SDKS = Recipe("clients-sdks", (("install", "openai==3.57.0", "anthropic==2.14.0"),))
FRAMEWORKS = Recipe(
    "clients-frameworks",
    (("install", "openai-agents==0.24.0", "pydantic-ai-slim[openai,anthropic]==2.66.0"),),
)
MINI = Recipe("clients-mini", (("install", "mini-swe-agent==2.4.6"),))
VERIFIERS = Recipe("clients-verifiers", (("install", "verifiers==0.4.0", "uv", f"{ROOT}[agents]"),))
"""april is beside the environment that it wraps: this is where the program itself runs."""

PACKAGES = {
    "sdks-js": ("openai@7.57.0", "@anthropic-ai/sdk@1.14.0", "node@22"),
    "codex": ("@openai/codex@0.171.0",),
    "claude-code": ("@anthropic-ai/claude-code@2.1.197",),
}


def of_npm(name: str, within: Path = ROOT / ".venv") -> Path:
    """Directory with the ``node_modules`` of a name in PACKAGES; raises CannotInstall."""
    where, wanted = within / f"clients-{name}", " ".join(PACKAGES[name])
    stamp = where / ".installed"
    if stamp.is_file() and stamp.read_text("utf-8") == wanted:
        return where
    if shutil.which("npm") is None:
        raise CannotInstall(f"{wanted}: there is no npm on this machine")
    print(f"installing {wanted} into {where.relative_to(ROOT)}", flush=True)
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    (where / "package.json").write_text("{}", "utf-8")
    run(["npm", "install", "--no-audit", "--no-fund", "--no-progress", *PACKAGES[name]], where)
    stamp.write_text(wanted, "utf-8")
    return where


def version_of(python: Path, package: str) -> str:
    look = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([str(python), "-c", look], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit("python -m tests.clients makes them")
