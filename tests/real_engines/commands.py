"""How the servers are started on a CPU; the flags are the same on a GPU, apart from those about the device."""

from __future__ import annotations

import json
import os
from pathlib import Path

import typer

from april.engines.vllm.plugin import BACKEND
from tests.real_engines.environments import HERE, SGLANG, VLLM, environment, packaged
from tests.real_engines.servers import Server, free_port

QUIET = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
"""No look-ups in the hub, no reports to anybody."""
VLLM_ON_CPU = QUIET | {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # the model runs in the engine's own process, on one of two cores: a worker of its own would be waited for in a loop
    # of sched_yield, beside which Linux 6.18 leaves the HTTP server without a core for seconds
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}
"""Whether it is served or in the trainer's process."""


def vllm_server(
    name: str, model: Path, out: Path, *, open_routes: bool, context: int, in_flight: int = 256, dtype: str = "float32"
) -> Server:
    """vLLM, with its log in ``out``; ``open_routes``: in developer mode, with the token-in token-out routes and april's
    back-end for weights. Else it is as a plain user has it.
    """
    where, port = environment(VLLM), free_port()
    command = [
        str(where / "bin" / "vllm"), "serve", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1",
        "--port", str(port), "--dtype", dtype, "--max-model-len", str(context), "--max-num-seqs", str(in_flight),
        "--enable-prefix-caching", "--enforce-eager",
        # a seeded request whose prefill is cut into chunks kills vLLM 0.32 on a CPU (its generators have no offset)
        "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(context, 16384)),
    ]  # fmt: skip
    if open_routes:
        command += ["--enable-scale-out", "--weight-transfer-config", json.dumps({"backend": BACKEND})]
    settings = VLLM_ON_CPU | {
        "VLLM_SERVER_DEV_MODE": "1" if open_routes else "0",
        "PYTHONPATH": str(packaged()) if open_routes else "",
        "PATH": f"{where / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    return Server(name, command, port, out / f"{name}.log", "/health", settings)


def sglang_server(
    name: str, model: Path, out: Path, *, context: int, in_flight: int = 256, room: int = 65536, dtype: str = "float32",
    experts: bool = False, images: bool = False,
) -> Server:  # fmt: skip
    """One SGLang worker, with key-value memory for ``room`` tokens; ``experts``: it returns those of tokens;
    ``images``: its model takes them.
    """
    where, port = environment(SGLANG), free_port()
    launch = [str(HERE / "sglang_on_cpu" / "launch_with_experts.py")] if experts else ["-m", "sglang.launch_server"]
    command = [
        str(where / "bin" / "python"), *launch, "--model-path", str(model), "--device", "cpu",
        "--attention-backend", "torch_native", "--dtype", dtype, "--host", "127.0.0.1", "--port", str(port),
        "--context-length", str(context), "--max-total-tokens", str(room), "--max-running-requests", str(in_flight),
        "--mem-fraction-static", "0.5", "--enable-metrics", "--incremental-streaming-output", "--random-seed", "1",
        # or it keeps one of two cores busy while it waits
        "--sleep-on-idle", *(["--enable-return-routed-experts"] if experts else []),
        *(["--mm-attention-backend", "sdpa"] if images else []),
    ]  # fmt: skip
    settings = QUIET | {"PYTHONPATH": str(HERE / "sglang_on_cpu"), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    return Server(name, command, port, out / f"{name}.log", "/ready", settings)


def server_of(kind: str, model: Path, out: Path, *, context: int, in_flight: int = 256) -> Server:
    """A server of this kind, with all routes open; raises typer.BadParameter for another word."""
    if kind == "vllm":
        return vllm_server(kind, model, out, open_routes=True, context=context, in_flight=in_flight)
    if kind == "sglang":
        room = max(65536, in_flight * context)
        return sglang_server(kind, model, out, context=context, in_flight=in_flight, room=room)
    raise typer.BadParameter(f"there are servers of kind vllm and sglang, not of kind {kind}")


def router_server(name: str, worker: Server, out: Path) -> Server:
    """sglang-router in front of one worker, which must be ready before."""
    port = free_port()
    command = [
        str(environment(SGLANG) / "bin" / "python"), "-m", "sglang_router.launch_router", "--host", "127.0.0.1",
        "--port", str(port), "--worker-urls", worker.url, "--policy", "round_robin",
        "--prometheus-port", str(free_port()),
    ]  # fmt: skip
    # it imports SGLang, and so torchvision
    settings = QUIET | {"PYTHONPATH": str(HERE / "sglang_on_cpu")}
    return Server(name, command, port, out / f"{name}.log", "/readiness", settings)
