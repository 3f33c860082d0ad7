"""Restarts under other settings, before other engines, over other prompts: what was promised is kept, or refused."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from saved_rollouts import resealed
from virtual_rollouts import on_virtual_time

import april
from april.driver.prompt_source import PromptSource
from april.errors import CheckpointError, DataExhausted
from april.testing import FakeEngine, rollouts
from april.testing.same_loop import Rollouts

PROMPTS = [{"token_ids": [3, 4 + i], "n": i} for i in range(60)]
BASE = {"rollout_batch_size": 6, "n_samples_per_prompt": 2, "over_sampling_batch_size": 30, "max_response_len": 300}


def length_of(request: Any) -> int:
    """Heavy-tailed, the same for a sample in every life."""
    seed = request.sample_key[0] * 64 + request.sample_key[1]
    return max(1, min(300, int(random.Random(seed).lognormvariate(3, 1))))


def started(engine: dict[str, Any] | None = None, prompts: Any = PROMPTS, **changes: Any) -> Any:
    """A run on virtual time before one fake engine."""
    functions: dict[str, Any] = {"reward": lambda prompt, response: 1.0}
    functions |= {name: changes.pop(name) for name in ("reward", "rollout") if name in changes}
    config = april.Config(**{**BASE, "engine": {"kind": "simulated"}, **changes})
    made = FakeEngine("e", lengths=length_of, **(engine or {}))
    return rollouts(config, engines=[made], prompts=prompts, **functions)


async def saved(steps: int = 3, **how: Any) -> tuple[Any, Counter[int]]:
    """A state after some steps, and the prompts that were trained on."""
    seen: Counter[int] = Counter()
    async with started(**how) as run:
        for _ in range(steps):
            seen.update({s.prompt.position for s in (await run.next_batch()).samples})
            await run.weight_update()
        return run.state_dict(), seen


async def to_the_end(run: Rollouts, seen: Counter[int]) -> list[april.Batch]:
    batches = []
    while True:
        try:
            batches.append(await run.next_batch())
        except DataExhausted:
            return batches
        seen.update({s.prompt.position for s in batches[-1].samples})
        await run.weight_update()


# ---------------------------------------------------------------- settings

MAY_CHANGE: list[dict[str, Any]] = [
    {},
    {"rollout_batch_size": 5},
    {"rollout_batch_size": 60, "over_sampling_batch_size": 60},
    {"max_staleness": 9},
    {"over_sampling_batch_size": 6},
    {"refill": "sample", "max_in_flight": 3, "over_sampling_batch_size": 6},
    {"partial_rollout": False, "over_sampling_batch_size": 6},
    {"partial_rollout": False, "over_sampling_batch_size": 9, "max_staleness": 0},
    {"max_response_len": 400},
    {"on_data_end": "wait"},
    {"on_stale": "restart", "max_staleness": 0},
    {"max_held_tokens": 10, "max_resumes": 1, "max_attempt_failures": 1},
    {"max_sample_tokens": 400, "max_chains": 2},
]


@pytest.mark.parametrize("changes", MAY_CHANGE, ids=str)
@on_virtual_time
async def test_settings_that_may_change(changes: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """They hold from the first step on; nothing is masked, nothing is too old, each prompt is trained on once."""
    state, seen = await saved()
    with caplog.at_level(logging.INFO, "april"):
        async with started(**changes) as run:
            await run.load_state_dict(state)
            batches = await to_the_end(run, seen)
    assert seen == dict.fromkeys(range(60), 1)
    assert sum(b.metrics["masked_tokens"] for b in batches) == 0
    assert max(b.metrics["staleness_max"] for b in batches) <= changes.get("max_staleness", 5)
    told = [r.getMessage() for r in caplog.records if "continues from the state under other settings" in r.getMessage()]
    assert bool(told) is bool(changes)
    for name in changes.keys() - {"partial_rollout"}:
        assert f"{name} was " in told[0]


MUST_NOT: list[tuple[dict[str, Any], str]] = [
    ({"n_samples_per_prompt": 3}, "saved with n_samples_per_prompt=2, but the configuration has 3"),
    ({"seed": 4}, "saved with seed=0, but the configuration has 4"),
    ({"max_response_len": 20},
     r"the state holds \d+ tokens of g\d+.s\d, but the configuration has max_response_len=20"),
    (
        {"rollout_batch_size": 2, "over_sampling_batch_size": 2},
        r"\d+ of the 24 groups of the state could not be delivered in time with rollout_batch_size=2, max_staleness=5 "
        r".*saved with rollout_batch_size=6\); set these as they were, or on_stale",
    ),
    (
        {"max_staleness": 0, "over_sampling_batch_size": 6},
        r"could not be delivered in time with .*max_staleness=0 .*saved with max_staleness=5",
    ),
    (
        {"sampling": {"temperature": 0.5}},
        r"holds \d+ tokens that were sampled with temperature=1.0, but the configuration has 0.5; set "
        r"sampling.temperature",
    ),
    ({"sampling": {"top_p": 0.5}, "allow_mismatch": True}, ""),
    ({"sampling": {"stop_token_ids": [9]}, "allow_mismatch": True}, r"with stop_token_ids=\[\], but the configuration"),
    ({"reward": None}, r"saved with a reward function and holds \d+ finished samples; this scheduler has none"),
]


@pytest.mark.parametrize(("changes", "words"), MUST_NOT, ids=str)
@on_virtual_time
async def test_settings_that_must_not_change(changes: dict[str, Any], words: str) -> None:
    """One sentence names what was and what is; nothing has changed, and the state can be loaded under the old ones."""
    state, seen = await saved()
    async with started(**changes) as run:
        if not words:
            await run.load_state_dict(state)
            return
        with pytest.raises(CheckpointError, match=words):
            await run.load_state_dict(state)
        assert run.version == (0, 0)
    async with started() as run:
        await run.load_state_dict(state)
        await to_the_end(run, seen)
    assert seen == dict.fromkeys(range(60), 1)


@pytest.mark.parametrize("before", ["mask", "finish"])
@on_virtual_time
async def test_what_was_late_before_the_restart(before: str) -> None:
    """A trainer that updates twice per batch has too old groups, and may go on as it did; mask promised nothing of
    them, so finish takes no such state over."""
    how = {"max_staleness": 1, "over_sampling_batch_size": 12}
    async with started(**how, on_stale=before) as run:
        for _ in range(3):
            await run.next_batch()
            for _ in range(3):
                await run.weight_update()
        state = run.state_dict()
    async with started(**how) as run:
        if before == "mask":
            with pytest.raises(CheckpointError, match=r"in time with .*, as on_stale: finish requires .*=mask\)"):
                await run.load_state_dict(state)
        else:
            await run.load_state_dict(state)
            await run.next_batch()


# ---------------------------------------------------------------- engines


@pytest.mark.parametrize("context", [130, 400])
@on_virtual_time
async def test_engines_with_a_smaller_context(context: int) -> None:
    """What has no room is refused at the load; what fits goes on."""
    prompts = [{"token_ids": [3] * (120 if 20 <= i < 24 else 20) + [4 + i], "n": i} for i in range(60)]
    how = {"prompts": prompts, "max_response_len": 100}
    state, seen = await saved(engine={"max_context": 600}, **how)
    before = state["core"]["tokens"]
    async with started(engine={"max_context": context}, **how) as run:
        if context == 130:
            with pytest.raises(CheckpointError, match=r"\d+ unfinished groups .* context of 130 tokens, which"):
                await run.load_state_dict(state)
            return
        await run.load_state_dict(state)
        assert run.ledger()["tokens"].observed == before["observed"]
        await to_the_end(run, seen)
    assert seen == dict.fromkeys(range(60), 1)


# ---------------------------------------------------------------- prompts


def loader(prompts: list[Any], broken: bool = False) -> Callable[[], Iterator[Any]]:
    def give() -> Iterator[Any]:
        for number, prompt in enumerate(prompts):
            if broken and number == 5:
                raise OSError("shard list is gone")
            yield prompt

    return give


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (PROMPTS[::-1], r"the first \d+ prompts of epoch 0 differ from those drawn .*in another order"),
        ([*PROMPTS[1:2], *PROMPTS[:1], *PROMPTS[2:]], "differ from those drawn"),
        ([{"token_ids": [9, 9]}, *PROMPTS[1:]], "differ from those drawn"),
        (PROMPTS[:7], r"the prompts ended after 7 of epoch 0, where \d+ had been drawn before"),
        ([*PROMPTS[:4], "text", *PROMPTS[5:]], r"differ from those .* \(prompt 4 is of type str"),
        (None, "the source failed at prompt 5: OSError: shard list is gone"),
    ],
    ids=["reversed", "two exchanged", "another one", "fewer", "an unusable one", "one that fails"],
)
@on_virtual_time
async def test_other_prompts(prompts: list[Any] | None, words: str, once: bool) -> None:
    """Refused at the load; a generator that was looked through for it still gives all its prompts afterwards."""
    state, _ = await saved()
    given = PROMPTS if prompts is None else prompts
    source = loader(given, broken=prompts is None)() if once else _Again(loader(given, broken=prompts is None))
    async with started(prompts=source, over_sampling_batch_size=6) as run:
        with pytest.raises(CheckpointError, match=words):
            await run.load_state_dict(state)
        if prompts is not None and "text" not in prompts:
            batch = await run.next_batch()
            assert {s.prompt.position for s in batch.samples} == set(range(6))
            assert {tuple(s.prompt.token_ids.tolist()) for s in batch.samples} == {
                tuple(p["token_ids"]) for p in given[:6]
            }


class _Again:
    """Iterated anew each time."""

    def __init__(self, give: Callable[[], Iterator[Any]]) -> None:
        self.give = give

    def __iter__(self) -> Iterator[Any]:
        return self.give()


@on_virtual_time
async def test_more_prompts_at_the_end_are_no_others() -> None:
    """A data set that has grown goes on; what was drawn is the same."""
    state, seen = await saved()
    async with started(prompts=[*PROMPTS, {"token_ids": [7, 7]}]) as run:
        await run.load_state_dict(state)
        await to_the_end(run, seen)
    assert seen == dict.fromkeys(range(61), 1)


@on_virtual_time
async def test_a_state_whose_prompts_were_not_drawn_is_damaged() -> None:
    """Its groups and the place where its prompts stand belong together."""
    state, _ = await saved()
    source = PromptSource(PROMPTS, 1000)
    source.draw(6)
    changed = resealed({**state, "prompts": source.state_dict()})
    async with started() as run:
        with pytest.raises(CheckpointError, match="that was not drawn before prompt 6 of epoch 0"):
            await run.load_state_dict(changed)


# ---------------------------------------------------------------- what is written into


@on_virtual_time
async def test_what_a_trainer_or_a_function_writes_into_is_its_own() -> None:
    """In-place work on a batch, a prompt or a response reaches neither the state nor what is delivered again."""

    async def rollout(prompt: april.Prompt, llm: Any) -> None:
        prompt.token_ids[:] = 7
        done = await llm.generate()
        done.tokens[:] = 7
        done.conversation[:] = 7

    async with started(over_sampling_batch_size=6, rollout=rollout) as run:
        batch = await run.next_batch()
        kept = [(s.tokens.tolist(), s.logprobs.tolist(), s.prompt.token_ids.tolist()) for s in batch.samples]
        for sample in batch.samples:
            sample.tokens[:], sample.logprobs[:], sample.prompt.token_ids[:] = 7, 7.0, 7
        state = run.state_dict(trained_through=-1)
    assert not any(tokens == [7] * len(tokens) for tokens, _, _ in kept)
    async with started(over_sampling_batch_size=6) as run:
        await run.load_state_dict(state)
        again = await run.next_batch()
    assert [(s.tokens.tolist(), s.logprobs.tolist(), s.prompt.token_ids.tolist()) for s in again.samples] == kept
