"""The rollout function before slime's contract: every token is stamped, hooks and flags are honoured, restarts exact.

docs/slime.md has what was run on the real slime and miles.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from real_schedulers import LENGTHS, VOCAB, assert_nothing_is_left

from adapters import slime_functions_of_a_user as user
from adapters.players import uncut_of
from adapters.slime_stand_in import DataSource, Run, Sample, Status, Tokenizer, installed, namespace, simulated
from april.adapters.slime import GenerateRollout, generate_rollout, make_generate_rollout, post_process_rewards
from april.adapters.slime.hooks import SlimeHooks
from april.core.types import DropReason
from april.engines.simulated.engine import synthetic_response
from april.errors import CheckpointError, ConfigError, DataExhausted, RolloutError
from april.state_file import write_state

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
    assert sample.metadata.get("start_rollout_id", rollout_id) == oldest


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


def test_a_custom_generate_function_generates() -> None:
    """--custom-generate-function-path: its sample is the truth, april's books agree."""
    with Run(custom_generate_function_path=f"{USER}.generate") as run:
        for rollout_id in range(6):
            for s in run.samples(rollout_id):
                goal = 5 + 3 * s.index % 40
                assert s.tokens == [1, 2, *range(10, 10 + goal)]
                assert s.reward == s.response_length == goal == s.metadata["april"]["spans"][-1][1]
        books = run.scheduler.ledger()
        assert books["prompts"].observed == len(run.data.drawn) == 18 + books["prompts"].held


def test_the_signature_is_slimes() -> None:
    """slime's contract test looks at names and defaults."""
    for function in (generate_rollout, make_generate_rollout()):
        parameters = inspect.signature(function).parameters
        assert list(parameters) == ["args", "rollout_id", "data_source", "evaluation"]
        assert parameters["evaluation"].default is False


def test_slime_evaluates_itself() -> None:
    """Evaluation goes to slime's own function and opens no session."""
    with Run() as run:
        assert run.function(run.args, 3, run.data, evaluation=True) == ("evaluated", 3)
        assert not run.function.function.sessions


def test_the_class_that_miles_constructs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cls(input), then calls for training with the servers' weight version, and for evaluation."""
    with installed("miles"):
        args = namespace()
        data = DataSource(args)
        monkeypatch.setattr(DataSource, "__module__", "miles.rollout.data_source")
        made = GenerateRollout(SimpleNamespace(args=args, data_source=data))
        made._function = make_generate_rollout([simulated("e0")], check=True).function
        try:
            for rollout_id, weights, version in ((0, 4, "0.0"), (1, 4, "0.0"), (2, 5, "0.1"), (3, 6, "0.2")):
                asked = SimpleNamespace(rollout_id=rollout_id, weight_version=weights, evaluation=False)
                output = made(asked)
                assert output.samples[0][0].metadata["april"]["version"] == version
                newest = {s.weight_versions[-1] for g in output.samples for s in g}
                assert newest <= {"4", "5", "6"} | {"0"}
            work = made(SimpleNamespace(rollout_id=4, evaluation=True))
            with pytest.raises(StopIteration) as ended:
                work.send(None)
            assert ended.value.value == ("evaluated", 4)
        finally:
            made.close()


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


def test_a_data_source_that_ends() -> None:
    """slime's never do; one that does gives a shorter last batch, and then says so."""
    args = namespace()
    data = DataSource(args)
    given = iter([data.get_samples(1) for _ in range(4)])
    data.get_samples = lambda num_samples: next(given, [])  # type: ignore[method-assign]
    made = make_generate_rollout([simulated("e0")], check=True)
    assert len(made(args, 0, data).samples) == 3
    assert len(made(args, 1, data).samples) == 1
    with pytest.raises(DataExhausted, match="the prompt source has ended"):
        made(args, 2, data)
    made.function.close()


# ---------------------------------------------------------------- checkpoints


def test_a_batch_that_was_not_trained_on_comes_again(tmp_path: Path) -> None:
    """slime's asynchronous loop saves rollout r after it has asked for r + 1: that batch is delivered again."""
    with Run(tmp_path) as run:
        run(0)
        run(1)
        lost = run.samples(2)
        run.data.save(1)
    with Run(tmp_path, 2) as run:
        again = run.samples(2)
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


def test_versions_go_on_over_a_restart(tmp_path: Path) -> None:
    """Tokens from before keep their stamp and their distance; names of versions are kept as well."""
    with Run(tmp_path) as run:
        for rollout_id in range(3):
            run(rollout_id)
        run.data.save(2)
    with Run(tmp_path, 3) as run:
        samples = run.samples(3)
    old = [s for s in samples if s.metadata["april"]["spans"][0][2].startswith("0.")]
    assert old
    assert {s.metadata["april"]["version"] for s in samples} == {"1.3"}
    for s in old:
        first = int(s.metadata["april"]["spans"][0][2].partition(".")[2])
        assert s.metadata["april"]["staleness"] == 3 - first
        assert s.metadata["start_rollout_id"] == first
        assert s.weight_versions[0] == str(first)


def test_a_custom_generate_function_goes_on_with_its_sample(tmp_path: Path) -> None:
    """What a function of the user has made of unfinished samples is in the checkpoint too."""
    flags = {"custom_generate_function_path": f"{USER}.generate"}
    with Run(tmp_path, **flags) as run:
        first = run.samples(0)
        run.data.save(0)
    with Run(tmp_path, 1, **flags) as run:
        second = run.samples(1)
    for s in second:
        assert s.tokens == [1, 2, *range(10, 15 + 3 * s.index % 40)]
    assert not {s.group_index for s in first} & {s.group_index for s in second}


