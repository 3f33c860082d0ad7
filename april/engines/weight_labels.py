"""The labels by which a server knows the weights that it has, and which of them an engine believes."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from april.core.versions import FIRST_VERSION, PolicyVersion
from april.errors import EngineError


class Span(Protocol):
    """Tokens [start, end) of a reply were generated under the weights called ``version``."""

    version: str
    start: int
    end: int


class WeightLabels:
    """One engine's names for the weights of its server: ``v<version>-<six digits of its own>``.

    The digits keep apart two engines that name the weights of one server: neither takes the other's for its own.
    """

    def __init__(self) -> None:
        self._end = f"-{secrets.token_hex(3)}"
        self._latest = (FIRST_VERSION, f"v{FIRST_VERSION}{self._end}")
        self.present = FIRST_VERSION
        """Of the weights that the server has confirmed; the newest version whose label is believed."""

    def of(self, version: PolicyVersion) -> str:
        """The label of these weights."""
        if self._latest[0] != version:  # asked for every request
            self._latest = (version, f"v{version}{self._end}")
        return self._latest[1]

    def version_of(self, label: str, since: PolicyVersion) -> PolicyVersion | None:
        """The version that this engine gave the label, if it is ``since`` or came after it and was confirmed.

        None: the label says nothing of the tokens of a request that was sent under ``since``.
        """
        if not label.startswith("v") or not label.endswith(self._end):
            return None
        incarnation, _, n = label[1 : -len(self._end)].partition(".")
        if not (incarnation.isdecimal() and n.isdecimal()):
            return None
        version = PolicyVersion(int(incarnation), int(n))
        return version if self.of(version) == label and since <= version <= max(since, self.present) else None


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
