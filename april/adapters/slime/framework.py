"""Finds slime, or its fork miles, and checks before the run starts that it has the functions that april calls.

slime is run from a source tree, so april cannot check a version number instead.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
from collections.abc import Coroutine
from typing import Any

from april.driver.user_code import check_function
from april.errors import ConfigError

NAMES = ("slime", "miles")
TESTED_VERSIONS = "slime 624b824 and miles 31f1ca9"

REQUIRED_FUNCTIONS = {
    "utils.misc.load_function": ("path",),
    "utils.async_utils.get_async_loop": (),
    "utils.processing_utils.load_tokenizer": ("name_or_path",),
    "rollout.base_types.RolloutFnTrainOutput": ("samples", "metrics"),
    "rollout.filter_hub.base_types.call_dynamic_filter": ("fn", "args", "group"),
    "rollout.rm_hub.async_rm": ("args", "sample"),
    "rollout.rm_hub.batched_async_rm": ("args", "samples"),
}
SAMPLE_FIELDS = (
    "index", "prompt", "tokens", "response", "response_length", "reward", "loss_mask", "weight_versions",
    "rollout_log_probs", "status", "metadata", "to_dict", "from_dict", "Status",
)  # fmt: skip


class Framework:
    """Access to the package slime or miles, whose modules are imported when first used."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get(self, path: str) -> Any:
        """Return the object at ``path`` inside the framework's package. Raises ConfigError if it is not there."""
        module, _, attribute = f"{self.name}.{path}".rpartition(".")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{self.name} has no {path}, which april needs ({type(error).__name__}: {error}); the adapter was "
                f"tried with {TESTED_VERSIONS}"
            ) from error

    def check(self) -> None:
        """Raise ConfigError unless all needed functions exist and take the parameters that april passes."""
        for path, parameters in REQUIRED_FUNCTIONS.items():
            try:
                check_function(f"{self.name}.{path}", self.get(path), parameters)
            except ConfigError as error:
                raise ConfigError(f"{error}; the adapter was tried with {TESTED_VERSIONS}") from None

    def check_sample(self, sample: Any) -> None:
        """Raise ConfigError unless a sample of the data source has all fields that april reads or writes."""
        missing = [name for name in SAMPLE_FIELDS if not hasattr(sample, name)]
        if missing:
            raise ConfigError(
                f"a sample of the data source ({type(sample).__name__}) has no {', '.join(missing)}; the adapter was "
                f"tried with {TESTED_VERSIONS}"
            )

    def load_function(self, path: str) -> Any:
        """Load the function that a flag names, with the trainer's own loader. Raises ConfigError if that fails."""
        try:
            return self.get("utils.misc.load_function")(path)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"{self.name} cannot load {path}: {type(error).__name__}: {error}") from error

    async def on_its_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Await ``work`` on the trainer's own background event loop, to which the trainer's HTTP sessions belong."""
        loop = self.get("utils.async_utils.get_async_loop")().loop
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


def framework_of(data_source: Any) -> Framework:
    """Return slime or miles: the data source's own, else the imported, else the installed one. ConfigError if none."""
    homes = {base.__module__.partition(".")[0] for base in type(data_source).__mro__}
    loaded = [name for name in NAMES if f"{name}.rollout.base_types" in sys.modules]
    for name in NAMES:
        if name in homes or (loaded and name == loaded[0] and not homes & set(NAMES)):
            return Framework(name)
    for name in NAMES:
        # find_spec also finds a mere folder of that name in the current directory, which has no origin
        spec = importlib.util.find_spec(name)
        if spec is not None and (spec.origin or importlib.util.find_spec(f"{name}.rollout") is not None):
            return Framework(name)
    raise ConfigError(
        "april.adapters.slime is called by slime or miles (--rollout-function-path "
        "april.adapters.slime.generate_rollout), and neither is on PYTHONPATH; in a loop of your own use "
        "april.RolloutScheduler"
    )
