"""Stop strings end a response at the same token however it was cut, for every kind of tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import END, KINDS, ids_of, tokenizer

from april.core.sampling import GAP, wrong_stop_strings
from april.driver.detokenizer import Detokenizer, StopMatcher
from april.errors import ConfigError

Decode = Callable[[list[int]], str]
PIECES = [
    "Hello", " world", "the answer", "</answer>", "🙂", "日本", "語", " ", "\n\n", "Observation:", "é", "ü", END, "x",
    "42", "🐍", "龍🐢", "🦊", " 🚀", "ab", "aab",
]  # fmt: skip


def decoder(kind: str) -> Decode:
    return Detokenizer(tokenizer(kind)).text


def occurrences(text: str, stops: Sequence[str]) -> int:
    return sum(text.startswith(stop, i) for stop in stops for i in range(len(text)))


def reference(decode: Decode, stops: Sequence[str], prompt: list[int], call: list[int], min_tokens: int) -> int | None:
    """Tokens of the uncut call to keep: all of its text is looked at anew after every token."""
    before = decode(prompt)
    begin = len(before.rstrip(GAP)) + before.endswith(GAP)  # a character that began in the prompt is the prompt's
    most = 0
    for count in range(1, len(call) + 1):
        found = occurrences(decode(prompt + call[:count])[begin:], stops)
        if found > most and count > min_tokens:
            return count
        most = max(most, found)
    return None


def matched(
    decode: Decode,
    stops: Sequence[str],
    prompt: list[int],
    call: list[int],
    attempts: Sequence[Sequence[int]],
    min_tokens: int = 0,
) -> int | None:
    """Tokens to keep of a call that comes in chunks of the given sizes, attempt by attempt (the last one repeats)."""
    held = 0
    while held < len(call):
        sizes = attempts[0]
        attempts = attempts[1:] or attempts
        matcher = StopMatcher(decode, stops, np.array(prompt + call[:held], np.int32), held, max(0, min_tokens - held))
        for size in sizes:
            kept = matcher.feed(np.array(call[held : held + size], np.int32))
            if kept is not None:
                return held + kept
            held += size
    return None


CUTS = st.lists(st.lists(st.sampled_from([1, 1, 2, 3, 7, 16, 40, 100]), min_size=1, max_size=6), min_size=1, max_size=6)


@st.composite
def responses(draw: st.DrawFn) -> dict[str, Any]:
    """A call after a prompt, and stop strings, most of which are somewhere in its text."""
    kind = draw(st.sampled_from(KINDS))
    anything = draw(st.booleans())
    if anything:  # whatever a model may write, half characters included
        ids = st.integers(0, tokenizer(kind).get_vocab_size() + 3)  # the last ones are padding of the vocabulary
        prompt = draw(st.lists(ids, min_size=1, max_size=6))
        call = draw(st.lists(ids, min_size=1, max_size=120))
    else:
        text = st.lists(st.sampled_from(PIECES), min_size=1, max_size=60).map("".join)
        prompt, call = ids_of(kind, draw(text)[:40]), ids_of(kind, draw(text))
    whole = tokenizer(kind).decode(call, skip_special_tokens=False)
    stops = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, max(0, len(whole) - 1)))
        stops.append(whole[start : start + draw(st.integers(1, 9))] or "x")
    stops = [s for s in stops if GAP not in s] or [draw(st.sampled_from(PIECES))]
    # the reference counts occurrences, and a wrong byte can take one back from tokenizers that spell in byte tokens
    countable = kind == "byte level" or not anything
    min_tokens = draw(st.one_of(st.just(0), st.integers(0, len(call)))) if countable else 0
    return {"kind": kind, "prompt": prompt, "call": call, "stops": stops, "min_tokens": min_tokens}


@settings(deadline=None, max_examples=500)
@given(case=responses(), attempts=CUTS)
def test_cuts_change_nothing(case: dict[str, Any], attempts: list[list[int]]) -> None:
    """For any text, stop strings, chunks and attempts: the tokens kept are those of a look at the whole response."""
    decode = decoder(case["kind"])
    prompt, call, stops, least = case["prompt"], case["call"], case["stops"], case["min_tokens"]

    expected = reference(decode, stops, prompt, call, least)

    assert matched(decode, stops, prompt, call, attempts, least) == expected
    assert matched(decode, stops, prompt, call, [[len(call)]], least) == expected


IN_BYTES = "龍🐢🦊龍龍🐎語🦊"
"""Characters that the vocabulary lacks, four tokens each."""
SAID = {stop: ["Question", "Grüße and then ", f"so{stop}more of it, and {stop} again"] for stop in (
    "</answer>", " is 42", "日本語", "🐍", "🙂🚀", END, "\n\nObservation:", "world! ",
)} | {IN_BYTES: ["Hello", f"龍🦊🐢龍🐎 {IN_BYTES}🦊🦊 {IN_BYTES}"]}  # fmt: skip
"""Stop string -> a prompt, and the texts of the call after it."""


@pytest.mark.parametrize(
    ("kind", "stop", "texts"),
    [
        *((kind, stop, texts) for kind in KINDS for stop, texts in SAID.items()),
        # tokenizers that strip the space at the beginning of a text do not hide it at the beginning of a window
        ("sentencepiece", " again", ["Hello", " world world again"]),
        ("sentencepiece", " world", ["Hello", " world world again"]),
    ],
)
def test_every_cut_inside_a_stop_string(kind: str, stop: str, texts: list[str]) -> None:
    """Cut at every token, chunk by chunk and attempt by attempt, the string is found at its last token."""
    decode = decoder(kind)
    prompt, *parts = (ids_of(kind, text) for text in texts)
    call = [token for part in parts for token in part]
    expected = reference(decode, [stop], prompt, call, 0)
    assert expected is not None
    assert stop != IN_BYTES or expected > 3 * len(stop)

    for cut in range(1, len(call)):
        assert matched(decode, [stop], prompt, call, [[cut], [1000]]) == expected
        assert matched(decode, [stop], prompt, call, [[cut, 1000]]) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_match_lies_in_the_call(kind: str) -> None:
    """Text of the prompt, or of what a tool said before the call, completes nothing and is no beginning of a match."""
    decode, prompt = decoder(kind), ids_of(kind, "x </answer> 42 </ans")
    tail = ids_of(kind, "wer> and")

    assert matched(decode, ["</answer>"], prompt, tail, [[1]]) is None
    assert matched(decode, ["wer>"], prompt, tail, [[1]]) == reference(decode, ["wer>"], prompt, tail, 0)


def test_a_character_that_began_in_the_prompt_is_the_prompts() -> None:
    """The call's first token completes an emoji of the prompt: a stop string cannot begin with it."""
    decode, snake = decoder("byte level"), ids_of("byte level", "🐍")
    assert len(snake) > 1
    tail = snake[-1:] + ids_of("byte level", "xy")

    assert matched(decode, ["🐍"], snake[:-1], tail, [[1]]) is None
    assert matched(decode, ["🐍x"], snake[:-1], tail, [[100]]) is None
    assert matched(decode, ["x"], snake[:-1], tail, [[1]]) == 2


