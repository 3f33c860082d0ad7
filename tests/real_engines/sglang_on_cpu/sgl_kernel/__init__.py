"""Stand-in for SGLang's compiled kernels: every name can be imported, calling one raises NotImplementedError.

``sgl_kernel.scalar_type`` stays missing: SGLang has a fallback for it, which it takes on ImportError only. Of torch's
operators, which SGLang looks for one by one in order to choose a path, those alone are there that a module of Qwen-VL
takes by name as it is imported.
"""

import importlib.abc
import importlib.machinery
import sys
import types

import torch

__version__ = "0.4.10"
_MISSING = ("scalar_type",)


class _Kernel:
    """A name that may be imported and looked into, and not called."""

    def __init__(self, path):
        self.__name__ = path.rpartition(".")[2]
        self._path = path

    def __getattr__(self, name):
        return _name_in(self._path, name)

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self._path} is a compiled kernel, and there are none on this machine")


class _Module(types.ModuleType):
    def __getattr__(self, name):
        return _name_in(self.__name__, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes every submodule up."""

    def find_spec(self, name, path, target=None):
        parent, _, last = name.rpartition(".")
        if parent.split(".")[0] != __name__ or last in _MISSING:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        """There is nothing in it."""


def _name_in(path, name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Kernel(f"{path}.{name}")


def __getattr__(name):
    return _name_in(__name__, name)


sys.meta_path.append(_Finder())

operators = torch.library.Library("sgl_kernel", "FRAGMENT")
for operator in (
    "fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):  # fmt: skip
    operators.define(f"{operator}(Tensor x, Tensor y) -> Tensor")
