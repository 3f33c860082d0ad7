"""The rollout function before slime's contract: nothing is lost, every token is stamped, hooks and flags are honoured.

docs/slime.md has what was run on the real slime and miles.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from real_schedulers import LENGTHS, VOCAB, assert_nothing_is_left

from adapters import slime_functions_of_a_user as user
from adapters.slime_stand_in import DataSource, Sample, Status, Tokenizer, installed, namespace
from april.adapters.slime import GenerateRollout, generate_rollout, make_generate_rollout
from april.adapters.slime.hooks import SlimeHooks
from april.core.types import DropReason
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.engine import SimulatedEngine, by_sample_key, synthetic_response
from april.errors import DataExhausted, RolloutError

USER = "adapters.slime_functions_of_a_user"


@pytest.fixture(autouse=True)
def framework() -> Iterator[None]:
    with installed():
        yield
    assert_nothing_is_left()


def simulated(name: str, slots: int = 64, **options: Any) -> SimulatedEngine:
    """0.5 ms a token, so that rollouts end in the middle of responses."""
    lengths = by_sample_key(LENGTHS)
    return SimulatedEngine(name, DecodeCost(5e-4, 0.0, 0.0), lengths, max_running=slots, vocab_size=VOCAB, **options)


class Run:
    """A rollout function on two simulated engines, with its data source; also a context manager."""

    def __init__(self, **flags: Any) -> None:
        slots = flags.pop("slots", 64)
        self.args = namespace(**flags)
        self.data = DataSource(self.args)
        engines = [simulated("e0", slots), simulated("e1", slots, stream_interval_s=1e-3)]
        self.function = make_generate_rollout(engines, check=slots == 64)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.function.function.close()

    def __call__(self, rollout_id: int) -> list[list[Sample]]:
        self.output = self.function(self.args, rollout_id, self.data)
        return self.output.samples

    @property
    def scheduler(self) -> Any:
        return self.function.function.sessions[id(self.data)].scheduler

    @property
    def hooks(self) -> Any:
        return self.function.function.sessions[id(self.data)]._hooks


def check(sample: Sample, rollout_id: int) -> None:
    """What slime's trainer asks of a sample, and that it is the uncut synthetic response."""
    april = sample.metadata["april"]
    prompt, response = sample.tokens[: -sample.response_length], sample.tokens[-sample.response_length :]
    assert prompt == Tokenizer().encode(sample.prompt, add_special_tokens=False)
    key = (sample.group_index, sample.index % 2)
    tokens, logprobs = synthetic_response(prompt, key, 0, min(LENGTHS.sample(*key), 100), VOCAB, (0,))
    if sample.status is Status.COMPLETED:
        tokens[-1] = 0
    else:
        assert (sample.status, sample.response_length) == (Status.TRUNCATED, 100)
    assert response == tokens.tolist()
    assert sample.rollout_log_probs == logprobs.tolist()
    assert len(sample.loss_mask) == sample.response_length
    assert sample.response == " ".join(map(str, response))
    assert sample.reward == sample.response_length
    ends = [end for _, end, _ in april["spans"]]
    assert [start for start, _, _ in april["spans"]] == [0, *ends[:-1]]
    assert ends[-1] == sample.response_length
    assert len(sample.weight_versions) == len(april["spans"])
    oldest = int(april["spans"][0][2].partition(".")[2])
    assert april["version"] == f"0.{rollout_id}"
    assert april["staleness"] == rollout_id - oldest
    assert sample.metadata.get("start_rollout_id", rollout_id) == oldest


def test_nothing_is_lost_in_twenty_rounds() -> None:
    """N = 32, N' = 64, n = 8: drawn == delivered + held; each group once, whole, with everything a trainer needs."""
    sizes = {"rollout_batch_size": 32, "over_sampling_batch_size": 64, "n_samples_per_prompt": 8}
    with Run(**sizes, slots=256, prompts=10_000) as run:
        delivered: Counter[int] = Counter()
        for rollout_id in range(20):
            groups = run(rollout_id)
            assert [len(g) for g in groups] == [8] * 32
            for group in groups:
                assert len({s.group_index for s in group}) == 1
                assert [s.index - group[0].index for s in group] == list(range(8))
                delivered[group[0].group_index] += 1
                for s in group:
                    assert s.reward == s.response_length == len(s.rollout_log_probs) == len(s.loss_mask)
                    assert all(s.loss_mask)
        books = run.scheduler.ledger()
        run.scheduler.validate()
        assert set(delivered.values()) == {1}
        assert len(delivered) == books["prompts"].delivered == 640
        assert len(run.data.drawn) == books["prompts"].observed == 640 + books["prompts"].held
        assert set(delivered) <= set(run.data.drawn)
        assert not sum(books["prompts"].dropped.values())
        assert not sum(books["tokens"].dropped.values())


def test_every_token_is_stamped_and_exact() -> None:
    """Spans, versions, staleness, log-probabilities and text of every sample, over cuts and weight updates."""
    with Run() as run:
        resumed = 0
        for rollout_id in range(12):
            for s in (s for g in run(rollout_id) for s in g):
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
            for s in (s for g in run(rollout_id) for s in g):
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


# ---------------------------------------------------------------- hooks


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


def test_a_reward_that_fails_ends_the_rollout_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What slime's function would raise, after it was tried again; the next call may go on."""
    monkeypatch.setattr("april.config.settings.RETRY_PAUSE_S", 0.0)
    with Run(custom_rm_path=f"{USER}.failing_reward") as run, pytest.raises(RolloutError, match="the judge is down"):
        run(0)


def test_a_custom_generate_function_generates() -> None:
    """--custom-generate-function-path: its sample is the truth, april's books agree."""
    with Run(custom_generate_function_path=f"{USER}.generate") as run:
        for rollout_id in range(6):
            for s in (s for g in run(rollout_id) for s in g):
                goal = 5 + 3 * s.index % 40
                assert s.tokens == [1, 2, *range(10, 10 + goal)]
                assert s.reward == s.response_length == goal == s.metadata["april"]["spans"][-1][1]
        books = run.scheduler.ledger()
        assert books["prompts"].observed == len(run.data.drawn) == 18 + books["prompts"].held


# ---------------------------------------------------------------- forms and surroundings


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


def test_a_state_has_what_the_filter_has_just_rejected() -> None:
    """It may be taken before the verdict and asked for its samples after it: they stay until the next batch."""
    with Run(dynamic_sampling_filter_path=f"{USER}.keep_short") as run:
        run(0)
        hooks, rejected = run.hooks, 0
        take = hooks.take

        def looking() -> Any:
            nonlocal rejected
            rejected += sum(hooks.dropped.values())
            out = [sample for sample in hooks.held if sample.group not in run.scheduler.held_groups()]
            assert len(out) >= 2 * sum(hooks.dropped.values())
            return take()

        hooks.take = looking
        for rollout_id in range(1, 6):
            run(rollout_id)
        assert rejected


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
