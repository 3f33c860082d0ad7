"""verl's checkpoints with april in them: what is unfinished goes on, token by token; nothing is trained twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapters.stand_in_verl import Trainer
from april.errors import CheckpointError
from april.processes.coordinator.run import STATE_FILE


def length_of(row: int, sample: int) -> int:
    return 3 + (11 * row + 5 * sample) % 35


@pytest.fixture
def trainer() -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def make(**more: Any) -> Trainer:
        made.append(Trainer(length_of, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_restart_goes_on_where_the_checkpoint_was(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    """Partials keep their tokens, finished siblings and surplus stay, no prompt is lost or trained twice."""
    first = trainer()
    for _ in range(3):
        first.step()
        first.update()
    first.step()
    mine = first.save(tmp_path)
    generated, tokens = first.server.generated, first.ask("ledgers")["tokens"]
    assert tokens["held"] > 0

    second = trainer()
    second.trained = list(first.trained)
    held = second.load(tmp_path, mine)
    assert held
    assert second.ask("ledgers")["tokens"] == tokens
    for _ in range(8):
        second.step()
        for response in second.last.values():
            assert response["spans"][-1][1] == len(response["tokens"])
        second.update()
    rows = {row for row, _ in second.trained}
    assert max(Counter(second.trained).values()) == 1
    assert rows >= set(range(12 * 3 - 3))
    after = second.ask("ledgers")["tokens"]
    assert after["observed"] == generated + second.server.generated
    assert (tmp_path / STATE_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("seed", range(8))
def test_random_restarts(trainer: Callable[..., Trainer], tmp_path: Path, seed: int) -> None:
    """Whatever the mode, and however often: each row once, in the history that the checkpoints kept."""
    chance = random.Random(seed)
    changes = {
        "april__refill": chance.choice(["none", "group", "sample"]),
        "april__max_in_flight": chance.choice([4, 8, 12]),
        "algorithm__filter_groups__enable": chance.random() < 0.5,
        "rejects": chance.random() < 0.5,
        "reward_of": lambda row, sample, response: float(sample if row % 4 else 1),
    }
    run = trainer(**changes)
    kept: list[tuple[int, int]] = []
    for life in range(4):
        for _ in range(chance.randint(1, 4)):
            run.step()
            folder = tmp_path / str(life)
            mine, kept = run.save(folder), list(run.trained)
            run.update()
        for _ in range(chance.randint(0, 2)):
            run.step()  # in vain: the process ends before the next checkpoint
            run.update()
        run = trainer(**changes)
        run.trained = kept
        run.load(folder, mine)
    for _ in range(3):
        run.step()
        run.update()
    filters = changes["algorithm__filter_groups__enable"]
    assert max(Counter(run.trained).values()) == 1
    trained = {row for row, _ in run.trained}
    assert all(row % 4 for row in trained) or not filters
    # a row that is neither trained nor held was filtered
    gone = set(range(run.drawn)) - trained - set(run.queue.values())
    assert all(row % 4 == 0 for row in gone)
    assert filters or not gone


def test_a_trajectory_that_verl_has_not_saved_is_made_again_from_its_tokens(
    trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    """verl saves its queue a moment before april's state: what was finished in between runs again without a server."""
    first = trainer()
    first.step()
    mine = first.save(tmp_path)
    surplus = sorted(set(mine["stored"]) - {k for k in mine["stored"] if k.split("_")[0] not in mine["queue"]})
    assert surplus
    lost = surplus[0]
    tokens = mine["stored"].pop(lost)["tokens"]
    second = trainer()
    second.load(tmp_path, mine)
    seen: dict[str, Any] = {}
    for _ in range(4):
        second.step()
        seen |= second.last
        second.update()
    assert seen[lost]["tokens"] == tokens
    assert {span[2] for span in seen[lost]["spans"]} == {"0.0"}


def test_files_that_do_not_fit(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    """A damaged file, another format, and prompts that verl's queue has not: one sentence each."""
    first = trainer()
    first.step()
    mine = first.save(tmp_path)
    uid = next(iter(mine["queue"]))
    with pytest.raises(CheckpointError, match="are not in the trainer's checkpoint"):
        trainer().load(tmp_path, mine | {"queue": {u: r for u, r in mine["queue"].items() if u != uid}})
    state = msgspec.msgpack.decode((tmp_path / STATE_FILE).read_bytes())
    (tmp_path / STATE_FILE).write_bytes(msgspec.msgpack.encode(state | {"format": 7}))
    with pytest.raises(CheckpointError, match="was written by another version of april"):
        trainer().load(tmp_path, mine)
    changed = bytearray(state["content"])
    changed[len(changed) // 2] ^= 1
    (tmp_path / STATE_FILE).write_bytes(msgspec.msgpack.encode(state | {"content": bytes(changed)}))
    with pytest.raises(CheckpointError, match="is damaged: its checksum does not fit its content"):
        trainer().load(tmp_path, mine)
    (tmp_path / STATE_FILE).write_bytes(b"\xc1")
    with pytest.raises(CheckpointError, match="cannot be read"):
        trainer().load(tmp_path, mine)
