"""Caps from measured memory: found when an engine is over-committed, given up when there is room."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

import april
from april.core.engine_table import FULL_MEMORY, AdmissionCap
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.engine import SimulatedEngine
from april.testing import rollouts, run_virtual


def test_preemptions_lower_the_cap_below_what_was_held() -> None:
    """The first report is the base line; growth means that requests were put back."""
    cap = AdmissionCap(None)
    assert not cap.report(100, 100, 0, 0.9, preemptions=40)
    assert cap.value is None
    assert cap.report(100, 80, 0, 0.9, preemptions=41)
    assert cap.value == 75
    assert not cap.report(90, 75, 0, 0.9, preemptions=41)


def test_it_goes_up_again_only_when_it_binds_and_there_is_room() -> None:
    """An eighth per report; back at the ceiling it is forgotten."""
    cap = AdmissionCap(90)
    cap.report(80, 64, 16, 0.99, 0)
    assert cap.value == 60
    cap.report(40, 40, 0, 0.2, 0)
    assert cap.value == 60  # it does not bind
    cap.report(60, 60, 0, 0.9, 0)
    assert cap.value == 60  # there is no room
    seen = []
    for _ in range(5):
        cap.report(cap.value or 0, 60, 0, 0.5, 0)
        seen.append(cap.value)
    assert seen == [67, 75, 84, 90, 90]
    assert cap.measured is None


def test_preemptions_are_not_set_against_what_is_left_at_the_end_of_a_step() -> None:
    """They happened while many ran; of the few that run now, and of an idle engine, they say nothing."""
    cap = AdmissionCap(None)
    cap.report(100, 100, 0, 0.9, preemptions=0)
    assert cap.report(2, 2, 0, 0.1, preemptions=7)
    assert cap.value == 94
    assert not cap.report(0, 0, 0, 0.0, preemptions=9)
    assert not cap.report(0, 40, 5, 0.99, preemptions=12)  # requests of others
    assert cap.value == 94


def test_a_burst_of_refusals_does_not_end_at_one() -> None:
    """An engine that refuses all of a hundred has not said how much it holds; the next burst may say more."""
    cap = AdmissionCap(None)
    for left in range(99, -1, -1):
        cap.refused(left, again=left < 99)
    assert cap.value == 25
    for left in range(24, -1, -1):
        cap.refused(left, again=left < 24)
    assert cap.value == 6


def test_a_cap_by_refusal_is_given_up_at_the_ceiling() -> None:
    """It recovers, however it came to be."""
    cap = AdmissionCap(10)
    cap.refused(8)
    for _ in range(8 + 9):
        cap.request_ended((cap.value or 0) - 1)
    assert (cap.value, cap.measured) == (10, None)


@given(st.lists(st.tuples(*[st.integers(0, 300)] * 3, st.floats(0, 1), st.integers(0, 50)), max_size=60))
def test_whatever_an_engine_says_it_is_never_starved(reports: list[tuple[int, int, int, float, int]]) -> None:
    """The cap is at least 1 and at most the ceiling; nothing lowers it while memory is free and none is put back."""
    cap = AdmissionCap(256)
    preempted = 0
    for in_flight, running, waiting, usage, more in reports:
        before, preempted = cap.value, preempted + more
        lowered = cap.report(in_flight, running, waiting, usage, preempted)
        assert 1 <= (cap.value or 1) <= 256
        if lowered and usage < FULL_MEMORY:
            assert more > 0
        if not lowered and before is not None:
            assert (cap.value or 256) >= before


# ---------------------------------------------------------------- a server whose memory is too small


MEMORY = DecodeCost(0.02, 1e-4, 1e-7, per_prefill_token_s=5e-4, kv_capacity_tokens=2_400)
"""Room for some 40 responses of the mean length at once; 128 may be in flight."""
STEPS = 4


@dataclass(frozen=True)
class Outcome:
    seconds: float
    preemptions: list[int]
    """Per step."""
    caps: list[float | None]
    """At the end of each step."""


def outcome(*, remote: bool) -> Outcome:
    """``remote``: april hears of the load, and may lower the cap."""

    async def program() -> Outcome:
        engine = SimulatedEngine(
            "simulated", MEMORY, lambda request: 30 + 4 * (request.sample_key or (0, 0))[0] % 90, max_running=128,
            admission_reserve=1, remote=remote,
        )  # fmt: skip
        config = april.Config(
            rollout_batch_size=32, over_sampling_batch_size=48, n_samples_per_prompt=4, max_response_len=2000,
            max_in_flight=128,
        )  # fmt: skip
        preemptions, caps = [0], []
        prompts = [[i % 900 + 1, i // 900 + 1] for i in range(1000)]
        run = rollouts(config, engines=[engine], prompts=prompts, reward=lambda p, r: 1.0)
        for _ in range(STEPS):
            batch = await run.next_batch()
            caps.append(batch.metrics.get("engine/simulated/cap"))
            preemptions.append(engine.decoder.counters().preemptions)
            await run.weight_update(transfer=lambda: None)
        seconds = asyncio.get_running_loop().time()
        await run.close()
        return Outcome(seconds, [b - a for a, b in pairwise(preemptions)], caps)

    return run_virtual(program())


def test_over_commitment_is_found_and_ended() -> None:
    """Fewer than a quarter of the preemptions are left, and the same work takes no longer than without a cap."""
    free, capped = outcome(remote=False), outcome(remote=True)
    assert free.caps == [128.0] * STEPS
    assert all(cap is not None and cap < 128 for cap in capped.caps)
    assert sum(capped.preemptions) < sum(free.preemptions) / 4
    assert capped.seconds < free.seconds
