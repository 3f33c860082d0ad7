"""Rollouts that somebody elsewhere carries on: prompts without tokens, calls with all that they have, failures told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from virtual_rollouts import on_virtual_time

import april
from april.driver.user_code import RemoteFunctionError
from april.errors import RolloutError
from april.testing import FakeEngine, rollouts

pytestmark = on_virtual_time
CONFIG = april.Config(rollout_batch_size=1, over_sampling_batch_size=2, n_samples_per_prompt=2, max_response_len=30)


class Later:
    """Prompts by name, whose owner says where they stand."""

    resumes = True

    def __init__(self) -> None:
        self.expected: list[int] = []
        self.drawn = 0

    def expect(self, count: int) -> None:
        self.expected.append(count)

    def __iter__(self) -> Later:
        return self

    def __next__(self) -> dict[str, Any]:
        self.drawn += 1
        return {"row": self.drawn}


async def brings_tokens(prompt: april.Prompt, llm: Any) -> int:
    """What a caller elsewhere asks."""
    assert len(prompt.token_ids) == 0
    done = await llm.forward([50, prompt.data["row"]], {"max_tokens": 9, "temperature": 1.0})
    assert (done.conversation[:2].tolist(), done.resumes) == ([50, prompt.data["row"]], 0)
    return int(prompt.data["row"])


async def test_the_tokens_of_a_prompt_come_with_the_first_call() -> None:
    """The source is told how many are drawn."""
    prompts = Later()
    async with rollouts(CONFIG, engines=[FakeEngine(lengths=5)], prompts=prompts, rollout=brings_tokens) as run:
        batch = await run.next_batch()
        for sample in batch.samples:
            assert sample.prompt.token_ids.tolist() == [50, sample.prompt.data["row"]]
            assert sample.loss_mask.tolist() == [1] * 5
        assert sum(prompts.expected) == prompts.drawn == 2
        rows = {s.prompt.data["row"] for s in batch.samples}
        state = run.state_dict()
    async with rollouts(CONFIG, engines=[FakeEngine(lengths=5)], prompts=Later(), rollout=brings_tokens) as run:
        await run.load_state_dict(state)
        assert {s.prompt.data["row"] for s in (await run.next_batch()).samples} == rows


async def test_what_has_failed_elsewhere_is_told_in_its_own_words(caplog: pytest.LogCaptureFixture) -> None:
    """With the kind that was found there: a mistake that no other try mends ends the step at once."""

    calls = 0

    async def fails(prompt: april.Prompt, llm: Any) -> None:
        nonlocal calls
        calls += 1
        raise RemoteFunctionError("NameError: x (line 7 of loop.py)", "NameError, line 7 of loop.py")

    with pytest.raises(RolloutError, match=r"the rollout function failed: NameError: x \(line 7 of loop.py\)"):
        async with rollouts(CONFIG, engines=[FakeEngine()], prompts=Later(), rollout=fails) as run:
            await run.next_batch()
    assert "Traceback" not in caplog.text
    assert calls < 12


async def test_extras_come_with_a_call() -> None:
    """A row for each token of the conversation but its last."""

    async def looks(prompt: april.Prompt, llm: Any) -> None:
        done = await llm.forward([50, 51], {"max_tokens": 9})
        assert done.extras["routed_experts"].shape[0] == 2 + len(done.tokens) - 1
        more = await llm.forward([*done.conversation, 7], {"max_tokens": 9})
        assert np.array_equal(more.extras["routed_experts"][: 1 + len(done.tokens)], done.extras["routed_experts"])

    config = CONFIG.model_copy(update={"extras": ("routed_experts",)})
    engine = FakeEngine(lengths=5, extras=("routed_experts",))
    async with rollouts(config, engines=[engine], prompts=Later(), rollout=looks) as run:
        await run.next_batch()
