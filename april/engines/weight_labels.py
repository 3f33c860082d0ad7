"""The labels by which a server knows the weights that it has: ``str`` of april's policy version."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from april.core.versions import PolicyVersion
from april.errors import EngineError


class Span(Protocol):
    """Tokens [start, end) of a reply were generated under the weights called ``version``."""

    version: str
    start: int
    end: int


def version_of(label: str) -> PolicyVersion | None:
    """The version that april gave this label; None: it is no label of april's."""
    incarnation, dot, n = label.partition(".")
    if dot and incarnation.isdecimal() and n.isdecimal():
        version = PolicyVersion(int(incarnation), int(n))
        return version if str(version) == label else None
    return None


def cover(spans: Sequence[Span], total: int) -> bool:
    """Whether the spans cover ``total`` tokens one after the other."""
    if not spans:
        return total == 0
    return spans[0].start == 0 and spans[-1].end == total and all(a.end == b.start for a, b in pairwise(spans))


def foreign_weights(attempt_id: str, sent_to: str, label: str) -> EngineError:
    """For tokens of weights that april has not put there."""
    return EngineError(
        f"attempt {attempt_id} was sent to weights {sent_to} and has tokens of weights {label[:64]!r}: the server was "
        "started anew, or somebody else changes its weights; change them through april only"
    )
