"""The study: its design is fixed, its trainings repeat and go on after a stop, its figures are what they are called."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import april
from april.core.batch import Batch
from april.driver.rewards import Response
from april.engines.transformers.engine import TransformersEngine
from april.testing import rollouts, run_virtual
from benchmarks.study import analysis, countdown, design, page, runner, sorting
from benchmarks.study.__main__ import FIGURES, RESULTS, ROOT, main
from benchmarks.study.claims import HOLDS, OPEN, REFUTED, UNDECIDED, judge
from benchmarks.study.clockwork import TimedEngine
from benchmarks.study.evaluation import right_at_once, sampled_drafts
from benchmarks.study.losses import LOSSES
from benchmarks.study.statistics import paired, share_interval, t_quantile, with_censored
from benchmarks.study.tasks import TASKS, Question
from benchmarks.study.training import QUARTERLY, Evaluation, Outcome, Settings, config_of
from benchmarks.study.warmup import build_model

SMOKE = design.DESIGN.with_name("smoke.toml")
DESIGN = design.read()
TRAININGS = DESIGN.trainings()
pytestmark = pytest.mark.usefixtures("one_thread")


# ---------------------------------------------------------------- the design


def test_the_design_is_whole_and_within_its_budget() -> None:
    """Every claim names trainings that are run; primary arms have 11 pairs or more; nobody has a rate of its own."""
    assert DESIGN.core_hours() <= DESIGN.budget_core_hours
    for task in TASKS:
        for arm in ("sync", "over-2"):
            assert len([n for n in TRAININGS if n.startswith(f"{task}/{arm}/")]) >= 11
    rates: dict[str, set[float]] = {}
    for name, settings in TRAININGS.items():
        rate = settings.learning_rate / DESIGN.tasks[settings.task].learning_rate
        assert ("-rate" in name) == (rate != 1.0)
        rates.setdefault(settings.task, set()).add(rate)
        config_of(settings, _task_of(settings))
    assert rates["tail"] == {0.5, 1.0, 2.0}
    assert len({claim.id for claim in DESIGN.claims}) == len(DESIGN.claims)
    assert {s.delay for s in TRAININGS.values()} == {0, 1, 2, 5, 10, 20}
    asked = {"none", "behaviour", "tis", "icepop", "decoupled", "gspo", "sequence"}
    assert asked <= {s.loss for s in TRAININGS.values()} <= LOSSES.keys()


def _task_of(settings: Settings) -> Any:
    return TASKS["tail" if settings.task == "sorting" else settings.task]()


def test_a_claim_about_nothing_is_refused(tmp_path: Path) -> None:
    """A design that claims something of trainings that no block runs is an error before anything runs."""
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(SMOKE.read_text("utf-8").replace('arm = "over-2"', 'arm = "over-3"', 1), "utf-8")
    with pytest.raises(ValueError, match=r"claim no-worse names tail/over-3"):
        design.read(wrong)


# ---------------------------------------------------------------- trainings


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The whole study in small: directory of the outcomes, and where the page went."""
    out, root = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("root")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        assert main(["--design", str(SMOKE), "--out", str(out), "--root", str(root), "--workers", "0"]) == 0
    return out, root


def test_a_study_goes_on_on_another_machine(smoke: tuple[Path, Path], tmp_path: Path) -> None:
    """Published outcomes of the same settings are taken over, and never instead of what is there."""
    out, elsewhere = smoke[0], tmp_path / "out"
    trainings = design.read(SMOKE).trainings()
    there = runner.gather(out, trainings)
    other, *rest = trainings
    changed = dict(trainings) | {other: msgspec.structs.replace(trainings[other], learning_rate=1.0)}
    assert runner.take_over(there, elsewhere, changed) == len(rest)
    assert list(runner.missing(elsewhere, changed)) == [other]
    assert runner.take_over(there, elsewhere, changed) == 0
    assert runner.gather(elsewhere, {name: trainings[name] for name in rest}) == {
        name: outcome for name, outcome in there.items() if name != other
    }


