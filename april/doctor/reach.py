"""Explains why a server cannot be examined, with advice: it is unreachable, of another kind, paused, or a router."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from april.config.engines import SglangEngineConfig
from april.doctor.findings import Finding, Level
from april.engines.http.http_client import HttpClient
from april.engines.kinds.identify import SETTINGS, Identity, ServerKind, identify
from april.errors import EngineError, EngineUnreachable
from april.text.server_text import clean

_NO_ENGINE = {
    ServerKind.OTHER: (
        "a web server answers here, but not an inference server that april knows (no /v1/models, /model_info or "
        "/workers)",
        "is this the right port? the address must be the server's root, without /v1",
    ),
    ServerKind.STARTING: (
        "the server answers every request with 502, 503 or 504",
        "wait until the server's log says that it is ready; if this is a proxy, the server behind it is down",
    ),
}
_RESUME = {
    ServerKind.VLLM: "wake it up or continue it: curl -X POST {url}/wake_up; curl -X POST {url}/resume",
    ServerKind.SGLANG: "wait for the log to say that it is ready, or continue it: "
    "curl -X POST {url}/continue_generation -H 'Content-Type: application/json' -d '{{}}'",
}


def missing(subject: str, sentence: str, advice: str) -> Finding:
    """Return a finding of level MISSING: april cannot work with the server."""
    return Finding(subject, Level.MISSING, sentence, advice)


def not_probed(url: str, identity: Identity, settings: Any, *, key_given: bool) -> Finding | None:
    """Return a finding on why a server cannot be probed; None if it can be.

    ``settings`` is the ``engine`` section that names the server, or None if it was named by its address.
    """
    kind = identity.kind
    if kind is ServerKind.ROUTER:
        return _router_alone(url, identity)
    if identity.needs_key:
        return _key_refused(url, key_given)
    if kind in _NO_ENGINE:
        return missing("kind", *_NO_ENGINE[kind])
    return _other_kind(settings, kind)


def paused_finding(url: str, kind: ServerKind, said: str) -> Finding:
    """Return a finding for a server of a known kind that reports that it is paused or asleep."""
    sentence = f"the server accepts requests but answers none: it is paused, asleep or loading ({said})"
    return missing("paused", sentence, _RESUME[kind].format(url=url))


def resting_finding(url: str, said: str) -> Finding:
    """Return a finding for a server that rejects requests for now."""
    advice = (
        "wait until it does, and run april doctor again; resume a paused TensorRT-LLM with resume_generation() of its "
        "AsyncLLM, and a sleeping one with /resume_memory"
    )
    return missing("busy", f"{url} accepts no requests at the moment ({said})", advice)


def router_findings(identity: Identity, settings: SglangEngineConfig) -> list[Finding]:
    """Check that ``engine.router`` is a router and knows exactly the servers that ``engine.urls`` names."""
    if identity.kind is not ServerKind.ROUTER:
        return [missing("kind", (
            f"engine.router is not an sglang-router ({identity.kind.value})"
        ), "list it in engine.urls")]
    workers = [url.rstrip("/") for url in identity.workers]
    unknown = [url for url in workers if url not in settings.urls]
    idle = [url for url in settings.urls if url not in workers]
    if unknown:
        sentence = (
            f"the router sends requests to {', '.join(unknown)}, which engine.urls does not list: april could neither "
            "abort them nor update its weights"
        )
        return [missing("workers", sentence, "add it to engine.urls, as seen from here, or remove it from the router")]
    if idle:
        advice = (
            "start the router with all of engine.urls as --worker-urls; a router that was just started needs some "
            "seconds"
        )
        return [missing("workers", f"the router does not know {', '.join(idle)}", advice)]
    return [Finding("workers", Level.OK, f"the router's workers are those of engine.urls: {', '.join(workers)}")]


def router_settings(url: str, identity: Identity) -> str:
    """Return an ``engine`` section for a router and the workers that it lists."""
    urls = ", ".join(worker.rstrip("/") for worker in identity.workers) or "http://WORKER:PORT"
    return f"engine: {{kind: sglang, router: {url}, urls: [{urls}]}}"


def _router_alone(url: str, identity: Identity) -> Finding:
    listed = ", ".join(identity.workers) or "none yet"
    sentence = (
        "this is an sglang-router: it forwards requests, but no aborts, pauses and weight updates, which go to its "
        f"workers: {listed}"
    )
    return missing("kind", sentence, "give april the workers' addresses too, as seen from here")


def _key_refused(url: str, key_given: bool) -> Finding:
    if key_given:
        return missing("key", f"{url} refuses the key", "give the key with which the server was started (--api-key)")
    advice = (
        "put it into an environment variable and use its name: april doctor --api-key-env NAME, and in the "
        "configuration engine.api_key_env: NAME"
    )
    return missing("key", f"{url} requires a key (it answers 401 or 403)", advice)


def _other_kind(settings: Any, kind: ServerKind) -> Finding | None:
    """Return a finding if the configuration names a different kind of server, else None."""
    if settings is None or isinstance(settings, SETTINGS[kind]) or settings.kind == ServerKind.OPENAI.value:
        return None  # every kind also has the OpenAI routes
    sentence = f"engine.kind is {settings.kind}, but the server is {kind.value}"
    return missing("kind", sentence, f"write engine.kind: {kind.value}")


_REACH = "reach"
_HTTP_SUBJECT = "talk"


async def why_unreachable(url: str, timeout_s: float) -> Finding | None:
    """Resolve the host and open a connection, each within ``timeout_s``. Return a finding, or None if both work."""
    parts = urlsplit(url)
    host, port = str(parts.hostname), parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(timeout_s):
            await _addresses(host, port)
    except TimeoutError:
        return missing(_REACH, f"the name {host} was not resolved within {timeout_s:g} s", _CHECK_NAME)
    except OSError as error:
        return missing(_REACH, f"the name {host} does not resolve ({clean(error.strerror or error)})", _CHECK_NAME)
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return missing(
            _REACH, f"{host} does not answer on port {port} within {timeout_s:g} s",
            "check the address, firewalls between here and there, and whether the machine is up",
        )  # fmt: skip
    except ConnectionRefusedError:
        return missing(
            _REACH, f"nothing listens on port {port} of {host}",
            "start the server, or correct the port; vLLM opens its port only when the model is loaded, which takes "
            "minutes; other machines cannot reach a server that listens on 127.0.0.1 (start it with --host 0.0.0.0, in "
            "a private network)",
        )  # fmt: skip
    except OSError as error:
        why = clean(error.strerror or error)
        return missing(_REACH, f"no connection to port {port} of {host} ({why})", "check the address")
    await _close(writer)
    return None


_CHECK_NAME = "correct the name, or write the address as a number"


async def _addresses(host: str, port: int) -> None:
    """Raise OSError unless the name resolves.

    The lookup runs in a thread that can be abandoned after a timeout: a resolver may take half a minute.
    """
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()  # a timeout cannot cancel a running future, so the thread can always set it

    def look_up() -> None:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=look_up, name="april-doctor-lookup", daemon=True).start()
    await asyncio.wrap_future(done)


async def why_no_http(url: str, error: EngineError, timeout_s: float) -> Finding:
    """Return a finding on why an open port does not respond like an HTTP server; ``error`` was raised by a request."""
    parts = urlsplit(url)
    if not isinstance(error, EngineUnreachable):  # a redirect, or an endless response
        return missing(_HTTP_SUBJECT, str(error), "is this the server itself, or a proxy or web site before it?")
    if not error.why:
        return missing(
            _HTTP_SUBJECT, f"{url} accepts connections but does not answer within {timeout_s:g} s",
            "the server hangs or is overloaded: look at its log, restart it",
        )  # fmt: skip
    if error.distrusted:
        return missing(
            _HTTP_SUBJECT, f"the certificate of {url} is not trusted ({error.distrusted})",
            "set the environment variable SSL_CERT_FILE to the certificate of its authority",
        )  # fmt: skip
    other = await _other_scheme(url, timeout_s)
    if other is not None:
        sentence = f"the server speaks {other.upper()}, but the address says {parts.scheme}"
        return missing(_HTTP_SUBJECT, sentence, f"write {other}://{parts.netloc}")
    return missing(_HTTP_SUBJECT, f"{url} does not speak HTTP ({error.why})", "is this the right port?")


async def _other_scheme(url: str, timeout_s: float) -> str | None:
    """Return the scheme that the server really speaks, ``http`` or ``https``, if it is not the URL's; else None."""
    parts = urlsplit(url)
    other, default = ("http", 443) if parts.scheme == "https" else ("https", 80)
    address = f"{other}://{parts.netloc}" if parts.port else f"{other}://{parts.netloc}:{default}"
    client = HttpClient(address, name=parts.netloc, connect_timeout_s=timeout_s)
    try:
        await identify(client, timeout_s)
    except EngineUnreachable as error:
        return other if error.distrusted else None
    finally:
        await client.close()
    return other


async def _close(writer: asyncio.StreamWriter) -> None:
    """Close a connection without waiting for the other side to close it, which may never happen."""
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()
