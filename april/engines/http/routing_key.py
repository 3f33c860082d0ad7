"""Headers by which a router before several servers can send requests that share a prefix to the same server.

Servers ignore these headers, or show the key in their metrics. Fields of the request body would not do, because some
servers refuse unknown fields.
"""

from __future__ import annotations

import hashlib

from april.config.engines import RoutingKey
from april.engines.protocol import Request

HEADERS = (
    "X-SMG-Routing-Key",  # sglang-router and its successor smg
    "X-Session-ID",  # vllm-router; the routers of production-stack and llm-d if configured
    "X-Dynamo-Session-ID",  # Dynamo
)


def routing_headers(request: Request, by: RoutingKey) -> dict[str, str]:
    """Return the headers with the key of the request's sample or group; empty with ``off``, or without a sample.

    The key is a hash of the numbers of the group and the sample, so it holds nothing of the prompt, and a restarted run
    sends the same key.
    """
    if by == "off" or request.sample_key is None:
        return {}
    numbers = b"%d %d" % request.sample_key if by == "sample" else b"%d" % request.sample_key[0]
    key = hashlib.blake2b(numbers, digest_size=8).hexdigest()
    return dict.fromkeys(HEADERS, key)
