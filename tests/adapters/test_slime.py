"""The rollout function before slime's contract: every token is stamped, hooks and flags are honoured, restarts exact.

docs/slime.md has what was run on the real slime and miles.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_servers.sglang import FakeSglangServer
from real_schedulers import LENGTHS, VOCAB, assert_nothing_is_left
from server_fixtures import ServerThread
from tiny_vision import IMAGE_ID, tiny_processor
from tiny_vision import VOCAB as WORDS

from adapters import slime_functions_of_a_user as user
from adapters.players import uncut_of
from adapters.slime_stand_in import (
    Run,
    Sample,
    Status,
    Tokenizer,
    build_processor_kwargs,
    data_of_the_actor,
    images_of,
    installed,
    namespace,
)
from april.adapters.slime import post_process_rewards
from april.adapters.slime.arguments import config_of
from april.adapters.slime.framework import Framework
from april.adapters.slime.hooks import SlimeHooks
from april.adapters.slime.samples import SampleImages, as_dict, carry_path, unpacked
from april.core.types import DropReason
from april.core.versions import PolicyVersion
from april.engines.simulated.engine import synthetic_response
from april.engines.simulated.synthetic_rows import LAYERS, TOP_K, synthetic_rows
from april.errors import ConfigError, RolloutError
from april.scheduler import RolloutScheduler
from april.testing import FakeEngine

REPLAY: dict[str, Any] = {"use_rollout_routing_replay": True, "num_layers": LAYERS, "moe_router_topk": TOP_K}
SEES: dict[str, Any] = {"multimodal_keys": '{"image": "images"}', "hf_checkpoint": "seeing"}
IMAGE_EOS = 2
USER = "adapters.slime_functions_of_a_user"
N, SIZE = 3, 6
HOOKED: dict[str, Any] = {
    "n_samples_per_prompt": SIZE, "custom_reward_post_process_path": "april.adapters.slime.post_process_rewards",
}  # fmt: skip
QUORUM: dict[str, Any] = {**HOOKED, "april": {"group_quorum": 0.5}}


@pytest.fixture(autouse=True)
def framework(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("april.config.settings.RETRY_PAUSE_S", 0.0)
    with installed():
        yield
    assert_nothing_is_left()


def check(sample: Sample, rollout_id: int) -> None:
    """What slime's trainer asks of a sample, and that it is the uncut synthetic response."""
    april = sample.metadata["april"]
    check_response(sample)
    ends = [end for _, end, _ in april["spans"]]
    assert [start for start, _, _ in april["spans"]] == [0, *ends[:-1]]
    assert ends[-1] == sample.response_length
    assert len(sample.weight_versions) == len(april["spans"])
    oldest = int(april["spans"][0][2].partition(".")[2])
    assert april["version"] == f"0.{rollout_id}"
    assert april["staleness"] == rollout_id - oldest


def check_response(sample: Sample) -> None:
    """The very one that would have come without cuts and restarts."""
    prompt, response = sample.tokens[: -sample.response_length], sample.tokens[-sample.response_length :]
    assert prompt == Tokenizer().encode(sample.prompt, add_special_tokens=False)
    key = (sample.group_index, sample.index % 2)
    assert response == uncut_of(prompt, key)
    assert sample.rollout_log_probs == synthetic_response(prompt, key, 0, len(response), VOCAB, (0,))[1].tolist()
    assert sample.status is (Status.TRUNCATED if LENGTHS.sample(*key) > 100 else Status.COMPLETED)
    assert len(sample.loss_mask) == sample.response_length
    assert sample.response == " ".join(map(str, response))
    assert sample.reward == sample.response_length


def test_every_token_is_stamped_and_exact() -> None:
    """Spans, versions, staleness, log-probabilities and text of every sample, over cuts and weight updates."""
    with Run() as run:
        resumed = 0
        for rollout_id in range(12):
            for s in run.samples(rollout_id):
                check(s, rollout_id)
                assert s.train_metadata["april"] == s.metadata["april"]  # what the trainer's conversion takes along
                resumed += s.metadata["april"]["resumes"]
        assert resumed
        assert run.output.metrics["rollout/april/off_policy_share"] > 0


