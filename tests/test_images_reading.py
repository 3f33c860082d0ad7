"""Images on their way in: every form that they may have, and every one that is refused, in one sentence."""

from __future__ import annotations

import base64
import hashlib
import io
import struct
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from tiny_vision import encoded, picture

pytest.importorskip("PIL")
from PIL import Image

import april
from april.config.images import ImagesConfig
from april.engines.attachments import attachment_bytes
from april.errors import ConfigError
from april.images.image_reader import ImageReader, Picture

RED = encoded()
DATA_URL = "data:image/png;base64," + base64.b64encode(RED).decode()


def read(item: Any, *, paths: bool = True, **limits: Any) -> Picture:
    return ImageReader(ImagesConfig(**limits), allow_paths=paths).read(item, "prompt 3, image 1")


def refused(item: Any, sentence: str, **options: Any) -> None:
    """An image that is not taken, in a sentence that names it."""
    with pytest.raises(ConfigError, match=sentence) as error:
        read(item, **options)
    assert str(error.value).startswith("prompt 3, image 1")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    "item",
    [
        RED, bytearray(RED), {"bytes": RED, "path": None}, DATA_URL,
        {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "low"}},
        {"type": "input_image", "image_url": DATA_URL},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA_URL.split(",")[1]}},
        {"type": "image", "image": RED},
    ],
    ids=lambda item: type(item).__name__,
)  # fmt: skip
def test_the_forms_of_bytes(item: Any) -> None:
    """All of them give one attachment, whose name is the hash of the bytes, and its size in pixels."""
    found = read(item)
    assert found.attachment.digest == hashlib.sha256(RED).hexdigest()
    assert (found.attachment.data, found.height, found.width) == (RED, 84, 56)


def test_a_file_is_held_as_a_reference(tmp_path: Path) -> None:
    """A path, a ``file://`` URL and Hugging Face's mapping: no bytes are held, and they are read when they are sent."""
    path = tmp_path / "red one.png"
    path.write_bytes(encoded(picture(color=(1, 2, 3))))
    for item in (path, str(path), path.as_uri(), {"bytes": None, "path": str(path)}):
        attachment = read(item).attachment
        assert (attachment.data, attachment.path, attachment.held_bytes) == (None, str(path), 0)
        assert attachment_bytes(attachment) == path.read_bytes()
    by_value = read(path, in_state="value").attachment
    assert (by_value.data, by_value.path, by_value.digest) == (path.read_bytes(), str(path), attachment.digest)


def test_an_image_object_is_encoded_without_loss() -> None:
    """A PIL image becomes a PNG of the same pixels; twice the same, so that it has one name."""
    noise = np.random.default_rng(0).integers(0, 256, (40, 30, 3), np.uint8)
    first, second = (read(Image.fromarray(noise)) for _ in range(2))
    assert first.attachment is second.attachment
    with Image.open(io.BytesIO(first.attachment.data or b"")) as again:
        np.testing.assert_array_equal(np.asarray(again), noise)


def test_equal_images_are_one_object_and_others_never_are(tmp_path: Path) -> None:
    """Content decides: equal bytes share, and a name that a user gave says nothing, so no two images have one hash."""
    blue = encoded(picture(color=(0, 0, 255)))
    one, other = {"bytes": RED, "path": "a.png"}, {"bytes": blue, "path": "a.png"}
    assert read(one).attachment is read(RED).attachment
    assert read(one).attachment != read(other).attachment
    path = tmp_path / "same.png"
    path.write_bytes(RED)
    before = read(path).attachment
    path.write_bytes(blue)
    assert read(path).attachment.digest != before.digest
    with pytest.raises(april.EngineError, match="has changed since"):
        attachment_bytes(april.core.attachments.Attachment("image", before.digest, 1, None, str(path)))


