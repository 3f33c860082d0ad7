"""The unmodified OpenRLHF trains on aborted and resumed responses of the real vLLM, and every number is right."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import short_runs

ALL = Counter({str(i): short_runs.SAMPLES for i in range(short_runs.ROWS)})


def rows_of(seen: short_runs.Seen) -> list[tuple[dict[str, Any], dict[str, Any], int]]:
    """(row that was trained, sample that april delivered, number of its batch), all of a process."""
    delivered = {(s["label"], tuple(s["prompt"] + s["tokens"])): s for b in seen.batches for s in b["samples"]}
    return [
        (row, delivered[row["label"], tuple(row["sequence"])], number)
        for number, rows in enumerate(seen.trained)
        for row in rows
    ]


def differences(seen: short_runs.Seen, first: tuple[int, int] = (0, 0)) -> tuple[list[float], list[float]]:
    """Between log-probabilities of rollout and trainer: of tokens of the trainer's present weights, and of older ones.

    ``first``: version of the weights with which the process began; the trainer recomputes batch i with the i-th ones
    after them, whatever the engines had then.
    """
    present, older = [], []
    for row, sample, number in rows_of(seen):
        version = [first[0], first[1] + number]
        start = len(sample["prompt"]) - 1
        count = len(sample["tokens"])
        assert sum(row["mask"]) == count == sum(row["mask"][start : start + count])
        rollout, recomputed = row["rollout"][start : start + count], row["recomputed"][start : start + count]
        assert rollout == pytest.approx(sample["logprobs"], abs=1e-7)
        for was, now, under in zip(rollout, recomputed, sample["versions"], strict=True):
            (present if under == version else older).append(abs(was - now))
    return present, older


def check_books(seen: short_runs.Seen) -> None:
    """Each prompt settled once, each response trained once, in whole groups; no token is lost."""
    assert seen.status == 0, seen.output[-4000:]
    assert Counter(row["label"] for rows in seen.trained for row in rows) == ALL
    assert len(rows_of(seen)) == sum(ALL.values())
    for batch in seen.batches:
        labels = [s["label"] for s in batch["samples"]]
        assert all(labels[i] == labels[i + 1] for i in range(0, len(labels), short_runs.SAMPLES))
    assert (seen.ledger["prompts"]["delivered"], seen.ledger["prompts"]["held"]) == (short_runs.ROWS, 0)
    tokens = sum(len(s["tokens"]) for b in seen.batches for s in b["samples"])
    assert seen.ledger["tokens"]["observed"] == seen.ledger["tokens"]["delivered"] == tokens


def report(name: str, seen: short_runs.Seen, present: list[float], older: list[float]) -> None:
    aborted = sum(b["metrics"]["aborted_attempts"] for b in seen.batches)
    samples = [s for b in seen.batches for s in b["samples"]]
    print(
        f"\n{name}: {len(seen.trained)} optimizer steps, {aborted:.0f} attempts aborted, "
        f"{sum(s['resumes'] > 0 for s in samples)} resumed responses among {len(samples)} trained, "
        f"{len(older) / (len(present) + len(older)):.0%} of {len(present) + len(older)} tokens from older weights; "
        f"log-probabilities differ by at most {max(present, default=0):.1e} (older: {max(older, default=0):.1e})"
    )


LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {}, "gspo": {"actor__policy_loss_type": "gspo"}, "grpo, bfloat16": {"dtype": "bfloat16"},
}  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
def test_the_synchronous_trainer(loss: str, tmp_path: Path) -> None:
    """Partials cross updates, log-probabilities agree as far as the precision goes, each prompt settled once.

    bfloat16 is OpenRLHF's default.
    """
    seen = short_runs.trained(tmp_path, **LOSSES[loss])

    check_books(seen)
    present, older = differences(seen)
    report(loss, seen, present, older)
    assert len(seen.trained) == short_runs.ROWS // short_runs.GROUPS >= 4
    assert [b["version"] for b in seen.batches] == [[0, n] for n in range(len(seen.batches))]
    assert sum(b["metrics"]["aborted_attempts"] for b in seen.batches) > 0
    assert any(len({tuple(v) for v in s["versions"]}) > 1 for b in seen.batches for s in b["samples"])
    assert max(present) <= (0.2 if "bfloat16" in loss else 1e-3)
    assert "bfloat16" in loss or max(older) > 10 * max(present)
    info = seen.trained[-1][0]["info"]
    assert {"vowels", "april/staleness", "april/off_policy_share"} <= set(info)
    assert "april/off_policy_share" in seen.output  # OpenRLHF's own log line


def test_the_asynchronous_trainer(tmp_path: Path) -> None:
    """Generation runs beside training, up to two updates behind; versions never decrease, some batches are ahead of
    them, and the tokens of the present ones are those recomputed.
    """
    seen = short_runs.trained(tmp_path, train__async_enable=True)

    check_books(seen)
    present, older = differences(seen)
    report("grpo, asynchronous", seen, present, older)
    versions = [b["version"][1] for b in seen.batches]
    assert versions == sorted(versions)
    assert versions[0] == 0 < versions[-1] < len(versions)
    assert sum(b["metrics"]["aborted_attempts"] for b in seen.batches) > 0
    assert max(present) <= 1e-3  # of the batch that was trained first, at least
    assert len(present) >= sum(len(s["tokens"]) for s in seen.batches[0]["samples"])


def test_dynamic_filtering_and_evaluation(tmp_path: Path) -> None:
    """Groups outside of the range are dropped by name, and evaluations in between change nothing of the rest."""
    seen = short_runs.trained(
        tmp_path, "--algo.dynamic_filtering_range", "0.15", "0.9", algo__dynamic_filtering_enable=True,
        eval__dataset=tmp_path / "prompts.jsonl", eval__steps=2, eval__n_samples_per_prompt=1, data__max_samples=12,
    )  # fmt: skip

    assert seen.status == 0, seen.output[-4000:]
    prompts = seen.ledger["prompts"]
    assert prompts["held"] == 0
    assert prompts["delivered"] + prompts["dropped"].get("filtered", 0) == 12
    assert prompts["dropped"].get("filtered", 0) > 0
    assert "eval_default_pass1" in seen.output
    scores: dict[str, list[float]] = {}
    for rows in seen.trained:
        for row in rows:
            scores.setdefault(row["label"], []).append(row["info"]["score"])
    assert scores
    assert all(0.15 < sum(group) / len(group) < 0.9 for group in scores.values())


# ---------------------------------------------------------------- checkpoints


SAVED, KILLED = 3, 4


MODES: dict[str, dict[str, Any]] = {
    "sync": {}, "async": {"train__async_enable": True},
    "continuous": {"train__async_enable": True, "april__generation": "continuous"},
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_training(mode: str, tmp_path: Path) -> None:
    """Killed one step after the checkpoint; partials cross the restart, and log-probabilities still agree."""
    files = short_runs.prepare(tmp_path)
    words = short_runs.flags(files, tmp_path, ckpt__save_steps=SAVED, **MODES[mode])
    before = short_runs.run(tmp_path / "before", words, killed_after=KILLED)
    assert before.status != 0
    assert len(before.trained) >= KILLED

    after = short_runs.run(tmp_path / "after", [*words, "--ckpt.load_enable"])

    assert after.status == 0, after.output[-4000:]
    kept = before.trained[:SAVED]
    trained = Counter(row["label"] for rows in kept + after.trained for row in rows)
    assert trained == ALL
    # tokens of the first process in responses that the second one finished; continuous, or that it only delivered, for
    # running requests hand theirs over when they end, so the state has what was cut by a broadcast or had ended
    carried = [s for b in after.batches for s in b["samples"] if s["versions"][0][0] == 0]
    if mode != "continuous":
        carried = [s for s in carried if s["versions"][-1][0] == 1]
    assert carried
    assert after.ledger["prompts"]["delivered"] == short_runs.ROWS
    assert after.ledger["prompts"]["held"] == 0
    assert after.batches[0]["version"] == [1, SAVED]
    present, older = differences(after, (1, SAVED))
    report(f"{mode}, resumed, {len(carried)} responses continued over the restart", after, present, older)
    assert max(present, default=0.0) <= 1e-3
