"""Images among tokens: as the model's processor places them, or refused; and prompts that bring them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_vision import (
    IMAGE_ID,
    VIDEO_ID,
    VOCAB,
    encoded,
    picture,
    tiny_gemma,
    tiny_processor,
    tiny_tokenizer,
)  # fmt: skip

pytest.importorskip("PIL")

import april
from april.config.images import ImagesConfig
from april.core.attachments import Attachment, Placed, collapsed
from april.core.sampling import SamplingParams
from april.core.types import Prompt
from april.driver.attempt_streams import refuse_attached
from april.driver.prompt_reader import PromptReader
from april.driver.prompt_source import PromptSource
from april.engines.protocol import Capabilities, Request
from april.errors import CheckpointError, ConfigError, RequestRefused
from april.images.image_placer import ImagePlacer
from april.testing import FakeEngine, rollouts, run_virtual

RED, BLUE = encoded(), encoded(picture(color=(0, 0, 255)))
TALL = encoded(picture(140, 300))
MARK = "<|vision_start|><|image_pad|><|vision_end|>"


def images(**limits: Any) -> ImagePlacer:
    return ImagePlacer(tiny_processor(), ImagesConfig(**limits))


def reader() -> PromptReader:
    way_in = images()
    return PromptReader(VOCAB, way_in.tokenizer, way_in)


def by_processor(text: str, *pictures: Any) -> list[int]:
    """What transformers makes of the same."""
    made: list[int] = tiny_processor()(text=[text], images=list(pictures))["input_ids"][0]
    return made


SIZES = [(56, 84), (140, 300), (20, 20), (500, 31), (29, 1000), (333, 777)]


def test_tokens_are_those_of_the_processor() -> None:
    """For every size of image, alone and several in a row; from one placeholder each, and from tokens that have all."""
    way_in = images()
    for some in ([s] for s in SIZES), (SIZES[:2], SIZES[1:4], [SIZES[0]] * 3):
        for sizes in some:
            shown = [picture(*size) for size in sizes]
            text = f"what is {MARK * (len(shown) - 1)} here{MARK}?"
            read = way_in.read(shown, "prompt 0")
            asked = way_in.encode(text)
            ids, placed = way_in.place(asked, read, "prompt 0")
            assert ids.tolist() == by_processor(text, *shown)
            again, same = way_in.place(ids, read, "prompt 0")
            assert again.tolist() == ids.tolist()
            assert same == placed
            np.testing.assert_array_equal(collapsed(ids, placed), asked)
            assert all((ids[p.at : p.end] == IMAGE_ID).all() for p in placed)


def test_some_of_the_images_may_be_placed_already() -> None:
    """As in a conversation that goes on, to which an environment adds one."""
    way_in = images()
    read = way_in.read([RED, TALL], "prompt 0")
    first, placed = way_in.place(way_in.encode(f"a{MARK}b"), read[:1], "prompt 0")
    more = np.concatenate((first, way_in.encode(f"c{MARK}")))
    ids, both = way_in.place_after(more, len(first), placed, read[1:], "prompt 0")
    assert ids.tolist() == by_processor(f"a{MARK}bc{MARK}", picture(), picture(140, 300))
    assert both == way_in.place(ids, read, "prompt 0")[1]


@pytest.mark.parametrize(
    ("text", "shown", "sentence"),
    [
        (f"a{MARK}", [], r"prompt 0 has 1 placeholder <\|image_pad\|> \(id 5\) and no images; give it an image"),
        (f"a{MARK}{MARK}", [RED], r"2 placeholders .* and 1 image; .*, or all 6 that \w+ makes of them"),
        ("a", [RED], r"no placeholders .* and 1 image;"),
        (f"a{MARK}<|video_pad|>", [RED], "1 placeholders of video or sound, but april only supports images"),
        (f"a{MARK}", [encoded(picture(3, 900))], r"prompt 0, image 1: \w+ rejects an image of 3 x 900 pixels"),
    ],
)
def test_placeholders_that_do_not_fit(text: str, shown: list[bytes], sentence: str) -> None:
    """More or fewer than images, one of a video, an image that the processor refuses: in one sentence."""
    way_in = images()
    with pytest.raises(ConfigError, match=sentence):
        way_in.place(way_in.encode(text), way_in.read(shown, "prompt 0"), "prompt 0")


class Odd:
    """The tiny processor, with something else of its own."""

    def __init__(self, **other: Any) -> None:
        self.__dict__.update(other)

    def __getattr__(self, name: str) -> Any:
        return getattr(tiny_processor(), name)

    def __call__(self, text: list[str], images: list[Any], **options: Any) -> Any:
        made = tiny_processor()(text=text, images=images, **options)
        if len(images) > 1:
            made["input_ids"][0].append(7)
        return made


@pytest.mark.parametrize(
    ("processor", "sentence"),
    [
        (Odd(), r"Odd turns a prompt with images into \d+ tokens and april"),
        (Odd(tokenizer=None), "Odd has no tokenizer; give the model's own: transformers.AutoProcessor"),
        (5, "int has no tokenizer nor image_processor nor image_token"),
        ("/nowhere/at/all", "processor: loading failed: "),
    ],
    ids=["other tokens", "no tokenizer", "a number", "no path"],
)
def test_a_processor_that_cannot_be_followed(processor: Any, sentence: str) -> None:
    """One that makes other tokens than april is found at the start, by trying it, and refused by name."""
    with pytest.raises(ConfigError, match=sentence):
        ImagePlacer(processor)


def test_structured_processors() -> None:
    """Of the kind of SmolVLM, where an image is rows of tokens between tokens of its own, as many as its size wants."""
    transformers = pytest.importorskip("transformers")
    tokenizer = tiny_tokenizer().__class__(tokenizer_object=tiny_tokenizer().backend_tokenizer)
    more = ["<global-img>", *(f"<row_{i + 1}_col_{j + 1}>" for i in range(6) for j in range(6))]
    tokenizer.add_tokens(more, special_tokens=True)

    made = transformers.Idefics3Processor(
        image_processor=transformers.Idefics3ImageProcessorPil(
            size={"longest_edge": 128}, max_image_size={"longest_edge": 64}
        ),
        tokenizer=tokenizer, image_seq_len=4,
    )  # fmt: skip
    way_in = ImagePlacer(made)
    shown = [picture(100, 60), picture(60, 60)]
    ids, placed = way_in.place(way_in.encode("a<image>b<image>"), way_in.read(shown, "prompt 0"), "prompt 0")
    theirs = made(text=["a<image>b<image>"], images=[shown], add_special_tokens=False)["input_ids"][0]
    assert ids.tolist() == theirs
    assert len({p.count for p in placed} | {1}) > 1
    assert collapsed(ids, placed).tolist() == way_in.encode("a<image>b<image>").tolist()
    assert tokenizer.convert_tokens_to_ids("<image>") in way_in.banned_ids


IMAGE = "<start_of_image>"


@pytest.mark.parametrize(
    "text",
    [
        f"user\n{IMAGE}what{IMAGE}{IMAGE}\n\nis", IMAGE, f"a{IMAGE}\n{IMAGE}b\n", f"{IMAGE}\n\n\n{IMAGE}{IMAGE}\n\n",
        f"<start_of_turn>{IMAGE}<end_of_turn>\n", f"\n{IMAGE}\n",
    ],
)  # fmt: skip
def test_text_around_an_image_is_put_together_with_what_is_beside_it(text: str) -> None:
    """As Gemma's processor does: line breaks become one token with those of the conversation, on either side."""
    made = tiny_gemma()
    way_in = ImagePlacer(made)
    shown = [picture(50 + i, 60) for i in range(text.count(IMAGE))]
    read = way_in.read(shown, "prompt 0")
    asked = way_in.encode(text)
    ids, placed = way_in.place(asked, read, "prompt 0")
    assert ids.tolist() == made(text=[text], images=[shown], add_special_tokens=False)["input_ids"][0]
    assert collapsed(ids, placed).tolist() == asked.tolist()
    soft = made.tokenizer.image_token_id
    assert [(ids[p.at : p.end] == soft).sum() for p in placed] == [4] * len(shown)
    again, same = way_in.place(ids, read, "prompt 0")
    assert again.tolist() == ids.tolist()
    assert same == placed
    assert [p.attachment for p in way_in.prompt_pictures(ids, placed)] == [p.attachment for p in placed]
    more = way_in.encode(IMAGE)
    for wrong in (ids[:-1] if text == IMAGE else np.append(ids, soft), np.append(asked, more), np.append(ids, more)):
        with pytest.raises(ConfigError, match="prompt 0 has"):
            way_in.place(wrong, read, "prompt 0")