def test_only_older_tokens_of_continued_responses_are_masked() -> None:
    """With --mask-offpolicy-in-partial-rollout no sample is masked whole, and one of a single version not at all."""
    with Run(mask_offpolicy_in_partial_rollout=True) as run:
        masked = carried = 0
        for rollout_id in range(12):
            for s in run.samples(rollout_id):
                spans = s.metadata["april"]["spans"]
                last = spans[-1][0]
                assert s.loss_mask == [0] * last + [1] * (s.response_length - last)
                masked += last > 0
                carried += len(spans) == 1 and spans[0][2] != f"0.{rollout_id}"
        assert masked
        assert carried


def test_the_same_rollout_again_is_no_weight_update() -> None:
    """A rollout that is asked for twice goes on under the same version; the next one has new weights."""
    with Run() as run:
        versions = [run(rollout_id)[0][0].metadata["april"]["version"] for rollout_id in (0, 0, 1, 1, 2)]
        assert versions == ["0.0", "0.0", "0.1", "0.1", "0.2"]


def test_rejected_groups_are_counted_with_their_reason() -> None:
    """--dynamic-sampling-filter-path: rejected groups are replaced, and settled by name."""
    paths = {"dynamic_sampling_filter_path": f"{USER}.keep_short",
             "rollout_all_samples_process_path": f"{USER}.all_samples"}  # fmt: skip
    user.seen.clear()
    with Run(**paths) as run:
        dropped = delivered = 0
        for rollout_id in range(8):
            groups = run(rollout_id)
            delivered += len(groups)
            assert all(g[0].response_length < user.KEPT_LENGTH for g in groups)
            dropped += run.output.metrics.get("rollout/dynamic_filter/drop_long", 0)
        books = run.scheduler.ledger()["prompts"]
        dropped += run.hooks.dropped["long"]  # scored between the rollouts
        assert dropped
        assert books.dropped[DropReason.FILTERED] == dropped
        assert len(run.data.drawn) == books.observed == delivered + books.held + dropped
        assert len({g for seen in user.seen for g in seen}) >= delivered + dropped


def test_a_filter_may_keep_what_would_be_too_few() -> None:
    """keep_when_insufficient: of N' = 5 groups, those that N = 3 needs are kept, as in slime."""
    with Run(dynamic_sampling_filter_path=f"{USER}.keep_none") as run:
        assert len(run(0)) == 3
        assert run.output.metrics["rollout/dynamic_filter/drop_none"] == 2


def test_rewards_of_groups_and_of_several_numbers() -> None:
    """--group-rm and --reward-key."""
    with Run(group_rm=True, custom_rm_path=f"{USER}.group_reward") as run:
        for group in run(0):
            assert sorted(s.reward for s in group)[0] == 0.0
    with Run(custom_rm_path=f"{USER}.two_rewards", reward_key="length") as run:
        assert all(s.reward["length"] == s.response_length for g in run(0) for s in g)


def test_sample_hooks_come_before_the_reward() -> None:
    """--rollout-sample-hook-path."""
    with Run(rollout_sample_hook_path=[f"{USER}.mark"]) as run:
        assert all(s.metadata["marked"] == s.response_length for g in run(0) for s in g)


def test_tokens_that_are_too_old_stay_masked_in_a_response_that_a_hook_has_shortened() -> None:
    """Mask and spans are of the tokens that are left."""
    stale = {"april": {"on_stale": "mask", "max_staleness": 1}, "over_sampling_batch_size": 12}
    with Run(**stale, rollout_sample_hook_path=[f"{USER}.trim"]) as run:
        masked = 0
        for rollout_id in range(14):
            for s in run.samples(rollout_id):
                spans = s.metadata["april"]["spans"]
                old = [rollout_id - int(v.partition(".")[2]) > 1 for start, end, v in spans for _ in range(start, end)]
                assert s.loss_mask == [int(not o) for o in old]
                assert len(s.loss_mask) == spans[-1][1] == s.response_length
                assert len(s.weight_versions) == len(spans)
                masked += sum(old)
    assert masked