@pytest.mark.parametrize("kind", ["metaspace", "sentencepiece"])
def test_a_wrong_byte_hides_no_match_before_it(kind: str) -> None:
    """One wrong byte makes a whole run of byte tokens unreadable: what was complete before it came, was complete."""
    decode, prompt = decoder(kind), ids_of(kind, "Hello")
    dragon, turtle = ids_of(kind, "x龍")[-3:], ids_of(kind, "x🐢")[-4:]
    call = [*dragon, *turtle, turtle[1], *ids_of(kind, "x龍")]
    assert decode(call[:7]) == "龍🐢"
    assert "龍" not in decode(call[:8])

    for chunk in (1, 2, 3, 5, 8, 100):
        assert matched(decode, ["龍"], prompt, call, [[chunk]]) == 3
        assert matched(decode, ["🐢"], prompt, call, [[chunk]]) == 7


def test_a_token_that_ends_inside_a_character() -> None:
    """Its whole characters count when it comes, and only then."""
    kind = "byte level"
    decode, prompt = decoder(kind), ids_of(kind, "Hello")
    texts = {i: decode([i]) for i in range(tokenizer(kind).get_vocab_size())}
    token = next(i for i, text in texts.items() if len(text) == 2 and text[0] != GAP and text[1] == GAP)
    stop, call = decode([token])[0], [token, *ids_of(kind, "🐍")[1:], *ids_of(kind, "xyz")]

    for chunk in (1, 2, 3, 100):
        assert matched(decode, [stop], prompt, call, [[chunk]]) == 1
        assert matched(decode, [stop], prompt, call, [[chunk]], 1) is None


