"""Images that come along with verl's tokens, over cuts and restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.stand_in_verl import EOS, Trainer
from april.processes.coordinator.calls import Session, generate
from april.processes.coordinator.media import digest_of, placed_media, runs_of

Make = Callable[..., Trainer]
PAD, VIDEO = 7, 8


def mixed(row: int, sample: int) -> int:
    """Lengths from 3 to 39."""
    return 3 + (7 * row + 11 * sample) % 37


@pytest.fixture
def trainer() -> Iterator[Make]:
    """A maker of trainers that are closed at the end."""
    made: list[Trainer] = []

    def make(**more: Any) -> Trainer:
        made.append(Trainer(mixed, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_media_are_known_by_their_content_at_their_places() -> None:
    """Each by its run of ids; a kind whose items and runs do not agree says nothing."""
    image_module = pytest.importorskip("PIL.Image")
    one, two = (image_module.new("RGB", (4, 4), color) for color in ("red", "blue"))
    ids = [1, PAD, PAD, 2, PAD, 3, VIDEO, VIDEO]
    frames = np.zeros((2, 3, 4, 4), np.uint8)
    stands = {"image": PAD, "video": VIDEO}
    placed = placed_media(ids, {"image": [one, two], "video": [(frames, {"fps": 2.0})], "audio": None}, stands)
    assert [(p.attachment.kind, p.at, p.count) for p in placed] == [("image", 1, 2), ("image", 4, 1), ("video", 6, 2)]
    assert placed[0].attachment.digest == digest_of(one.copy()) != digest_of(two) == placed[1].attachment.digest
    assert placed_media(ids, {"image": [one]}, stands) == placed_media(ids, {"image": [object(), one]}, stands) == ()
    assert runs_of(np.array([], np.int32), PAD) == []
    assert digest_of([frames, "a"]) != digest_of([frames, "b"])


def test_a_rollout_that_sees_another_image_after_a_restart_begins_anew(trainer: Make, tmp_path: Path) -> None:
    """Their tokens are equal: what was said of the one is no answer about the other. With the same image it goes on."""

    def looks_at(picture: bytes) -> Any:
        async def rollout(session: Session, prompt: list[int], send: Any) -> list[int]:
            attached = placed_media(prompt, {"image": [picture]}, {"image": 50})
            assert len(attached) == 1
            done = await generate(session, send, prompt, 40, 1.0, attached=attached)
            return [int(token) for token in done.tokens]

        return rollout

    run = trainer()
    run.agent_loop = looks_at(b"a cat")
    run.steps(2)
    mine = run.save(tmp_path)
    assert run.ask("ledgers")["tokens"]["held"]
    diverged = {}
    for picture in (b"a cat", b"a dog"):
        again = trainer()
        again.agent_loop = looks_at(picture)
        again.load(tmp_path, mine)
        again.steps(2)
        diverged[picture] = again.ask("ledgers")["tokens"]["dropped"].get("replay_diverged", 0)
    assert diverged[b"a cat"] == 0
    assert diverged[b"a dog"] > 0


def test_a_generated_placeholder_is_dropped_by_name(trainer: Make) -> None:
    """A server without bans may write one; the actor could not read the row, so it is generated again."""

    async def rollout(session: Session, prompt: list[int], send: Any) -> list[int]:
        done = await generate(session, send, prompt, 40, 1.0, banned_ids=(PAD,))
        return [int(token) for token in done.tokens]

    run = trainer()
    run.agent_loop = rollout
    run.server.wrong = [{"token_ids": [PAD, EOS], "log_probs": [-0.1, -0.1]}]
    run.step()
    assert all(PAD not in response["tokens"] for response in run.last.values())
    assert run.ask("ledgers")["tokens"]["dropped"]["corrupt"] == 2
