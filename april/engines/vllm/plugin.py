"""vLLM plugin: each vLLM process finds :func:`register` through the entry point group ``vllm.general_plugins``.

The plugin lets a server be started with ``--weight-transfer-config '{"backend": "april_gloo"}'``.
"""

from __future__ import annotations

from typing import Any

from april.engines.weight_transfer import GLOO, NCCL

BACKEND = "april_gloo"
"""Name of april's back-end in ``--weight-transfer-config``."""
BACKENDS = {BACKEND: GLOO, "nccl": NCCL}
"""Back-ends over which april can send weights, indexed by their names in ``--weight-transfer-config``."""


def register() -> None:
    """Register the back-end once, however often vLLM calls this. torch is imported when the back-end is first used."""
    import importlib

    factory: Any = importlib.import_module("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
    if BACKEND not in factory._registry:
        factory.register_engine(BACKEND, "april.engines.vllm.gloo_worker", "GlooWeightTransferEngine")
