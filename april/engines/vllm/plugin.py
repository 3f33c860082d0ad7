"""april in vLLM's own processes: they find :func:`register` through the entry point group ``vllm.general_plugins``.

With it a server can be started with ``--weight-transfer-config '{"backend": "april_gloo"}'``.
"""

from __future__ import annotations

from typing import Any

from april.engines.weight_routes import GLOO, NCCL

BACKEND = "april_gloo"
"""The name of april's back-end for ``--weight-transfer-config``."""
BACKENDS = {BACKEND: GLOO, "nccl": NCCL}
"""The back-ends that april can send over, by the name that a server is started with."""


def register() -> None:
    """Make the back-end known, once, however often vLLM calls this; torch is imported only where it is used."""
    import importlib

    factory: Any = importlib.import_module("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
    if BACKEND not in factory._registry:
        factory.register_engine(BACKEND, "april.engines.vllm.gloo_worker", "GlooWeightTransferEngine")
