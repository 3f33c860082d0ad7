"""Findings about servers that cannot be probed, or are not what the configuration says, and what to do."""

from __future__ import annotations

from typing import Any

from april.config.engines import SglangEngineConfig
from april.doctor.findings import Finding, Level
from april.engines.kinds.identify import Identity, ServerKind
from april.engines.kinds.probe import SETTINGS

_NO_ENGINE = {
    ServerKind.OTHER: (
        "a web server answers here, but no inference server that april knows (no /v1/models, /model_info or /workers)",
        "is this the right port? the address must be the server's root, without /v1",
    ),
    ServerKind.STARTING: (
        "everything is answered with 502, 503 or 504",
        "wait until the server's log says that it is ready; if this is a proxy, the server behind it is down",
    ),
}
_RESUME = {
    ServerKind.VLLM: "wake it up or continue it: curl -X POST {url}/wake_up; curl -X POST {url}/resume",
    ServerKind.SGLANG: "wait for the log to say that it is ready, or continue it: "
    "curl -X POST {url}/continue_generation -H 'Content-Type: application/json' -d '{{}}'",
}


def missing(subject: str, sentence: str, advice: str) -> Finding:
    """A finding with which april cannot work."""
    return Finding(subject, Level.MISSING, sentence, advice)


def not_probed(url: str, identity: Identity, settings: Any, *, key_given: bool) -> Finding | None:
    """Why this server is not asked what it can do; None if it can be.

    ``settings`` is the ``engine`` section that names it, None if it was named by its address.
    """
    kind = identity.kind
    if kind is ServerKind.ROUTER:
        return _router_alone(url, identity)
    if identity.needs_key:
        return _key_refused(url, key_given)
    if kind in _NO_ENGINE:
        return missing("kind", *_NO_ENGINE[kind])
    return _other_kind(settings, kind)


def paused(url: str, kind: ServerKind, said: str) -> Finding:
    """The server is of a known kind, but by its own word answers no requests."""
    sentence = f"the server takes requests and answers none: it is paused, asleep or loading ({said})"
    return missing("paused", sentence, _RESUME[kind].format(url=url))


def at_rest(url: str, said: str) -> Finding:
    """The server answers that it takes no requests for now."""
    advice = (
        "wait until it does, and call april doctor again; a TensorRT-LLM that is paused goes on with "
        "resume_generation() of its AsyncLLM, and one that sleeps with /resume_memory"
    )
    return missing("busy", f"{url} takes no requests for now ({said})", advice)


def router_findings(identity: Identity, settings: SglangEngineConfig) -> list[Finding]:
    """Whether ``engine.router`` is a router, and knows the servers that ``engine.urls`` names, and no others."""
    if identity.kind is not ServerKind.ROUTER:
        return [missing("kind", f"engine.router is no sglang-router ({identity.kind.value})", "name it in engine.urls")]
    workers = [url.rstrip("/") for url in identity.workers]
    unknown = [url for url in workers if url not in settings.urls]
    idle = [url for url in settings.urls if url not in workers]
    if unknown:
        sentence = (
            f"the router sends requests to {', '.join(unknown)}, which engine.urls does not name: april could neither "
            "abort them nor give it weights"
        )
        return [missing("workers", sentence, "add it to engine.urls, as seen from here, or take it out of the router")]
    if idle:
        advice = "start the router with all of engine.urls as --worker-urls; just started, it needs some seconds"
        return [missing("workers", f"the router does not know {', '.join(idle)}", advice)]
    return [Finding("workers", Level.OK, f"the router's workers are those of engine.urls: {', '.join(workers)}")]


def router_settings(url: str, identity: Identity) -> str:
    """The ``engine`` section for a router and the workers that it names."""
    urls = ", ".join(worker.rstrip("/") for worker in identity.workers) or "http://WORKER:PORT"
    return f"engine: {{kind: sglang, router: {url}, urls: [{urls}]}}"


def _router_alone(url: str, identity: Identity) -> Finding:
    listed = ", ".join(identity.workers) or "none yet"
    sentence = (
        "this is an sglang-router: it passes requests on, but no aborts, pauses and weight updates, which go to its "
        f"workers: {listed}"
    )
    return missing("kind", sentence, "give april the workers' addresses too, as seen from here")


def _key_refused(url: str, key_given: bool) -> Finding:
    if key_given:
        return missing("key", f"{url} refuses the key", "give the one that the server was started with (--api-key)")
    advice = (
        "put it into an environment variable and name that: april doctor --api-key-env NAME, and in the configuration "
        "engine.api_key_env: NAME"
    )
    return missing("key", f"{url} wants a key (it answers 401 or 403)", advice)


def _other_kind(settings: Any, kind: ServerKind) -> Finding | None:
    """The configuration says another kind than the server is."""
    if settings is None or isinstance(settings, SETTINGS[kind]) or settings.kind == ServerKind.OPENAI.value:
        return None  # every kind speaks openai too
    sentence = f"engine.kind is {settings.kind}, and the server is {kind.value}"
    return missing("kind", sentence, f"write engine.kind: {kind.value}")
