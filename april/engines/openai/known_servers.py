"""What is known of OpenAI-compatible servers by their name, because asking would not show it.

A server says in its list of models who it is (``owned_by``). All else is asked; see ``probe.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from april.engine_limits import IT, Limit, LimitCode
from april.engines.openai.wire import TokenShape


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownServer:
    """How a kind of server differs from what its answers to single short requests show."""

    name: str
    """For people; empty: a server of no special kind."""
    shapes: tuple[TokenShape, ...] = tuple(TokenShape)
    """Ways of token ids to try, the likeliest first."""
    load_route: str = "/metrics"
    """Its Prometheus page."""
    load_route_always: bool = True
    """That page costs nothing where it is not there; if not, it is asked once, and again only if it was there."""
    adapter_name: str = "{adapter}"
    """How a request names an adapter; by another name the base of the adapter answers."""
    honours_seeds: bool = True
    """Of requests that run together; alone is asked."""
    limits: tuple[Limit, ...] = ()


ANY = KnownServer(name="")
TENSORRT_LLM = KnownServer(
    name="TensorRT-LLM",
    shapes=(TokenShape.DETOKENIZE,),
    # /metrics is no Prometheus page there: it waits 2 s for records of iterations, and takes them away from others
    load_route="/prometheus/metrics",
    load_route_always=False,
    honours_seeds=False,
    limits=(
        Limit(
            LimitCode.NO_SEEDS,
            "runs TensorRT-LLM, which honours the seed of a request only while it runs alone: runs cannot be repeated "
            "exactly. Start it without speculative decoding: there, samples of a group may come out equal",
            server=IT,
        ),
        Limit(
            LimitCode.LATE_STREAM_END,
            "looks once a second whether a client is gone: a request goes on for up to 1 s after april has closed its "
            "stream, also while the trainer begins to use a GPU that it shares with it",
            server=IT,
        ),
        Limit(
            LimitCode.EARLY_STOP,
            "holds back only its tokenizer's EOS before min_tokens: a response that ends earlier by another id is "
            "refused, and generated again",
            server=IT,
        ),
        Limit(
            LimitCode.NO_START_TIME,
            "does not say when its process began: one that is started anew with other weights is noticed only if its "
            "port was found closed meanwhile",
            server=IT,
        ),
    ),
)
SGLANG = KnownServer(name="SGLang", adapter_name="{base}:{adapter}")
_BY_OWNER = {"tensorrt_llm": TENSORRT_LLM, "sglang": SGLANG}


def known_server(owner: str | None) -> KnownServer:
    """By ``owned_by`` of its models; ANY for one that is not known."""
    return _BY_OWNER.get(owner or "", ANY)
