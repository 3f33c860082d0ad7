"""Places images in a prompt: replaces the placeholder of each image by the tokens that the model's processor uses.

Invariant: the tokens of a conversation with placed images are those that the processor would make from the same text
and images. This is checked once, before anything starts, with two small images.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april.config.images import ImagesConfig
from april.core.attachments import Attachment, Placed
from april.engines.attachments import attachment_bytes
from april.errors import ConfigError
from april.images.chat_images import counted
from april.images.image_reader import IMAGE, ImageReader, Picture
from april.images.image_text import ImageTextCodec, Replacement
from april.text.install_command import require
from april.text.server_text import clean

Int32 = NDArray[np.int32]
_TRIAL_SIZES = ((56, 84), (200, 140))
"""(height, width) of the images with which a processor is checked."""
_MAX_CACHED_SIZES = 4096
"""Number of image sizes for which the replacement tokens are cached."""


def load_processor(processor: Any) -> Any:
    """Return the processor, loading it if ``processor`` is a path or name; raises ConfigError if that fails."""
    if not isinstance(processor, (str, os.PathLike)):
        return processor
    require("processor=", "transformers")
    import transformers

    try:
        loader: Any = transformers.AutoProcessor
        return loader.from_pretrained(processor)
    except Exception as error:  # such as a wrong path, a model without a processor, or a missing package
        raise ConfigError(f"processor: loading failed: {clean(error)}") from error


class ImagePlacer:
    """Reads the images of prompts and replaces their placeholders with tokens, as the model's processor does.

    Args:
        processor: a transformers processor with an image processor and a tokenizer, or the path or name of one.
        limits: limits on images; None means the defaults.

    Raises:
        ConfigError: the object is not such a processor, or april cannot reproduce how it expands prompts.
    """

    kind = IMAGE
    """Kind of the attachments that this class places."""

    def __init__(self, processor: Any, limits: ImagesConfig | None = None) -> None:
        self.limits = ImagesConfig() if limits is None else limits
        self.reader = ImageReader(self.limits)
        self.processor = processor = load_processor(processor)
        self.name = type(processor).__name__
        self.tokenizer: Any = getattr(processor, "tokenizer", None)
        missing = [
            name for name in ("tokenizer", "image_processor", "image_token") if getattr(processor, name, None) is None
        ]
        if not callable(processor) or missing:
            raise ConfigError(
                f"processor: {self.name} has no {' nor '.join(missing) or '__call__'}; give the model's own: "
                "transformers.AutoProcessor.from_pretrained(...)"
            )
        self._placeholder = str(processor.image_token)
        self._placeholder_id = self._id_of(self._placeholder)
        self.banned_ids = tuple(sorted({self._placeholder_id, *self._media_ids()}))
        """Ids of placeholder tokens for images, video and sound, which must never be generated."""
        self._special_ids = frozenset((*self.banned_ids, *_unmergeable_ids(self.tokenizer)))
        self._text_codec = ImageTextCodec(lambda text: self.encode(text).tolist(), self._decode, self._special_ids)
        self._writes_text = False
        """True if the processor writes text around an image."""
        self._counts_tokens = False
        self._replacements_by_size: dict[tuple[int, int], Int32] = {}
        self._lock = threading.RLock()
        self._check_processor()

    def _id_of(self, token: str) -> int:
        found = self.tokenizer.convert_tokens_to_ids(token)
        if type(found) is not int:
            raise ConfigError(f"processor: the tokenizer of {self.name} does not know its placeholder {clean(token)}")
        return found

    def _media_ids(self) -> Iterator[int]:
        for medium in ("image", "video", "audio"):
            ids = getattr(self.processor, f"{medium}_token_ids", None) or ()
            for found in (getattr(self.processor, f"{medium}_token_id", None), *ids):
                if isinstance(found, int):
                    yield found

    def _check_processor(self) -> None:
        """Place two images, and raise ConfigError if the tokens differ from those that the processor makes."""
        mark = self._placeholder
        pictures = [Picture(Attachment.of(IMAGE, b""), *size) for size in _TRIAL_SIZES]
        alone = [self._processor_tokens(mark, [size]) for size in _TRIAL_SIZES]
        runs = all((ids == self._placeholder_id).all() for ids in alone)
        self._writes_text = not self._special_ids.issuperset(int(ids[i]) for ids in alone for i in (0, -1))
        lengths = [len(ids) for ids in alone]
        self._counts_tokens = runs and [self._token_count(*size) for size in _TRIAL_SIZES] == lengths
        texts = [f"a{mark}b{mark}c", self._trial_chat()]
        for text in filter(None, texts):
            theirs = self._processor_tokens(text, _TRIAL_SIZES)
            ours, _ = self.place(self.encode(text), pictures, "a prompt")
            if not np.array_equal(ours, theirs):
                raise ConfigError(
                    f"processor: {self.name} turns a prompt with images into {len(theirs)} tokens and april into "
                    f"{len(ours)}; april only supports processors that replace each {clean(mark)} by the same tokens, "
                    "so this model's images cannot be used"
                )

    def _trial_chat(self) -> str:
        content = [{"type": IMAGE}, {"type": "text", "text": "a"}, {"type": IMAGE}]
        try:
            text = self.text([{"role": "user", "content": content}], None)
        except Exception:  # without a template, or with one for other messages, there are no chats
            return ""
        return text if text.count(self._placeholder) == len(_TRIAL_SIZES) else ""

    def _processor_tokens(self, text: str, sizes: Sequence[tuple[int, int]]) -> Int32:
        from PIL import Image

        blank = [Image.new("RGB", (width, height)) for height, width in sizes]
        try:
            output = self.processor(text=[text], images=blank, add_special_tokens=False)
            return np.array(output["input_ids"][0], np.int32)
        except Exception as error:
            size = " and ".join(f"{width} x {height}" for height, width in sizes)
            raise ConfigError(f"{self.name} rejects an image of {size} pixels: {clean(error)}") from error

    def _token_count(self, height: int, width: int) -> int:
        """Return the number of tokens that the processor computes from an image's size; -1 if it cannot."""
        try:
            output = self.processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
            return int(output["num_image_tokens"][0])
        except (AttributeError, KeyError, TypeError):
            return -1
        except Exception as error:  # a size that the processor does not take
            raise ConfigError(
                f"{self.name} rejects an image of {width} x {height} pixels: {clean(error)}"
            ) from error

    # ---------------------------------------------------------------- text

    def encode(self, text: str) -> Int32:
        """Return the tokens of a text, with one placeholder per image."""
        with self._lock:
            return np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Any, *, add_answer_start: bool = True) -> str:
        """Return what the chat template writes for messages; ``add_answer_start`` adds the start of an answer."""
        with self._lock:
            write = self.processor if getattr(self.processor, "chat_template", None) else self.tokenizer
            options = {"add_generation_prompt": add_answer_start, **({"tools": tools} if tools else {})}
            text: str = write.apply_chat_template(list(messages), tokenize=False, **options)
        return text

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any, where: str) -> Int32:
        """Return the tokens of a chat, with one placeholder for each content part of type ``image``."""
        try:
            return self.encode(self.text(messages, tools))
        except Exception as error:  # whatever a template raises
            raise ConfigError(f"{where}: the chat template rejects its messages: {clean(error)}") from error

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    # ---------------------------------------------------------------- placing images

    def prompt_pictures(self, token_ids: Int32, attached: Sequence[Placed]) -> list[Picture]:
        """Return a conversation's images as pictures that can be placed again, also at other positions."""
        if self._writes_text:  # the tokens depend on the text beside the image, so they cannot be reused
            data = [attachment_bytes(placed.attachment) for placed in attached]
            return [self.reader.read(item, "the prompt's image", decode=False) for item in data]
        return [Picture(p.attachment, 0, 0, tuple(token_ids[p.at : p.end].tolist())) for p in attached]

    def place_after(
        self, token_ids: Int32, placed_tokens: int, attached: Sequence[Placed], pictures: Sequence[Picture], where: str
    ) -> tuple[Int32, tuple[Placed, ...]]:
        """Place images after the first ``placed_tokens`` tokens, whose images ``attached`` are placed already.

        Returns all tokens and all attachments.
        """
        new, placed = self.place(token_ids[placed_tokens:], pictures, where)
        moved = (replace(one, at=one.at + placed_tokens) for one in placed)
        return np.concatenate((token_ids[:placed_tokens], new)), (*attached, *moved)

    def read(self, images: Sequence[Any], where: str, *, decode: bool = True) -> list[Picture]:
        """Read all images of a conversation, in order; raises ConfigError, naming the image, if one cannot be used."""
        self.reader.check_count(len(images), where)
        return [self.reader.read(item, f"{where}, image {i}", decode=decode) for i, item in enumerate(images, 1)]

    def place(self, token_ids: Any, pictures: Sequence[Picture], where: str) -> tuple[Int32, tuple[Placed, ...]]:
        """Return the tokens that the model reads, and the position of each image among them.

        Args:
            token_ids: tokens with one placeholder per image, or with all tokens that replace the placeholder.
            pictures: images, in order.
            where: name of the prompt for error messages.

        Raises:
            ConfigError: there are more or fewer placeholders than images, or placeholders of other media.
        """
        ids = np.asarray(token_ids, np.int32)
        replacements = [self._replacement(picture, f"{where}, image {i}") for i, picture in enumerate(pictures, 1)]
        with self._lock:
            parts = [self._text_codec.split(r) if self._writes_text else Replacement(r) for r in replacements]
            one_each = self._text_codec.collapse(ids, self._placeholder_id, parts) if parts else None
            ids = ids if one_each is None else one_each
            at = np.flatnonzero(ids == self._placeholder_id)
            others = int(np.isin(np.delete(ids, at), self.banned_ids).sum())
            if len(at) != len(pictures) or others:
                raise ConfigError(self._wrong_count_message(len(at), others, replacements, where))
            ids, places = self._text_codec.expand(ids, at.tolist(), parts)
        found = zip(pictures, places, strict=True)
        return ids, tuple(Placed(picture.attachment, *place) for picture, place in found)

    def _replacement(self, picture: Picture, where: str) -> Int32:
        """Return the tokens that replace an image's placeholder, which depend only on the image's size."""
        if picture.placed_tokens:
            return np.array(picture.placed_tokens, np.int32)
        size = (picture.height, picture.width)
        with self._lock:
            known = self._replacements_by_size.get(size)
            if known is None:
                try:
                    known = (
                        np.full(self._token_count(*size), self._placeholder_id, np.int32)
                        if self._counts_tokens
                        else self._processor_tokens(self._placeholder, [size])
                    )
                except ConfigError as error:
                    raise ConfigError(f"{where}: {error}") from error.__cause__
                if len(self._replacements_by_size) >= _MAX_CACHED_SIZES:
                    self._replacements_by_size.clear()
                self._replacements_by_size[size] = known
        return known

    def _wrong_count_message(self, found: int, others: int, replacements: Sequence[Int32], where: str) -> str:
        mark, images = clean(self._placeholder), len(replacements)
        if others and found == images:
            return f"{where} has {others} placeholders of video or sound, but april only supports images"
        whole = sum(int((tokens == self._placeholder_id).sum()) for tokens in replacements)
        remedy = f"one placeholder for each image, or all {whole} that {self.name} makes of them"
        return (
            f"{where} has {counted(found, 'placeholder')} {mark} (id {self._placeholder_id}) and "
            f"{counted(images, 'image')}; give it {remedy if images else 'an image (in images) for each placeholder'}"
        )


def _unmergeable_ids(tokenizer: Any) -> set[int]:
    """Return the ids of tokens that a tokenizer never merges with the text beside them."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return {*(getattr(tokenizer, "all_special_ids", None) or ()), *(i for i, t in added.items() if t.special)}
