"""OpenRLHF's images: each in the requests of its prompt and in what is trained of it, over cuts and a restart."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_schedulers import assert_nothing_is_left
from tiny_vision import IMAGE_ID, encoded, picture, tiny_processor

from adapters.openrlhf_stand_in import ROWS, Engine, Loader, Run, Tokenizer, installed, namespace
from april.adapters.openrlhf.arguments import config_of
from april.attachments import attachment_bytes
from april.engines.protocol import Capabilities, Chunk, Request
from april.errors import ConfigError, RolloutError

SEES: dict[str, Any] = {"data__max_images_per_prompt": 2, "data__max_len": 400}


@pytest.fixture(autouse=True)
def modules() -> Iterator[Any]:
    with installed() as made:
        yield made
    assert_nothing_is_left()


def image_of(number: int) -> Any:
    """Of two sizes, and a colour of its own."""
    return picture(56 + 28 * (number % 2), 84, (number, 2 * number, 255 - number))


def text_of(number: int, images: int = 1) -> str:
    marks = "<|vision_start|><|image_pad|><|vision_end|>" * images
    return f"<|im_start|>user\n{marks}a tiny model sees {number} cats<|im_end|>\n"


class SeeingLoader(Loader):
    """Every form of images that OpenRLHF reads, and prompts without any."""

    folder = Path()

    def _iterate(self, order: list[int]) -> Iterator[Any]:
        while self._at < len(order):
            self._at += 1
            number = order[self._at - 1]
            yield ["default"], [text_of(number, int(number % 6 < 5))], [str(number)], [self.images(number)]
        self._at = len(order) + 1

    def images(self, number: int) -> Any:
        """One of a prompt."""
        image = image_of(number)
        path = self.folder / f"{number}.png"
        path.write_bytes(encoded(image))
        forms = [image, [encoded(image)], str(path), [base64.b64encode(encoded(image, "BMP")).decode()], [
            "data:image/png;base64," + base64.b64encode(encoded(image)).decode()
        ], [None]]  # fmt: skip
        return forms[number % 6]


class SeeingEngine(Engine):
    """Takes images, remembers which came with which text, and writes no placeholder."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._check_prefix = False  # its own tokens come back otherwise where they were placeholders
        self.seen: list[tuple[str, list[bytes]]] = []

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, attachments=("image",), bans=True)

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        assert IMAGE_ID in request.sampling.banned_ids
        prompt = request.token_ids[: len(request.token_ids) - request.response_offset]
        text = tiny_processor().tokenizer.decode([i for i in prompt.tolist() if i != IMAGE_ID])
        self.seen.append((text, [attachment_bytes(placed.attachment) for placed in request.attached]))
        async for chunk in super().generate(request):
            banned = np.isin(chunk.tokens, request.sampling.banned_ids)
            yield replace(chunk, tokens=np.where(banned, 9, chunk.tokens).astype(np.int32))


def pixels(data: bytes) -> Any:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def run(folder: Path) -> Run:
    SeeingLoader.folder = folder
    return Run(loader=SeeingLoader, engine=SeeingEngine, tokenizer=tiny_processor(), **SEES)


def check(made: Run) -> None:
    """What is trained is what was asked, and what OpenRLHF's processor makes of the prompt and its image."""
    processor = tiny_processor()
    for response in made.responses:
        number = int(response["label"])
        if number % 6 == 5:
            assert response["mm_train_inputs"] is response["images"] is None
            continue
        expected = processor(
            text=[response["prompt"]], images=[image_of(number)], add_special_tokens=False, return_tensors="pt"
        )
        start = response["action_ranges"][0][0]
        assert response["observation_tokens"][:start] == expected["input_ids"][0].tolist()
        assert IMAGE_ID not in response["observation_tokens"][start:]
        assert set(response["mm_train_inputs"]) == {"pixel_values", "image_grid_thw"}
        for name, value in response["mm_train_inputs"].items():
            assert (value == expected[name]).all()
        assert len(response["images"]) == 1
    for engine in made.engines:
        for text, images in engine.seen:
            number = int(text.split(" sees ")[1].split(" cats")[0])
            assert len(images) == int(number % 6 < 5)
            assert all((pixels(data) == np.asarray(image_of(number))).all() for data in images)


def test_images_of_openrlhfs_loader_reach_requests_and_training(tmp_path: Path) -> None:
    """In every form that it reads; cut and resumed responses among them, and prompts that are text alone."""
    with run(tmp_path) as made:
        made.episode()
        check(made)
        assert Counter(made.labels) == Counter(map(str, range(ROWS)))
        assert sum(r["extra_logs"]["april/resumes"] > 0 for r in made.responses) > 0


def test_images_live_through_a_restart(tmp_path: Path) -> None:
    """The checkpoint has what was drawn and is not finished, with its images, from files, text and objects."""
    with run(tmp_path) as made:
        made.step()
        made.step()
        state = made.loader.state_dict()
        first = made.labels
    with run(tmp_path) as made:
        made.loader.load_state_dict(state)
        made.push()
        made.episode()
        check(made)
        assert Counter(first + made.labels) == Counter(map(str, range(ROWS)))


def test_what_cannot_be_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """A model that does not see, images where none may be, a file that is none, one image and no place for it."""
    with pytest.raises(ConfigError, match="is for models that see, and this one has no image processor"):
        Run(tokenizer=Tokenizer(), **SEES)
    SeeingLoader.folder = tmp_path
    with Run(loader=SeeingLoader) as made, pytest.raises(RolloutError, match="max_images_per_prompt is 0"):
        made.episode()

    class Broken(SeeingLoader):
        def images(self, number: int) -> Any:
            return str(tmp_path / "nothing.png")

    broken = Run(loader=Broken, engine=SeeingEngine, tokenizer=tiny_processor(), **SEES)
    with broken, pytest.raises(RolloutError, match="cannot be read: No such file"):
        broken.step()


def test_limits_of_images_are_flags_of_aprils() -> None:
    """--april.images.NAME, beside OpenRLHF's own count."""
    config = config_of(namespace(**SEES), {"images.hosts": "a.example.com", "images": {"max_bytes": 1000}})
    assert (config.images.max_per_prompt, config.images.hosts, config.images.max_bytes) == (2, ("a.example.com",), 1000)
