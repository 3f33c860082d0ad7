"""No code reads april's own sentences: what it decides on is data (codes, enums, fields), and sentences are for people.

A word that is looked for in a text is held against everything that april itself says. What is left is looked for in
the words of others, each with its reason below.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "april"
FILES = sorted(PACKAGE.rglob("*.py"))
ASKS = {
    "startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "split", "rsplit", "find",
    "rfind", "index", "count", "replace",
}  # fmt: skip
"""Methods of texts that look for another one."""
PATTERNS = {"compile", "search", "match", "fullmatch", "findall", "finditer", "sub", "split"}
WORD = re.compile(r"[^\W\d_]{4}")
"""What has no four letters in a row is no word of a sentence."""
ALLOWED = {
    ("adapters/common/deliveries.py", "response_len"): "names of metrics",
    ("adapters/areal/settings.py", "max_in_flight"): "names of settings",
    ("adapters/areal/settings.py", "vllm"): "AReaL's names of backends",
    ("adapters/slime/functions.py", "evaluation"): "parameters of a user's function",
    ("adapters/trl/data.py", "images"): "columns of a data set",
    ("agents/dialects.py", "input_schema"): "keys of a request",
    ("agents/responses.py", "status"): "keys of an item",
    ("view/off_policy_summary.py", "kept"): "prefixes of metrics",
    ("corrections/importance.py", "torch."): "names of dtypes",
    ("core/state_checksum.py", "april"): "keys of a state",
    ("driver/prompt_reader.py", "attention_mask"): "keys of a user's row",
    ("driver/prompt_reader.py", "prompt"): "keys of a user's row",
    ("engines/http/wire.py", r"\bis (?:paused|asleep|sleeping)\b"): "what a server says",
    ("images/image_reader.py", "base64"): "what a client sends",
    ("engines/kinds/identify.py", "/v1/models"): "routes that answered",
    ("engines/vllm/probe.py", "data"): "keys of an answer",
    ("engines/vllm/probe.py", "speculation"): "keys of a server's settings",
    ("serialization/plain_values.py", "torch."): "names of dtypes",
    ("serialization/torch_arrays.py", "_mask"): "names of arrays",
    ("serialization/own_values.py", "digest"): "the field of an attachment that has travelled",
}
"""(file, what it looks for): in whose words."""
ROOMS = ("doctor", "testing/conformance", "config", "engines/abilities.py")
"""Where facts of engines become sentences."""
SENTENCES = re.compile(r"note|sentence|advice|remed|consequence|promise|change|detail|error|message|mistake")


def docstrings(tree: ast.AST) -> Iterator[ast.AST]:
    """Strings that stand alone: of modules, classes and functions, and below fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


@cache
def own_sentences() -> str:
    """All texts of april that have at least three words, one per line."""
    texts = []
    for path in FILES:
        tree = ast.parse(path.read_text("utf-8"))
        skipped = set(map(id, docstrings(tree)))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
                texts += [node.value] if len(node.value.split()) > 2 else []
    return "\n".join(texts).casefold()


def literals(node: ast.expr) -> Iterator[str]:
    for one in node.elts if isinstance(node, ast.Tuple) else [node]:
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value


def asked(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Every text that is looked for in another one, and whether it is a pattern."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for before, op in zip([node.left, *node.comparators], node.ops, strict=False):
                if isinstance(op, ast.In | ast.NotIn):
                    yield from ((text, False) for text in literals(before))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            of_re = isinstance(node.func.value, ast.Name) and node.func.value.id == "re"
            if of_re and node.func.attr in PATTERNS:
                yield from ((text, True) for text in literals(node.args[0]))
            elif not of_re and node.func.attr in ASKS:
                yield from ((text, False) for text in literals(node.args[0]))


def reads(tree: ast.AST) -> Iterator[str]:
    """What is looked for and stands in one of april's sentences."""
    for text, is_pattern in asked(tree):
        if WORD.search(text) is None:
            continue
        if re.search(text, own_sentences(), re.IGNORECASE) if is_pattern else text.casefold() in own_sentences():
            yield text


def test_nothing_is_looked_for_in_what_april_says_itself() -> None:
    """Neither a word nor a pattern that one of its sentences has, but for the words of others."""
    found = {
        (path.relative_to(PACKAGE).as_posix(), text)
        for path in FILES
        for text in reads(ast.parse(path.read_text("utf-8")))
    }
    assert found - ALLOWED.keys() == set()
    assert ALLOWED.keys() - found == set(), "these are looked for no longer"


@pytest.mark.parametrize("room", ROOMS)
def test_no_sentence_is_searched_where_facts_are_told(room: str) -> None:
    """Not for a word that only the run shows either: nothing is asked whether it stands in a note or a message."""
    for path in (path for path in FILES if path.relative_to(PACKAGE).as_posix().startswith(room)):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Compare) and any(isinstance(op, ast.In | ast.NotIn) for op in node.ops):
                for text in node.comparators:
                    assert not SENTENCES.search(ast.unparse(text)), f"{path.name}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    "code",
    [
        'any("API processes" in note for note in c.notes)',
        'next(n for n in notes if "seed" in n.lower())',
        'sentence.removeprefix("The server ")',
        'text.startswith(("nothing", "Seeds have no effect"))',
        r're.compile(r"\b(?:lost|loses?)\b")',
        r're.findall(r"--(?:no-)?enable-[a-z-]+", text)',
    ],
)
def test_what_was_done_before_is_found(code: str) -> None:
    """The searches that once decided what a server can do."""
    assert list(reads(ast.parse(code)))
