"""Explains why a server cannot be examined, with advice: it is unreachable, of another kind, paused, or a router."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from april.doctor.findings import Finding, Level
from april.engines.kinds.identify import SETTINGS, Identity, ServerKind
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
    if settings is None or isinstance(settings, SETTINGS[kind]) or settings.kind == ServerKind.OPENAI.value:
        return None  # every kind also has the OpenAI routes
    sentence = f"engine.kind is {settings.kind}, but the server is {kind.value}"
    return missing("kind", sentence, f"write engine.kind: {kind.value}")


_REACH = "reach"


async def why_unreachable(url: str, timeout_s: float) -> Finding | None:
    """Open a connection within ``timeout_s``. Return a finding on why that fails, or None if it works."""
    parts = urlsplit(url)
    host, port = str(parts.hostname), parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return missing(
            _REACH, f"{host} does not answer on port {port} within {timeout_s:g} s",
            "check the address, firewalls between here and there, and whether the machine is up",
        )  # fmt: skip
    except socket.gaierror as error:
        sentence = f"the name {host} does not resolve ({clean(error.strerror or error)})"
        return missing(_REACH, sentence, "correct the name, or write the address as a number")
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
    writer.transport.abort()  # a close would wait for the other side, which may never close
    with suppress(OSError):
        await writer.wait_closed()
    return None


def why_no_http(url: str, error: EngineError, timeout_s: float) -> Finding:
    """Return a finding on why an open port does not respond like an HTTP server; ``error`` was raised by a request."""
    if not isinstance(error, EngineUnreachable):  # a redirect, or an endless response
        return missing("talk", str(error), "is this the server itself, or a proxy or web site before it?")
    if not error.why:
        return missing(
            "talk", f"{url} accepts connections but does not answer within {timeout_s:g} s",
            "the server hangs or is overloaded: look at its log, restart it",
        )  # fmt: skip
    tls = (
        "if the server does not use TLS, the address must begin with http; if its certificate is not trusted, set "
        "SSL_CERT_FILE to the certificate of its authority"
    ) if urlsplit(url).scheme == "https" else "if the server uses TLS, the address must begin with https"
    return missing("talk", f"{url} does not speak HTTP ({error.why})", f"is this the right port? {tls}")
