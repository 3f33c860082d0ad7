"""slime's samples with images: each one's own reach the engines and the actor, over cuts and restarts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_schedulers import assert_nothing_is_left
from tiny_vision import IMAGE_ID, VOCAB, tiny_processor

from adapters.slime_stand_in import (
    Run,
    Sample,
    build_processor_kwargs,
    images_of,
    installed,
    namespace,
)
from april.adapters.slime.framework import Framework
from april.adapters.slime.images import SampleImages
from april.adapters.slime.samples import carry_path
from april.errors import ConfigError
from april.testing import FakeEngine

SEES: dict[str, Any] = {"multimodal_keys": '{"image": "images"}', "hf_checkpoint": "seeing"}
EOS = 2


@pytest.fixture(autouse=True)
def framework(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("april.config.settings.RETRY_PAUSE_S", 0.0)
    with installed():
        yield
    assert_nothing_is_left()


def engines() -> list[FakeEngine]:
    """Two that see, 0.5 ms a token."""
    def length(request: Any) -> int:
        return 10 + 13 * sum(request.sample_key) % 90

    return [FakeEngine(f"e{i}", lengths=length, seconds_per_token=5e-4, chunk_tokens=8, vocab_size=VOCAB,
                       eos_token_id=EOS) for i in range(2)]  # fmt: skip


def opened(**flags: Any) -> Any:
    """The process of a run whose samples have images."""
    return lambda directory=None, start=0: Run(directory, start, engines_of=engines, **SEES, **flags)


def check(run: Run, sample: Sample) -> int:
    """Its images are its own, in its tokens, at its engines and at its actor; 1 if several versions wrote it."""
    offset = int(str(sample.label))
    images = images_of(offset)
    prompt = sample.tokens[: -sample.response_length]
    theirs = tiny_processor()(text=sample.prompt, **build_processor_kwargs({"images": images or None}))
    assert prompt == list(theirs["input_ids"][0])
    assert prompt.count(IMAGE_ID) > len(images) or not images
    assert IMAGE_ID not in sample.tokens[-sample.response_length :]
    if not images:
        assert sample.multimodal_train_inputs is None
        return len(sample.metadata["april"]["spans"]) > 1
    assert sample.multimodal_inputs is not None
    assert [i.tobytes() for i in sample.multimodal_inputs["images"]] == [i.tobytes() for i in images]
    assert sample.multimodal_train_inputs is not None
    assert set(sample.multimodal_train_inputs) == {"pixel_values", "image_grid_thw"}
    for name, value in sample.multimodal_train_inputs.items():
        assert np.array_equal(value.numpy(), theirs[name].numpy()), name
    return len(sample.metadata["april"]["spans"]) > 1


def test_each_sample_has_its_own_images() -> None:
    """Prompts of none, one and two images, of several sizes; some are cut and continued with the same ones."""
    with opened()() as run:
        checked = (sum([check(run, sample) for sample in run.samples(i)]) for i in range(40))
        assert any(found >= 2 for found in accumulate(checked))
        for engine in run.engines:
            assert not engine.violations
            for record in engine.attempts.values():
                for placed in record.request.attached:
                    assert set(record.request.token_ids[placed.at : placed.end]) == {IMAGE_ID}


def test_samples_of_a_group_share_what_they_have_of_images() -> None:
    """While they are held there is one copy, in the prompt; the actor's tensors are one object for a group."""
    with opened()() as run:
        for i in range(3):
            groups = run(i)
            for group in groups:
                assert len({id(sample.multimodal_train_inputs) for sample in group}) == 1
        held = run.scheduler._driver.core.buffer.groups.values()
        assert any(group.prompt.attached for group in held)
        for group in held:
            for sample in group.prompt.data["group"]:
                assert not any((sample.multimodal_inputs or {}).values())


def test_images_go_on_after_a_restart(tmp_path: Path) -> None:
    """The checkpoint has each image once, by its hash, and no other process of slime's is asked for it."""
    with opened()(tmp_path) as run:
        for i in (0, 1):
            for sample in run.samples(i):
                check(run, sample)
        run.data.save(1)
    assert carry_path(str(tmp_path), 1).read_bytes().count(b"\x89PNG") <= 2 * 5
    with opened()(tmp_path, 2) as again:
        assert any(sum([check(again, sample) for sample in again.samples(i)]) for i in range(2, 40))


def test_a_reward_sees_the_images() -> None:
    """slime's functions find them in the sample, as its data set gave them."""
    with opened(custom_rm_path="adapters.test_slime_images.counts_images")() as run:
        for sample in run.samples(0):
            assert sample.reward == int(str(sample.label)) % 3


async def counts_images(args: Any, sample: Sample, **kwargs: Any) -> float:
    """A reward function."""
    return float(len((sample.multimodal_inputs or {}).get("images") or ()))


def test_a_checkpoint_without_a_processor_is_told() -> None:
    """By the flag and the path."""
    with pytest.raises(ConfigError, match="finds no processor for them at --hf-checkpoint text"):
        SampleImages.of(Framework("slime"), namespace(**{**SEES, "hf_checkpoint": "text"}))
    assert SampleImages.of(Framework("slime"), namespace()) is None