def test_the_file_is_plain(tmp_path: Path) -> None:
    """msgpack, and nothing half-written beside it."""
    with Run(tmp_path) as run:
        run(0)
        run.data.save(0)
    files = sorted((tmp_path / "rollout").iterdir())
    assert [file.name for file in files] == ["april_carry_0.msgpack", "global_dataset_state_dict_0.json"]
    outer = msgspec.msgpack.decode(files[0].read_bytes())
    assert set(outer) == {"april", "format", "checksum", "content"}
    assert set(msgspec.msgpack.decode(outer["content"])) == {"state", "lag", "names", "ahead", "held", "finished"}


def test_a_checkpoint_without_carry_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that began with slime's own function goes on, and the log says what is missing."""
    Run(tmp_path).data.save(0)
    with Run(tmp_path, 1) as run:
        run(1)
    assert "goes on from a checkpoint that april has not written" in caplog.text


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A sample with something that is no plain value."""
    with pytest.raises(CheckpointError, match="cannot be saved: a object is no plain value"):
        write_state(tmp_path / "x", "slime", {"held": {"0.0": {"image": object()}}})
    assert not list(tmp_path.iterdir())


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
    user.seen.clear()
    rows: dict[int, list[Sample]] = {}
    for start in (0, 3):
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
    assert set(user.seen) >= set(rows)
    assert len(user.seen) == len(set(user.seen))  # about each response once


def test_what_an_agent_cannot_go_with() -> None:
    """Everything that takes rows for responses, and a second function that generates."""
    for flags, said in (
        ({"custom_reward_post_process_path": None}, "takes the mean reward over rows; add --custom-reward-post"),
        ({"use_dynamic_batch_size": False}, "slime's micro-batches .build_dp_schedule.; add --use-dynamic"),
        ({"log_passrate": True}, "--log-passrate takes n rows for a group, and april.rollout may bring several rows"),
        ({"custom_generate_function_path": f"{USER}.generate"}, "both generate the responses; leave out one of them"),
        ({"april": {"rollout": 7}}, "april.rollout must be the path of a function"),
        ({"april": {"rollout": f"{USER}.generate"}}, "april.rollout"),
    ):
        with Run(**AGENT | flags) as run, pytest.raises(ConfigError, match=said):
            run(0)


def test_a_plain_agent_of_one_conversation_is_what_april_does_itself() -> None:
    """Such a function runs in a thread."""
    with Run(april={"rollout": f"{USER}.plain_agent"}, custom_reward_post_process_path=AGENT[
        "custom_reward_post_process_path"]) as run:  # fmt: skip
        for s in run.samples(0):
            check(s, 0)


# ---------------------------------------------------------------- quorum and samples that fail


def watched(run: Any) -> list[Any]:
    """Batches of april, from its second on, as they are delivered."""
    scheduler, batches = run.scheduler, []

    def next_batch() -> Any:
        batches.append(scheduler_next())
        return batches[-1]

    scheduler_next, scheduler.next_batch = scheduler.next_batch, next_batch
    return batches


def by_hand(delivered: Any, *, scaled: bool) -> float:
    """From the first k - 1 other finishers, in plain Python."""
    k = len(delivered.cohort)
    others = [reward for index, reward in delivered.cohort if index != delivered.id.index][: k - 1]
    centred = (k - 1) / k * (delivered.reward - sum(others) / len(others))
    return centred / (float(np.std([delivered.reward, *others], ddof=1)) + 1e-6) if scaled else centred


@pytest.mark.parametrize(("estimator", "std", "scaled"), [
    ("grpo", True, True), ("gspo", False, False), ("reinforce_plus_plus_baseline", True, False),
])  # fmt: skip
def test_batches_are_full_and_their_advantages_are_of_the_first_finishers(
    estimator: str, std: bool, scaled: bool
) -> None:
    """N * n samples in parts of groups; each sample once; its baseline is that of the first k - 1 other finishers."""
    with Run(**QUORUM, advantage_estimator=estimator, grpo_std_normalization=std) as run:
        groups = run(0)
        batches = watched(run)
        seen = Counter(s.index for g in groups for s in g)
        late = parts = 0
        for rollout_id in range(1, 12):
            groups = run(rollout_id)
            samples = [s for g in groups for s in g]
            assert len(samples) == N * SIZE
            assert all(len({s.group_index for s in g}) == 1 for g in groups)
            parts += any(len(g) < SIZE for g in groups)
            seen.update(s.index for s in samples)
            raw, advantages = post_process_rewards(run.args, samples)
            assert raw == [s.response_length for s in samples]
            delivered = {(d.id.group, d.id.index): d for d in batches[-1].samples}
            for s, advantage in zip(samples, advantages, strict=True):
                d = delivered[s.group_index, s.index % SIZE]
                late += s.index % SIZE not in [index for index, _ in d.cohort]
                assert advantage == pytest.approx(by_hand(d, scaled=scaled), rel=1e-4, abs=1e-4)
        assert set(seen.values()) == {1}
        books = run.scheduler.ledger()
        run.scheduler.validate()
        assert len(run.data.drawn) == books["prompts"].observed == books["prompts"].delivered + books["prompts"].held
        assert late
        assert parts


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
    with pytest.raises(RolloutError, match="goes with --rollout-function-path april"):
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
    args = namespace(n_samples_per_prompt=SIZE, april={"group_quorum": 0.5}, advantage_estimator="reinforce_plus_plus")
    function = make_generate_rollout([simulated("e0")], check=True)
    groups = function(args, 0, DataSource(args)).samples
    function.function.close()
    assert "advantage" not in groups[0][0].metadata["april"]
    assert sum(map(len, groups)) == N * SIZE
