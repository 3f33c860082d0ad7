"""vLLM plugin: each vLLM process finds :func:`register` through the entry point group ``vllm.general_plugins``.

It lets a server be started with ``--weight-transfer-config '{"backend": "april_gloo"}'``.
"""

from __future__ import annotations

from typing import Any

from april.engines.weight_transfer import GLOO, NCCL

BACKEND = "april_gloo"
"""Name of april's backend in ``--weight-transfer-config``."""
BACKENDS = {BACKEND: GLOO, "nccl": NCCL}
"""Backends that april can send weights over, indexed by their name in ``--weight-transfer-config``."""


def register() -> None:
    """Register the backend once, however often vLLM calls this. torch is imported only when the backend is used."""
    import importlib

    factory: Any = importlib.import_module("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
    if BACKEND not in factory._registry:
        factory.register_engine(BACKEND, "april.engines.vllm.gloo_worker", "GlooWeightTransferEngine")
