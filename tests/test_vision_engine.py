"""The embedded engine with models that see: what is sampled behind an image is what the model says of that image."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models_that_see import (
    FAMILIES,
    IMAGE,
    VOCAB_SIZE,
    Seeing,
    apart_seeing,
    picture,
    seeing,
    tiny_processor,
    tiny_vision_model,
    with_images,
)
from tiny_models import V1, asked, collect, generated, joined, tiny_model

import april
from april.core.attachments import Attachment, Placed
from april.core.sampling import SamplingParams
from april.engines.protocol import Chunk, EngineFinish, Request
from april.engines.transformers import vision
from april.engines.transformers.engine import TransformersEngine
from april.errors import AttachmentError, ConfigError, EngineError

MOST = 1e-5


def _engine(model: Any, processor: Any = None, **options: Any) -> TransformersEngine:
    return TransformersEngine(
        model, processor=processor, **({"slots": 5, "max_len": 256, "eos_token_ids": ()} | options)
    )


def _conversations(processor: Any) -> list[Seeing]:
    """Text alone, short and long; an image; another of the same size behind the same text; two of other sizes."""
    made = [([10, 11], []), ([33] * 30, []), ([12], [picture(1)]), ([12], [picture(2)])]
    made += [([20, 21, 22], [picture(3, 40, 24), picture(4, 24, 24)]), ([40] * 9, [picture(1), picture(5, 32, 32)])]
    return [with_images(processor, words, images) for words, images in made]


@pytest.mark.parametrize("family", FAMILIES)
async def test_cut_by_abort_and_resumed_under_a_new_vision_tower(family: str) -> None:
    """Mixed batches, cut in the middle; new weights, of the vision tower too; every log-probability is its own."""
    model, processor = tiny_vision_model(family), tiny_processor(family)
    engine = _engine(model, processor)
    assert engine.capabilities.attachments == ("image",)
    requests = [
        seeing(f"r{i}", *both, 24 + 3 * (i % 5), temperature=0.8, seed=i)
        for i, both in enumerate(_conversations(processor) * 2)
    ]
    tasks = [asyncio.create_task(collect(engine, request)) for request in requests]
    while engine.stats.decode_steps < 12:  # noqa: ASYNC110 - the worker thread's state has no event
        await asyncio.sleep(0)
    await engine.pause()
    await engine.abort()
    partials = [joined(await task) for task in tasks]
    assert {chunk.finish for chunk in partials} >= {EngineFinish.ABORT}
    assert sum(1 for r, c in zip(requests, partials, strict=True) if len(c.tokens) and r.attached) >= 3
    _check(model, processor, requests, partials)

    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(1.3 if "vis" in name or "multi_modal" in name else 1.02)
    await engine.update_weights(V1)
    await engine.resume()
    rest = []
    for request, chunk in zip(requests, partials, strict=True):
        if chunk.finish is EngineFinish.ABORT:
            longer = np.concatenate([request.token_ids, chunk.tokens])
            left = request.sampling.after(len(chunk.tokens), seed=9)
            name = f"{request.attempt_id}+"
            rest.append(Request(attempt_id=name, token_ids=longer, sampling=left, attached=request.attached))
    again = await asyncio.gather(*(generated(engine, request) for request in rest))
    assert {chunk.version for chunk in again} == {V1}
    _check(model, processor, rest, again)
    await engine.close()


def _check(model: Any, processor: Any, requests: list[Request], chunks: list[Chunk]) -> None:
    """Each against its own image; another one gives other numbers, so that none can pass for another."""
    for request, chunk in zip(requests, chunks, strict=True):
        if not len(chunk.tokens):
            continue
        found = (model, processor, request.token_ids)
        assert apart_seeing(*found, request.attached, chunk, 0.8).max() <= MOST
        for i, placed in enumerate(request.attached):
            height, width = (16, 24) if len(request.attached) == 1 else (40, 24) if i == 0 else (24, 24)
            other = Placed(picture(77, height, width), placed.at, placed.count, placed.stands)
            attached = [other if p is placed else p for p in request.attached]
            if len(chunk.tokens) > 8 and _count(processor, other.attachment) == placed.count:
                assert apart_seeing(*found, attached, chunk, 0.8).max() > 1e-3


def _count(processor: Any, image: Attachment) -> int:
    return with_images(processor, [9], [image])[1][0].count


async def test_samples_of_a_group_share_a_prefill_and_no_image_passes_for_another() -> None:
    """Equal tokens are not enough: two images of one size are two prefills, and each is processed once."""
    model, processor = tiny_vision_model(), tiny_processor()
    engine = _engine(model, processor, slots=8)
    made: list[int] = []
    process = engine._vision._process  # type: ignore[union-attr]
    engine._vision._process = lambda image: made.append(1) or process(image)  # type: ignore
    pairs = [with_images(processor, [12], [picture(i)]) for i in (1, 2)]
    np.testing.assert_array_equal(pairs[0][0], pairs[1][0])
    requests = [seeing(f"{i}/{j}", *pairs[i], 20, temperature=0.8, seed=j) for j in range(4) for i in (0, 1)]
    before = engine.stats.prefill_tokens
    chunks = await asyncio.gather(*(generated(engine, request) for request in requests))

    assert engine.stats.prefill_tokens - before == 2 * len(pairs[0][0])
    assert len(made) == 2
    _check(model, processor, requests, chunks)
    await engine.close()


async def test_pixels_are_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last images are, whatever the bound; an image that is needed again is processed again."""
    model, processor = tiny_vision_model(), tiny_processor()
    engine = _engine(model, processor, slots=1)
    kept = engine._vision._kept  # type: ignore[union-attr]
    pairs = [with_images(processor, [12], [picture(i)]) for i in (1, 2, 3, 1)]
    monkeypatch.setattr(vision, "PIXELS_KEPT", 1)
    chunks = []
    for i, pair in enumerate(pairs):
        chunks.append(await generated(engine, seeing(f"{i}", *pair)))
        assert list(kept) == [pair[1][0].attachment.digest]
    np.testing.assert_array_equal(chunks[0].tokens, chunks[3].tokens)
    await engine.close()


