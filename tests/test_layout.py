"""The house: floors import downwards only, the core is pure, nothing unsafe is imported."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def module(path: Path) -> str:
    """The name that a file of the package is imported by."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


PACKAGE = ROOT / "april"
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {module(path) for path in FILES}
FLOORS = ("corrections", "core", "record", "config", "engines", "weights", "driver")
"""From the ground up; scheduler, simulate, doctor and cli are above them all."""
ABOVE = ("scheduler", "processes", "export", "view", "simulate", "doctor", "cli", "adapters",
         "testing")  # fmt: skip
CLOCKS_AND_CHANCE = {"time", "datetime", "random", "secrets"}
IMPURE = {"asyncio", "aiohttp", "socket", "threading", "torch", "os", "pathlib"} | CLOCKS_AND_CHANCE
UNSAFE = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def imports(path: Path, *, for_types: bool = False) -> Iterator[str]:
    """Every module imported anywhere in a file, as ``from``s name it; those for type checking only if asked for."""
    tree = ast.parse(path.read_text("utf-8"))
    skipped = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and isinstance(branch.test, ast.Name) and branch.test.id == "TYPE_CHECKING"
        for node in ast.walk(branch)
        if not for_types
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from below & MODULES
            if not below <= MODULES:
                yield node.module


def test_the_core_is_pure() -> None:
    """No asyncio, network, disk, clock, randomness or torch in april/core."""
    for path in (PACKAGE / "core").glob("*.py"):
        assert not {name.split(".")[0] for name in imports(path)} & IMPURE, path.name


@pytest.mark.parametrize("floor", range(len(FLOORS)))
def test_floors_import_only_what_is_below(floor: int) -> None:
    """From the ground up as listed, sub-packages too; none knows what stands on it."""
    above = {f"april.{name}" for name in (*FLOORS[floor + 1 :], *ABOVE)}
    files = list((PACKAGE / FLOORS[floor]).rglob("*.py"))
    assert files
    for path in files:
        for name in imports(path):
            assert not any(name == a or name.startswith(a + ".") for a in above), f"{path.name} imports {name}"


def test_no_adapter_imports_another() -> None:
    """Each trainer's adapter is a leaf, which nothing outside of it imports; what they do alike is in one room."""
    adapters = PACKAGE / "adapters"
    rooms = {path.name for path in adapters.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == {"areal", "common", "openrlhf", "slime", "trl", "verl"}
    assert [path.name for path in adapters.glob("*.py")] == ["__init__.py"]
    for path in FILES:
        own = path.relative_to(adapters).parts[0] if path.is_relative_to(adapters) else None
        for name in imports(path):
            if name.startswith("april.adapters"):
                assert own is not None, f"{path.name} imports {name}"
                assert name.split(".")[2] in (own, "common"), f"{path.name} imports {name}"


def test_every_engine_is_one_package() -> None:
    """Protocols, abilities, a base class, engines by name, a group of workers, a package per kind, one for servers."""
    entries = {path.name for path in (PACKAGE / "engines").iterdir()} - {"__init__.py", "__pycache__"}
    kinds = {"vllm", "sglang", "openai", "transformers", "simulated", "served"}
    modules = {"abilities.py", "fit.py", "protocol.py", "base.py", "attachments.py", "weight_transfer.py",
               "gloo_group.py", "random_bits.py"}  # fmt: skip
    assert entries == {*modules, "kinds", "http", *kinds}
    for path in (PACKAGE / "engines" / "http").glob("*.py"):
        for name in imports(path):
            assert not any(name.startswith(f"april.engines.{kind}") for kind in kinds), f"{path.name} imports {name}"


def test_modules_import_each_other_in_one_direction() -> None:
    """No module comes back to itself by way of its imports, those in functions and for type checking included."""
    arrows = {module(path): set(imports(path, for_types=True)) & MODULES - {module(path)} for path in FILES}
    graphlib.TopologicalSorter(arrows).prepare()


def test_packages_import_each_other_in_one_direction() -> None:
    """No circle; a module beside packages counts as a package."""
    packages = {name for name in MODULES if any(other.startswith(name + ".") for other in MODULES)}
    mixed = {"april", "april.engines"}

    def package(name: str) -> str:
        parent = name.rpartition(".")[0]
        return name if name in packages or parent in mixed else parent

    graph: dict[str, set[str]] = {}
    for path in FILES:
        below = graph.setdefault(package(module(path)), set())
        below |= {package(n) for n in imports(path) if n in MODULES and n not in mixed}
        below.discard(package(module(path)))
    graphlib.TopologicalSorter(graph).prepare()


def test_no_engine_is_decided_on_by_name_above_the_engines() -> None:
    """Decide by capabilities: engine kinds are named in engines/ and in the configuration's types only."""
    kinds = ('"transformers"', '"simulated"', '"vllm"', '"sglang"', '"openai"')
    for path in FILES:
        if path.is_relative_to(PACKAGE / "engines") or path == PACKAGE / "config" / "settings.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Compare):
                assert not any(kind in ast.unparse(node).replace("'", '"') for kind in kinds), path.name


def test_nothing_unsafe_is_imported() -> None:
    """No pickle and its kin, in the package, the benchmarks or the examples."""
    for path in [*FILES, *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").glob("*.py")]:
        assert not {name.split(".")[0] for name in imports(path)} & UNSAFE, path.name


def test_wall_clock_is_not_read_in_the_library() -> None:
    """Nothing depends on the wall clock: ``time.time`` appears nowhere in april."""
    for path in FILES:
        assert "time.time(" not in path.read_text("utf-8"), path.name


def exists(reference: str, path: Path) -> bool:
    """Whether what a docstring of ``path`` refers to is there: a name of a module, or of a class in it."""
    *parts, name = reference.lstrip(".").split(".")
    package = ".".join(module(path).split(".")[: -1 if path.name != "__init__.py" else None])
    name_of_module = ".".join(([package] if reference.startswith(".") else []) + parts)
    if f"{name_of_module}.{name}" in MODULES:
        return True
    while name_of_module not in MODULES:  # a method: its class is looked for
        name_of_module, _, name = name_of_module.rpartition(".")
    file = PACKAGE.parent.joinpath(*name_of_module.split("."))
    text = (file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text("utf-8")
    return re.search(rf"\b{name}\b", text) is not None


def test_what_docstrings_refer_to_exists() -> None:
    """References to modules, classes and files of april lead somewhere."""
    names = {path.relative_to(PACKAGE.parent).as_posix() for path in FILES}
    for path in FILES:
        text = path.read_text("utf-8")
        for reference in re.findall(r":\w+:`~?(\.[\w.]+|april\.[\w.]+)`", text):
            assert exists(reference, path), f"{path}: {reference}"
        for reference in re.findall(r"``((?:\w+/)+\w+\.py)``", text):
            assert any(name.endswith(f"/{reference}") for name in names), f"{path}: {reference}"


def test_a_name_of_a_module_means_one_thing() -> None:
    """No table of a test file is given a second meaning further down: the tests above would read that one."""
    for path in [*FILES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        statements = ast.parse(path.read_text("utf-8")).body
        targets = [t for s in statements if isinstance(s, ast.Assign) for t in s.targets]
        targets += [s.target for s in statements if isinstance(s, ast.AnnAssign)]
        names = [node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
        stores = [name.id for name in names if isinstance(name.ctx, ast.Store)]
        twice = sorted({name for name in stores if stores.count(name) > 1})
        assert not twice, f"{path}: {twice}"
