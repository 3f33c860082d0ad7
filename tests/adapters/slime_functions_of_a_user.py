"""Functions that a user of slime names on its command line, for the tests of the adapter."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable
from itertools import count
from typing import Any

import aiohttp

from adapters.slime_stand_in import DynamicFilterOutput, Sample

KEPT_LENGTH = 30
running: dict[int, asyncio.Event] = {}
"""By index of the sample: set it to cut the call of :func:`generate`."""
seen: list[Any] = []
numbers = count()
at_reward: list[Callable[[], Any]] = []
"""Done once per reward."""


async def group_reward(args: Namespace, samples: list[Sample], **kwargs: Any) -> list[float]:
    """The place among the siblings."""
    lengths = sorted(s.response_length for s in samples)
    return [float(lengths.index(s.response_length)) for s in samples]


async def group_length(args: Namespace, samples: list[Sample], **kwargs: Any) -> list[float]:
    """The number of response tokens of each."""
    return [float(s.response_length) for s in samples]


async def two_rewards(args: Namespace, sample: Sample, **kwargs: Any) -> dict[str, float]:
    """Several numbers; --reward-key names one."""
    return {"length": float(sample.response_length), "other": 0.0}


async def busy_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Does what ``at_reward`` says in another thread, as something beside the rollout would."""
    for what in at_reward:
        await asyncio.to_thread(what)
    return float(sample.response_length)


async def agent(prompt: Any, llm: Any) -> dict[str, Any]:
    """A rollout function of april: for every second prompt two conversations, the second one with a tool's answer."""
    assert prompt.data["prompt"] == f"p{prompt.data['label']}"
    first = await llm.generate(prompt.token_ids.tolist(), any_conversation=True, max_tokens=12)
    if int(prompt.data["label"]) % 2:
        own = [5, *first.tokens.tolist()[:2]]
        second = await llm.generate(own, any_conversation=True, max_tokens=6)
        await llm.generate([*second.conversation.tolist(), 9, 9], any_conversation=True, max_tokens=6)
    return {"label": prompt.data["label"]}


def plain_agent(prompt: Any, llm: Any) -> None:
    """The same conversation as ever."""
    llm.generate()


async def reward_of_agents(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """By the number of the sample; notes who was asked about."""
    assert sample.metadata["output"] == {"label": sample.label}
    seen.append(sample.index)
    return float(sample.index or 0)


async def fails_for_one(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Never works for the second sample of every third group; the length of all others."""
    n = args.n_samples_per_prompt
    if sample.index is not None and sample.index % n == 1 and sample.index // n % 3 == 0:
        raise ValueError("the judge cannot read this")
    return float(sample.response_length)


def keep_short(args: Namespace, group: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """A reason with every verdict."""
    return DynamicFilterOutput(group[0].response_length < KEPT_LENGTH, reason="long")


def keep_none(args: Namespace, group: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Rejects all, unless there would be too few."""
    return DynamicFilterOutput(False, reason="none", keep_when_insufficient=True)


def mark(args: Namespace, sample: Sample) -> None:
    sample.metadata["marked"] = sample.response_length


def trim(args: Namespace, sample: Sample) -> None:
    """Removes the last token of a response."""
    sample.tokens, sample.response_length = sample.tokens[:-1], sample.response_length - 1
    sample.rollout_log_probs = (sample.rollout_log_probs or [])[:-1]
    sample.loss_mask = None if sample.loss_mask is None else sample.loss_mask[:-1]


def drop_first(args: Namespace, sample: Sample) -> None:
    """Removes the first token of a response."""
    at = len(sample.tokens) - sample.response_length
    sample.tokens, sample.response_length = sample.tokens[:at] + sample.tokens[at + 1 :], sample.response_length - 1
    sample.rollout_log_probs, sample.loss_mask = (sample.rollout_log_probs or [])[1:], (sample.loss_mask or [])[1:]


async def fails_once(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """The length of a response; fails the first time that it is asked about an even sample."""
    if sample.index is not None and sample.index % 2 == 0 and sample.index not in seen:
        seen.append(sample.index)
        raise ConnectionError("the judge is away")
    return float(sample.response_length)


async def group_fails_once(args: Namespace, samples: list[Sample], **kwargs: Any) -> list[float]:
    """The same of a group."""
    return [await fails_once(args, sample) for sample in samples]


def all_samples(args: Namespace, groups: list[list[Sample]], data_source: Any) -> None:
    """Sees rejected groups too."""
    seen.append([g[0].group_index for g in groups])


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """A token per turn of the loop, up to 5 + 3 * index of them; cut by its event, and continued from its sample."""
    event = running.setdefault(sample.index or 0, asyncio.Event())
    goal = 5 + 3 * (sample.index or 0) % 40
    sample.tokens = sample.tokens or [1, 2]
    sample.rollout_log_probs = sample.rollout_log_probs or []
    sample.status = sample.Status.COMPLETED
    while sample.response_length < goal:
        if event.is_set():
            sample.status = sample.Status.ABORTED
            break
        sample.tokens.append(10 + sample.response_length)
        sample.rollout_log_probs.append(-0.25)
        sample.response_length += 1
        await asyncio.sleep(0)
    running.pop(sample.index or 0, None)
    return sample


async def over_http(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One request to the router, of what is left; as slime's own function."""
    ids = sample.tokens or [3 + (sample.index or 0) % 400, 7]
    params = {"max_new_tokens": sampling_params["max_new_tokens"] - sample.response_length, "temperature": 1.0}
    body = {"rid": f"mine-{next(numbers)}", "input_ids": ids, "sampling_params": params, "return_logprob": True}
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as reply:
        meta = (await reply.json())["meta_info"]
    sample.tokens = ids + [token for _, token, *_ in meta["output_token_logprobs"]]
    said = [logprob for logprob, *_ in meta["output_token_logprobs"]]
    sample.rollout_log_probs = (sample.rollout_log_probs or []) + said
    sample.response_length += len(said)
    ends = {"stop": sample.Status.COMPLETED, "length": sample.Status.TRUNCATED, "abort": sample.Status.ABORTED}
    sample.status = ends[meta["finish_reason"]["type"]]
    return sample


async def several(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """One sample becomes two."""
    return [sample, sample]


async def one_argument(input: Any) -> Any:
    """Not what slime calls."""
