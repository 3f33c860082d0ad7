"""april inside OpenRLHF: ``python -m april.adapters.openrlhf <OpenRLHF's flags> --april.config april.yaml``."""

from __future__ import annotations

from april.adapters.openrlhf.launch import main

__all__ = ["main"]
