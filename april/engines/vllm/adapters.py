"""The call that loads an adapter (LoRA) on a running vLLM server."""

from __future__ import annotations

from april.engines.http.http_client import HttpClient
from april.engines.http.loaded_adapters import LOAD_S, LoadedAdapter
from april.engines.http.server_probe import is_listed
from april.engines.http.wire import error_text
from april.errors import EngineBusy, EngineError

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
NEEDED = (
    "start the server with VLLM_SERVER_DEV_MODE=1, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-scale-out, "
    "--enable-lora and a --max-lora-rank of at least the adapter's rank"
)


async def load_adapter(client: HttpClient, adapter: LoadedAdapter) -> None:
    """Load an adapter and change nothing else. Raises EngineError unless the server confirms and lists the adapter."""
    body = {"lora_name": adapter.name, "lora_path": adapter.path}
    reply = await client.call("POST", LOAD, body, timeout_s=LOAD_S)
    text = f"{client.url} could not load the adapter in {adapter.path}"
    if reply.status in (429, 503):
        raise EngineBusy(f"{text}: it answered {reply.status}, {error_text(reply.body)}", reply.retry_after_s)
    if not reply.ok:
        raise EngineError(f"{text}: it answered {reply.status}, {error_text(reply.body)}; it keeps its old adapter")
    if await is_listed(client, adapter.name) is not True:
        raise EngineError(
            f"{text}: it answered {reply.status}, {error_text(reply.body)}, and does not list the adapter; it keeps "
            "its old one"
        )
