"""Stop strings that servers look for: april delivers the same tokens as where it alone looks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_servers.base import uncut
from fake_servers.sglang import FakeSglangServer
from fake_servers.vllm import FakeVllmServer
from real_schedulers import reward
from server_fixtures import ServerThread, saved, settings
from virtual_rollouts import Angles

import april
from april.core.types import DropReason, FinishReason

STOPS = ("7><1", "4><23")
"""Each begins in one token and ends in the next one, so that a weight update can cut it."""
BUDGET = 120


def other_text(ids: Sequence[int]) -> str:
    """Another tokenizer, which writes the last two digits: it finds strings where there are none, and misses others."""
    return "".join(f"<{i % 100}>" for i in ids)


def expected(prompt: Sequence[int], tokens: Sequence[int]) -> tuple[list[int], FinishReason]:
    """Return the part of ``tokens`` up to the first one that completes a stop string, and why it ends."""
    for count in range(1, len(tokens) + 1):
        if any(stop in Angles().decode(tokens[:count]) for stop in STOPS):
            return list(tokens[:count]), FinishReason.STOP
    return list(tokens), FinishReason.LENGTH if len(tokens) == BUDGET and tokens[-1] != 2 else FinishReason.STOP


TOKENIZERS: dict[str, Callable[[Sequence[int]], str] | None] = {
    "none": None, "same": Angles().decode, "other": other_text,
}  # fmt: skip
SERVERS: dict[str, Callable[..., Any]] = {
    "vllm": FakeVllmServer, "sglang": partial(FakeSglangServer, incremental=False),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "tokenizer", "updates"), [
    ("vllm", "none", True), ("vllm", "same", True), ("vllm", "same", False), ("vllm", "other", False),
    ("sglang", "same", True), ("sglang", "other", True),
])  # fmt: skip
def test_tokens_are_those_up_to_the_stop_string(tmp_path: Path, kind: str, tokenizer: str, updates: bool) -> None:
    """Whoever looks for them, with whatever tokenizer, and whatever cuts the responses."""
    decode = TOKENIZERS[tokenizer]
    server = SERVERS[kind](turns=2, mean_length=200, decode=decode)
    prompts = [[3 + i, 7, 9] for i in range(64)]
    stopped = cut = 0
    with ServerThread(server):
        config = april.Config(
            rollout_batch_size=4, n_samples_per_prompt=2, over_sampling_batch_size=8, max_response_len=BUDGET,
            sampling={"stop": STOPS}, abort_resend_s=0.05, engine=settings(kind, server, eos_token_ids=(2,)),
        )  # fmt: skip
        with april.RolloutScheduler(config, prompts=prompts, reward=reward, check=True, tokenizer=Angles()) as run:
            for step in range(1, 5):
                batch = run.next_batch()
                for sample in batch.samples:
                    tokens, before = list[int](), list(map(int, sample.prompt.token_ids))
                    for part in sample.segments:
                        made, _ = uncut(
                            before + tokens, weights=f"w{part.version.n}", max_tokens=BUDGET - part.start,
                            mean_length=200,
                        )  # fmt: skip
                        tokens += made if part is sample.segments[-1] else made[: part.count]
                    assert (sample.tokens.tolist(), sample.finish) == expected(before, tokens)
                    stopped += any(stop in Angles().decode(sample.tokens.tolist()) for stop in STOPS)
                    cut += len(sample.segments) > 1
                if updates:
                    run.weight_update(path=saved(tmp_path, f"w{step}"))
                else:
                    run.commit(batch.id)
            for prompt, group in zip(prompts, run.evaluate(prompts[:8]).responses, strict=False):
                made, _ = uncut(prompt, weights=f"w{4 if updates else 0}", max_tokens=BUDGET, mean_length=200)
                assert [(r.tokens.tolist(), r.finish) for r in group] == [expected(prompt, made)]
            tokens_of_run = run.ledger()["tokens"]
            assert (tokens_of_run.balanced, tokens_of_run.dropped[DropReason.CORRUPT]) == (True, 0)
    assert stopped > 8
    asked = [run for run in server.runs if run.params[run.MAX_TOKENS] > 1]
    whole = [run for run in asked if not run.stream]
    assert all(bool(run.params.get("stop")) is not run.stream for run in asked)
    assert bool(whole) is (decode is not None)
    # no request that continues a response is given stop strings: they may begin before its tokens
    assert all(run.stream for run in asked if len(run.prompt) > 3)
    assert cut or not updates
