"""Wrong use of the slime adapter: one sentence each, in slime's own words, before anything starts."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from real_schedulers import assert_nothing_is_left, engine

from adapters import slime_stand_in
from adapters.slime_stand_in import DataSource, Sample, installed, namespace
from april.adapters.slime import generate_rollout, make_generate_rollout
from april.errors import AprilError, ConfigError

USER = "adapters.slime_functions_of_a_user"


@pytest.fixture(autouse=True)
def framework() -> Iterator[None]:
    with installed():
        yield
    assert_nothing_is_left()


def ask(data: Any = None, **flags: Any) -> Any:
    """One rollout."""
    args = namespace(**flags)
    made = make_generate_rollout([engine()], check=True)
    try:
        return made(args, 0, DataSource(args) if data is None else data)
    finally:
        made.function.close()


QUORUM: dict[str, Any] = {"april": {"group_quorum": 0.5}, "n_samples_per_prompt": 6}
HOOKED = {"custom_reward_post_process_path": "april.adapters.slime.post_process_rewards"}
FLAGS: list[tuple[dict[str, Any], str]] = [
    (
        {"partial_rollout": False},
        "--over-sampling-batch-size 5 starts more groups than --rollout-batch-size 3, and without --partial-rollout",
    ),
    ({"rollout_top_p": 0.9}, "--rollout-top-p 0.9: the trainer would recompute other log-probabilities"),
    ({"rollout_temperature": 0.0}, "--rollout-temperature 0: greedy samples of a group are all equal"),
    ({"rollout_top_k": 20}, "--rollout-top-k 20: the trainer would recompute other log-probabilities"),
    ({"use_rollout_routing_replay": True}, "--use-rollout-routing-replay needs the experts of every token"),
    ({"rollout_max_response_len": None}, "--rollout-max-response-len is missing"),
    ({"rollout_global_dataset": False}, "--disable-rollout-global-dataset leaves april without prompts"),
    ({"april": {"rollout_batch_size": 4}}, "april.rollout_batch_size is decided by --rollout-batch-size of slime"),
    ({"april": {"max_stalenes": 4}}, "max_stalenes: unknown setting; do you mean max_staleness?"),
    (
        QUORUM,
        "april.group_quorum=0.5 delivers groups in parts, and slime takes the mean reward over whole ones; add "
        "--custom-reward-post-process-path april.adapters.slime.post_process_rewards",
    ),
    (
        {**QUORUM, "custom_reward_post_process_path": f"{USER}.my_rewards"},
        f"in parts, and {USER}.my_rewards takes the mean reward over whole ones; add --custom-reward-post-process-path",
    ),
    (
        {**QUORUM, "custom_reward_post_process_path": f"{USER}.my_rewards", "rewards_normalization": False},
        f"in parts, and {USER}.my_rewards takes the mean reward over whole ones",
    ),
    *(
        ({**QUORUM, **HOOKED, flag: "x"}, f"--{flag.replace('_', '-')} goes by whole groups, and april.group_quorum")
        for flag in (
            "group_rm", "log_passrate", "rollout_all_samples_process_path", "custom_convert_samples_to_train_data_path",
        )
    ),
    ({"april": {"group_quorum": 0.5}, **HOOKED}, "count with 1 finished responses, and a baseline needs 3"),
    ({"april": {"on_failed_sample": "shrink"}}, "april.on_failed_sample=shrink: a batch would have fewer than"),
    ({"april": "fast"}, "april: in --custom-config-path must be a mapping of settings, got str"),
    ({"custom_rm_path": "nowhere.reward"}, "slime cannot load nowhere.reward"),
    ({"custom_rm_path": f"{USER}.nothing"}, f"slime cannot load {USER}.nothing"),
    ({"custom_generate_function_path": f"{USER}.one_argument"}, "--custom-generate-function-path is called with (args"),
    ({"custom_rm_path": f"{USER}.two_rewards"}, "no number; of several, name one by --reward-key"),
    ({"custom_generate_function_path": f"{USER}.several"}, "the custom generate function returned several samples"),
]


@pytest.mark.parametrize(("flags", "said"), FLAGS)
def test_flags_that_cannot_be_right(flags: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its flag, and what to do."""
    monkeypatch.setattr("april.config.settings.RETRY_PAUSE_S", 0.0)
    with pytest.raises(AprilError, match=re.escape(said)):
        ask(**flags)


def test_settings_of_april_come_from_slimes_custom_config() -> None:
    """``april:`` in --custom-config-path."""
    assert len(ask(april={"max_staleness": 2, "refill": "sample"}).samples) == 3


def test_neither_slime_nor_miles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called without them, the adapter says what it is for."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "slime"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"is called by slime or miles .* neither is on PYTHONPATH"):
        generate_rollout(namespace(), 0, object())


def test_functions_that_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slime in which something is elsewhere, or takes something else, is found at the start."""
    with monkeypatch.context() as patch:
        patch.delattr(sys.modules["slime.rollout.rm_hub"], "async_rm")
        with pytest.raises(ConfigError, match=r"slime has no rollout.rm_hub.async_rm.* tried with slime 624b824"):
            ask()

    async def other(sample: Any) -> float:
        return 0.0

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["slime.rollout.rm_hub"], "async_rm", other)
        with pytest.raises(ConfigError, match=r"async_rm is called with \(args, sample\), which .* does not take"):
            ask()


class Other(DataSource):
    """Gives what ``made`` says."""

    made: Any = None

    def get_samples(self, num_samples: int) -> Any:
        return [self.made for _ in range(num_samples)]


@pytest.mark.parametrize(("group", "said"), [
    ([object(), object()], "a sample of the data source (object) has no index, prompt"),
    ([Sample(0, 0, "p1")], "the data source gave a group of 1 samples, and --n-samples-per-prompt is 2"),
    ([Sample(0, i, [{"role": "user"}]) for i in range(2)], "is no text; add --apply-chat-template"),
    ([Sample(0, i, "p1", multimodal_inputs={"images": [1]}) for i in range(2)], "has images or other inputs"),
])  # fmt: skip
def test_groups_that_cannot_be_used(group: list[Any], said: str) -> None:
    """What a data source of the user's own may get wrong."""
    data = Other(namespace())
    data.made = group
    with pytest.raises(AprilError, match=re.escape(said)):
        ask(data)


def test_a_data_source_that_ends() -> None:
    """slime's never do; one that does gives a shorter last batch, and then says so."""
    args = namespace()
    data = DataSource(args)
    given = iter([data.get_samples(1) for _ in range(4)])
    data.get_samples = lambda num_samples: next(given, [])  # type: ignore[method-assign]
    made = make_generate_rollout([engine()], check=True)
    assert len(made(args, 0, data).samples) == 3
    assert len(made(args, 1, data).samples) == 1
    with pytest.raises(AprilError, match="the prompt source has ended"):
        made(args, 2, data)
    made.function.close()


def test_the_stand_in_is_gone_afterwards() -> None:
    """The tests of other adapters do not see it."""
    assert slime_stand_in.__name__ in sys.modules
    assert "miles.rollout" not in sys.modules