def sideways() -> bytes:
    """A picture of 56 x 84 that its camera took lying: the header says 84 x 56."""
    lying = picture(84, 56)
    lying.putpixel((0, 0), (0, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    lying.save(buffer, "PNG", exif=exif)
    return buffer.getvalue()


def test_what_readers_would_see_differently_is_encoded_anew() -> None:
    """Orientation, transparency and palettes are resolved as processors do, once, so that all see the same pixels."""
    turned = read(sideways())
    assert (turned.height, turned.width) == (84, 56)
    clear = Image.new("RGBA", (30, 20), (255, 0, 0, 0))
    for image in (clear, picture(30, 20, (204, 51, 51)).convert("P")):
        found = read(encoded(image))
        with Image.open(io.BytesIO(found.attachment.data or b"")) as seen:
            assert seen.mode == "RGB"
            assert seen.getpixel((0, 0)) == ((255, 255, 255) if image is clear else (204, 51, 51))


def bomb() -> bytes:
    """A PNG of a few bytes that says that it has 60,000 x 60,000 pixels."""
    small = bytearray(encoded(picture(8, 8)))
    small[16:24] = (60_000).to_bytes(4, "big") * 2
    small[29:33] = zlib.crc32(small[12:29]).to_bytes(4, "big")
    return bytes(small)


def many_frames(count: int) -> bytes:
    """A TIFF file of so many frames of one pixel."""
    tags = {256: 1, 257: 1, 258: 8, 259: 1, 262: 1, 273: 0, 277: 1, 278: 1, 279: 1}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    parts = [b"II*\0", struct.pack("<I", 8)]
    for following in range(1, count + 1):
        at = 8 + following * (2 + len(entries) + 4)
        parts.append(struct.pack("<H", len(tags)) + entries + struct.pack("<I", at if following < count else 0))
    return b"".join(parts)


def animated() -> bytes:
    """A GIF of two frames."""
    buffer = io.BytesIO()
    picture().save(buffer, "GIF", save_all=True, append_images=[picture(color=(0, 255, 0))])
    return buffer.getvalue()


def test_base64_of_common_writers() -> None:
    """In lines, of the URL-safe alphabet, without padding, percent-encoded, behind other parameters: one image."""
    data = next(d for d in (encoded(picture(color=(c, 9, 9))) for c in range(256)) if b"+" in base64.b64encode(d))
    text, safe = base64.b64encode(data).decode(), base64.urlsafe_b64encode(data).decode()
    lines = base64.encodebytes(data).decode()
    bodies = [text, text.rstrip("="), safe, safe.rstrip("="), lines, lines.replace("\n", "\r\n  "), quote(lines)]
    urls = [f"data:image/png;base64,{body}" for body in bodies]
    urls += [f" \n{urls[0]}", f"data:image/png;charset=utf-8;base64,{text}", f"DATA:image/png; BASE64 ;a=b,{text}"]
    given: list[Any] = [*urls, *({"type": "base64", "data": body} for body in bodies)]
    reader = ImageReader(ImagesConfig()).for_clients()
    assert {reader.read(item, "an image").attachment.data for item in given} == {data}


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        (b"", "is empty: 0 bytes"),
        (b"<svg>", r"is not an image that can be read \(5 bytes beginning with b'<svg>'\); give one of PNG, JPEG"),
        (RED[: len(RED) // 2], "is damaged or truncated: it cannot be decoded"),
        (encoded(picture(300, 300), "JPEG")[:-700], "is damaged or truncated"),
        (bomb(), r"has (60,000 x 60,000|more) pixels"),
        (animated(), "is animated, .*; give one frame"),
        (many_frames(50_000), "is animated, .*; give one frame"),
        (Image.new("I", (4, 4)), "has the mode I, more than 8 bits per channel"),
        (Image.new("RGB", (0, 5)), "is empty: 0 x 5 pixels"),
        ("data:image/png;base64,AAAA=A", r"is not base64; was it truncated, or encoded twice \(character 5 is '='\)"),
        ("data:image/png;base64,AA AA", r"is not base64; was it truncated.*character 3 is ' '"),
        ("data:image/png;base64,A+A-", "is not base64; was it truncated.*character 4 is '-'"),
        ("data:image/png;base64,AAAAA", "is not base64; was it truncated.*no text of 5 characters is"),
        ("data:image/png;base64,AAAA==", "is not base64; was it truncated.*2 padding characters follow 4 others"),
        ("data:image/png;base64,A\ud800AA", r"is not base64; was it truncated.*character 2 is '\?'"),
        ("data:image/png;base64", "without a comma"),
        ("nowhere.png", r"\(nowhere.png\) cannot be read: No such file"),
        ("a\0b", "cannot be read"),
        (Path("/"), "cannot be read: Is a directory|is not a file"),
        ("/dev/zero", "is not a file"),
        ("file://elsewhere/a.png", "a file on another machine"),
        ("https://me:secret@host/a.png", "is an https address, but april fetches no images; download it first, and"),
        (5, "is of type int; give bytes, a path, a PIL.Image"),
        ({"type": "image"}, "is a mapping with type; give"),
        ({"type": "image", "source": {"type": "file", "file_id": "x"}}, "is a mapping with type, file_id; give"),
    ],
)
def test_an_image_that_cannot_be_used(item: Any, sentence: str) -> None:
    """Empty, no image, cut, a bomb, animated, of an odd mode or size, no file, a device: one sentence each."""
    refused(item, sentence)


def test_the_size_is_known_before_anything_is_read(tmp_path: Path) -> None:
    """1 GB, as a file, as bytes in base64 and by its pixels: refused by what is said of it, not by reading it."""
    giant = tmp_path / "giant.png"
    with giant.open("wb") as file:
        file.truncate(1 << 30)
    refused(giant, r"giant.png\) has 1,073,741,824 bytes, but images.max_bytes is 20,000,000; make it smaller")
    refused("data:image/png;base64," + "A" * 4096, "has 3,0.. bytes, but images.max_bytes is 1,000", max_bytes=1000)
    refused(RED, "has [0-9]+ bytes, but images.max_bytes is 10", max_bytes=10)
    refused(RED, "has 56 x 84 pixels, but images.max_pixels is 4,000; make", max_pixels=4000)


@pytest.mark.parametrize(
    "item", ["/etc/passwd", "file:///etc/passwd", Path("/etc/passwd"), {"path": "/etc/passwd"}, "secret.png",
             {"type": "image", "path": "/etc/passwd"}]
)  # fmt: skip
def test_a_client_names_no_files(item: Any) -> None:
    """What comes from the outside is bytes; a path is refused and nothing is opened."""
    refused(item, "a client must send an image as a data: URL or in base64", paths=False)
    assert read(DATA_URL, paths=False).attachment.data == RED


def test_without_the_package_the_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow is an extra."""
    monkeypatch.setattr("april.text.install_command.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"an image needs PIL: pip install .*\[images\]"):
        ImageReader(ImagesConfig())
