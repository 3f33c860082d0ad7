"""The best settings for a workload, found by simulating few of them: for ``april plan``, and for a run's auto."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from auto_questions import NOW, question
from records import command, recorded, rewritten

import april
from april.core.types import OnStale, Refill, Work
from april.engines.simulated.decode_cost import DecodeCost
from april.simulate import plan as planning
from april.simulate.choose import choose as answer
from april.simulate.choose import space_of
from april.simulate.choose import workload_of as asked_workload
from april.simulate.plan import BRIEF, EQUAL_SPEED, CandidateResult, SearchSpace, choose, coarse_grid, plan
from april.simulate.plan_run import notes, settings
from april.simulate.recorded_workload import workload_of
from april.simulate.run import measure
from april.simulate.workload import Placement, Schedule, Workload
from april.testing import FakeEngine
from april.view.units import cost_of_a_step, three_digits

SMALL = Workload(groups=8, samples=4, engines=2, max_response_len=2000, median_len=500)


def expect(workload: Workload, schedule: Schedule, steps: int, ramp: int) -> CandidateResult:
    """One candidate, simulated for so many steps."""
    return planning._row(replace(workload, steps=steps, ramp=ramp), schedule)


def row(over: int, speed: float, share: float, **changes: Any) -> CandidateResult:
    """One with N' groups."""
    return CandidateResult(
        schedule=Schedule(over, Refill.NONE, 8 * over), tokens_per_s=speed, off_policy_share=share,
        staleness_mean=share, staleness_max=1, step_s=1.0, long=True, **changes,
    )  # fmt: skip


def test_the_fastest_within_the_limit_is_chosen() -> None:
    """Of those as fast the youngest; without one within the limit the youngest of all."""
    sync, some, more, most = row(8, 1.0, 0.0), row(10, 1.5, 0.3), row(16, 2.0, 0.7), row(24, 2.0 + EQUAL_SPEED, 0.9)
    rows = [sync, some, more, most]
    assert choose(rows, 1.0) is more
    assert choose(rows, 0.7) is more
    assert choose(rows, 0.69) is some
    assert choose([*rows, row(9, 1.6, 0.5)], 0.6).schedule.over == 9
    assert choose(rows, 0.0) is sync
    assert choose(rows[1:], 0.1) is some


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_brief_run_says_what_a_long_one_does(seed: int) -> None:
    """Where places are full, within 1 %: the lengths that happen to fall into it do not count."""
    workload, refill = replace(SMALL, seed=seed), Schedule(8, Refill.SAMPLE, 32)
    brief, long = expect(workload, refill, *BRIEF), expect(workload, refill, 160, 10)
    assert brief.tokens_per_s == pytest.approx(long.tokens_per_s, rel=0.01)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with N' = 12, and a trainer that takes 3 s on the same GPUs."""
    path = tmp_path_factory.mktemp("record") / "run.jsonl"
    recorded(path, SMALL.one_shot(12), 60, workload=SMALL, train_s=3.0)
    return path


def test_a_record_is_planned_for_as_the_run_was(record: Path) -> None:
    """Batch, engines, costs, lengths, trainer: the expectation for its own settings is what it did, within 10 %."""
    seen = workload_of(record)
    assert (seen.groups, seen.samples, seen.engines, seen.prompt_len) == (8, 4, 2, SMALL.prompt_len)
    assert seen.train_s == pytest.approx(3.0, rel=0.01)
    assert seen.placement is Placement.COLOCATED
    steps = seen.cost.step_s(8, 8 * 500) / SMALL.cost.step_s(8, 8 * 500)
    assert steps == pytest.approx(1.0, rel=0.05)
    lines = [json.loads(line) for line in record.read_text().splitlines() if '"Batch"' in line]
    took = (lines[-1][0] - lines[9][0]) / (len(lines) - 10)
    assert expect(seen, seen.one_shot(12), 60, 10).step_s == pytest.approx(took, rel=0.1)


