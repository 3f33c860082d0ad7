"""What responses that fail for good cost: trained per generated tokens, by what fails and by on_failed_sample.

The real driver on virtual time, N = 8, n = 8, N' = 2 N, until the prompts have ended: what was generated is trained or
dropped. 5 % of all responses, fresh ones too, fail every time that they are tried, whatever their length. What fails:

* function, early: the rollout function raises before its first call.
* request: the engine breaks off at the last token, every time; what came before is kept, so it is generated once.
* reward: the reward function raises, every time; the response is generated once.
* function, late: the rollout function raises when it has its response, which each try generates anew.

Rewards and baselines of all that is trained are compared with an account of their own. Run:
``python -m benchmarks.failing_samples``.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

import numpy as np

import april
from april.core.batch import DeliveredSample
from april.core.types import EngineFinish, OnFailedSample
from april.driver.llm import LLM
from april.driver.rewards import Response
from april.engines.protocol import Chunk, Request
from april.engines.simulated.response_lengths import LognormalLengths
from april.errors import DataExhausted, EngineError
from april.testing import FakeEngine, rollouts, run_virtual

KINDS = ("function, early", "request", "reward", "function, late")
SHARE, SAMPLES, CAP = 0.05, 8, 1000
Key = tuple[int, int]


def luck(key: Key, what: str) -> float:
    """In [0, 1), for each sample."""
    return int.from_bytes(hashlib.blake2b(repr((tuple(key), what)).encode(), digest_size=8).digest(), "big") / 2**64


def fails(key: Key) -> bool:
    """Whether this sample does, every time."""
    return luck(key, "fails") < SHARE


class BreakingEngine(FakeEngine):
    """Breaks off before the last token of the responses that fail."""

    def breaks(self, lengths: LognormalLengths) -> BreakingEngine:
        """This one, told how long responses are."""
        self._true = lengths
        return self

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        key = request.sample_key
        if key is None or not fails(key):
            async for chunk in super().generate(request):
                yield chunk
            return
        left = self._true.sample(*key) - 1 - request.response_offset
        if left > 0:
            shorter = replace(request, sampling=request.sampling.capped(min(left, request.sampling.max_tokens)))
            async for chunk in super().generate(shorter):
                at_the_end = chunk.finish is EngineFinish.LENGTH
                yield replace(chunk, finish=None) if at_the_end else chunk
                if chunk.finish is EngineFinish.ABORT:
                    return
        raise EngineError("the request broke off")


@dataclass(kw_only=True)
class Outcome:
    """What became of a run's tokens and samples."""

    trained: int
    generated: int
    samples: int
    groups_dropped: int

    @property
    def share(self) -> float:
        """Trained per generated tokens."""
        return self.trained / self.generated


class Account:
    """Rewards in the order in which samples finished, and what follows from it."""

    def __init__(self, quorum: int) -> None:
        self.quorum = quorum
        self.finished: dict[int, list[int]] = defaultdict(list)

    def check(self, sample: DeliveredSample) -> None:
        """The baseline is that of the first k - 1 others that finished; a sample that fails is never there."""
        group, index = sample.id
        assert not fails(sample.id)
        assert sample.reward == np.float32(luck(sample.id, "reward"))
        others = [i for i in self.finished[group] if i != index]
        k = len(sample.cohort)
        assert k == min(self.quorum, len(self.finished[group]))
        expected = [luck((group, i), "reward") for i in others[: k - 1]]
        assert np.allclose(sample.baseline_rewards, np.array(expected, np.float32))


async def run(kind: str, policy: OnFailedSample, *, quorum: float, tries: int, groups: int, seed: int) -> Outcome:
    """One run to the end of its prompts; ``tries``: max_attempt_failures."""
    lengths = LognormalLengths(60, 0.6, 0.5, cap=CAP, seed=seed)
    config = april.Config(
        rollout_batch_size=8, n_samples_per_prompt=SAMPLES, over_sampling_batch_size=16, max_response_len=CAP,
        on_failed_sample=policy, group_quorum=quorum, max_attempt_failures=tries, max_failed_groups=10**6,
    )  # fmt: skip
    account = Account(config.core_settings(has_reward=True, group_reward=False, run_id=0).quorum(SAMPLES))

    async def rollout(prompt: april.Prompt, llm: LLM) -> None:
        failing = fails(llm.sample_id)
        if failing and kind == "function, early":
            raise ConnectionError("the sandbox did not start")
        await llm.generate()
        if failing and kind == "function, late":
            raise ConnectionError("the sandbox was lost")

    async def reward(prompt: april.Prompt, response: Response) -> float:
        if fails(response.sample_id) and kind == "reward":
            raise ConnectionError("the judge was away")
        account.finished[response.sample_id.group].append(response.sample_id.index)
        return luck(response.sample_id, "reward")

    def length(request: Request) -> int:
        assert request.sample_key is not None
        return lengths.sample(*request.sample_key)

    names = [f"e{i}" for i in range(4)]
    engines = [
        BreakingEngine(n, lengths=length).breaks(lengths) if kind == "request" else FakeEngine(n, lengths=length)
        for n in names
    ]
    prompts = [[1 + i % 900, 1 + i // 900] for i in range(groups)]
    batches = []
    scheduler = rollouts(config, engines=engines, prompts=prompts, reward=reward, rollout=rollout, check=False)
    async with scheduler as running:
        while True:
            try:
                batches.append(await running.next_batch())
            except DataExhausted:
                break
            await running.weight_update()
        ledger = running.ledger()["tokens"]
    seen = [sample for batch in batches for sample in batch.samples]
    for sample in seen:
        account.check(sample)
    assert len({sample.id for sample in seen}) == len(seen)
    assert ledger.held == 0
    return Outcome(
        trained=ledger.delivered, generated=ledger.observed, samples=len(seen),
        groups_dropped=int(sum(batch.metrics["groups_dropped_failed"] for batch in batches)),
    )  # fmt: skip


def main() -> None:
    """Print one row per kind of failure and policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--groups", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quorum", type=float, default=1.0)
    parser.add_argument("--tries", type=int, default=3)
    given = parser.parse_args()
    logging.getLogger("april").setLevel(logging.CRITICAL)  # hundreds of failures, all on purpose
    chosen = {name: getattr(given, name) for name in ("quorum", "tries", "groups", "seed")}
    print("| what fails | on_failed_sample | trained / generated | responses per prompt | groups lost |")
    for kind in given.kinds:
        for policy in OnFailedSample:
            it = run_virtual(run(kind, policy, **chosen))
            per_prompt, lost = it.samples / given.groups, it.groups_dropped / given.groups
            print(f"| {kind} | {policy} | {it.share:.3f} | {per_prompt:.2f} | {lost:.0%} |", flush=True)


if __name__ == "__main__":
    main()