def test_only_a_study_that_is_not_whole_goes_on_from_what_was_published(
    smoke: tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    """Of a whole one everything is run anew, so nobody takes published results for a repetition."""
    out, root = smoke[0], tmp_path / "root"
    there = runner.gather(out, design.read(SMOKE).trainings())
    results = root / RESULTS.relative_to(ROOT)
    results.parent.mkdir(parents=True)
    arguments = ["run", "--design", str(SMOKE), "--root", str(root), "--only", "tail/over-2/8", "--workers", "0"]
    part = dict([*there.items()][1:])
    for published, said in ((there, "0 of 1 trainings are there"), (part, "1 trainings were run before")):
        runner.write_results(results, published)
        elsewhere = tmp_path / str(len(published))
        shutil.copytree(out / "starts", elsewhere / "starts")
        assert main([*arguments, "--out", str(elsewhere)]) == 0
        assert capsys.readouterr().out.startswith(said)


def test_the_study_in_small(smoke: tuple[Path, Path]) -> None:
    """Every kind of training runs within its bound of staleness, and the page, figure and figures come out of them."""
    out, root = smoke
    small = design.read(SMOKE)
    outcomes = runner.read_results(root / RESULTS.relative_to(ROOT))
    assert list(outcomes) == list(small.trainings())
    assert outcomes == runner.gather(out, small.trainings())
    for outcome in outcomes.values():
        assert [e.step for e in outcome.evaluations][-1] == outcome.settings.steps
        spent = [(e.decode_steps, e.trained_tokens) for e in outcome.evaluations]
        assert spent == sorted(spent)
        assert outcome.staleness_max <= config_of(outcome.settings, TASKS["tail"]()).max_staleness
    assert outcomes["tail/sync/7"].old_share == 0.0
    assert outcomes["tail/over-2/7"].old_share > 0.0
    assert outcomes["tail/continuous-bound2/7"].old_share > 0.0
    assert outcomes["tail/sync-none-delay1-minibatches2/7"].staleness_max == 1
    assert (root / "docs/images/study.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (root / "docs/study.md").read_text("utf-8") == page.page(small, outcomes)
    verdicts = [v.verdict for v in judge(small, outcomes)]
    assert verdicts == [HOLDS, REFUTED, OPEN]


def test_a_stopped_study_goes_on_and_repeats_exactly(smoke: tuple[Path, Path], capsys: Any) -> None:
    """What is there is not run again; what is missing is run, with the same outcome to the last digit."""
    out, _ = smoke
    gone = runner.outcome_path(out, "tail/over-2/8")
    before = {path: path.read_bytes() for path in (out / "runs").iterdir()}
    gone.unlink()
    assert main(["run", "--design", str(SMOKE), "--out", str(out), "--workers", "0"]) == 0
    assert {path: path.read_bytes() for path in (out / "runs").iterdir()} == before
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{len(before) - 1} of {len(before)} trainings are there"
    assert len(said) == 2
    assert f"[{len(before)}/{len(before)}] tail/over-2/8: " in said[1]
    assert main(["status", "--design", str(SMOKE), "--out", str(out)]) == 0
    assert f"{len(before)} of {len(before)} trainings, " in capsys.readouterr().out


def test_workers_run_the_same_and_a_failure_stops_nobody_else(smoke: tuple[Path, Path], tmp_path: Path) -> None:
    """Two processes make the outcomes of one; a training that fails is named, and the others are there."""
    small = design.read(SMOKE)
    chosen = {n: s for n, s in small.trainings().items() if n in ("tail/sync/7", "tail/over-2/8")}
    chosen["tail/wrong/7"] = msgspec.structs.replace(chosen["tail/sync/7"], loss="nothing")
    lines: list[str] = []
    two = runner.Runner(tmp_path, chosen, 2, lines.append, nice=0)
    assert not two.run()
    assert two.failed == ["tail/wrong/7: KeyError: 'nothing'"]
    for name in ("tail/sync/7", "tail/over-2/8"):
        assert runner.outcome_path(tmp_path, name).read_bytes() == runner.outcome_path(smoke[0], name).read_bytes()


def test_virtual_time_changes_no_token() -> None:
    """The engine on virtual time delivers what RolloutScheduler does with the embedded engine on a real loop."""
    tail = TASKS["tail"]()
    settings = Settings(
        task="tail", seed=3, steps=3, groups=2, samples=4, loss="sequence", learning_rate=1e-3, over_sampling=2.0
    )
    config = config_of(settings, tail)

    def prompts() -> Any:
        return (april.Prompt(tail.prompt(3, index)) for index in itertools.count())

    async def reward(prompt: april.Prompt, response: Response) -> float:
        return float(len(response.tokens) % 2)

    def moved(model: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)

    async def on_virtual_time() -> list[Batch]:
        model = build_model(3)
        engine = TimedEngine(model, slots=8, max_len=tail.max_len, seed=3)
        async with rollouts(config, engines=[engine], prompts=prompts(), reward=reward) as run:
            for _ in range(3):
                await run.next_batch()
                moved(model)
                await run.weight_update()
            return run.batches

    model = build_model(3)
    engine = TransformersEngine(model, slots=8, max_len=tail.max_len, seed=3)
    batches = []
    with april.RolloutScheduler(config, prompts=prompts(), reward=reward, engines=[engine]) as scheduler:
        for _ in range(3):
            batches.append(scheduler.next_batch())
            moved(model)
            scheduler.weight_update()
    for ours, theirs in zip(run_virtual(on_virtual_time()), batches, strict=True):
        for key, array in theirs.ragged().items():
            assert np.array_equal(ours.ragged()[key], array), key
        assert np.array_equal(ours.rewards, theirs.rewards)


# ---------------------------------------------------------------- tasks


@pytest.mark.parametrize("name", ["tail", "long"])
def test_nothing_that_is_held_out_is_trained(name: str) -> None:
    """No prompt and no demonstration of any seed asks what an evaluation asks; right answers earn the reward."""
    task = TASKS[name]()
    held_out = {q.prompt.tobytes() for q in (*task.short, *task.long)}
    for seed in (0, 1):
        assert not {task.prompt(seed, i).tobytes() for i in range(400)} & held_out
        assert not {task.demonstration(seed, i)[0].tobytes() for i in range(400)} & held_out
    for question in (*task.short, *task.long):
        assert task.reward(question.prompt, question.answer) == 1.0
        assert task.reward(question.prompt, question.answer[:-1]) == 0.0
        assert len(question.answer) <= task.response_cap


def test_long_responses_are_long() -> None:
    """The right answers of the task for weights per response have 1,000 tokens and more, in the mean 1,130."""
    lengths = [len(question.answer) for question in TASKS["long"]().long]
    assert min(lengths) > 950
    assert np.mean(lengths) > 1100


def test_lists_are_those_of_reasoning_gym() -> None:
    """Right answers get reasoning-gym's full score and wrong ones do not; held-out lists are in no order trained."""
    pytest.importorskip("reasoning_gym")
    from reasoning_gym.algorithmic.number_sorting import NumberSortingConfig, NumberSortingDataset

    judge_of = NumberSortingDataset(NumberSortingConfig(size=1, seed=0))
    for index in range(40):
        entry = sorting.entry(0, 5, index)
        prompt, answer = sorting.encode(entry)
        assert sorting.reward(prompt, answer) == 1.0
        said = [str(float(token - sorting.NUMBERS)) for token in answer[1:-1]]
        assert judge_of.score_answer(str(said), entry) == 1.0
        wrong = np.concatenate([answer[:1], answer[2:3], answer[2:]])
        assert sorting.reward(prompt, wrong) == float(np.array_equal(wrong, answer))
        assert sorting.reward(prompt, np.concatenate([[countdown.DRAFT_ID], wrong[1:-1], answer])) == 1.0
        assert sorting.reward(prompt, answer[:-1]) == 0.0
    task = TASKS["sorting"]()

    def lists(prompts: Any) -> set[bytes]:
        return {np.sort(prompt[1:-2]).tobytes() for prompt in prompts}

    held_out = lists(q.prompt for q in (*task.short, *task.long))
    assert not lists(task.prompt(seed, i) for seed in (0, 1) for i in range(400)) & held_out
    assert not lists(task.demonstration(0, i)[0] for i in range(400)) & held_out
    share = np.mean([len(task.prompt(2, i)) - 3 >= sorting.LONG_FROM for i in range(2000)])
    assert share == pytest.approx(sorting.LONG_SHARE, abs=0.03)


# ---------------------------------------------------------------- evaluation


def test_the_probability_of_an_answer_is_that_of_its_tokens() -> None:
    """Without drafts it is exact: the product over the answer's tokens, each after those before it."""
    model, question = build_model(2), Question(*_pair(123))
    ids = torch.tensor([[*question.prompt, *question.answer]])
    with torch.no_grad():
        probabilities = model(input_ids=ids).logits[0].softmax(-1)
    places = range(len(question.prompt), ids.shape[1])
    by_hand = math.prod(float(probabilities[place - 1, ids[0, place]]) for place in places)
    assert right_at_once(model, [question])[0] == pytest.approx(by_hand, rel=1e-4)


def _pair(number: int) -> tuple[np.ndarray, np.ndarray]:
    return countdown.encode_prompt(number), np.array(countdown.answer_ids(number), np.int32)


def test_drafts_are_sampled_with_the_same_numbers_each_time() -> None:
    """With equal probabilities the draft is what the random numbers say; a longer prompt beside it changes nothing."""
    task, model = TASKS["tail"](), build_model(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    asked = [Question(*_pair(123)), Question(*_pair(456)), Question(np.append(_pair(7)[0], 3), _pair(7)[1])]
    numbers = torch.rand((task.response_cap, 3), generator=torch.Generator().manual_seed(12_345)).numpy()
    wanted: list[list[int] | None] = []
    for column in numbers.T:
        tokens = [int(u * countdown.VOCAB_SIZE) for u in column]
        ends = [i for i, token in enumerate(tokens) if token in (countdown.ANSWER_ID, countdown.EOS_ID)]
        answered = bool(ends) and tokens[ends[0]] == countdown.ANSWER_ID
        wanted.append(tokens[: ends[0]] if answered else None)
    assert sampled_drafts(model, task, asked, 0) == wanted
    assert sampled_drafts(model, task, asked, 0) == wanted


# ---------------------------------------------------------------- losses


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_losses_are_their_formulas(name: str) -> None:
    """Value and gradient of each loss, for a short and a long response, against the formula token by token."""
    rng = np.random.default_rng(5)
    shape, lengths = (2, 6), (3, 6)
    mask = np.arange(6) < np.array(lengths)[:, None]
    p = (-rng.random(shape) * 2 - 0.5).astype(np.float32)
    q = np.minimum(p + rng.normal(0, 0.6, shape), -0.01).astype(np.float32)
    advantages = np.array([1.5, -0.7], np.float32)
    loss = LOSSES[name]
    now = torch.tensor(p + 0.01, requires_grad=True)
    weights = np.ones_like(p) if loss.weights is None else loss.weights(p, q, mask)
    reference = torch.tensor(q if loss.to_behaviour else p)
    objective = loss.objective(
        now, reference, torch.tensor(weights), torch.tensor(mask), torch.tensor(advantages)[:, None]
    )
    (objective * torch.tensor(mask)).sum().backward()
    for row in range(2):
        there = slice(0, lengths[row])
        for place in range(6):
            value, slope = _by_hand(name, now.detach().numpy()[row, there], p[row, there], q[row, there], place,
                                    float(advantages[row]))  # fmt: skip
            assert objective.detach().numpy()[row, place] * mask[row, place] == pytest.approx(value, rel=1e-4, abs=1e-6)
            assert now.grad.numpy()[row, place] == pytest.approx(slope, rel=1e-4, abs=1e-6)  # type: ignore[union-attr]


def _by_hand(name: str, now: Any, p: Any, q: Any, place: int, advantage: float) -> tuple[float, float]:
    """(value, derivative by the token's own log-probability)."""
    if place >= len(now):
        return 0.0, 0.0
    to_p, own, low, high = math.exp(now[place] - p[place]), math.exp(p[place] - q[place]), 0.8, 1.28
    whole = math.exp(float((p - q).sum()))
    weight, ratio = {
        "none": (1.0, to_p), "tis": (min(own, 2.0), to_p), "icepop": (own * (0.5 <= own <= 5.0), to_p),
        "decoupled": (own, to_p), "sequence": (min(whole, 2.0), to_p),
        "behaviour": (1.0, math.exp(now[place] - q[place])),
        "gspo": (1.0, math.exp(float((now - q).mean()))),
    }[name]  # fmt: skip
    if name == "gspo":
        low, high = 1 - 3e-4, 1 + 4e-4
    clipped = min(max(ratio, low), high) * advantage
    value = min(ratio * advantage, clipped)
    return weight * value, weight * ratio * advantage * (value == ratio * advantage)


# ---------------------------------------------------------------- figures


def test_intervals_are_those_of_the_tables() -> None:
    """Student's quantiles as printed; a mean with its interval by hand; a median where a pair never got there."""
    for probability, degrees, printed in (
        (0.975, 1, 12.706), (0.975, 3, 3.182), (0.975, 11, 2.201), (0.95, 11, 1.796), (0.95, 5, 2.015),
        (0.975, 10, 2.228),
    ):  # fmt: skip
        assert t_quantile(probability, degrees) == pytest.approx(printed, abs=1e-3)
    found = paired([1.0, 2.0, 3.0, 6.0])
    assert (found.mean, found.sd, found.n) == (3.0, pytest.approx(2.1602, rel=1e-4), 4)
    assert found.high - found.mean == pytest.approx(3.182 * 2.1602 / 2, rel=1e-3)
    assert found.mean - found.lower == pytest.approx(2.353 * 2.1602 / 2, rel=1e-3)
    assert math.isinf(paired([1.0]).high)
    for bound in share_interval(34, 55):  # Wilson's bounds are the shares from which 34 of 55 are 1.96 errors away
        assert abs(34 / 55 - bound) == pytest.approx(1.96 * math.sqrt(bound * (1 - bound) / 55), rel=1e-4)
    assert with_censored([1.0, 2.0, 3.0, 6.0]) == found
    # of twelve, the third smallest and the third largest: P(B < 3) = 79 / 4096 <= 0.025, P(B < 4) = 0.073
    values = [*map(float, range(11)), math.inf]
    censored = with_censored(values)
    assert (censored.mean, censored.low, censored.high, censored.censored) == (5.5, 2.0, 9.0, 1)
    assert with_censored([0.0] * 6 + [math.inf] * 6).high == math.inf


def outcome(name: str, rewards: list[float], spent: int = 100, **others: Any) -> Outcome:
    """An outcome with an evaluation per entry, every fifth step, and so many decode steps for each."""
    settings = msgspec.structs.replace(TRAININGS[name], steps=5 * (len(rewards) - 1))
    evaluations = [
        Evaluation(step=5 * i, decode_steps=spent * i, trained_tokens=10 * i, reward=reward, long=reward / 2)
        for i, reward in enumerate(rewards)
    ]
    given = {
        "kl_k3": [0.0] * settings.steps, "ess_token": [1.0] * settings.steps,
        "quarters": {name: [1.0, 2.0, 3.0, 4.0] for name in QUARTERLY}, "old_share": 0.5, "staleness_max": 1,
        "places": 3.0,
    }  # fmt: skip
    return Outcome(settings=settings, evaluations=evaluations, **(given | others))


def with_passes(of: Outcome, each: int) -> Outcome:
    """The same with so many forward passes per training step."""
    evaluations = [msgspec.structs.replace(e, passes=each * e.step) for e in of.evaluations]
    return msgspec.structs.replace(of, evaluations=evaluations)


RISING = [0.5, 0.5, 0.6, 0.7, 0.8, 0.8, 0.8, 0.8, 0.9]


def test_outcomes_of_other_settings_are_refused(tmp_path: Path) -> None:
    """An outcome is missing, or there, or was made with other settings: then nobody overwrites it or takes it."""
    there = outcome("tail/sync/1000", RISING)
    path = runner.outcome_path(tmp_path, "tail/sync/1000")
    assert list(runner.missing(tmp_path, {"tail/sync/1000": there.settings})) == ["tail/sync/1000"]
    path.parent.mkdir()
    path.write_bytes(msgspec.json.encode(there))
    assert runner.missing(tmp_path, {"tail/sync/1000": there.settings}) == {}
    with pytest.raises(ValueError, match=r"was made with other settings"):
        runner.missing(tmp_path, {"tail/sync/1000": msgspec.structs.replace(there.settings, learning_rate=1.0)})


def test_figures_of_a_training_by_hand() -> None:
    """The end is the last quarter's mean; a target is looked for in the smoothed curve; never is infinite."""
    one = outcome("tail/sync/1000", RISING)
    assert analysis.end(one) == pytest.approx(0.85)
    assert analysis.end(one, steps=20) == pytest.approx(0.8)
    assert analysis.smoothed(np.array([0.0, 0.3, 0.6, 0.9])) == pytest.approx([0.0, 0.3, 0.6, 0.75])
    # smoothed: 0.5, 0.533, 0.6, 0.7, ...
    assert analysis.reached(one, 0.65) == pytest.approx(250.0)
    assert analysis.reached(one, 0.65, "step") == pytest.approx(12.5)
    assert analysis.reached(one, 0.5) == 0.0
    assert math.isinf(analysis.reached(one, 0.95))
    lucky = outcome("tail/sync/1000", [0.5, 0.5, 0.8, 0.5, 0.5])
    assert math.isinf(analysis.reached(lucky, 0.7))
    assert analysis.reward_after(one, 250.0) == pytest.approx(0.65)


def test_pairs_by_hand() -> None:
    """Differences and ratios are of the same seeds, steps and spending; what is never reached is censored."""
    sync = {1000 + s: outcome(f"tail/sync/{1000 + s}", [r + s / 100 for r in RISING]) for s in range(3)}
    half = {1000 + s: outcome(f"tail/over-2/{1000 + s}", [r + s / 100 for r in RISING], 50) for s in range(4)}
    assert analysis.difference(half, sync).mean == pytest.approx(0.0)
    assert analysis.difference(half, sync).n == 3
    assert math.exp(analysis.ratio(half, sync, 20).mean) == pytest.approx(0.5)
    assert math.exp(analysis.ratio(half, sync, 20, "step").mean) == pytest.approx(1.0)
    assert math.exp(analysis.spent_ratio(half, sync).mean) == pytest.approx(0.5)
    # for 350 decode steps sync is between its steps 15 and 20
    assert analysis.at_equal(half, sync, "decode_steps").mean == pytest.approx(0.8333333 - (0.7 + 0.7666667) / 2)
    # of pairs in which a figure was not counted nothing is said, of the others all
    assert analysis.ratio(half, sync, 20, "passes").n == 0
    counted = {seed: with_passes(o, 3) for seed, o in half.items()}
    assert analysis.ratio(counted, sync, 20, "passes").n == 0
    both = analysis.ratio(counted, {1001: with_passes(sync[1001], 6)}, 20, "passes")
    assert (math.exp(both.mean), both.n) == (pytest.approx(0.5), 1)
    flat = {1000 + s: outcome(f"tail/over-2/{1000 + s}", [0.5] * 9) for s in range(3)}
    assert analysis.ratio(flat, sync, 20).censored == 3
    short = {1000: outcome("tail/over-2/1000", RISING[:5])}
    assert analysis.difference(short, sync).mean == pytest.approx(0.0)


def test_guards_by_hand() -> None:
    """A fall is 0.08 below the best so far; an alarm counts if it is there when the fall shows; others are false.

    Trainings without older tokens say nothing of a guard.
    """
    falls = [0.5, 0.6, 0.7, 0.61, 0.5]
    quiet, loud = [0.0] * 20, [0.0] * 10 + [0.03] * 10
    early = outcome("tail/sync/1000", falls, kl_k3=loud)
    late = outcome("tail/sync/1000", falls, kl_k3=[0.0] * 17 + [0.03] * 3, ess_token=[0.1] + [1.0] * 19)
    sound = outcome("tail/sync/1000", RISING[:5], kl_k3=quiet)
    alarmed = outcome("tail/sync/1000", RISING[:5], kl_k3=loud)
    assert (analysis.fall(early), analysis.fall(sound)) == (15, None)
    assert (analysis.kl_alarm(early), analysis.kl_alarm(late), analysis.kl_alarm(sound)) == (13, 20, None)
    at_once = outcome("tail/sync/1000", falls, kl_k3=[0.0] * 12 + [0.03] * 8)
    on_policy = outcome("tail/sync/1000", RISING[:5], kl_k3=loud, old_share=0.0)
    wanted = analysis.Guard(falls=3, in_time=2, early=1, sound=2, false=1)
    assert analysis.guard([early, late, at_once, sound, alarmed, on_policy]) == wanted
    assert analysis.guard([early, late, sound], analysis.ess_alarm) == analysis.Guard(2, 1, 1, 1, 0)


# ---------------------------------------------------------------- claims and the page


def made_up(change: float = 0.0) -> dict[str, Outcome]:
    """Outcomes of the whole design: arms are as good as sync for half of the decode steps, delayed ones are not."""
    found = {}
    for name, settings in TRAININGS.items():
        worse = 0.1 * (settings.delay >= 10) + change * ("over-2" in name)
        noise = 0.001 * math.sin(settings.seed * 7 + len(name))
        count = settings.steps // settings.evaluate_every
        rewards = [0.3 + (0.4 - worse) * (1 - math.exp(-i / 4)) + noise * (i > 0) for i in range(count + 1)]
        made = outcome(name, rewards, 100 if name.split("/")[1] == "sync" else 40)
        evaluations = [
            Evaluation(step=settings.evaluate_every * i, decode_steps=e.decode_steps, trained_tokens=e.trained_tokens,
                       reward=e.reward, long=e.long) for i, e in enumerate(made.evaluations)
        ]  # fmt: skip
        found[name] = msgspec.structs.replace(made, settings=settings, evaluations=evaluations)
    return found


def test_claims_are_judged_by_what_was_written_down() -> None:
    """The same claim holds, is refuted by worse outcomes, and is open while trainings are missing.

    It is undecided where its interval reaches over the limit.
    """
    fine, bad = made_up(), made_up(change=0.1)

    def verdicts(outcomes: dict[str, Outcome]) -> dict[str, str]:
        return {v.claim.id: v.verdict for v in judge(DESIGN, outcomes)}

    assert verdicts(fine)["over-2-tail"] == HOLDS
    assert verdicts(bad)["over-2-tail"] == REFUTED
    assert verdicts(fine)["over-2-tail-cheaper"] == HOLDS
    assert verdicts(fine)["over-2-again-passes"] == OPEN  # nobody counted them
    spread = dict(fine)
    for name in [name for name in fine if name.startswith("tail/over-2/")]:
        off = 0.05 * (-1) ** int(name[-1])
        evaluations = [msgspec.structs.replace(e, reward=e.reward + off) for e in fine[name].evaluations]
        spread[name] = msgspec.structs.replace(fine[name], evaluations=evaluations)
    assert verdicts(spread)["over-2-tail"] == UNDECIDED
    del fine["tail/over-2/1000"]
    assert verdicts(fine)["over-2-tail"] == OPEN
    assert set(verdicts({}).values()) == {OPEN}


def test_the_page_is_short_and_made_of_the_outcomes() -> None:
    """It has at most WORDS words, whole; its figures move with the outcomes; nothing is infinite in JSON."""
    fine, bad = made_up(), made_up(change=0.1)
    text = page.page(DESIGN, fine)
    assert len(text.split()) <= page.WORDS
    assert text != page.page(DESIGN, bad)
    assert len(page.page(DESIGN, bad).split()) <= page.WORDS
    computed = page.figures(DESIGN, fine)
    json.dumps(computed, allow_nan=False)
    end = computed["arms"]["tail/over-2"]["end_minus_sync"]["mean"]
    assert f"|tail, over-2|{end:+.3f} ±" in text
    assert {f"{task}/{arm}" for task, arms in analysis.by_arm(fine).items() for arm in arms} == set(computed["arms"])


def test_arms_are_paired_with_sync_of_their_rate_and_mean() -> None:
    """An arm at twice the rate is compared with sync at twice the rate; that with sync at the task's rate."""
    outcomes = made_up()
    for name in [name for name in outcomes if name.startswith("tail/sync-rate2/")]:
        lower = [msgspec.structs.replace(e, reward=e.reward - 0.2) for e in outcomes[name].evaluations]
        outcomes[name] = msgspec.structs.replace(outcomes[name], evaluations=lower)
    arms = page.figures(DESIGN, outcomes)["arms"]
    for arm, sync, difference in (
        ("over-2-rate2", "sync-rate2", 0.2),
        ("sync-rate2", "sync", -0.2),
        ("over-2-rate0.5", "sync-rate0.5", 0.0),
        ("quorum-0.5-samplemean", "sync-samplemean", 0.0),
        ("sync-none-delay5", "sync", 0.0),
    ):
        assert arms[f"tail/{arm}"]["sync"] == f"tail/{sync}"
        assert arms[f"tail/{arm}"]["end_minus_sync"]["mean"] == pytest.approx(difference, abs=0.005)
    assert "end_minus_sync" not in arms["tail/sync"]


def test_each_arm_is_compared_at_its_own_best_rate() -> None:
    """Where sync ends higher at twice its rate, all arms are beside that; fresh seeds are pooled; falls are counted."""
    outcomes = made_up()
    for name in [name for name in outcomes if name.startswith("tail/sync-rate2/")]:
        higher = [msgspec.structs.replace(e, reward=e.reward + 0.1) for e in outcomes[name].evaluations]
        outcomes[name] = msgspec.structs.replace(outcomes[name], evaluations=higher)
    name = "again/quorum-0.5/2000"
    fallen = [*outcomes[name].evaluations[:-1], msgspec.structs.replace(outcomes[name].evaluations[-1], reward=0.1)]
    outcomes[name] = msgspec.structs.replace(outcomes[name], evaluations=fallen)
    computed = page.figures(DESIGN, outcomes)
    for arm in ("over-2", "refill", "quorum-0.75", "quorum-0.5"):
        at_best = computed["at_best_rates"][arm]
        assert at_best["rate_of_sync"] == 2.0
        assert at_best["end_minus_sync"]["mean"] == pytest.approx(-0.1, abs=0.005)
    pooled = computed["pooled"]["tail and again, quorum-0.5"]
    assert (pooled["trainings"], pooled["falls"], pooled["end_minus_sync"]["n"]) == (36, 1, 36)
    assert "|1 of 36|" in page.page(DESIGN, outcomes)


def test_the_page_says_which_figures_are_of_a_part_of_the_pairs() -> None:
    """While trainings are missing, a row or a cell that lacks some names its pairs; one that has them all does not."""
    whole = made_up()
    assert " pairs)" not in page.page(DESIGN, whole)
    gone = ("tail/over-2/1000", "long/sync/1010", "tail/sync-none-delay10/1001")
    text = page.page(DESIGN, {name: outcome for name, outcome in whole.items() if name not in gone})
    rows = [line for line in text.splitlines() if " pairs)" in line]
    assert [row.split("|")[1] for row in rows] == [
        "tail, over-2 (11/12 pairs)",
        "long, over-2 (10/11 pairs)",
        "tail and again, over-2 (11/12 pairs)",
        "tail, none",
    ]
    assert rows[-1].count(" pairs)") == 1
    assert "** (3/4 pairs)|" in rows[-1]


def test_the_page_says_what_was_added_after_outcomes_were_seen() -> None:
    """Claims were fixed before the first training; a task run again with fresh seeds is named as added later."""
    fixed = "with claims fixed before the first ran"
    assert f"{fixed}, but for `again`, added later" in page.page(DESIGN, {})
    assert f"{fixed} (" in page.page(design.read(SMOKE), {})


def test_what_is_published_is_computed_from_the_raw_outcomes() -> None:
    """Page and figures in the repository are those of the raw outcomes beside them; without those there is no page."""
    published = ROOT / "docs" / "study.md"
    assert published.exists() == RESULTS.exists() == FIGURES.exists()
    if RESULTS.exists():
        outcomes = runner.read_results(RESULTS)
        same = published.read_text("utf-8") == page.page(DESIGN, outcomes)
        same = same and json.loads(FIGURES.read_text("utf-8")) == page.figures(DESIGN, outcomes)
        assert same, "make them again: python -m benchmarks.study page"  # pytest would compare megabytes


def test_what_other_pages_say_of_the_study_is_so() -> None:
    """Each sentence of another page about the study is there, and true of the figures, which the test above checks."""
    computed = json.loads(FIGURES.read_text("utf-8"))
    arms, guard = computed["arms"], computed["guards"]["kl_k3"]
    own = computed["guards"]["kl_k3 without fixed delays"]

    def ends(arm: str, *tasks: str) -> list[float]:
        return [arms[f"{task}/{arm}"]["end_minus_sync"]["mean"] for task in tasks]

    def falls(arm: str) -> list[int]:
        return [arms[f"{task}/{arm}"]["falls"] for task in ("tail", "sorting", "long")]

    everywhere = ("tail", "sorting", "long")
    per_token = [f"sync-{loss}-delay" for loss in ("tis", "icepop", "decoupled")]
    of_groups = [arms[f"tail/{arm}"] for arm in ("over-2", "quorum-0.75", "quorum-0.5")]
    whole, most, half = (math.exp(arm["log_decode_steps_to_late"]["mean"]) for arm in of_groups)
    age = [arm["staleness"] for arm in of_groups]
    best, three = computed["at_best_rates"], ("over-2", "refill", "quorum-0.75")
    pooled = {arm: computed["pooled"][f"tail and again, {arm}"] for arm in ("over-2", "refill", "quorum-0.5")}
    once, twice = pooled["quorum-0.5"], arms["tail/quorum-0.5-rate2"]
    halves = [figure for of in (once, twice) for figure in (of["falls"], of["trainings"])]
    raw = analysis.by_arm(runner.read_results(RESULTS))
    over = {}
    for d in (5, 10, 20):
        two = [[of.get(f"sync-{loss}delay{d}", {}) for loss in ("", "behaviour-")] for of in raw.values()]
        pairs = [(a, b, analysis.common_steps(a, b)) for product, clip in two for a, b in analysis.pairs(product, clip)]
        over[d] = paired([analysis.end(a, steps=n) - analysis.end(b, steps=n) for a, b, n in pairs])
    for where, said, so in (
        ("corrections.md", "Without a correction rewards fell at D = 5 on all three tasks.",
         max(ends("sync-none-delay5", *everywhere)) < -0.1),
        ("corrections.md", "At the ages of N' = 2N they did not.", arms["tail/over-2-none"]["falls"] == 0),
        ("corrections.md", "With the recommended loss, at D = 5 as at D = 10, one training of four fell on `tail`, and "
         "none on the others; at D = 5, `sorting` ended 0.005 lower.",
         falls("sync-delay5") == falls("sync-delay10") == [1, 0, 0]
         and {arms[f"{task}/sync-delay{d}"]["trainings"] for task in everywhere for d in (5, 10)} == {4}
         and round(ends("sync-delay5", "sorting")[0], 3) == -0.005),
        ("corrections.md", "At D = 5 it ended 0.015 (±0.010) above a clipped ratio to q. At more there are too few "
         "pairs to tell.",
         (round(over[5].mean, 3), round(over[5].half_width, 3)) == (0.015, 0.010)
         and all(over[d].low < 0 < over[d].high for d in (10, 20))),
        ("corrections.md", "A clipped ratio to q lost up to 0.02 at D = 5 and 0.10 at D = 10.",
         -0.03 < min(ends("sync-behaviour-delay5", *everywhere)) < -0.02
         and -0.11 < min(ends("sync-behaviour-delay10", *everywhere)) < -0.09),
        ("corrections.md", "At the ages of N' = 2N and `refill: sample` it does as well.",
         min(ends("over-2-behaviour", "tail") + ends("refill-behaviour", "tail")) > -0.005),
        ("corrections.md", "Weights per token did as that at D = 5; at 10, up to half of the trainings fell on `tail`.",
         all(round(ends(f"{arm}5", "tail")[0], 2) == -0.02 for arm in per_token)
         and max(arms[f"tail/{arm}10"]["falls"] for arm in per_token) == 2),
        ("corrections.md", "GSPO with its own bounds learned slowly.",
         all(ends(f"sync-gspo-delay{d}", "tail")[0] < -0.05 and not arms[f"tail/sync-gspo-delay{d}"]["falls"]
             for d in (5, 10, 20))),
        ("choosing.md", "In the study 1.5N then saved as much as 2N with whole groups, with tokens half as old, and "
         "ended as high as synchronous training at the same rate; 0.5 saved no more, and 3 of 36 trainings fell, at "
         "twice the rate 2 of 6.",
         most < whole < half and age[1] < 0.55 * age[0] and abs(ends("quorum-0.75", "tail")[0]) < 0.005
         and halves == [3, 36, 2, 6]),
        ("choosing.md", "In [the study](study.md) that took a third of the decode steps to the reward that synchronous "
         "training has half-way, where tails were heavy. Half of the pairs never reached the reward that it has after "
         "its last step, as with equal curves.",
         all(0.29 < math.exp(arms[f"{task}/over-2"]["log_decode_steps_to_late"]["mean"]) < 0.36
             for task in ("tail", "sorting", "again"))
         and 2 * pooled["over-2"]["never"] == pooled["over-2"]["trainings"]),
        ("choosing.md", "At its best rate synchronous training ended about 0.012 (±0.013 to 0.018) above N' = 2N, "
         "refill and a quorum of 0.75 at theirs, which still reached its half-way reward in 0.28 to 0.39 of the decode "
         "steps",
         all(-0.0135 < best[arm]["end_minus_sync"]["mean"] < -0.0115 for arm in three)
         and all(best[arm]["rate_of_sync"] == 2.0 for arm in three)
         and [round(f(best[arm]["end_minus_sync"]["high"] - best[arm]["end_minus_sync"]["mean"] for arm in three), 3)
              for f in (min, max)] == [0.013, 0.018]
         and [round(math.exp(f(best[arm]["log_decode_steps_to_late"]["mean"] for arm in three)), 2)
              for f in (min, max)] == [0.28, 0.39]),
        ("choosing.md", "In the study it ended 0.004 lower than synchronous training at the same rate (95%: 0.001 to "
         "0.007).",
         [round(-pooled["refill"]["end_minus_sync"][name], 3) for name in ("mean", "high", "low")]
         == [0.004, 0.001, 0.007]),
        ("choosing.md", "In the study synchronous training bore twice its rate, while N' = 2N and refill ended 0.03 to "
         "0.06 lower there; at its rate or half of it they did not.",
         ends("sync-rate2", "tail")[0] > 0 and all(
             -0.065 < ends(f"{arm}-rate2", "tail")[0] < -0.025
             and min(ends(f"{arm}-rate0.5", "tail") + ends(arm, "tail", "again")) > -0.006
             for arm in ("over-2", "refill")
         )),
        ("corrections.md", "A mean per response ended synchronous training itself 0.02 lower",
         round(ends("sync-samplemean", "tail")[0], 2) == -0.02),
        ("corrections.md", "before 34 of 55 falls of the reward, and in 43 of 412 trainings [that did not "
         "fall](study.md#guards); with april's own schedules before 2 of 8, and in 7 of 297.",
         [[of[name] for name in ("in_time", "falls", "false", "sound")] for of in (guard, own)]
         == [[34, 55, 43, 412], [2, 8, 7, 297]]),
        ("quorum.md", "a quorum of 0.75 ended as high as synchronous training at the same rate; with 0.5, 3 of 36 "
         "trainings fell, and none of synchronous training.",
         abs(ends("quorum-0.75", "tail")[0]) < 0.005 and halves[:2] == [3, 36]
         and not arms["tail/sync"]["falls"] + arms["again/sync"]["falls"]),
        ("../README.md", "In [a study](docs/study.md) sync at its best rate ended 0.012 higher.",
         round(ends("sync-rate2", "tail")[0], 3) == 0.012),
    ):  # fmt: skip
        text = " ".join((ROOT / "docs" / where).read_text("utf-8").replace("\n* ", "\n").split())
        assert said in text, said
        assert so, said
