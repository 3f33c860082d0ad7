"""Labels that name the weights of a server, and the rules by which an engine trusts them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import msgspec

from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.protocol import FirstWeights
from april.errors import EngineError, WeightsGone, WireError
from april.text.server_text import quoted


class Span(msgspec.Struct, gc=False):
    """Tokens [start, end) of a response, generated under the weights labelled ``version``."""

    version: str
    start: int
    end: int


START_LABEL = "default"
"""Label that servers give to the weights they were started with."""
MARK = "between-"
GIVEN = "-given"
"""Suffix of the first version's label once the weights may differ from those of the server's start."""
_OURS = re.compile(rf"(v\d+\.\d+|{MARK}[0-9a-f]{{8}})-[0-9a-f]{{6}}({GIVEN})?")
_OF_START = re.compile(rf"v{re.escape(str(FIRST_VERSION))}-[0-9a-f]{{6}}")


class LabelledServer(Protocol):
    """Server that shows a label of its weights. A new process has lost the label that the old one was given."""

    async def label(self) -> str:
        """Return the present label. Raises EngineError if the server does not answer."""
        ...

    async def set_label(self, label: str) -> None:
        """Set the label. Raises EngineError unless the server shows it afterwards."""
        ...


class ReadingLabels(Protocol):
    """Maps labels to policy versions while the response to a request is read."""

    def of(self, version: PolicyVersion) -> str:
        """Return the label that the server shows while it has ``version``."""
        ...

    def version_of(self, label: str, since: PolicyVersion) -> PolicyVersion | None:
        """Return the version of tokens with another label; None if the label is unknown."""
        ...


class WeightLabels:
    """Labels of one engine for the weights of its server: ``v<version>-<six hex digits>``.

    The digits are random per engine, so that two engines on one server do not mistake each other's labels for their
    own. For later runs, the label of the first version also tells whether the server still has the weights of its
    start.
    """

    def __init__(self) -> None:
        self._end, self._salt = f"-{secrets.token_hex(3)}", secrets.token_hex(8)
        self._first = self._start = f"v{FIRST_VERSION}{self._end}"
        self._latest = (FIRST_VERSION, self._first)
        self.present = FIRST_VERSION
        """Version of the weights that the server has confirmed, and the newest version whose label is trusted."""

    def of(self, version: PolicyVersion) -> str:
        """Return the label of ``version``."""
        if self._latest[0] != version:  # cached, because it is asked for every request
            self._latest = (version, self._first if version == FIRST_VERSION else f"v{version}{self._end}")
        return self._latest[1]

    def salt(self, version: PolicyVersion) -> str:
        """Return the cache salt of requests under ``version``. No other engine or run ever uses it."""
        return f"v{version}-{self._salt}"

    def is_of(self, label: str | None, version: PolicyVersion) -> bool:
        """Return whether ``label`` is one of this engine's labels for ``version``."""
        return label == self.of(version) or (version == FIRST_VERSION and label in (self._start, self._start + GIVEN))

    def name_first(self, *, of_start: bool) -> None:
        """Set whether the label of the first version says that the weights are those of the server's start."""
        self._first = self._start if of_start else self._start + GIVEN
        self._latest = (FIRST_VERSION, self._first)

    def mark(self) -> str:
        """Return a new label that stands for no version, for weights that are unknown or about to change."""
        return f"{MARK}{secrets.token_hex(4)}{self._end}"

    def is_mark(self, label: str) -> bool:
        """Return whether :meth:`mark` of this engine made the label."""
        return label.startswith(MARK) and label.endswith(self._end)

    def version_of(self, label: str, since: PolicyVersion) -> PolicyVersion | None:
        """Return the version with this label, if it is ``since`` or a later confirmed one.

        None means that the label says nothing about tokens of a request that was sent under ``since``.
        """
        if self.is_of(label, FIRST_VERSION):
            return FIRST_VERSION if since == FIRST_VERSION else None
        if not label.startswith("v") or not label.endswith(self._end):
            return None
        incarnation, _, n = label[1 : -len(self._end)].partition(".")
        if not (incarnation.isdecimal() and n.isdecimal()):
            return None
        version = PolicyVersion(int(incarnation), int(n))
        return version if self.of(version) == label and since <= version <= max(since, self.present) else None


