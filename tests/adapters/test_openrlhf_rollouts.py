"""Rollouts before OpenRLHF's contract: every prompt settled once, every token stamped, nothing lost at a restart."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from real_schedulers import LENGTHS, VOCAB, assert_nothing_is_left

from adapters.openrlhf_stand_in import GROUPS, ROWS, SAMPLES, Loader, LoaderWithWorkers, Run, row
from april.adapters.openrlhf.rollouts import Rollouts
from april.core.types import DropReason, Prompt
from april.driver.rewards import Response
from april.engines.simulated.engine import synthetic_response
from april.errors import CheckpointError, RolloutError

ALL = Counter(row(i)[1] for i in range(ROWS))


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    assert_nothing_is_left()


@pytest.mark.parametrize("loader", [Loader, LoaderWithWorkers])
def test_every_prompt_is_delivered_once_per_episode(loader: type[Loader]) -> None:
    """Two episodes; aborted and resumed responses among them; the books balance."""
    with Run(loader=loader) as run:
        run.episode()
        assert Counter(run.labels) == ALL
        run.episode()
        assert Counter(run.labels) == Counter(dict.fromkeys(ALL, 2))
        assert sum(r["extra_logs"]["april/resumes"] > 0 for r in run.responses) > 0
        assert max(r["extra_logs"]["april/staleness"] for r in run.responses) > 0
    ledger = run.rollouts.ledger
    assert (ledger["prompts"].delivered, ledger["prompts"].held) == (2 * ROWS, 0)
    assert ledger["tokens"].delivered == ledger["tokens"].observed
    assert run.rollouts._scored == {}


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 9, 23])
def test_the_end_of_the_data(rows: int) -> None:
    """Whatever N does to the number of prompts: the last batch may be short, and the episode ends after it."""
    with Run(rows=rows) as run:
        run.episode()
        assert sorted(run.labels, key=int) == [row(i)[1] for i in range(rows)]
        assert len(run.responses) == rows * SAMPLES


def test_a_response_is_what_the_executor_would_have_returned() -> None:
    """Tokens, log-probabilities and masks of one length; the cut ones are as if they had not been cut."""
    with Run() as run:
        numbers: dict[int, Any] = {}
        while run.step():
            assert run.rollouts.batch is not None
            samples = run.rollouts.batch.samples
            numbers |= {id(r): s for r, s in zip(run.responses[-len(samples) :], samples, strict=True)}
    for response in run.responses:
        sample = numbers[id(response)]
        ids, (start, end) = response["observation_tokens"], response["action_ranges"][0]
        assert (start, end, len(response["action_ranges"])) == (2, len(ids), 1)
        assert " ".join(map(str, ids[:start])) == response["prompt"]
        count = min(LENGTHS.sample(*sample.id), 100)
        tokens, logprobs = synthetic_response(np.array(ids[:start], np.int32), sample.id, 0, count, VOCAB, (0,))
        assert response["truncated"] == (count == 100 and ids[-1] != 0)
        assert ids[start:-1] == tokens.tolist()[:-1]
        assert response["rollout_log_probs"] == [0.0, 0.0, *logprobs.tolist()]
        assert response["reward"] == len(ids)
        assert response["scores"] == 0.5
        assert response["images"] is response["mm_train_inputs"] is None
    assert len({tuple(sorted(r["extra_logs"])) for r in run.responses}) == 1
    assert {"words", "april/off_policy_share", "april/version_first"} <= set(run.responses[0]["extra_logs"])


def test_rewards_see_the_whole_conversation() -> None:
    """The function is asked once per response, with prompt and label of its row."""
    with Run() as run:
        run.episode()
    asked = [call for engine in run.engines for call in engine.judged]
    assert len(asked) == ROWS * SAMPLES
    assert all(call[0].startswith(call[1]) and call[1:] == row(int(call[2])) for call in asked)
    assert all(engine.judged for engine in run.engines)


def test_without_a_reward_function_the_reward_model_is_left_to_openrlhf() -> None:
    """``reward`` is None, and nobody is asked."""
    with Run(reward__remote_url=None) as run:
        run.step()
    assert {r["reward"] for r in run.responses} == {r["scores"] for r in run.responses} == {None}
    assert not any(engine.judged for engine in run.engines)


def test_versions_follow_the_transfers() -> None:
    """One per transfer, two between steps are two, none is none; a batch says under which it was delivered."""
    with Run() as run:
        seen = []
        for pushes in (1, 0, 2, 1):
            run.step(pushes)
            assert run.rollouts.batch is not None
            seen.append(run.rollouts.batch.version.n)
        assert seen == [0, 1, 1, 3]


def test_engines_that_differ_are_named() -> None:
    """One that was started anew has old weights, and nobody may train on its tokens."""
    with Run() as run:
        run.step()
        run.engines[0].counted += 1
        with pytest.raises(RolloutError, match=r"the engines have got weights \[2, 1\] times"):
            run.step()


def resumed(before: Run, saved: Any, **changes: Any) -> Run:
    """A new process that goes on from a checkpoint: the trainer puts its weights into new engines first."""
    after = Run(**changes)
    after.loader.load_state_dict(saved)
    after.push()
    return after


@pytest.mark.parametrize("saved_at", range(1, 7))
def test_a_run_goes_on_from_its_checkpoint(saved_at: int) -> None:
    """At every step, those after the last prompt was drawn too: nothing is lost and nothing delivered twice."""
    with Run() as before:
        for _ in range(saved_at):
            before.step()
        saved = before.loader.state_dict()
        trained = list(before.labels)
        held = before.rollouts.scheduler.ledger()["tokens"].held  # type: ignore[union-attr]
        version = before.rollouts.scheduler.version  # type: ignore[union-attr]
        before.step()  # goes on, and is killed
    with resumed(before, saved) as after:
        more = after.step()
        assert more == (saved_at < 6)
        assert after.rollouts.scheduler is not None
        assert after.rollouts.scheduler.version.n == version.n + 1
        if more:
            after.episode()
        assert Counter(trained + after.labels) == ALL
        after.episode()  # the next one begins with its first prompt
        assert Counter(trained + after.labels) == Counter(dict.fromkeys(ALL, 2))
    assert held > 0 or saved_at > 1  # all in work may have ended together
    assert after.rollouts.ledger["tokens"].balanced


def test_a_restart_after_a_restart() -> None:
    """The second checkpoint holds what came from the first."""
    trained: list[str] = []
    saved = None
    for _ in range(4):
        with Run() as run:
            if saved is not None:
                run.loader.load_state_dict(saved)
                run.push()
            run.step()
            trained += run.labels
            saved = run.loader.state_dict()
    with resumed(run, saved) as last:
        last.episode()
    assert Counter(trained + last.labels) == ALL


def test_an_asynchronous_trainer_is_behind() -> None:
    """Its checkpoint has the weights of the batch, though the engines have had fewer transfers: versions are right."""
    with Run() as before:
        before.step(0)
        before.step(0)
        before.step(1)
        saved = before.loader.state_dict()  # all three are trained on when it is written
    with resumed(before, saved) as after:
        after.step()
        assert after.rollouts.batch is not None
        assert after.rollouts.batch.version == (1, 3)


def test_prompts_that_were_drawn_too_early_are_saved() -> None:
    """What april's books do not hold yet is kept beside them."""
    with Run() as before:
        before.step()
        ahead = next(before.rollouts._prompts)
        saved = before.loader.state_dict()
        trained = list(before.labels)
    with resumed(before, saved) as after:
        after.episode()
    assert ahead["label"] in after.labels
    assert Counter(trained + after.labels) == ALL


