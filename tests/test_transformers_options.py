"""The embedded engine when it is made: options, threads, imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

from april.engines.transformers.engine import TransformersEngine
from april.errors import ConfigError


@pytest.mark.parametrize("options", [{"slots": 0}, {"max_len": 0}, {"max_len": 8}, {"stream_interval": 0}])
def test_options_out_of_range_are_refused(options: dict[str, int]) -> None:
    """By name, at construction."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        TransformersEngine(tiny_model(), **options)


def test_threads_are_left_alone_unless_asked() -> None:
    """torch's thread count is the whole process's: it changes only on request."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        TransformersEngine(tiny_model())
        assert torch.get_num_threads() == 2
        TransformersEngine(tiny_model(), num_threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_importing_the_engine_imports_no_torch() -> None:
    """Neither torch nor transformers is loaded until an engine is made."""
    code = "import sys, april.engines.transformers.engine; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    root = str(Path(__file__).parents[1])
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)

    assert result.stdout.strip() == "[]"
