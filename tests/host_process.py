"""A host as a process of its own, for tests: ``host_process.py NAME ADDRESS``, and its token in APRIL_TOKEN."""

from __future__ import annotations

import os
import sys
from typing import Any

import april
from april.testing import FakeEngine


def lengths(request: Any) -> int:
    """Of a response."""
    group, index = request.sample_key
    return int(5 + (7 * group + 11 * index) % 40)


async def reward(prompt: Any, response: Any) -> float:
    """Says who was asked."""
    return float(prompt.data["i"])


def main(name: str, address: str) -> None:
    """Lend an engine and a reward until the scheduler says goodbye."""
    engine = FakeEngine("f", lengths=lengths, chunk_tokens=1, seconds_per_token=0.002)
    with april.Host(name, engines=[engine], reward=reward, address=address, token=os.environ["APRIL_TOKEN"]) as host:
        print("joined", flush=True)
        print(host.wait(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
