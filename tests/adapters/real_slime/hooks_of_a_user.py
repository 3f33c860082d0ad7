"""What a user of slime names on its command line; for the checks on the real one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

judged = 0


async def group_reward(args: Any, samples: list[Any], **kwargs: Any) -> list[float]:
    """All alike in every third group."""
    same = samples[0].group_index % 3 == 0
    return [1.0 if same else float(sample.index % 2) for sample in samples]


async def fails_for_one(args: Any, sample: Any, **kwargs: Any) -> float:
    """Never works for the second sample of every eighth group."""
    if sample.index % 4 == 1 and sample.index // 4 % 8 == 0:
        raise ValueError("the judge cannot read this")
    return float(sample.index % 2)


async def agent(prompt: Any, llm: Any) -> None:
    """A rollout function of april: one to three conversations."""
    first = await llm.generate(prompt.token_ids.tolist(), any_conversation=True)
    for number in range(prompt.data["index"] % 3):
        await llm.generate([5 + number, *first.tokens.tolist()[:4]], any_conversation=True, max_tokens=60)


def mark(args: Any, sample: Any) -> None:
    """A sample hook."""
    sample.metadata["marked"] = True


def last_is_removed(args: Any, groups: list[list[Any]]) -> None:
    groups[-1][-1].remove_sample = True


def see(args: Any, groups: list[list[Any]], data_source: Any) -> None:
    """Is shown rejected groups too."""
    global judged
    judged += len(groups)


async def asks_the_server(args: Any, sample: Any, **kwargs: Any) -> float:
    """A judge behind slime's own HTTP client."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/figures"
    said = await import_module("slime.utils.http_utils").get(url)
    return float(said["requests"])
