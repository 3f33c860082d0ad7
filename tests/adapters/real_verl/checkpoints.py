"""A training that ended in the middle, and went on from verl's checkpoint: nothing lost, nothing trained twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tiny_verl import train
from training import WITNESS, assert_whole, report, rows_of


def test_a_restart_from_the_middle(tmp_path: Path) -> None:
    """Five steps, then a process that goes on from the third one's checkpoint: the fourth and fifth never were."""
    first = train(tmp_path, "trainer.total_training_steps=5", *WITNESS)
    assert first.status == 0, first.log[-4000:]
    kept = [step for step in first.trained if step["step"] <= 3]
    before = [row for step in kept for row in step["rows"]]
    held = first.metrics[2]["april/held_tokens"]
    folder = tmp_path / "checkpoints" / "global_step_3"
    assert (folder / "april_state.msgpack").stat().st_mode & 0o777 == 0o600

    second = train(
        tmp_path, "trainer.total_training_steps=7", *WITNESS, "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={folder}",
    )  # fmt: skip
    assert second.status == 0, second.log[-4000:]
    assert [m["step"] for m in second.metrics] == [4, 5, 6, 7]
    assert_whole(second)
    after = rows_of(second)
    report("after the restart", second)

    # each prompt once, with both its samples, in the history that the checkpoint kept
    assert set(Counter(row["row"] for row in [*before, *after]).values()) == {2}
    assert len({row["row"] for row in [*before, *after]}) == 7 * 4
    # no prompt was passed over: those between are trained, or held
    seen = {row["row"] for row in [*before, *after]}
    assert len([row for row in range(max(seen)) if row not in seen]) <= 8
    # tokens from before the restart are trained after it, and were not generated again
    old = sum(end - start for row in after for start, end, version in row["spans"] if version.startswith("0."))
    assert old > 0
    generated = sum(len(r["tokens"]) for r in second.requests)
    trained = sum(len(row["response"]) for row in after)
    assert held + generated == trained + second.metrics[-1]["april/held_tokens"]
    # a response that spans the restart goes on with the tokens it had
    spanning = [row for row in after if len({version[0] for *_, version in row["spans"]}) == 2]
    assert spanning
    for row in spanning:
        cut = max(end for _, end, version in row["spans"] if version.startswith("0."))
        asked = [*row["prompt"], *row["response"][:cut]]
        assert any(request["ids"] == asked for request in second.requests)