async def test_banned_ids_are_never_sampled_and_change_no_log_probability() -> None:
    """Of rows with and without a ban, one batch; those of a ban are log_softmax(logits / T) as a trainer has it."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[3:60] *= 3  # tokens that would be drawn all the time
    engine = _engine(model)
    words, banned = np.arange(60, 70, dtype=np.int32), tuple(range(3, 60))
    sampling = [
        SamplingParams(40, temperature=t, top_p=p, seed=i, banned_ids=b, min_tokens=m, stop_token_ids=(70,))
        for i, (t, p, b, m) in enumerate(
            [(1.0, 1.0, banned, 0), (1.0, 1.0, (), 0), (0.0, 1.0, banned, 5), (0.7, 0.8, (*banned, 10_000), 9)]
        )
    ]
    requests = [asked(f"{i}", words, params) for i, params in enumerate(sampling)]
    chunks = await asyncio.gather(*(generated(engine, request) for request in requests))

    assert engine.capabilities.bans
    for request, chunk in zip(requests, chunks, strict=True):
        drawn = set(chunk.tokens.tolist()) & set(banned)
        assert bool(drawn) is not bool(request.sampling.banned_ids)
        assert apart_seeing(model, None, words, (), chunk, request.sampling.temperature or 1.0).max() <= MOST
        assert len(chunk.tokens) >= request.sampling.min_tokens
    with pytest.raises(EngineError, match="every token of the vocabulary is banned"):
        await collect(engine, asked("x", words, SamplingParams(5, banned_ids=tuple(range(VOCAB_SIZE)))))
    await engine.close()


async def test_what_cannot_be_seen_is_refused_by_a_sentence_and_alone(tmp_path: Path) -> None:
    """Before anything is computed where the tokens say it, else when it is admitted; companions do not notice."""
    model, processor = tiny_vision_model(), tiny_processor()
    engine = _engine(model, processor)
    tokens, (placed,) = with_images(processor, [12], [picture(1)])
    path = tmp_path / "image.png"
    path.write_bytes(picture(2).data or b"")
    from_file = Attachment("image", picture(6).digest, 10, None, str(path))
    two = (placed, Placed(picture(2), placed.end, placed.count, placed.stands))
    together = np.concatenate([tokens[: placed.end], tokens[placed.at :]])

    def of(attachment: Attachment) -> tuple[Placed, ...]:
        return (Placed(attachment, placed.at, placed.count, (IMAGE,)),)

    bad: list[tuple[Any, tuple[Placed, ...], str]] = [
        (together, two, "follows another one immediately"),
        (tokens, of(picture(5, 32, 32)), r"needs 16 placeholder tokens, but the conversation has 6 for it"),
        (tokens, of(Attachment.of("image", (picture(1).data or b"")[:60])), "cannot be read"),
        (tokens, of(from_file), "has changed since its prompt was drawn"),
    ]
    good = asyncio.gather(*(generated(engine, seeing(f"good{i}", tokens, (placed,), seed=i)) for i in range(2)))
    found = await asyncio.gather(
        *(collect(engine, seeing(f"bad{i}", ids, places)) for i, (ids, places, _) in enumerate(bad)),
        return_exceptions=True,
    )
    for i, (error, (*_, sentence)) in enumerate(zip(found, bad, strict=True)):
        assert isinstance(error, AttachmentError)
        assert f"attempt bad{i}: " in str(error)
        with pytest.raises(AttachmentError, match=sentence):
            raise error
    assert [len(chunk.tokens) for chunk in await good] == [20, 20]
    assert engine.stats.failures == 3
    assert not engine._streams
    assert (await engine.health()).ok
    await engine.close()


async def test_models_and_processors_that_do_not_fit() -> None:
    """Text models declare no images, unknown families are refused by name, and a wrong processor at once."""
    blind = _engine(tiny_model(), tiny_processor())
    assert blind.capabilities.attachments == ()
    alone = _engine(tiny_vision_model())
    assert alone.capabilities.attachments == ()
    text = asked("b", np.array([10, 11], np.int32), SamplingParams(10))
    assert apart_seeing(alone._model, None, text.token_ids, (), await generated(alone, text)).max() <= MOST
    unknown = tiny_vision_model()
    unknown.config.model_type = "seer"
    sentence = r"images of seer: the transformers engine only supports images of gemma3, qwen2_5_vl"
    with pytest.raises(ConfigError, match=sentence):
        _engine(unknown, tiny_processor())
    with pytest.raises(ConfigError, match="processor is a TokenizersBackend, which makes no pixels"):
        _engine(tiny_vision_model(), tiny_processor().tokenizer)
    other = tiny_vision_model()
    other.config.image_token_id = 5
    with pytest.raises(ConfigError, match="TinyProcessor turns an image into tokens other than 5, the model's"):
        _engine(other, tiny_processor())
    with pytest.raises(ConfigError, match=r"\(KeyError: 'image_grid_thw'\); is the processor its own\? Else use a ser"):
        _engine(tiny_vision_model(), tiny_processor("gemma3"))
    with pytest.raises(ConfigError, match=r"qwen2_5_vl reads small images as \d+ tokens, but max_len leaves 14"):
        _engine(tiny_vision_model(), tiny_processor(), max_len=20)
    await asyncio.gather(blind.close(), alone.close())


def test_a_model_that_sees_otherwise_than_it_should_fails_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that are off by one behind an image: the trial has images in it."""
    see = vision.Vision.process

    def off_by_one(self: Any, *arguments: Any) -> vision.ProcessedImages:
        seen = see(self, *arguments)
        return vision.ProcessedImages(seen.pixels, seen.positions, seen.offset + 1)

    monkeypatch.setattr(vision.Vision, "process", off_by_one)
    with pytest.raises(ConfigError, match=r"differs from a full forward pass by .* of prompts with images"):
        _engine(tiny_vision_model(), tiny_processor())