class LabelOfBase:
    """Label of the base model of adapters. It does not change with the version, and any other label is an error."""

    __slots__ = ("_label",)

    def __init__(self, label: str) -> None:
        self._label = label

    def of(self, version: PolicyVersion) -> str:
        """Return the label of the server while requests under ``version`` run."""
        return self._label

    def version_of(self, label: str, since: PolicyVersion) -> PolicyVersion | None:
        """Return None: another label means that somebody has changed the base model."""
        return None


async def mark_process(
    server: LabelledServer, labels: WeightLabels, first: str | None, version: PolicyVersion | None = None
) -> str:
    """Return a label that identifies the present process and is not that of ``version``.

    A label that was given to this process identifies it. The label it had from its start (``first``) does not, since a
    restarted process would have it too, so it is replaced by a :meth:`WeightLabels.mark`. A label that says "weights of
    the start" is replaced as well: the weights may be overwritten from now on, and the run may die before it labels the
    new ones.
    """
    shown = await server.label()
    if is_of_start(shown) and labels.is_of(shown, FIRST_VERSION):
        labels.name_first(of_start=False)
        mark = labels.of(FIRST_VERSION)
    elif shown in (START_LABEL, first, version and labels.of(version)):
        mark = labels.mark()
    else:
        return shown
    await server.set_label(mark)
    return mark


def is_another_process(label: str, mark: str | None, labels: WeightLabels, first: str | None) -> bool:
    """Return whether the server's process was replaced since it had the label ``mark``; ``label`` is the present one.

    With ``mark`` None the former label is unknown, so any label other than that of the present version may belong to a
    new process. A trainer may label the weights that it sends, but hardly with a label that a process has at its start.
    """
    if label == mark or labels.is_of(label, labels.present):
        return False
    return mark is None or label in (START_LABEL, first)


async def require_base(
    server: LabelledServer, labels: WeightLabels, first: str | None, base: PolicyVersion
) -> None:
    """Set the server's label to that of ``base``, the model below the adapters; it must have that model.

    Raises WeightsGone if the server was restarted and has another model.
    """
    of_start = base == FIRST_VERSION and start_is_known(first)
    if of_start:  # adapters do not overwrite them
        labels.name_first(of_start=True)
    shown, label = await server.label(), labels.of(base)
    if shown == label:
        return
    fresh = shown in (START_LABEL, first) or labels.is_mark(shown) or labels.is_of(shown, base)
    if not (fresh and of_start):
        raise WeightsGone(
            f"its server has the model {quoted(shown)}, but the adapter belongs to {label}; update it with full weights"
        )
    await server.set_label(label)


def start_is_known(first: str | None) -> bool:
    """Return whether a restarted server has the weights that it had when april connected and it showed ``first``.

    Servers show START_LABEL until other weights are loaded. A server without labels is assumed to have them.
    """
    return first in (None, START_LABEL) or is_of_start(first)


def is_of_start(label: str | None) -> bool:
    """Return whether the label is one that april gives to weights with which a server was started."""
    return label is not None and _OF_START.fullmatch(label) is not None


def is_ours(label: str | None) -> bool:
    """Return whether some run of april has given this label."""
    return label is not None and _OURS.fullmatch(label) is not None


def first_weights(label: str | None, *, present: bool) -> FirstWeights:
    """Return what a new run knows of weights with this label; ``present`` is the setting that it starts with them."""
    if present or start_is_known(label):
        return FirstWeights.KNOWN
    return FirstWeights.OTHERS if is_ours(label) else FirstWeights.UNVERIFIED


async def require_first_weights(
    server: LabelledServer, labels: WeightLabels, first: str | None, version: PolicyVersion
) -> None:
    """Raise WeightsGone if ``version`` means weights from before april connected that the server may have lost."""
    if version == FIRST_VERSION and not start_is_known(first) and not labels.is_of(await server.label(), version):
        raise WeightsGone(
            f"its server was restarted, and had got weights ({quoted(first)}) before april connected"
        )


def require_covering(spans: Sequence[Span], total: int) -> bool:
    """Return whether the spans cover ``total`` tokens without gaps or overlaps."""
    if not spans:
        return total == 0
    return spans[0].start == 0 and spans[-1].end == total and all(a.end == b.start for a, b in pairwise(spans))


def foreign_weights(attempt_id: str, sent_to: str, label: str, *, too_late: bool) -> EngineError:
    """Return the error for tokens of foreign weights; ``too_late`` means that some may have been handed over."""
    error = WireError if too_late else EngineError
    return error(
        f"attempt {attempt_id} was sent to weights {sent_to}, but has tokens of weights {quoted(label)}: the server "
        "was restarted, or somebody else changes its weights; change them only through april"
    )