# ---------------------------------------------------------------- prompts

SAID = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}]


@pytest.mark.parametrize(
    "item",
    [
        {"messages": SAID, "images": [RED]},
        {"messages": [{"role": "user", "content": "what is it?"}], "images": [RED]},
        {"messages": [{"role": "user", "content": [{"type": "image", "image": RED}, SAID[0]["content"][1]]}]},
        {"messages": [{"role": "user", "content": [
            {"type": "image", "index": 0, "text": None}, {"type": "text", "index": None, "text": "what is it?"},
        ]}], "images": [RED]},
        {"messages": [
            {"role": "user", "images": [], "content": [{"image": RED}, {"text": "what is it?", "image": None}]},
        ]},
        {"token_ids": None, "images": [RED]},
    ],
    ids=["beside", "before the first words", "in the message", "filled up with null", "without types", "token ids"],
)
def test_prompts_with_images(item: dict[str, Any]) -> None:
    """Chats, with images in their parts or beside them, and token ids with a placeholder: one prompt."""
    whole = tiny_processor().apply_chat_template(SAID, tokenize=False, add_generation_prompt=True)
    if "token_ids" in item:
        item = {**item, "token_ids": images().encode(whole).tolist()}
    prompt = reader().read({**item, "answer": 4}, 3, 1)
    assert prompt.token_ids.tolist() == by_processor(whole, picture())
    (placed,) = prompt.attached
    assert placed.attachment.data == RED
    assert (prompt.position, prompt.epoch, prompt.data["answer"]) == (3, 1, 4)
    assert "images" not in prompt.data  # they are held once, by what is attached
    assert [m["content"] for m in prompt.data.get("messages", SAID)] == [SAID[0]["content"]]


