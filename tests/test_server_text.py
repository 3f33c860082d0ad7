"""What a server says reaches messages short, printable and without keys, however it is written there."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Callable
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april.engines.http.wire import NotJson, error_text, read_json
from april.text import server_text
from april.text.server_text import MAX_SCANNED_CHARS, clean, hide, quoted

KEY = "sk-Test/Key+77aa=="
WRITTEN: dict[str, Callable[[str], str]] = {
    "plain": str,
    "lower case": str.lower,
    "backwards": lambda key: key[::-1],
    "in two lines": lambda key: f"{key[:6]}\r\n\t{key[6:]}",
    "in UTF-16": lambda key: "\0".join(key),
    "JSON": lambda key: json.dumps(key).replace("/", "\\/"),
    "JSON, all escaped": lambda key: "".join(f"\\u{ord(c):04x}" for c in key),
    "JSON in JSON": lambda key: json.dumps("".join(f"\\u{ord(c):04X}" for c in key)),
    "percent": lambda key: quote(key, safe=""),
    "percent, all": lambda key: "".join(f"%{ord(c):02x}" for c in key),
    "percent, twice": lambda key: quote("".join(f"%{ord(c):02x}" for c in key)),
    "HTML": html.escape,
    "HTML, numbers": lambda key: "".join(f"&#{ord(c)};" for c in key),
    "HTML, hexadecimal, twice": lambda key: html.escape("".join(f"&#x{ord(c):x};" for c in key)),
    "hexadecimal": lambda key: key.encode().hex(),
    "hexadecimal with colons": lambda key: key.encode().hex(":").upper(),
    "escapes of C": lambda key: "".join(f"\\x{ord(c):02x}" for c in key),
    "octal": lambda key: "".join(f"\\{ord(c):03o}" for c in key),
    "mail": lambda key: "".join(f"={ord(c):02X}" for c in key),
    "base64": lambda key: base64.b64encode(key.encode()).decode(),
    "base64 of the header": lambda key: base64.b64encode(f"Bearer {key}".encode()).decode(),
    "base64 of a pair": lambda key: base64.b64encode(f"me:{key}".encode()).decode(),
    "base64 for URLs": lambda key: base64.urlsafe_b64encode(f"Bearer {key}".encode()).decode().rstrip("="),
    "base64, escaped": lambda key: quote(base64.b64encode(f"Bearer {key}".encode()).decode(), safe=""),
    "base32": lambda key: base64.b32encode(f"Bearer {key}".encode()).decode(),
    "without its end": lambda key: f"{key[:12]}***",
}  # fmt: skip


@pytest.fixture(autouse=True)
def only_this_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_text, "_hidden", {})
    hide(KEY)


def pieces(text: str, key: str = KEY, size: int = 8) -> list[str]:
    """Runs of the key's letters and digits that are still there, whatever stands between them."""
    plain, wanted = ("".join(filter(str.isalnum, t.casefold())) for t in (text, key))
    return [wanted[i : i + size] for i in range(len(wanted) - size + 1) if wanted[i : i + size] in plain]


@pytest.mark.parametrize("how", WRITTEN)
def test_a_key_is_removed_however_it_is_written(how: str) -> None:
    """What stands around it stays, unless the key is escaped."""
    shown = clean(f"upstream refused {WRITTEN[how](KEY)} and gave up")
    assert "<the key>" in shown
    assert not pieces(shown)
    assert not pieces(shown[::-1])
    if shown == "<the key>":
        assert how not in ("plain", "lower case", "in two lines", "JSON", "without its end")
        return
    assert shown.startswith("upstream refused ")
    assert shown.endswith(" and gave up")
    # what stands for the words around the key, or for its punctuation, may stay
    assert len(shown) <= len("upstream refused <the key> and gave up") + (14 if how.endswith("header") else 40)


@pytest.mark.parametrize("how", WRITTEN)
@pytest.mark.parametrize("shown", range(250, 310, 7))
def test_a_cut_leaves_no_part_of_a_key(how: str, shown: int) -> None:
    """It is removed before the text is cut."""
    text = clean("." * shown + WRITTEN[how](KEY) + " and more")
    assert len(text) <= server_text.MAX_CHARS + 4
    assert "sk" not in text.casefold()


@pytest.mark.parametrize("before", range(MAX_SCANNED_CHARS - 20, MAX_SCANNED_CHARS + 1))
def test_the_end_of_what_is_looked_at_leaves_no_part_of_a_key(before: int) -> None:
    """White space before it is taken away, so that the end of what is looked at may be in the message."""
    assert "sk" not in clean(" " * before + KEY)


@settings(derandomize=True, deadline=None)
@given(st.text(), st.text(), st.sampled_from(sorted(WRITTEN)))
def test_any_text_around_it(before: str, after: str, how: str) -> None:
    """Nothing around a key hides it, and nothing makes reading fail."""
    shown = clean(f"{before} {WRITTEN[how](KEY)} {after}")
    assert not pieces(shown) or pieces(f"{before} {after}")
    assert shown.isprintable()


def test_short_keys_are_removed_as_they_stand() -> None:
    """Nothing would be left of any text if two letters were looked for in every spelling."""
    hide("a1")
    assert clean("refused a1, not A1") == "refused <the key>, not A1"
    hide("")
    assert clean("fine") == "fine"


def test_several_keys() -> None:
    """One server may repeat another's."""
    hide("another-key-of-mine")
    hide("another-key-of-theirs")
    assert clean(f"{KEY} another-key-of-mine") == "<the key>== <the key>"


@pytest.mark.parametrize(
    ("text", "shown"),
    [("\x1b[2Jgone\x07", "\\x1b[2Jgone\\x07"), ("a\u202eb\u200b", "a\\u202eb\\u200b"), ("\ud800", "\\ud800"),
     ("a\r\nb \t c", "a b c"), (b"\xff\x1b", "\ufffd\\x1b"), ("grün €", "grün €"), (None, "None"), (17, "17")],
)  # fmt: skip
def test_nothing_steers_a_terminal(text: object, shown: str) -> None:
    """Control characters and those that turn the writing around are shown by their number; all is on one line."""
    assert clean(text) == shown


@pytest.mark.parametrize("value", ["x" * (5 << 20), b"x" * (5 << 20), "x " * 5000, "\\" * (1 << 20), "&" * (1 << 20)])
def test_long_texts_are_cut(value: object) -> None:
    """To some hundred characters, without looking at all of it."""
    assert len(clean(value)) <= server_text.MAX_CHARS + 4
    assert clean(value).endswith(" ...")
    assert len(quoted(value)) <= 64 + 6


@pytest.mark.parametrize("depth", [400, 900, 100_000])
def test_deep_json(depth: int) -> None:
    """Nested beyond what can be read or shown, it is said so; nothing else comes of it."""
    raw = b'{"error":' + b"[" * depth + b"]" * depth + b"}"
    assert len(error_text(raw)) <= server_text.MAX_CHARS + 4
    if depth > 10_000:
        with pytest.raises(NotJson, match="nested too deeply"):
            read_json(raw)


def test_numbers_without_end() -> None:
    """Python refuses to write integers of more than 4,300 digits."""
    assert clean(10**5000) == "a value of type int"