def test_a_hook_that_rewrites_a_response_before_masked_tokens_is_told() -> None:
    """Nobody knows then which of its tokens are older; without such tokens, what follows has no version."""
    hook = {"rollout_sample_hook_path": [f"{USER}.drop_first"]}
    with Run(**hook) as run:
        for rollout_id in range(4):
            for s in run.samples(rollout_id):
                assert s.metadata["april"]["spans"][-1] == [0, s.response_length, None]
                assert s.loss_mask == [1] * s.response_length
    run = Run(**hook, mask_offpolicy_in_partial_rollout=True)
    with run, pytest.raises(RolloutError, match="from token 0 on, and later tokens are too old to be trained"):
        list(map(run, range(12)))


@pytest.mark.parametrize("flags", [
    {"custom_rm_path": f"{USER}.fails_once"}, {"custom_rm_path": f"{USER}.group_fails_once", "group_rm": True},
], ids=["sample", "group"])  # fmt: skip
def test_a_hook_runs_once_on_a_sample_whose_reward_fails(flags: dict[str, Any], tmp_path: Path) -> None:
    """Each reward is asked with what the custom generate function returned, over restarts too."""
    flags |= {"custom_generate_function_path": f"{USER}.generate", "rollout_sample_hook_path": [f"{USER}.trim"]}
    user.seen.clear()
    samples: list[Sample] = []
    for start in (0, 3):
        with Run(tmp_path, start, **flags) as run:
            for rollout_id in range(start, start + 3):
                samples += run.samples(rollout_id)
                run.data.save(rollout_id)
    assert {s.index for s in samples} & set(user.seen)
    assert all(s.reward == s.response_length == 4 + 3 * s.index % 40 for s in samples)


def test_a_custom_generate_function_generates(tmp_path: Path) -> None:
    """--custom-generate-function-path: its sample is the truth, april's books agree, and a restart goes on with it."""
    trained: Counter[int] = Counter()
    for start in (0, 6):
        with Run(tmp_path, start, custom_generate_function_path=f"{USER}.generate") as run:
            for rollout_id in range(start, start + 6):
                for s in run.samples(rollout_id):
                    goal = 5 + 3 * s.index % 40
                    assert s.tokens == [1, 2, *range(10, 10 + goal)]
                    assert s.reward == s.response_length == goal == s.metadata["april"]["spans"][-1][1]
                    trained[s.index] += 1
            books = run.scheduler.ledger()["prompts"]
            assert books.observed == run.data.groups == books.delivered + books.held
            run.data.save(rollout_id)
    assert set(trained.values()) == {1}
    assert len(trained) == 2 * 36


def test_slime_evaluates_itself() -> None:
    """Evaluation goes to slime's own function and opens no session."""
    with Run() as run:
        assert run.function(run.args, 3, run.data, evaluation=True) == ("evaluated", 3)
        assert not run.function.sessions