def test_checkpoints_of_others() -> None:
    """Without april's part april begins anew; a damaged part is named."""
    with Run() as run:
        run.loader.load_state_dict({"pass": 0, "at": 4})
        run.episode()
        assert len(run.labels) == ROWS - 4
        run.step()
        saved = run.loader.state_dict()
    assert saved["april"].dtype.itemsize == 1
    changed = saved["april"].clone()
    changed[len(changed) // 2] ^= 1
    for damaged, said in ((saved["april"][:-9], "cannot be read"), (changed, "is damaged: its checksum does not fit")):
        with Run() as other, pytest.raises(CheckpointError, match=f"april's state in the loader's state {said}"):
            other.loader.load_state_dict({**saved, "april": damaged})


def test_dynamic_filtering() -> None:
    """Groups whose mean score is on or outside of the bounds are replaced, and dropped by name."""

    def scores(query: str, prompt: str, label: str) -> Any:
        return {"rewards": 1.0, "scores": [0.0, 0.5, 1.0][int(label) % 3], "extra_logs": None}

    with Run(algo__dynamic_filtering_enable=True) as run:
        for engine in run.engines:
            engine.answer = scores
        run.episode()
    assert sorted(run.labels, key=int) == [str(i) for i in range(ROWS) if i % 3 == 1]
    assert run.rollouts.ledger["prompts"].dropped == {DropReason.FILTERED: 16}


def test_what_a_rejected_group_was_given_is_kept_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that was taken just before the verdict asks for it after it; and nobody does later."""
    in_range = Rollouts._in_range
    rejected = 0

    def judged(self: Rollouts, prompt: Prompt, responses: Sequence[Response]) -> bool:
        nonlocal rejected
        kept = in_range(self, prompt, responses)
        rejected += not kept
        assert {response.sample_id for response in responses} <= set(self._scored)
        return kept

    def scores(query: str, prompt: str, label: str) -> Any:
        return {"rewards": 1.0, "scores": [int(label) % 2 / 2]}

    monkeypatch.setattr(Rollouts, "_in_range", judged)
    with Run(algo__dynamic_filtering_enable=True) as run:
        for engine in run.engines:
            engine.answer = scores
        seen: list[set[int]] = []
        while run.step():
            scheduler = run.rollouts.scheduler
            assert scheduler is not None
            scored = {sample_id.group for sample_id in list(run.rollouts._scored)}
            seen.append(scored - scheduler.held_groups())
    assert rejected
    assert any(seen)
    assert not any(first & third for first, third in zip(seen, seen[2:], strict=False))


def test_a_reward_function_that_fails_costs_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenRLHF would train it without a reward; april tries again, then drops the group by name."""
    monkeypatch.setattr("april.config.settings.RETRY_PAUSE_S", 0.0)
    failures: Counter[str] = Counter()

    def fails(query: str, prompt: str, label: str) -> Any:
        if label == "3" or (label == "5" and not failures[label]):
            failures[label] += 1
            raise OSError("no answer")
        return {"rewards": 1.0} if label != "7" else {}

    with Run() as run:
        for engine in run.engines:
            engine.answer = fails
        run.episode()
    assert Counter(run.labels) == ALL - Counter({"3": 1, "7": 1})
    assert run.rollouts.ledger["prompts"].dropped == {DropReason.FAILED: 2}
    assert failures["5"] == 1


def test_a_reward_that_fails_for_one_response_may_cost_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """on_failed_sample: replace. Its group is delivered whole, with a fresh response in its place."""
    monkeypatch.setattr("april.config.settings.RETRY_PAUSE_S", 0.0)
    failures: Counter[str] = Counter()

    def fails(query: str, prompt: str, label: str) -> Any:
        if label == "3" and failures[label] < 5:  # of two responses; three tries give one up
            failures[label] += 1
            raise OSError("no answer")
        return {"rewards": 1.0}

    with Run({"over_sampling_batch_size": 2 * GROUPS, "on_failed_sample": "replace"}) as run:
        for engine in run.engines:
            engine.answer = fails
        run.episode()
    assert Counter(run.labels) == ALL
    assert len(run.responses) == ROWS * SAMPLES
    assert run.rollouts.ledger["prompts"].dropped == {}


def test_logs_that_differ_are_refused() -> None:
    """OpenRLHF stacks them by name, and would mix up the samples."""
    with Run() as run:
        for engine in run.engines:
            engine.answer = lambda query, prompt, label: {"rewards": 1.0, "extra_logs": {label: 1.0}}
        with pytest.raises(RolloutError, match="extra_logs of the reward function are"):
            run.step()


def test_without_over_sampling_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """It runs, and waits for every response."""
    with caplog.at_level(logging.WARNING, "april"), Run({}) as run:
        run.step()
        assert len(run.labels) == GROUPS
    assert "set --april.over_sampling_batch_size above --rollout.batch_size" in caplog.text
