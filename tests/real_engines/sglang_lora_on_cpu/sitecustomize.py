"""Lets SGLang load adapters (LoRA) on a CPU build of torch, which has no pinned memory; Python runs it by itself.

Invariant: nothing but where tensors lie is changed.
"""

import importlib.abc
import runpy
import sys
from pathlib import Path

MAKE = ("tensor", "empty", "zeros", "ones", "arange", "full", "zeros_like", "ones_like", "empty_like")
_done = []

# that of the servers without adapters, which this one stands before
runpy.run_path(str(Path(__file__).parent.parent / "sglang_on_cpu" / "sitecustomize.py"))


def _unpinned(make):
    def made(*args, pin_memory=False, **kwargs):
        return make(*args, **kwargs)

    return made


class _BeforeAdapters(importlib.abc.MetaPathFinder):
    """Finds nothing; replaces pinned memory by ordinary memory when somebody first looks for SGLang's adapters."""

    def find_spec(self, name, path, target=None):
        if name.startswith("sglang.srt.lora") and not _done:
            import torch

            _done.append(name)
            for make in MAKE:
                setattr(torch, make, _unpinned(getattr(torch, make)))
            torch.Tensor.pin_memory = lambda self, *args, **kwargs: self


sys.meta_path.insert(0, _BeforeAdapters())