async def test_weights_of_a_model_that_sees_come_from_a_directory(tmp_path: Path) -> None:
    """The vision tower included, in place; and the engine is made of a directory."""
    model, newer, processor = tiny_vision_model(), tiny_vision_model(seed=1), tiny_processor()
    newer.save_pretrained(tmp_path)
    engine, of_directory = (
        _engine(model, processor),
        TransformersEngine.from_pretrained(str(tmp_path), processor=processor, eos_token_ids=()),
    )
    await engine.pause()
    await engine.update_weights(V1, str(tmp_path))
    await engine.resume()
    request = seeing("a", *with_images(processor, [12], [picture(1)]))
    for one in (engine, of_directory):
        chunk = await generated(one, request)
        assert apart_seeing(newer, processor, request.token_ids, request.attached, chunk).max() <= MOST
        await one.close()


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_a_scheduler_with_text_one_image_and_two(family: str) -> None:
    """Prompts as users give them, with one placeholder per image; cut and resumed responses are exact, too."""
    model, processor = tiny_vision_model(family), tiny_processor(family)
    mark = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    prompts: list[Any] = [{"token_ids": [12, mark, 9], "images": [picture(i).data]} for i in range(6)]
    prompts[1] = {"token_ids": [30, 31, 32]}
    prompts[4] = {"token_ids": [30, mark, 31, mark], "images": [picture(6).data, picture(7, 24, 24).data]}
    config = april.Config(
        rollout_batch_size=2, n_samples_per_prompt=3, over_sampling_batch_size=4, max_response_len=120,
        engine={"kind": "transformers", "slots": 8, "stream_interval": 4, "max_len": 256},
    )  # fmt: skip
    with april.RolloutScheduler(config, prompts=prompts, model=model, processor=processor, reward=None) as scheduler:
        samples = [sample for _ in range(3) for sample in scheduler.next_batch().samples]

    assert any(sample.resumes for sample in samples)
    assert {len(sample.prompt.attached) for sample in samples} == {0, 1, 2}
    for sample in samples:
        assert not {mark, IMAGE} & set(sample.tokens.tolist())
        found = (sample.prompt.token_ids, sample.prompt.attached, sample)
        assert apart_seeing(model, processor, *found).max() <= MOST