def test_tokens_without_correction_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Over-sampling without --use-tis or --use-rollout-logprobs works, and says what it means."""
    with caplog.at_level(logging.WARNING, "april"), Run(use_tis=False, buffer_filter_path="some.filter") as run:
        run(0)
    assert "without correction" in caplog.text
    assert "--use-tis" in caplog.text
    assert "--buffer-filter-path has nothing to choose from" in caplog.text


def test_slimes_filter_sees_the_rewards_that_are_trained() -> None:
    """Rounded to float32 where they enter, of several the one that --reward-key names."""
    third = float(np.float32(0.1 + 0.2))
    hooks = SlimeHooks.__new__(SlimeHooks)
    for key, reward, held in (("", 0.1 + 0.2, third), ("a", {"a": 0.1 + 0.2, "b": 0.1}, {"a": third, "b": 0.1})):
        hooks._args = SimpleNamespace(reward_key=key)
        sample = Sample(reward=reward)
        assert (hooks._value(sample), sample.reward) == (third, held)


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("flags", [{}, REPLAY], ids=["plain", "with experts"])
def test_a_batch_that_was_not_trained_on_comes_again(flags: dict[str, Any], tmp_path: Path) -> None:
    """slime's asynchronous loop saves rollout r after it has asked for r + 1: that batch is delivered again.

    Its rows of experts come again too; the file has no second copy of them.
    """
    with Run(tmp_path, **flags) as run:
        run(0)
        run(1)
        lost = run.samples(2)
        run.data.save(1)
    with Run(tmp_path, 2, **flags) as run:
        again = run.samples(2)
    if flags:
        replayed(run, again)
    # the saved weights were trained on rollout 1, those that generated rollout 2 were not
    for was, now in zip(lost, again, strict=True):
        check_response(now)
        assert (now.group_index, now.tokens) == (was.group_index, was.tokens)
        assert (was.metadata["april"]["version"], now.metadata["april"]["version"]) == ("0.2", "1.3")
        assert now.metadata["april"]["staleness"] == was.metadata["april"]["staleness"] + 1


def test_a_checkpoint_in_the_middle_of_a_rollout(tmp_path: Path) -> None:
    """miles saves beside the next rollout: each of the files written meanwhile is whole, and restores everything."""
    files: list[tuple[bytes, bytes]] = []
    one_by_one = threading.Lock()
    over: list[bool] = []

    def save() -> None:
        with one_by_one:
            if over:  # a reward that the rollout did not wait for
                return
            run.data.save(1)
            written = sorted((tmp_path / "rollout").iterdir())
            files.append((written[0].read_bytes(), written[1].read_bytes()))

    with Run(tmp_path, custom_rm_path=f"{USER}.busy_reward") as run:
        trained = {s.group_index for rollout_id in (0, 1) for s in run.samples(rollout_id)}
        user.at_reward.append(save)
        try:
            run(2)
        finally:
            user.at_reward.clear()
        with one_by_one:
            over.append(True)
    names = sorted((tmp_path / "rollout").iterdir())
    for contents in files[:: max(1, len(files) // 4)]:
        for name, content in zip(names, contents, strict=True):
            name.write_bytes(content)
        with Run(tmp_path, 2) as again:
            samples = [s for rollout_id in (2, 3, 4, 5) for s in again.samples(rollout_id)]
            books = again.scheduler.ledger()["prompts"]
        for sample in samples:
            check_response(sample)
        after = Counter(s.group_index for s in samples)
        assert set(after.values()) == {2}
        assert not trained & set(after)
        assert books.observed == again.data.groups == len(trained) + len(after) + books.held
    assert files


def test_a_group_that_nobody_has_asked_for_is_kept(tmp_path: Path) -> None:
    """What the data source has given and april has not drawn yet is in the file: slime's own position is behind it.

    With rewards of whole groups.
    """
    flags = {"group_rm": True, "custom_rm_path": f"{USER}.group_length"}
    with Run(tmp_path, **flags) as run:
        run(0)
        (ahead,) = run.data.get_samples(1)
        run.session._groups.ahead.append(ahead)
        run.data.save(0)
    with Run(tmp_path, 1, **flags) as run:
        samples = [s for rollout_id in range(1, 8) for s in run.samples(rollout_id)]
        assert run.scheduler.ledger()["prompts"].observed == run.data.groups
    for sample in samples:
        check_response(sample)
    assert ahead[0].group_index in {s.group_index for s in samples}


def test_a_checkpoint_without_carry_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that began with slime's own function goes on, and the log says what is missing."""
    Run(tmp_path).data.save(0)
    with Run(tmp_path, 1) as run:
        run(1)
    assert "continues from a checkpoint that april did not write" in caplog.text