def test_a_chat_without_images_needs_a_tokenizer_only() -> None:
    """``messages`` are written by the chat template, with a processor or without."""
    chat = {"messages": [{"role": "user", "content": "hello"}], "level": 2}
    text = tiny_tokenizer().apply_chat_template(chat["messages"], tokenize=False, add_generation_prompt=True)
    for way in (reader(), PromptReader(VOCAB, tiny_tokenizer())):
        prompt = way.read(chat, 0)
        assert prompt.token_ids.tolist() == tiny_tokenizer().encode(text)
        assert (prompt.attached, prompt.data) == ((), chat)


def of_part(part: Any) -> dict[str, Any]:
    """A prompt whose message has this part after a text."""
    return {"messages": [{"role": "user", "content": ["a", part]}]}


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        ({"messages": SAID, "images": [RED, BLUE]}, r"prompt 5 has 2 images in .*, but 1 part "),
        ({"messages": SAID}, r"prompt 5 has no images in .*, but 1 part "),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "index": 1}]}], "images": [RED]},
            "prompt 5: a part of type image has index and no image",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "file_id": "f"}]}], "images": [RED]},
            "prompt 5: a part of type image_url has file_id and no image",
        ),
        ({"messages": SAID, "images": RED}, "prompt 5: images must be a list of images, got bytes"),
        ({"messages": "hello", "images": []}, "prompt 5: messages must be a list of chat messages, got str"),
        (of_part({"type": "video"}), "type 'video' is not supported; april takes"),
        (of_part({"type": "text", "text": "a", "image": RED}), "prompt 5: a text part has 'image'; april takes"),
        (of_part({"type": "text", "text": "a", "video": "a.mp4"}), "prompt 5: a text part has 'video'"),
        (of_part({"video": "a.mp4"}), "prompt 5: a text part has 'video'; april takes text, and images in parts"),
        (of_part({"input_audio": {"data": "a"}}), "prompt 5: a text part has 'input_audio'"),
        (of_part({"image": RED, "text": "a"}), "prompt 5: a part has an image and a text; give each a part of its own"),
        (of_part({"type": "text", "content": "a"}), "prompt 5: the text of a part must be a string, got NoneType"),
        (of_part({"type": "text", "text": ["a"]}), "prompt 5: the text of a part must be a string, got list"),
        (of_part(None), "prompt 5: a part must have a type and a text or an image, got NoneType"),
        ({"messages": [{"role": "user", "content": "a", "images": [RED]}]}, "prompt 5: a message has 'images'; images"),
        ({"token_ids": [1, IMAGE_ID], "images": [RED[:50]]}, "prompt 5, image 1 is damaged or truncated"),
        ({"token_ids": [1, IMAGE_ID]}, "prompt 5 has 1 placeholder"),
        ([1, IMAGE_ID], "prompt 5 has 1 placeholder"),
        ({"token_ids": [1], "images": [RED] * 65}, r"prompt 5 has 65 images, but images.max_per_prompt is 64"),
    ],
)
def test_prompts_that_cannot_be_used(item: Any, sentence: str) -> None:
    """Refused by their number, before anything starts from them: no image, video, sound or text is lost silently."""
    with pytest.raises(ConfigError, match=sentence):
        reader().read(item, 5)


