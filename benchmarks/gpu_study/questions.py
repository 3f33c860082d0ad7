r"""Questions with one known answer, and the verifier: the boxed answer of a response, or else its last number.

Invariant: no question that is held out is ever trained on, of any seed.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import april
from benchmarks.gpu_study.design import GpuSizes, Source

Row = Mapping[str, Any]
ASKS = r"Please reason step by step, and put your final answer within \boxed{}."
"""Behind every question that is text; messages are taken as they are."""
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")


def rows_of(source: Source) -> list[Row]:
    """Return the rows of a set; a data set of the hub is loaded, or found in its cache, by ``datasets``."""
    if Path(source.path).suffix == ".jsonl":
        return [json.loads(line) for line in Path(source.path).read_text("utf-8").splitlines() if line.strip()]
    from datasets import load_dataset

    return list(load_dataset(source.path, source.config, split=source.split))


def column(row: Row, name: str) -> Any:
    """Return a value; dots go into nested columns."""
    value: Any = row
    for part in name.split("."):
        value = value[part]
    return value


def asked(source: Source, rows: Sequence[Row], sizes: GpuSizes, tokenizer: Any) -> list[dict[str, Any]]:
    """Return rows as prompts, each question once and none that is too long."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        question, answer = column(row, source.question), str(column(row, source.answer))
        messages = [{"role": "user", "content": f"{question}\n{ASKS}"}] if isinstance(question, str) else question
        key = json.dumps(messages)
        if key in found:
            continue
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=sizes.thinking
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) <= sizes.prompt_cap:
            right = answer.rpartition(source.marker)[2] if source.marker else answer
            found[key] = {"token_ids": ids, "answer": right.strip()}
    return list(found.values())


def split(sizes: GpuSizes, tokenizer: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the questions that are trained on, and those that are held out.

    Raises:
        ValueError: there are too few.
    """
    train = asked(sizes.questions, rows_of(sizes.questions), sizes, tokenizer)
    order = random.Random(sizes.held_out_seed)
    if sizes.held_out is None:
        order.shuffle(train)
        held_out, train = train[: sizes.held_out_count], train[sizes.held_out_count :]
    else:
        held_out = asked(sizes.held_out, rows_of(sizes.held_out), sizes, tokenizer)
        order.shuffle(held_out)
        held_out = held_out[: sizes.held_out_count]
        known = {tuple(prompt["token_ids"]) for prompt in held_out}
        train = [prompt for prompt in train if tuple(prompt["token_ids"]) not in known]
    if len(held_out) < sizes.held_out_count or len(train) < sizes.groups:
        raise ValueError(
            f"{sizes.questions.path}: {len(train)} questions and {len(held_out)} held-out ones are too few"
        )
    return train, held_out


def stream(train: Sequence[dict[str, Any]], seed: int) -> Iterator[dict[str, Any]]:
    """Yield the questions for ever, each pass in an order of its own; the same for all arms of a seed."""
    for epoch in range(10**9):
        order = list(train)
        random.Random(f"{seed}/{epoch}").shuffle(order)
        yield from order


# ---------------------------------------------------------------- the verifier


def boxed(text: str) -> str | None:
    r"""Return what the last \boxed{...} holds, braces inside included."""
    begin = text.rfind(r"\boxed{")
    depth = 0
    for end in range(begin + 6, len(text) if begin >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin + 7 : end]
    return None


def plain(answer: str) -> str:
    """Return an answer without what changes nothing: spaces, dollar signs, commas in numbers, a final point."""
    answer = re.sub(r"\s|\$|\\[,;!]|(?<=\d),(?=\d{3})", "", answer).rstrip(".")
    return re.sub(r"\\d?frac\{(-?\d+)\}\{(\d+)\}", r"\1/\2", answer)


def equal(a: str, b: str) -> bool:
    """Return whether two answers are the same text or the same number."""
    a, b = plain(a), plain(b)
    try:
        return a == b or Fraction(a) == Fraction(b)
    except (ValueError, ZeroDivisionError):
        return False


def is_right(text: str, answer: str) -> bool:
    """Return whether a response ends in the answer."""
    said = boxed(text)
    if said is None:
        numbers = _NUMBER.findall(text)
        said = numbers[-1] if numbers else ""
    return equal(said, answer)


def reward(prompt: april.Prompt, response: april.Response) -> float:
    """Return 1 if the answer is right, else 0; a response that was cut at its longest has no answer."""
    return float(response.finish is not april.FinishReason.LENGTH and is_right(response.text(), prompt.data["answer"]))
