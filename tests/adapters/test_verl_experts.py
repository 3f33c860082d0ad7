"""``enable_rollout_routing_replay``: verl's trajectories have the experts of the weights that wrote each token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from adapters.stand_in_verl import Trainer
from april.adapters.verl.outputs import result_of
from april.core.versions import PolicyVersion
from april.engines.simulated.synthetic_rows import synthetic_rows
from april.processes.coordinator.messages import Result

REPLAY = {"actor_rollout_ref__rollout__enable_rollout_routing_replay": True}


def mixed(row: int, sample: int) -> int:
    """Lengths from 3 to 39."""
    return 3 + (7 * row + 11 * sample) % 37


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    made = Trainer(mixed, **REPLAY)
    yield made
    made.close()


def check(row: int, sample: int, trajectory: dict[str, Any]) -> int:
    """Every row is of the version of its token, int16 as verl's own; returns how many versions there are."""
    ids = np.array([50, row, sample, *trajectory["tokens"]], np.int32)
    spans = [(PolicyVersion(0, int(name.partition(".")[2])), end - start) for start, end, name in trajectory["spans"]]
    spans[0] = (spans[0][0], spans[0][1] + 2)  # the prompt is read under the first one
    assert trajectory["experts"].dtype == np.int16
    assert np.array_equal(trajectory["experts"], synthetic_rows("routed_experts", ids, spans))
    return len(spans)


def checked(trainer: Trainer, count: int) -> int:
    """So many steps; how many of their trajectories several versions have written."""
    continued = 0
    for _ in range(count):
        delivery = trainer.step()
        for uid, rollout in delivery.rollouts:
            row = trainer.queue.get(uid, int(uid[1:]))
            continued += check(row, rollout, trainer.last[f"{uid}_{rollout}_0"]) > 1
        trainer.update()
    return continued


def test_rows_of_what_was_cut_and_continued(trainer: Trainer) -> None:
    """Each row stays as the weights made it that wrote its token, over two cuts and more."""
    assert checked(trainer, 8) >= 4


@pytest.mark.parametrize("delay_s", [0.0, 5.0])
def test_rows_go_on_after_a_restart(delay_s: float, tmp_path: Path) -> None:
    """april's file has the rows of what was held, those of results that came late among them."""
    first = Trainer(mixed, **REPLAY)
    first.delay_s = delay_s
    checked(first, 3)
    first.step()
    mine = first.save(tmp_path)
    first.close()
    second = Trainer(mixed, **REPLAY)
    assert second.load(tmp_path, mine)
    assert checked(second, 4) >= 1
    second.close()


def test_a_cut_without_rows_is_generated_again(trainer: Trainer) -> None:
    """verl's server gives none for a request that was put back: its tokens are dropped by name."""
    checked(trainer, 1)
    trainer.server.wrong += [{"routed_experts": None, "stop_reason": "aborted"}] * 2
    checked(trainer, 3)
    assert trainer.ask("ledgers")["tokens"]["dropped"]["no_extras"] > 0


def test_a_whole_answer_without_rows_is_refused(trainer: Trainer) -> None:
    """Nothing of it is believed; the request is made again."""
    trainer.server.wrong.append({"routed_experts": None})
    checked(trainer, 2)
    assert trainer.ask("ledgers")["tokens"]["dropped"]["corrupt"] > 0


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_what_a_server_says(dtype: Any) -> None:
    """Rows of every type that verl's servers use are held in as few bytes as they need; a cut token takes its row."""
    rows = np.arange(2 * 3 * 2, dtype=dtype).reshape(2, 3, 2) * dtype(20)
    output = SimpleNamespace(token_ids=[5, 6], log_probs=[-1.0, -1.0], stop_reason="completed", extra_fields={},
                             routed_experts=rows)  # fmt: skip
    result: Result = result_of(1, output)
    assert result.extras["routed_experts"].dtype == np.uint8
    assert np.array_equal(result.extras["routed_experts"], rows)
    assert np.array_equal(result.rows_from(1).extras["routed_experts"], rows[1:])
    assert len(result_of(1, output, 1).extras["routed_experts"]) == 1


def test_without_the_setting_nobody_asks() -> None:
    """No row anywhere."""
    plain = Trainer(mixed)
    plain.step()
    assert all("experts" not in trajectory for trajectory in plain.last.values())
    plain.close()
