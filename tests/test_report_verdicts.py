"""What a report says first: whether april helped against synchronous steps, and the health of learning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from records import raw_lines, recorded, rewritten, written

import april
from april.record.file import RunRecord
from april.record.replay import replay
from april.testing import FakeEngine
from april.view.off_policy_summary import off_policy_summary
from april.view.report import page, speed_up_sentence
from april.view.run_data import RunData, limit_distance_of, read_run
from april.view.speed_up import SpeedUp, speed_up_of

REPORTS: list[dict[str, float]] = [
    {"ess_token": 0.9, "kl_k3": 0.01, "clip_share": 0.1, "tokens": 30.0,
     "age_0/ess_token": 1.0, "age_0/kl_k3": 0.001, "age_0/clip_share": 0.0, "age_0/tokens": 10.0,
     "age_12/ess_token": 0.8, "age_12/kl_k3": 0.02, "age_12/clip_share": 0.2, "age_12/tokens": 20.0},
    {"ess_token": 0.6, "kl_k3": 0.04, "clip_share": 0.4, "tokens": 10.0,
     "age_0/ess_token": 0.6, "age_0/kl_k3": 0.04, "age_0/clip_share": 0.4, "age_0/tokens": 10.0},
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of a run with over-sampling, whose trainer has said nothing."""
    path = tmp_path_factory.mktemp("record") / "run.jsonl"
    recorded(path)
    return path


def gain(path: Path, **changes: Any) -> SpeedUp:
    """What a record says, with other settings of the core."""
    data = read_run(path)
    data.settings = replace(data.settings, **changes)
    return speed_up_of(data, limit_distance_of(data))


def told(path: Path, target: Path, reports: list[dict[str, float]], each: int = 1) -> RunData:
    """The record with these reports, each of so many batches, before its last line."""
    lines = raw_lines(path)
    digest = lines[-1][-1]
    said = [[lines[-1][0], "Learning", {"id": i // each, "report": r}, digest] for i, r in enumerate(reports)]
    return read_run(written(target, [*lines[:-1], *said, lines[-1]]))


# ---------------------------------------------------------------- against synchronous steps


@pytest.mark.parametrize("mode", ["april", "refill"])
def test_the_gain_is_that_against_a_run_that_was_synchronous(mode: str, tmp_path: Path) -> None:
    """The same responses were simulated with synchronous steps, too: the record of the other run tells as much."""
    runs = {name: recorded(tmp_path / name, name, steps=24) for name in ("sync", mode)}
    real, sync = (runs[name].result.summary(1)["trained_tokens_per_s"] for name in (mode, "sync"))
    found = gain(tmp_path / mode)
    assert found.doubt == ""
    assert found.real == pytest.approx(real, rel=1e-4)
    assert found.sync == pytest.approx(sync, rel=0.03)
    assert found.factor > 1.1
    words = speed_up_sentence(found)
    assert words.startswith(f"Yes: it has {found.factor:.2f}x the speed of synchronous steps")
    assert "simulated" in words
    assert words in page([read_run(tmp_path / mode)])


def test_what_cannot_be_known_is_said(run: Path, tmp_path: Path) -> None:
    """A filter, responses that were given up, slow functions, a cost that does not fit, a record that is short."""

    def metric(name: str, value: float) -> SpeedUp:
        def change(line: list[Any]) -> list[Any]:
            if line[1] == "Batch":
                line[2]["metrics"] |= {name: value}
            return line

        return gain(rewritten(run, tmp_path / f"{name}.jsonl", change))

    data = read_run(run)
    limit = limit_distance_of(data)
    assert limit is not None
    doubts = {
        "a filter rejected groups": gain(run, has_filter=True),
        "5% of the responses were given up": metric("length_unknown", 0.05),
        "waited for functions and prompts": metric("idle_functions", 0.5),
        "it misses": speed_up_of(data, replace(limit, doubt="it misses")),
        "too few requests, or too few batches": speed_up_of(data, None),
        "too few groups were finished": gain(run, n_samples_per_prompt=99),
    }
    for words, found in doubts.items():
        assert words in found.doubt
        assert found.sync == 0.0
        assert speed_up_sentence(found) == f"This record does not show it: {found.doubt}."


# ---------------------------------------------------------------- the health of learning


def test_the_health_is_of_all_tokens_and_by_age(run: Path, tmp_path: Path) -> None:
    """Means over the tokens, whichever batch or share they are of; the ages in order."""
    health = off_policy_summary(told(run, tmp_path / "told.jsonl", REPORTS))
    assert health is not None
    assert [(row.name, row.tokens) for row in health.rows] == [
        ("all", 40.0), ("of the present weights", 20.0), ("12 updates old", 20.0)
    ]  # fmt: skip
    for row, expected in zip(health.rows, [(0.0175, 0.825, 0.175), (0.0205, 0.8, 0.2), (0.02, 0.8, 0.2)], strict=True):
        assert (row.kl, row.ess, row.clipped) == pytest.approx(expected)
    assert (health.batches, health.drifts) == (2, False)
    text = page([told(run, tmp_path / "told.jsonl", REPORTS)])
    assert "KL 0.0175 nats per token, effective sample size 82%, 17.5% of the tokens clipped, over 2 batches" in text
    assert "<tr><td>12 updates old</td><td>20</td><td>0.0200</td><td>80%</td><td>20.0%</td></tr>" in text
    assert text.index("Did april help?") < text.index("The health of learning") < text.index("Busy places")


def test_a_trainer_puts_it_into_the_record(tmp_path: Path) -> None:
    """Names and numbers as they are; the replay passes them over; anything but numbers is refused."""
    path = tmp_path / "run.jsonl"
    config = april.Config(rollout_batch_size=2, n_samples_per_prompt=2, max_response_len=30)
    engine = FakeEngine("e", lengths=lambda request: 9, seconds_per_token=1e-5)
    with april.RolloutScheduler(
        config, prompts=[[5, 6]] * 4, reward=None, engines=[engine], record=RunRecord(path), progress=False
    ) as rollouts:
        batch = rollouts.next_batch()
        report = april.off_policy_report(batch, batch.ragged()["logprobs"])
        rollouts.record_report(batch.id, report)
        for wrong in ({"kl": float("nan")}, {"kl": "much"}, [1.0], None):
            with pytest.raises(april.ConfigError, match="record_report"):
                rollouts.record_report(batch.id, wrong)  # type: ignore[arg-type]
        rollouts.validate()
    (found,) = read_run(path).reports
    assert (found.id, found.report) == (batch.id, pytest.approx(report, rel=1e-5))
    assert replay(path).checks
    assert read_run(path).head["format"] == 6