def test_the_command(record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record or a file of lengths: a table, and a configuration that april takes; mistakes in a sentence."""
    monkeypatch.setattr(planning, "ENOUGH_RESPONSES", 32)  # so a batch of 32 gets no more steps than a larger batch
    out = tmp_path / "plan"
    code, said = command("plan", record, "--out", out)
    assert code == 0, said
    assert "N' = 8" in said
    assert re.search(r"; a step takes [\d.]+ .?s, plus [\d.]+ .?s for each response", said)
    written = json.loads((out / "plan.json").read_text())
    assert written["best"]["tokens_per_s"] > 1.2 * written["sync"]["tokens_per_s"]
    config = april.Config.from_yaml(out / "plan.yaml")
    assert (config.rollout_batch_size, config.n_samples_per_prompt) == (8, 4)
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text("12\nmany\n")
    for arguments, expected, words in (
        ((record, "--gpu", "h100"), 2, "leave out gpu"), ((lengths,), 2, "line 2"),
        ((tmp_path / "nothing",), 1, "cannot be read"),
    ):  # fmt: skip
        code, said = command("plan", *arguments)
        assert (code, words in said) == (expected, True), said


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        (DecodeCost(0.00759, 8.13e-6, 5.87e-8), "7.59 ms, plus 8.13 us for each response in flight and 58.7 us"),
        (DecodeCost(0.0121, 0.0031, 3.4157870e-4), "12.1 ms, plus 3.1 ms for each response in flight and 342 ms"),
        (DecodeCost(2.0, 9.9996e-4, 0.0), "2 s, plus 1 ms for each response in flight and 0 ns"),
    ],
    ids=["GPU", "CPU", "slow"],
)
def test_times_have_units_of_their_size(cost: DecodeCost, words: str) -> None:
    """On a GPU, on a CPU, and at the border between two units: never more than a person reads at a glance."""
    shown = cost_of_a_step(cost).replace("\N{MICRO SIGN}", "u")
    assert shown == f"{words} for each 1,000 tokens of these in memory"
    assert [three_digits(x) for x in (0.03118, 7.5, 74.66, 99.96, 1234.4)] == ["0.0312", "7.5", "74.7", "100", "1234"]


@pytest.mark.parametrize("train_s", [0.65, 0.7])
def test_a_trainer_that_is_about_as_fast_as_its_engines(train_s: float, tmp_path: Path) -> None:
    """Steps in which it trained the rest of a batch and most of the next one are not taken for all."""
    path, tiny = tmp_path / "ahead.jsonl", replace(SMALL, groups=4, max_response_len=600, median_len=150)
    recorded(path, Schedule(4, Refill.SAMPLE, 16, 2), 18, workload=tiny, train_s=train_s, fetch_ahead=1)
    assert workload_of(path).train_s < 1.06 * train_s


def test_without_older_tokens_tail_batching_is_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is faster than N' = N at staleness 0; what speculative decoding brings is said of both."""
    monkeypatch.setattr(planning, "MAX_STEP_FACTOR", 2)
    space = SearchSpace(base=SMALL.one_shot(8), free=(), tail_batching=True)
    found = plan(replace(SMALL, speculative="1:1.3,4:1"), space, max_off_policy_share=0.0)
    assert found.best.schedule.tail_batching
    assert (found.best.staleness_max, found.best.off_policy_share) == (0, 0.0)
    assert found.best.tokens_per_s > found.base.tokens_per_s
    assert 1.0 < found.speculative_gains[0] < found.speculative_gains[1]


def test_masked_tokens_are_no_gain() -> None:
    """What is too old to be trained does not make a candidate faster."""
    tight = replace(SMALL, max_staleness=1, on_stale=OnStale.MASK, steps=30, ramp=10)
    many = SMALL.one_shot(32)
    found = measure(tight, many)
    assert found["masked_tokens"] > 0
    kept = found["trained_tokens"] / (found["trained_tokens"] + found["masked_tokens"])
    batch = 8 * 4 * float(tight.length_sample.mean())
    row = expect(tight, many, 30, 10)
    assert row.tokens_per_s * row.step_s == pytest.approx(batch * kept)


def configured(record: Path, target: Path, config: april.Config, **settings: Any) -> Path:
    """The record with another configuration, and with other settings of its core."""

    def change(line: list[Any]) -> list[Any]:
        if line[1] == "Record":
            line[2]["settings"] |= settings
            line[2]["config"] = config.to_mapping()
        return line

    return rewritten(record, target, change)


RUN = april.Config(
    rollout_batch_size=8, n_samples_per_prompt=4, over_sampling_batch_size=12, max_response_len=2000, seed=7,
    sampling={"temperature": 0.7, "stop_token_ids": [5], "stop": ["\n\n", "# no"], "min_tokens": 2}, epochs=3,
    max_failed_groups=50, function_timeout_s=None, stall_timeout_s=60, on_failed_sample="shrink", min_group_size=3,
    max_filtered_groups=9, allow_mismatch=True, on_data_end="short", max_age=30, max_held_tokens=10**6,
    outage_deadline_s=99,
    engine={"kind": "vllm", "urls": ["http://a:1"], "api_key": "k-of-mine", "model": "m", "max_token_loss": 50},
)  # fmt: skip
CHOSEN = {"over_sampling_batch_size", "refill", "max_in_flight", "group_quorum", "generation", "max_off_policy_share"}


@pytest.mark.parametrize("schedule", [Schedule(8, Refill.SAMPLE, 24, None, 0.75), SMALL.one_shot(10)])
def test_a_plan_is_the_run_but_for_what_it_chose(record: Path, tmp_path: Path, schedule: Schedule) -> None:
    """Sampling, seed, limits and engine, all but the key of the servers, which is named."""
    workload = workload_of(configured(record, tmp_path / "run.jsonl", RUN))
    path = tmp_path / "plan.yaml"
    path.write_text(settings(workload, replace(row(8, 1.0, 0.5), schedule=schedule)))
    assert "k-of-mine" not in path.read_text() + (tmp_path / "run.jsonl").read_text()
    planned = april.Config.from_yaml(path)
    kept = [name for name in RUN.to_mapping() if name not in CHOSEN]
    assert [planned.to_mapping()[name] for name in kept] == [RUN.to_mapping()[name] for name in kept]
    assert planned.samples_in_flight == schedule.in_flight
    assert any("engine.api_key_env" in note for note in notes(workload, row(8, 1.0, 0.0)))


def test_the_configuration_is_in_the_record_and_its_key_is_not(tmp_path: Path) -> None:
    """What the scheduler was given, as a configuration takes it."""
    config = RUN.model_copy(update={"sampling": april.SamplingConfig()})
    engine = FakeEngine()
    path = tmp_path / "run.jsonl"
    april.RolloutScheduler(config, prompts=[[5]], reward=None, engines=[engine], record=path).close()
    assert "k-of-mine" not in path.read_text()
    head = json.loads(path.read_text().splitlines()[0])[2]
    assert april.Config.from_mapping(head["config"]).to_mapping() == config.to_mapping() == head["config"]


@pytest.mark.parametrize(
    "changes",
    [{"over_sampling_batch_size": "auto", "group_quorum": "auto", "max_off_policy_share": 0.5},
     {"refill": "sample", "max_in_flight": "auto"}, {"generation": "continuous", "refill": "sample"},
     {"partial_rollout": False}, {"on_stale": "mask"}],
)  # fmt: skip
def test_whatever_a_run_was_its_plan_is_a_configuration(record: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Each schedule as the configuration that runs it; settings that made sense only before are not in its way."""
    run = april.Config(rollout_batch_size=8, n_samples_per_prompt=4, max_response_len=2000, seed=3, **changes)
    workload = workload_of(configured(record, tmp_path / "run.jsonl", run))
    for schedule in (*coarse_grid(workload, SearchSpace.full(workload)), Schedule(8, Refill.SAMPLE, 24, 5, 0.75)):
        planned = april.Config(**yaml.safe_load(settings(workload, replace(row(8, 1.0, 0.0), schedule=schedule))))
        tail = schedule.tail_batching
        assert (planned.seed, planned.auto, planned.partial_rollout) == (3, (), not tail)
        assert planned.on_stale == (OnStale.FINISH if tail else workload.on_stale)
        core = planned.core_settings(has_reward=False, group_reward=False, run_id=0)
        wanted = workload.core_settings(schedule)
        for name in ("over_sampling_batch_size", "max_in_flight", "refill", "group_quorum", "generation"):
            if name != "over_sampling_batch_size" or schedule.refill is Refill.NONE:
                assert getattr(core, name) == getattr(wanted, name), (name, schedule)


def test_what_a_plan_cannot_know_is_named(record: Path, tmp_path: Path) -> None:
    """In the file and on the terminal: a filter, and what a quorum asks of the loss."""
    old = workload_of(configured(record, tmp_path / "run.jsonl", RUN, has_filter=True))
    parts = replace(row(8, 1.0, 0.4), schedule=Schedule(8, Refill.SAMPLE, 24, None, 0.75))
    text = " ".join(settings(old, parts).replace("# ", "").split())
    for words in ("batch.advantages()", 'april.loss_weights(mask, "dapo")', "40% of the trained tokens", "filter="):
        assert words in text
        assert any(words in note for note in notes(old, parts))
    assert "planned from lengths, without a run: sampling, engine, seed" in notes(SMALL, row(8, 1.0, 0.0))[0]
    assert notes(workload_of(configured(record, tmp_path / "run.jsonl", RUN)), row(8, 1.0, 0.0))[1:] == []
    assert notes(replace(old, doubts=("they may be wrong",)), parts)[0] == "they may be wrong"
    masks = replace(SMALL, on_stale=OnStale.MASK)
    assert any("loss_mask 0" in note for note in notes(masks, row(8, 1.0, 0.0)))


# ---------------------------------------------------------------- what a run is answered whose settings are auto


def rows(monkeypatch: pytest.MonkeyPatch, value: Callable[[Schedule], tuple[float, float]]) -> None:
    """Simulations of which is known what they give: (speed, off-policy share)."""
    monkeypatch.setattr(planning, "_row", lambda workload, s: replace(row(8, *value(s)), schedule=s))


def test_what_is_hardly_better_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 % may be noise, and a change costs a few steps."""
    rows(monkeypatch, lambda s: (102.0 if s.over == 6 else 100.0, 0.1))
    found = answer(question())
    assert found.best == NOW
    assert found.speed_up == 1.0


def test_what_is_better_is_chosen_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a margin to it; and what is beyond it is left, though it is faster."""
    rows(monkeypatch, lambda s: (100.0 + 10 * s.over, s.over / 16))
    found = answer(question(max_off_policy_share=0.5))
    assert found.best.over_sampling_batch_size == 7
    assert found.off_policy_share <= 0.97 * 0.5
    beyond = answer(question(max_off_policy_share=0.5, now=replace(NOW, over_sampling_batch_size=12)))
    assert beyond.best.over_sampling_batch_size == 7
    at_limit = replace(NOW, over_sampling_batch_size=8, max_in_flight=32)
    assert answer(question(max_off_policy_share=0.5, now=at_limit)).best == at_limit


def test_no_quorum_below_three_quarters_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast it is, by auto and by a plan: trainings with 0.5 fell. A run whose checkpoint has it leaves it."""
    rows(monkeypatch, lambda s: (100.0 + 100.0 * (1.0 - s.quorum) + s.over, 0.1))
    assert {s.quorum for s in coarse_grid(SMALL, SearchSpace.full(SMALL))} == {1.0, 0.75}
    now = replace(NOW, over_sampling_batch_size=12, max_in_flight=96, group_quorum=0.5)
    for q in (question(samples=8), question(samples=8, now=now)):
        found = answer(q)
        assert found.best.group_quorum == 0.75
    fixed = question(samples=8, now=now, free=(Work.OVER_SAMPLING, Work.IN_FLIGHT))
    assert answer(fixed).best.group_quorum == 0.5  # the user's own


@pytest.mark.parametrize("on_stale", [OnStale.MASK, OnStale.DROP])
def test_what_would_be_refused_is_not_proposed(on_stale: OnStale) -> None:
    """More groups than can be trained in time are no candidates, also where the configuration would take them."""
    q = question(max_staleness=1, on_stale=on_stale)
    found = coarse_grid(asked_workload(q), space_of(q))
    assert max(s.over for s in found if s.refill is Refill.NONE) == 8


def test_what_is_in_work_is_always_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a quorum without more in work, with which a run begins: or another would pass for it."""
    rows(monkeypatch, lambda s: (100.0 + s.over, 0.1))
    now = replace(NOW, group_quorum=0.5)
    q = question(now=now, samples=8, free=(Work.OVER_SAMPLING, Work.IN_FLIGHT))
    assert coarse_grid(asked_workload(q), space_of(q))[0] == space_of(q).base
    found = answer(q)
    assert found.best.over_sampling_batch_size > 4
    assert found.speed_up == pytest.approx(112.0 / 104.0)
    strict = replace(q, max_staleness=0)
    assert answer(strict).best == now