def test_work_does_not_grow_with_the_response() -> None:
    """Tokens decoded per chunk of 16 are bounded, at the start of a response as after 100,000 tokens, and on resume."""
    kind = "byte level"
    decode = decoder(kind)
    text = ids_of(kind, "Grüße aus München: 🙂🚀 und 日本語 テスト, the answer is 42 and the world is x. ")
    looked_at = [0]

    def counting(ids: list[int]) -> str:
        looked_at[0] += len(ids)
        return decode(ids)

    matcher = StopMatcher(counting, ["</answer>", "never said"], np.array(text, np.int32), 0)
    assert looked_at[0] < 200
    response = np.array(text * (100_000 // len(text)), np.int32)
    costs = []
    for start in range(0, len(response), 16):
        looked_at[0] = 0
        assert matcher.feed(response[start : start + 16]) is None
        costs.append(looked_at[0])
    assert max(costs) < 40 * 16
    assert np.mean(costs[-1000:]) < 1.1 * np.mean(costs[100:1100])

    looked_at[0] = 0
    StopMatcher(counting, ["</answer>", "never said"], response, len(response))
    assert looked_at[0] < 200


def test_broken_bytes_cost_a_bounded_number_of_looks() -> None:
    """A response of nothing but half characters is looked at token by token, in a window of bounded size."""
    kind = "byte level"
    decode = decoder(kind)
    half = ids_of(kind, "🐍")[1]
    longest = [0]

    def counting(ids: list[int]) -> str:
        longest[0] = max(longest[0], len(ids))
        return decode(ids)

    matcher = StopMatcher(counting, ["</answer>"], np.array([half] * 5000, np.int32), 5000)
    assert matcher.feed(np.array([half] * 5000, np.int32)) is None
    assert longest[0] < 300
    found = matcher.feed(np.array(ids_of(kind, "x</answer>"), np.int32))
    assert found == len(ids_of(kind, "x</answer>"))


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ([""], "empty stop string"), (["ok", "a\ufffd"], r"U\+FFFD"), ([b"x"], "must be strings, got b'x'"),
        (["a\ud83d"], r"'a\\ud83d' contains half of a surrogate pair"),
    ],
)
def test_impossible_stop_strings(stop: Any, message: str) -> None:
    """Each is refused in one sentence."""
    wrong = wrong_stop_strings(stop)
    assert wrong is not None
    assert re.search(message, wrong)
    assert wrong_stop_strings(["x", "\n\n", END, "\U0001f600"]) is None


class Cleaning:
    """Like a Hugging Face tokenizer that removes spaces before punctuation unless told not to."""

    clean_up_tokenization_spaces = True

    def decode(
        self, ids: list[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = True
    ) -> str:
        text = "".join(["a", " ", ".", "<eos>"][i] for i in ids if not (skip_special_tokens and i == 3))
        return text.replace(" .", ".") if clean_up_tokenization_spaces else text


def test_text_is_not_cleaned_up() -> None:
    """Text is what the tokens say: spaces before punctuation stay, special tokens are in or out as asked."""
    detokenizer = Detokenizer(Cleaning())

    assert detokenizer.text([0, 1, 2, 3]) == "a .<eos>"
    assert detokenizer.text([0, 1, 2, 3], special_tokens=False) == "a ."


@pytest.mark.parametrize("tokenizer", ["gpt2", 5, {}.get, type("T", (), {"decode": lambda self, ids: "x"})()])
def test_what_is_no_tokenizer(tokenizer: Any) -> None:
    """Refused before anything starts, with what is expected."""
    with pytest.raises(ConfigError, match=r"tokenizer must have decode\(ids, skip_special_tokens=False\) -> str"):
        Detokenizer(tokenizer)