def test_without_a_processor_images_are_refused_by_name() -> None:
    """They are not passed over, and no template writes them."""
    for item in ({"token_ids": [1], "images": [RED]}, {"messages": SAID, "images": [RED]}):
        with pytest.raises(ConfigError, match=r"prompt 2 has images, but there is no processor .*; give processor="):
            PromptReader(VOCAB, tiny_tokenizer()).read(item, 2)
    with pytest.raises(ConfigError, match=r"prompt 2 has messages, .*; give tokenizer="):
        PromptReader(VOCAB).read({"messages": [{"role": "user", "content": "a"}]}, 2)
    assert PromptReader(VOCAB).read({"token_ids": [1], "images": []}, 2).attached == ()


def test_a_restart_over_other_images_is_found_out(tmp_path: Path) -> None:
    """The digest of a pass has the images: equal tokens with another picture are other prompts."""
    path = tmp_path / "a.png"
    path.write_bytes(RED)
    prompts = [{"token_ids": [1, IMAGE_ID], "images": [path]}] * 3
    source = PromptSource(prompts, reader(), 1)
    assert source.is_slow
    drawn, *_ = source.draw(2)
    assert drawn[0].attached[0].attachment is drawn[1].attached[0].attachment
    state = source.state_dict()
    PromptSource(prompts, reader(), 1).load_state_dict(state)
    path.write_bytes(BLUE)
    with pytest.raises(CheckpointError, match="other"):
        PromptSource(prompts, reader(), 1).load_state_dict(state)


def batch_of(prompts: list[Any], rollout: Any = None, **options: Any) -> april.Batch:
    """The first batch of a run on virtual time, whose engine reads images."""

    async def program() -> april.Batch:
        config = april.Config(rollout_batch_size=1, n_samples_per_prompt=2, max_response_len=200)
        engine = FakeEngine("e", lengths=5, vocab_size=VOCAB, eos_token_id=2)
        given = {} if rollout is None else {"rollout": rollout}
        async with rollouts(
            config, engines=[engine], prompts=prompts, reward=lambda p, r: 1.0, processor=tiny_processor(),
            **given, **options,
        ) as run:  # fmt: skip
            batch = await run.next_batch()
            run.audit()
            assert engine.violations == []
            assert all(a.request.sampling.banned_ids == (IMAGE_ID, VIDEO_ID) for a in engine.attempts.values())
            return batch

    return run_virtual(program())


def test_a_batch_of_prompts_with_images() -> None:
    """The engine gets the image with the expanded prompt, once per group, and never generates a placeholder."""
    batch = batch_of([{"messages": SAID, "images": [RED]}])
    one, other = batch.samples
    assert one.prompt.attached[0].attachment is other.prompt.attached[0].attachment
    assert len(one.prompt.token_ids) == len(by_processor(tiny_processor().apply_chat_template(
        SAID, tokenize=False, add_generation_prompt=True), picture()))  # fmt: skip