# ---------------------------------------------------------------- agents

AGENT: dict[str, Any] = {
    "april": {"rollout": f"{USER}.agent"}, "custom_rm_path": f"{USER}.reward_of_agents",
    "custom_reward_post_process_path": "april.adapters.slime.post_process_rewards",
}  # fmt: skip


def by_response(samples: list[Sample]) -> dict[int, list[Sample]]:
    """The rows of each response, by what slime counts once."""
    found: dict[int, list[Sample]] = {}
    for sample in samples:
        assert sample.rollout_id == sample.index
        found.setdefault(sample.rollout_id or 0, []).append(sample)
    return found


def test_the_conversations_of_an_agent_are_rows_that_count_once(tmp_path: Path) -> None:
    """Tokens, masks and provenance are each row's own; reward and advantage are the response's, over restarts too."""
    rows: dict[int, list[Sample]] = {}
    scored = set[int]()
    for start in (0, 3):
        user.seen.clear()
        with Run(tmp_path, start, **AGENT) as run:
            for rollout_id in range(start, start + 3):
                groups = run(rollout_id)
                assert len(groups) == 3
                for group in groups:
                    of_group = by_response(group)
                    assert len(of_group) == 2
                    assert not set(of_group) & set(rows)
                    rows |= of_group
                    raw, advantages = post_process_rewards(run.args, group)
                    rewards = np.array([float(i) for i in of_group])
                    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
                    said = dict(zip(of_group, expected, strict=True))
                    assert advantages == pytest.approx([said[s.index] for s in group], rel=1e-5)
                    assert raw == [float(s.index) for s in group]
                run.data.save(rollout_id)
        # once about each response; after the restart again about those that were scored after the state was saved
        assert len(user.seen) == len(set(user.seen))
        scored |= set(user.seen)

    several = 0
    for index, of_response in rows.items():
        sample = of_response[0]
        prompt = Tokenizer().encode(sample.prompt, add_special_tokens=False)
        assert sample.tokens[: len(prompt)] == prompt
        assert len(of_response) == 1 + int(sample.label) % 2
        for row in of_response:
            assert (row.index, row.reward, row.group_index) == (index, float(index), sample.group_index)
            assert len(row.loss_mask) == len(row.rollout_log_probs) == row.response_length
            assert row.response == " ".join(map(str, row.tokens[-row.response_length :]))
            spans = row.metadata["april"]["spans"]
            assert row.loss_mask == [int(v is not None) for start, end, v in spans for _ in range(start, end)]
        if len(of_response) == 2:
            several += 1
            second = of_response[1]
            assert second.tokens[:3] == [5, *sample.tokens[len(prompt) :][:2]]
            assert second.response_length <= 14
            assert second.loss_mask.count(0) in (0, 2)
            assert second.train_metadata["april"] is not sample.train_metadata["april"]
    assert several > 3
    assert scored >= set(rows)


def test_a_plain_agent_of_one_conversation_is_what_april_does_itself() -> None:
    """Such a function runs in a thread."""
    with Run(april={"rollout": f"{USER}.plain_agent"}, custom_reward_post_process_path=AGENT[
        "custom_reward_post_process_path"]) as run:  # fmt: skip
        for s in run.samples(0):
            check(s, 0)


# ---------------------------------------------------------------- quorum and samples that fail


@pytest.mark.parametrize("flags", [
    {}, {"grpo_std_normalization": False}, {"advantage_estimator": "reinforce_plus_plus_baseline"},
    {"rewards_normalization": False}, {"advantage_estimator": "ppo"},
], ids=str)  # fmt: skip
def test_without_a_quorum_the_hook_gives_what_slime_makes_of_rewards(flags: dict[str, Any]) -> None:
    """slime's own normalisation over n neighbours, written down a second time."""
    with Run(**HOOKED, **flags) as run:
        samples = run.samples(0)
    raw, advantages = post_process_rewards(run.args, samples)
    expected = np.array(raw)
    if not {"rewards_normalization", "advantage_estimator"} & set(flags) or "reinforce" in str(flags):
        rows = expected.reshape(-1, SIZE)
        rows = rows - rows.mean(1, keepdims=True)
        expected = (rows if flags else rows / (rows.std(1, ddof=1, keepdims=True) + 1e-6)).ravel()
    assert np.ptp(advantages)
    np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=1e-4)


