"""A pytest plugin for OpenRLHF's own tests: where they load a module, april's subclass stands for the class in it."""

from __future__ import annotations

import importlib.util
from typing import Any

SUBSTITUTED: list[str] = []
"""Of which modules."""


def pytest_configure() -> None:
    """From now on, for files that are loaded by path, as those tests do."""
    from april.adapters.openrlhf.actors import GeneratesByApril, WithApril

    places = {
        "samples_generator.py": ("SamplesGenerator", GeneratesByApril),
        "ppo_trainer.py": ("PPOTrainer", WithApril),
    }
    locate = importlib.util.spec_from_file_location

    def located(name: str, location: Any = None, **options: Any) -> Any:
        spec = locate(name, location, **options)
        place = places.get(str(location).rpartition("/")[2])
        if spec is not None and spec.loader is not None and place is not None:
            run = spec.loader.exec_module

            def run_and_substitute(module: Any) -> None:
                run(module)
                cls, mixin = place
                setattr(module, cls, type(f"April{cls}", (mixin, getattr(module, cls)), {}))
                SUBSTITUTED.append(cls)

            spec.loader.exec_module = run_and_substitute  # type: ignore[method-assign]
        return spec

    importlib.util.spec_from_file_location = located


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How often each class was substituted."""
    for cls in sorted(set(SUBSTITUTED)):
        terminalreporter.write_line(f"substituted {cls} {SUBSTITUTED.count(cls)} times")
