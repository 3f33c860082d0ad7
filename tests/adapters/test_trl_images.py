"""The TRL adapter with images, before a stand-in of TRL's trainer: each row has its own, on ranks and after a restart.

The real package is held against it by ``make test-adapters``.
"""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from models_that_see import IMAGE, VIDEO, apart_seeing, opened, picture, tiny_processor, tiny_vision_model

import april
from april.adapters.trl import data as images
from april.adapters.trl import trainer as trainers
from april.core.attachments import Attachment, Placed
from april.core.versions import FIRST_VERSION
from april.engines.protocol import Chunk

from . import stand_in_trl as trl
from .stand_in_ranks import in_threads

ROWS = 12


def multimodal(messages: list[dict[str, Any]], images: list[Any]) -> list[dict[str, Any]]:
    """As ``trl.data_utils.prepare_multimodal_messages``, of one message."""
    (said,) = messages
    shown = [{"type": "image", "image": image} for image in images]
    return [{**said, "content": [*shown, {"type": "text", "text": said["content"]}]}]


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's way to show images, and ranks that are threads."""
    module = ModuleType("trl.data_utils")
    module.prepare_multimodal_messages = multimodal  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trl.data_utils", module)
    in_threads(monkeypatch, alone=trainers.scheduler_of)


class SeeingTrainer(trl.GRPOTrainer):
    """Shows images and writes prompts as TRL does with a processor."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, sees=True, **options)
        self.processing_class = tiny_processor()  # type: ignore[assignment]

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        shown = [[part["image"] for part in said[0]["content"] if part["type"] == "image"] for said in prompts]
        made = self.processing_class.apply_chat_template(  # type: ignore[attr-defined]
            conversation=prompts, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return made["input_ids"], shown, {}

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        shown = [row | {"prompt": multimodal(row["prompt"], row["images"])} for row in inputs]
        return super()._generate_and_score_completions(shown) | {"shown": [row["images"] for row in inputs]}


def attachments(row: int, first: int = 200) -> list[Attachment]:
    """One image, or two; those of a row are of one size, so that tokens do not tell them apart."""
    return [picture(first + row + 50 * i) for i in range(1 + (row % 5 == 4))]


def pictures(row: int) -> list[Any]:
    return [opened(image) for image in attachments(row)]


def data(count: int = ROWS) -> trl.Rows:
    said = [{"role": "user", "content": "t20"}]
    return trl.Rows({"prompt": said, "answer": row, "images": pictures(row)} for row in range(count))


train = partial(trl.train, kind=SeeingTrainer, model=tiny_vision_model, data=data, max_completion_length=200)


def check(trained: list[Any]) -> Counter[int]:
    """Every row that was scored has its own image, and was generated from it; rows of the data set."""
    seen: Counter[int] = Counter()
    for made in trained:
        for rows, output in zip(made.scored, made.outputs, strict=True):
            columns = (output["prompt_ids"], output["completion_ids"], output["logprobs"], output["shown"])
            for row, prompt, ids, logprobs, shown in zip(rows, *columns, strict=True):
                expected = pictures(row["answer"])
                assert [image.tobytes() for image in shown] == [image.tobytes() for image in expected]
                assert not {IMAGE, VIDEO} & set(ids)
                seen[row["answer"]] += 1
                response = Chunk(np.array(ids, np.int32), np.array(logprobs, np.float32), FIRST_VERSION)
                own, other = (apart(made, attachments(row["answer"], n), prompt, response) for n in (200, 900))
                assert own <= 1e-4
                assert len(ids) < 9 or other > 1e-3
    return seen


def apart(made: Any, images: list[Attachment], prompt: list[int], response: Chunk) -> float:
    """In nats, from the model's own forward pass over these images."""
    places = [Placed(image, 0, 0, ()) for image in images]
    return float(apart_seeing(made.model, made.processing_class, np.array(prompt, np.int32), places, response).max())


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_row_is_generated_from_its_own_image(ranks: int) -> None:
    """And handed to TRL with it, on whatever rank; cut and resumed ones, too."""
    trained = train(4, ranks=ranks)

    assert check(trained) == dict.fromkeys(range(ROWS), 2)
    assert sum(trained[0]._metrics["train"]["april/resumed_samples"]) > 0
    assert trained[0].rollout_func.ledger["tokens"].balanced


def test_a_restart_goes_on_with_the_same_images(tmp_path: Path) -> None:
    """What is held in the state comes back with its image, and every prompt is trained once."""
    before = train(2, folder=tmp_path)
    after = train(4, folder=tmp_path, resume=tmp_path / "checkpoint-2")

    assert check(before) + check(after) == dict.fromkeys(range(ROWS), 2)
    assert sum(after[0]._metrics["train"]["april/resumed_samples"]) > 0


def test_an_evaluation_is_one_of_all_ranks_with_their_images() -> None:
    """Each gets the answers to its own rows, from their images, those that one process would have got."""
    rows = [dict(row) for row in data(4)]
    alone = trl.evaluated_alike(train, rows)
    alone.outputs, alone.scored = [alone.evaluated], [rows]
    assert check([alone]) == dict.fromkeys(range(4), 1)


def test_rewards_that_april_asks_for_see_what_trl_shows() -> None:
    """For a filter, and in TRL: messages with the row's image in them."""
    seen: list[tuple[int, Any]] = []

    def reward(prompts: list[Any], answer: list[int], **others: Any) -> list[float]:
        for said, row in zip(prompts, answer, strict=True):
            shown = [part["image"].tobytes() for part in said[0]["content"] if part["type"] == "image"]
            seen.append((row, shown == [image.tobytes() for image in pictures(row)]))
        return [float(i) for i in range(len(prompts))]

    wrap = {"on_data_end": "wrap"}
    train(1, settings=wrap, filter=april.rewards_differ, reward_funcs=[reward], max_completion_length=40)

    assert len(seen) >= 12
    assert all(right for _, right in seen)


def test_trl_gets_images_as_they_were_read() -> None:
    """One with an alpha channel, of which every reader makes its own: the row that TRL trains has three."""

    def clear() -> trl.Rows:
        rows = data(6)
        for image in (image for row in rows for image in row["images"]):
            image.putalpha(90)
        return rows

    (made,) = train(1, data=clear, max_completion_length=8)
    shown = [image for images in made.outputs[0]["shown"] for image in images]
    assert {image.mode for image in shown} == {"RGB"}


def test_an_image_within_messages_is_refused_where_it_is_drawn() -> None:
    """The first row is looked at when the trainer is made, others when their turn comes; columns are what counts."""
    within = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
    assert images.column_of(data()) == "images"
    assert images.column_of(trl.prompts(2)) is None
    assert [*map(images.images_of_row, ({"image": None}, {"images": None}, {}))] == [[], [], []]
    with pytest.raises(april.ConfigError, match="has an image in its messages"):
        images.with_images(within, [])
    with pytest.raises(april.ConfigError, match="has images and a prompt of plain text"):
        images.with_images("t20", [1])