def test_samples_of_somebody_else_are_refused() -> None:
    """The hook without april's rollout function."""
    with pytest.raises(RolloutError, match="only works with --rollout-function-path april"):
        post_process_rewards(namespace(), [Sample(0, 0, "p1", reward=1.0)])


@pytest.mark.parametrize("flags", [{}, {"custom_generate_function_path": f"{USER}.generate"}], ids=["april", "slime"])
@pytest.mark.parametrize("settings", [
    {"on_failed_sample": "replace"},
    {"on_failed_sample": "replace", "group_quorum": 0.5},
    {"on_failed_sample": "shrink", "group_quorum": 0.5},
], ids=str)  # fmt: skip
def test_a_sample_that_fails_for_good_costs_a_sample(settings: dict[str, Any], flags: dict[str, Any]) -> None:
    """Batches stay full, no group is dropped; one that takes another's place has an index of its own."""
    flags = {**HOOKED, **flags, "custom_rm_path": f"{USER}.fails_for_one", "april": settings}
    with Run(**flags) as run:
        seen: Counter[int] = Counter()
        for rollout_id in range(8):
            samples = run.samples(rollout_id)
            assert len(samples) == N * SIZE
            seen.update(s.index for s in samples)
            assert len(post_process_rewards(run.args, samples)[1]) == N * SIZE
        books = run.scheduler.ledger()["prompts"]
        run.scheduler.validate()
        assert set(seen.values()) == {1}
        assert not sum(books.dropped.values())
        failing = {s for s in range(len(run.data.drawn) * SIZE) if s % SIZE == 1 and s // SIZE % 3 == 0}
        assert not failing & set(seen)
        replaced = {-1 - s for s in seen if s < 0}
        assert bool(replaced) == (settings["on_failed_sample"] == "replace")
        assert all(s // SIZE % 3 == 0 for s in replaced)


def test_nothing_of_a_rejected_group_is_kept() -> None:
    """--dynamic-sampling-filter-path sees the first k; what else was scored of a group goes two batches later."""
    with Run(**QUORUM, dynamic_sampling_filter_path=f"{USER}.keep_short") as run:
        seen: list[set[int]] = []
        for rollout_id in range(8):
            samples = run.samples(rollout_id)
            assert len(samples) == N * SIZE
            kept = {sample_id.group for sample_id in list(run.hooks.held)}
            seen.append(kept - run.scheduler.held_groups())
        assert any(seen)
        assert not any(first & third for first, third in zip(seen, seen[2:], strict=False))


def test_a_quorum_needs_no_hook_where_rewards_go_as_they_are() -> None:
    """--disable-rewards-normalization, PPO, REINFORCE++: no group is looked at."""
    own = {"group_quorum": 0.5}
    with Run(n_samples_per_prompt=SIZE, advantage_estimator="reinforce_plus_plus", april=own) as run:
        samples = run.samples(0)
    assert "advantage" not in samples[0].metadata["april"]
    assert len(samples) == N * SIZE


# ---------------------------------------------------------------- experts


def rows_of(sample: Sample) -> Any:
    """The rows that the versions of its spans have made; those of the prompt are of the first."""
    told = sample.metadata["april"]["spans"]
    spans = [(PolicyVersion(*map(int, version.split("."))), end - start) for start, end, version in told]
    spans[0] = (spans[0][0], spans[0][1] + len(sample.tokens) - sample.response_length - 1)
    return synthetic_rows("routed_experts", np.array(sample.tokens, np.int32), spans)


def replayed(run: Run, samples: list[Sample]) -> int:
    """Compare every row of the actor's data; returns how many samples several versions have written."""
    data = data_of_the_actor(run.args, samples)
    for sample, rows in zip(samples, data["rollout_routed_experts"], strict=True):
        assert np.array_equal(rows[:-1], rows_of(sample)), sample.index
    return sum(len(sample.metadata["april"]["spans"]) > 1 for sample in samples)


def test_every_row_reaches_the_actor() -> None:
    """Continued samples have the rows of each of their versions, one per token but the last.

    How many rollouts it takes until three were continued, the clock decides.
    """
    with Run(**REPLAY) as run:
        assert any(found >= 3 for found in accumulate(replayed(run, run.samples(i)) for i in range(40)))


def test_rows_go_on_after_a_restart(tmp_path: Path) -> None:
    """What was held is continued from the checkpoint with the rows that it had; the file has them once."""
    with Run(tmp_path, **REPLAY) as run:
        for i in (0, 1):
            run.samples(i)
        run.data.save(1)
    assert b"routed_experts" in carry_path(str(tmp_path), 1).read_bytes()
    with Run(tmp_path, 2, **REPLAY) as again:
        assert any(replayed(again, again.samples(i)) for i in range(2, 40))


def test_the_flags_say_the_shape() -> None:
    """Layers and experts per token are those of the trainer's model; april.extras is decided by slime's flag."""
    args = namespace(**REPLAY, sglang_router_ip="127.0.0.1", sglang_router_port=1)
    config = config_of(args, ["http://127.0.0.1:30000"])
    assert config.extras == ("routed_experts",)
    assert config.engine.expert_shape == (LAYERS, TOP_K)
    assert config_of(args, ["http://127.0.0.1:30000"], own_function=True).extras == ()
    with pytest.raises(ConfigError, match=r"april\.extras: slime's --use-rollout-routing-replay decides"):
        config_of(namespace(april={"extras": "routed_experts"}), None)


def test_a_hook_that_rewrites_a_response_is_told() -> None:
    """Its tokens are others than those whose experts would be replayed."""
    hook = ["adapters.test_slime.shorten"]
    with Run(**REPLAY, rollout_sample_hook_path=hook) as run, pytest.raises(RolloutError, match="a hook has rewritten"):
        run.samples(0)


def shorten(args: Any, sample: Sample) -> None:
    sample.tokens = sample.tokens[:-1]


def test_rows_of_a_function_of_the_users_are_kept_in_the_file() -> None:
    """slime's own generate function fills them in; a checkpoint has them as plain values."""
    sample = Sample(tokens=[1, 2, 3], rollout_routed_experts=np.arange(8, dtype=np.int32).reshape(2, 2, 2))
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(as_dict(sample)))
    again = Sample.from_dict(unpacked(plain))
    assert np.array_equal(again.rollout_routed_experts, sample.rollout_routed_experts)


def test_servers_without_the_flag_are_told() -> None:
    """slime gives its servers --enable-return-routed-experts itself; servers of somebody else may be without."""
    server = FakeSglangServer()
    with ServerThread(server):
        config = config_of(namespace(**REPLAY, sglang_router_ip="127.0.0.1", sglang_router_port=1), [server.url])
        alone = config.model_copy(update={"engine": config.engine.model_copy(update={"router": None})})
        with pytest.raises(ConfigError, match="start the server with --enable-return-routed-experts"):
            RolloutScheduler(alone, prompts=[[1]], reward=lambda p, r: 0.0)


# ---------------------------------------------------------------- images


def engines() -> list[FakeEngine]:
    """Two that see, 0.5 ms a token."""

    def length(request: Any) -> int:
        return 10 + 13 * sum(request.sample_key) % 90

    return [FakeEngine(f"e{i}", lengths=length, seconds_per_token=5e-4, chunk_tokens=8, vocab_size=WORDS,
                       eos_token_id=IMAGE_EOS) for i in range(2)]  # fmt: skip


def seeing(directory: Path | None = None, start: int = 0, **flags: Any) -> Run:
    """The process of a run whose samples have images."""
    return Run(directory, start, engines_of=engines, **SEES, **flags)


def check_images(run: Run, sample: Sample) -> int:
    """Its images are its own, in its tokens, at its engines and at its actor; 1 if several versions wrote it."""
    offset = int(str(sample.label))
    images = images_of(offset)
    prompt = sample.tokens[: -sample.response_length]
    theirs = tiny_processor()(text=sample.prompt, **build_processor_kwargs({"images": images or None}))
    assert prompt == list(theirs["input_ids"][0])
    assert prompt.count(IMAGE_ID) > len(images) or not images
    assert IMAGE_ID not in sample.tokens[-sample.response_length :]
    if not images:
        assert sample.multimodal_train_inputs is None
        return len(sample.metadata["april"]["spans"]) > 1
    assert sample.multimodal_inputs is not None
    assert [i.tobytes() for i in sample.multimodal_inputs["images"]] == [i.tobytes() for i in images]
    assert sample.multimodal_train_inputs is not None
    assert set(sample.multimodal_train_inputs) == {"pixel_values", "image_grid_thw"}
    for name, value in sample.multimodal_train_inputs.items():
        assert np.array_equal(value.numpy(), theirs[name].numpy()), name
    return len(sample.metadata["april"]["spans"]) > 1


def test_each_sample_has_its_own_images() -> None:
    """Prompts of none, one and two images, of several sizes; some are cut and continued with the same ones."""
    with seeing() as run:
        checked = (sum([check_images(run, sample) for sample in run.samples(i)]) for i in range(40))
        assert any(found >= 2 for found in accumulate(checked))
        for engine in run.engines:
            assert not engine.violations
            for record in engine.attempts.values():
                for placed in record.request.attached:
                    assert set(record.request.token_ids[placed.at : placed.end]) == {IMAGE_ID}


def test_samples_of_a_group_share_what_they_have_of_images() -> None:
    """While they are held there is one copy, in the prompt; the actor's tensors are one object for a group."""
    with seeing() as run:
        for i in range(3):
            groups = run(i)
            for group in groups:
                assert len({id(sample.multimodal_train_inputs) for sample in group}) == 1
        held = run.scheduler._driver.core.buffer.groups.values()
        assert any(group.prompt.attached for group in held)
        for group in held:
            for sample in group.prompt.data["group"]:
                assert not any((sample.multimodal_inputs or {}).values())


def test_images_go_on_after_a_restart(tmp_path: Path) -> None:
    """The checkpoint has each image once, by its hash, and no other process of slime's is asked for it."""
    with seeing(tmp_path) as run:
        for i in (0, 1):
            for sample in run.samples(i):
                check_images(run, sample)
        run.data.save(1)
    assert carry_path(str(tmp_path), 1).read_bytes().count(b"\x89PNG") <= 2 * 5
    with seeing(tmp_path, 2) as again:
        assert any(sum([check_images(again, sample) for sample in again.samples(i)]) for i in range(2, 40))


def test_a_reward_sees_the_images() -> None:
    """slime's functions find them in the sample, as its data set gave them."""
    with seeing(custom_rm_path="adapters.test_slime.counts_images") as run:
        for sample in run.samples(0):
            assert sample.reward == int(str(sample.label)) % 3


async def counts_images(args: Any, sample: Sample, **kwargs: Any) -> float:
    return float(len((sample.multimodal_inputs or {}).get("images") or ()))


def test_a_checkpoint_without_a_processor_is_told() -> None:
    """By the flag and the path."""
    with pytest.raises(ConfigError, match="finds no processor for them at --hf-checkpoint text"):
        SampleImages.of(Framework("slime"), namespace(**{**SEES, "hf_checkpoint": "text"}))
    assert SampleImages.of(Framework("slime"), namespace()) is None
