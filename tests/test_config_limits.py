"""Settings at their limits: refused in one sentence, or taken; never an OverflowError later on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from real_schedulers import scheduler

import april
from april.config.flags import settings_of
from april.config.values import LONGEST_S, MOST
from april.errors import ConfigError

SMALL: dict[str, Any] = {"rollout_batch_size": 2, "max_response_len": 50, "engine": {"kind": "simulated"}}
LARGEST_SEED = 2**63 - 1


def counts_and_waits() -> list[tuple[str, str]]:
    """Each whole number and each number of seconds, those of the engines left out: (path, kind)."""
    found = []
    for setting in settings_of():
        name, kind = setting.path.rpartition(".")[2], str(setting.annotation)
        if not setting.path.startswith("engine."):
            if name.endswith("_s"):
                found.append((setting.path, "seconds"))
            elif "int" in kind:
                found.append((setting.path, "count"))
    return found


def with_value(path: str, value: Any) -> dict[str, Any]:
    parent, _, name = path.rpartition(".")
    if name == "stop_token_ids":
        value = [value]
    return {**SMALL, parent: {name: value}} if parent else {**SMALL, name: value}


@pytest.mark.parametrize(("path", "kind"), counts_and_waits(), ids=lambda p: str(p))
def test_too_much_is_refused_by_name(path: str, kind: str) -> None:
    """Whatever is counted has a limit, and so has every wait; numbers that Python refuses to print have it too."""
    most = LARGEST_SEED if path == "seed" else MOST
    values = [LONGEST_S * 2, 1e300] if kind == "seconds" else [most + 1, 2**64, 10**5000]
    for value in values:
        with pytest.raises(ConfigError, match=path) as refused:
            april.Config(**with_value(path, value))
        assert len(str(refused.value)) < 300


def test_the_list_is_not_empty() -> None:
    kinds = [kind for _, kind in counts_and_waits()]
    assert kinds.count("seconds") >= 5
    assert kinds.count("count") >= 10


def test_aborts_are_not_asked_for_without_end() -> None:
    """A thousandth of the longest wait is fine; what would be asked more than a million times is not."""
    april.Config(**SMALL, abort_deadline_s=30, abort_resend_s=0.001)
    for resend_s in (1e-9, 1e-300):
        with pytest.raises(ConfigError, match="would ask"):
            april.Config(**SMALL, abort_deadline_s=LONGEST_S, abort_resend_s=resend_s)


@pytest.mark.parametrize("changes", [{"abort_deadline_s": LONGEST_S, "abort_resend_s": LONGEST_S / 1e6}, {
    "outage_deadline_s": LONGEST_S, "function_timeout_s": LONGEST_S, "stall_timeout_s": LONGEST_S}])  # fmt: skip
def test_the_longest_waits_can_be_waited_for(changes: dict[str, float]) -> None:
    """They fit the clocks of the loop and of threads."""
    config = april.Config(rollout_batch_size=3, n_samples_per_prompt=2, max_response_len=100, **changes)
    with scheduler(config=config, reward=lambda prompt, response: float(len(response.tokens))) as rollouts:
        rollouts.next_batch()
        rollouts.weight_update()


def test_the_largest_numbers_go_into_a_checkpoint() -> None:
    """In msgpack too, in which adapters write it."""
    largest = {"seed": LARGEST_SEED, "max_in_flight": MOST, "max_staleness": MOST, "max_resumes": MOST}
    config = april.Config(rollout_batch_size=3, n_samples_per_prompt=2, max_response_len=100, **largest)
    with scheduler(config=config) as rollouts:
        rollouts.next_batch()
        rollouts.weight_update()
        msgspec.msgpack.encode(rollouts.state_dict())


@pytest.mark.parametrize("name", ["n_samples", "max_tokens"])
def test_evaluations_have_limits(name: str) -> None:
    with scheduler() as rollouts, pytest.raises(ConfigError, match=f"evaluate: {name} must be at most 2,147,483,647"):
        rollouts.evaluate([[1]], **{name: 10**5000})