def test_an_environment_adds_an_image() -> None:
    """``llm.generate(images=)``: it belongs to the placeholder in what is new, which becomes what stands for it."""
    seen: list[list[int]] = []

    async def rollout(prompt: Prompt, llm: april.LLM) -> None:
        first = await llm.generate(max_tokens=3)
        new = images().encode(f"look{MARK}")
        done = await llm.generate([*first.conversation, *new], images=[TALL], max_tokens=3)
        done = await llm.generate([*done.conversation, 9], max_tokens=3)
        seen.append(done.conversation.tolist())

    batch = batch_of([{"messages": SAID, "images": [RED]}], rollout)
    (sample, _) = batch.samples
    conversation = [*sample.prompt.token_ids.tolist(), *sample.tokens.tolist()]
    assert conversation in seen
    way_in = images()
    (_, tall) = way_in.read([RED, TALL], "")
    added = way_in.place(way_in.encode(f"look{MARK}"), [tall], "")[0].tolist()
    assert sample.tokens[3 : 3 + len(added)].tolist() == added
    assert not sample.loss_mask[3 : 3 + len(added)].any()


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda llm, ids: llm.generate([*ids, IMAGE_ID]), "the new part has 1 placeholder"),
        (lambda llm, ids: llm.generate([*ids, 9], images=[RED]), "the new part has no placeholders .* and 1 image"),
        (lambda llm, ids: llm.generate(images=[RED]), "images belong to placeholders in token_ids; give both"),
        (lambda llm, ids: llm.generate([*ids, IMAGE_ID], images=RED), "images must be a list of images, got bytes"),
        (lambda llm, ids: llm.generate([*ids, IMAGE_ID], images=[b"x"]), "llm.generate, image 1 is not an image"),
        (lambda llm, ids: llm.generate([1, 2, IMAGE_ID], any_conversation=True), "the new part has 1 placeholder"),
    ],
)
def test_images_that_do_not_fit_a_call(ask: Any, sentence: str) -> None:
    """Each is a UsageError of the function that asked, in one sentence; nothing was sent."""
    errors: list[Exception] = []

    async def rollout(prompt: Prompt, llm: april.LLM) -> None:
        with pytest.raises(april.UsageError, match=sentence) as error:
            await ask(llm, prompt.token_ids)
        errors.append(error.value)
        await llm.generate(max_tokens=3)

    batch_of([{"messages": SAID, "images": [RED]}], rollout)
    assert len(errors) == 2


def test_requests_that_an_engine_would_read_otherwise_are_refused() -> None:
    """An attachment of a kind that it does not take, and a placeholder without one, which it would read as text."""
    sound = Placed(Attachment.of("audio", b"la"), 1, 1, (IMAGE_ID,))
    for attached, sentence in (((sound,), "engine e accepts no audios"), ((), f"token {IMAGE_ID} at position 1 ")):
        asked = Request(
            attempt_id="a", token_ids=np.array([3, IMAGE_ID], np.int32), attached=attached,
            sampling=SamplingParams(5, banned_ids=(IMAGE_ID,)),
        )  # fmt: skip
        attempt: Any = SimpleNamespace(engine="e", request=asked)
        with pytest.raises(RequestRefused, match=sentence):
            refuse_attached(attempt, {"image"})


def test_engines_that_take_no_images_are_named_at_the_start() -> None:
    """Before anything is drawn."""

    class Blind(FakeEngine):
        @property
        def capabilities(self) -> Capabilities:
            return replace(super().capabilities, attachments=())

    config = april.Config(rollout_batch_size=1, max_response_len=9)
    sentence = r"engine e accepts no images, .*; use an engine and a model that accept them; for text"
    with pytest.raises(ConfigError, match=sentence):
        april.RolloutScheduler(config, prompts=[[1]], reward=None, engines=[Blind("e")], processor=tiny_processor())
