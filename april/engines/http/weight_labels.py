"""The labels by which a server knows the weights that it has, and which of them an engine believes."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import msgspec

from april.core.versions import FIRST_VERSION, PolicyVersion
from april.errors import EngineError, WeightsGone, WireError
from april.server_text import quoted


class Span(msgspec.Struct, gc=False):
    """Tokens [start, end) of a reply were generated under the weights called ``version``."""

    version: str
    start: int
    end: int


START_LABEL = "default"
"""The name that servers give to the weights with which they were started."""
MARK = "between-"


class LabelledServer(Protocol):
    """A server that may show a label of its weights; a new process has forgotten what the old one was given."""

    async def label(self) -> str | None:
        """The present one; None: the server has no labels. Raises EngineError if it does not say it."""
        ...

    async def set_label(self, label: str) -> None:
        """Give another; raises EngineError unless the server shows it afterwards."""
        ...


class ReadingLabels(Protocol):
    """Labels by which the answer to a request is read."""

    def of(self, version: PolicyVersion) -> str:
        """The label that the server shows while it has ``version``."""
        ...

    def version_of(self, label: str, since: PolicyVersion) -> PolicyVersion | None:
        """The version of tokens under another label; None: they are nobody's."""
        ...


class WeightLabels:
    """An engine's names for the weights of its server: ``v<version>-<six digits of its own>``.

    The digits keep apart two engines that name the weights of one server: neither takes the other's for its own.
    """

    def __init__(self) -> None:
        self._end = f"-{secrets.token_hex(3)}"
        self._latest = (FIRST_VERSION, f"v{FIRST_VERSION}{self._end}")
        self.present = FIRST_VERSION
        """The version of the weights that the server has confirmed; the newest version whose label is believed."""

    def of(self, version: PolicyVersion) -> str:
        """The label of these weights."""
        if self._latest[0] != version:  # asked for every request
            self._latest = (version, f"v{version}{self._end}")
        return self._latest[1]

    def mark(self) -> str:
        """A fresh name that is no version's, for weights that are not known or are about to change."""
        return f"{MARK}{secrets.token_hex(4)}{self._end}"

    def is_mark(self, label: str) -> bool:
        """Return whether :meth:`mark` has made it here."""
        return label.startswith(MARK) and label.endswith(self._end)

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


class LabelOfBase:
    """The one label of the model below an adapter: it says nothing of versions, but must stay."""

    __slots__ = ("_label",)

    def __init__(self, label: str) -> None:
        self._label = label

    def of(self, version: PolicyVersion) -> str:
        """The label of the server while requests under ``version`` run."""
        return self._label

    def version_of(self, label: str, since: PolicyVersion) -> PolicyVersion | None:
        """None: another label means that somebody has changed the model."""
        return None


async def mark_process(
    server: LabelledServer, labels: WeightLabels, first: str | None, version: PolicyVersion | None = None
) -> str | None:
    """A label by which the present process is known again, and which is not that of ``version``.

    One that was given to it does, whoever gave it; one that it had at its start (``first``) is replaced, for the next
    process has it too. None: it has no labels.
    """
    shown = await server.label()
    if shown is None or shown not in (START_LABEL, first, version and labels.of(version)):
        return shown
    mark = labels.mark()
    await server.set_label(mark)
    return mark


def is_another_process(label: str, mark: str | None, labels: WeightLabels, first: str | None) -> bool:
    """Return whether the process that has the ``mark`` has gone, or may have (``mark`` None).

    A trainer that hands weights over may name them, but hardly as they were named at the start.
    """
    if label in (mark, labels.of(labels.present)):
        return False
    return mark is None or label in (START_LABEL, first)


async def require_base(
    server: LabelledServer, labels: WeightLabels, first: str | None, base: PolicyVersion
) -> None:
    """Have the server show the label of the model below the adapters, ``base``; it must have that model.

    Raises WeightsGone if it was started anew and has another one.
    """
    shown, label = await server.label(), labels.of(base)
    if shown in (None, label):
        return
    fresh = shown in (START_LABEL, first) or labels.is_mark(shown)
    if not (fresh and base == FIRST_VERSION and start_is_known(first)):
        raise WeightsGone(
            f"its server has the model {quoted(shown)}, and not {label}, to which the adapter belongs; update it with "
            "whole weights"
        )
    await server.set_label(label)


def start_is_known(first: str | None) -> bool:
    """Return whether a server that starts anew has the weights it had when april connected, and showed ``first``.

    Servers show START_LABEL until weights are put there; of one without labels, that is taken on trust.
    """
    return first in (None, START_LABEL)


async def require_first_weights(
    server: LabelledServer, labels: WeightLabels, first: str | None, version: PolicyVersion
) -> None:
    """Raises WeightsGone if ``version`` means weights that the server had at the connection, and may have lost."""
    if version == FIRST_VERSION and not start_is_known(first) and await server.label() != labels.of(version):
        raise WeightsGone(
            f"its server was started anew, and had been given weights ({quoted(first)}) before april connected"
        )


def cover(spans: Sequence[Span], total: int) -> bool:
    """Return whether the spans cover ``total`` tokens one after the other."""
    if not spans:
        return total == 0
    return spans[0].start == 0 and spans[-1].end == total and all(a.end == b.start for a, b in pairwise(spans))


def foreign_weights(attempt_id: str, sent_to: str, label: str, *, too_late: bool) -> EngineError:
    """The error for tokens of weights that are not april's; ``too_late``: some may have been handed over."""
    error = WireError if too_late else EngineError
    return error(
        f"attempt {attempt_id} was sent to weights {sent_to} and has tokens of weights {quoted(label)}: the server was "
        "started anew, or somebody else changes its weights; change them through april only"
    )
