"""AReaL's recover checkpoint with april's state beside it: every prompt once, tokens as they were, plain values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapters import stand_in_areal as areal
from adapters.test_areal_rollouts import mislabelled, trained_rows, trainer  # noqa: F401
from april.errors import CheckpointError

Make = Callable[..., Any]


@pytest.mark.parametrize("generation", ["continuous", "stepwise"])
def test_a_run_that_goes_on_asks_each_prompt_once(trainer: Make, generation: str) -> None:  # noqa: F811
    """Over three lives and two epochs, in the loader's own order of each, with exact versions and closed books."""
    lives = []
    for _ in range(3):
        lives.append(trainer({"generation": generation}, rows=12))
        # what is drawn for a rejected prompt is one of three that the loader gives
        lives[-1].workflow.fails = {5: [None] * 99}
        lives[-1].train(lives[-1].workflow, 3)
    rows = [row for life in lives for row in trained_rows(life)]
    drawn = rows + [group["row"] for group in _held(lives[-1])]
    rejected = lives[-1]._april.rollouts.ask("ledgers")["prompts"]["dropped"]["filtered"]
    drawn += [5] * rejected
    assert rejected
    in_order = [*range(12), *reversed(range(12)), *range(12), *reversed(range(12))]
    assert sorted(drawn) == sorted(in_order[: len(drawn)])
    for life in lives:
        assert mislabelled(life)[0] == 0
        for group in (g for batch in life.trained for g in batch):
            assert group["loss_mask"].sum(1).tolist() == [4 + int(group["input_ids"][0][1]) % 5] * areal.SAMPLES
    if generation == "stepwise":  # what is cut by a batch is cut whenever it comes
        assert any(len(g["versions"][g["loss_mask"].bool()].unique()) > 1 for g in lives[1].trained[0])


def _held(run: Any) -> list[Any]:
    run.rollout.pause()
    rollouts = run._april.rollouts
    return [*rollouts._rows.values(), *(row for _, (_, row) in rollouts._run.offered)]


def test_the_state_is_the_one_that_areals_checkpoint_names(trainer: Make, tmp_path: Path) -> None:  # noqa: F811
    """A file of its own per checkpoint, the last two kept; a crash between the two writes goes on from the older."""
    run = trainer()
    run.train(run.workflow, 2)
    info = tmp_path / "e" / "t" / "recover_info" / "info.json"
    before = info.read_text()
    run.train(run.workflow, 1)
    files = {p.name for p in info.parent.glob("april_0_*")}
    assert len(files) == 2
    assert json.loads(info.read_text())["loader"]["april"] in files
    seen = trained_rows(run)[: 2 * areal.GROUPS]
    info.write_text(before)
    after = trainer()
    assert len(list(info.parent.glob("april_0_*"))) == 1
    after.train(after.workflow, 4)
    again = seen + trained_rows(after)
    assert len(again) == len(set(again))
    assert sorted([*again, *(row["row"] for row in _held(after))])[: len(again)] == list(range(len(again)))


def test_a_checkpoint_without_april_goes_on_with_a_warning(
    trainer: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture  # noqa: F811
) -> None:  # fmt: skip
    """From where the loader stood."""
    info = tmp_path / "e" / "t" / "recover_info" / "info.json"
    info.parent.mkdir(parents=True)
    info.write_text(json.dumps({"step": 2, "loader": {"at": 6}}))
    run = trainer()
    assert "AReaL's recover checkpoint was saved without april" in caplog.text
    run.train(run.workflow, 1)
    assert min(trained_rows(run)) >= 6


@pytest.mark.parametrize(("harm", "message"), [
    (lambda path: path.unlink(), "needs april's state .* and it is not there"),
    (lambda path: path.write_bytes(path.read_bytes()[:-20]), "cannot be read|is damaged"),
    (lambda path: path.write_bytes(path.read_bytes().replace(b"messages", b"massages")), "is damaged: its checksum"),
])  # fmt: skip
def test_a_state_that_is_not_whole_is_refused(
    trainer: Make, tmp_path: Path, harm: Callable[[Path], Any], message: str  # noqa: F811
) -> None:  # fmt: skip
    """Instead of prompts that are lost in silence."""
    run = trainer()
    run.train(run.workflow, 2)
    info = tmp_path / "e" / "t" / "recover_info" / "info.json"
    harm(info.parent / json.loads(info.read_text())["loader"]["april"])

    def go_on() -> None:
        after = trainer()
        after.train(after.workflow, 1)

    with pytest.raises(CheckpointError, match=message):
        go_on()
