"""Lets the CUDA build of torchvision be imported next to a CPU build of torch; Python runs this file by itself.

Invariant: torch is imported only when torchvision is, so that processes without either start as fast as before.
"""

import importlib.abc
import sys

OPERATORS = ("nms", "qnms")
_declared = []  # the schemas live as long as the library object


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; declares torchvision's operators when somebody first looks for it."""

    def find_spec(self, name, path, target=None):
        if name == "torchvision" and not _declared:
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in OPERATORS:
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _declared.append(library)


sys.meta_path.insert(0, _BeforeTorchvision())
