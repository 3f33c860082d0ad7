"""Labels the weights on engine servers, which tells the policy version of each token and reveals a restarted server."""

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
"""Prefix of labels that name no policy version."""
GIVEN = "-given"
"""Suffix of the first version's label once the weights may differ from those that the server was started with."""
_OURS = re.compile(rf"(v\d+\.\d+|{MARK}[0-9a-f]{{8}})-[0-9a-f]{{6}}({GIVEN})?")
_OF_START = re.compile(rf"v{re.escape(str(FIRST_VERSION))}-[0-9a-f]{{6}}")


class LabelledServer(Protocol):
    """Server that shows a label of its weights. After a restart, it no longer shows the label that april set."""

    async def label(self) -> str:
        """Return the present label. Raises EngineError if the server does not answer."""
        ...

    async def set_label(self, label: str) -> None:
        """Set the label. Raises EngineError unless the server shows it afterwards."""
        ...


class WeightLabels:
    """Labels of one engine for the weights of its server: ``v<version>-<six hex digits>``.

    The digits are random per engine, so that two engines on one server do not mistake each other's labels for their
    own. The label of the first version also tells later runs whether the server has the weights it was started with.
    """

    def __init__(self) -> None:
        self._end, self._salt = f"-{secrets.token_hex(3)}", secrets.token_hex(8)
        self._first = self._start = f"v{FIRST_VERSION}{self._end}"
        self._latest = (FIRST_VERSION, self._first)
        self.present = FIRST_VERSION
        """Version of the weights that the server has confirmed, and the newest version whose label is trusted."""

    def of(self, version: PolicyVersion) -> str:
        """Return the label of ``version``."""
        if self._latest[0] != version:  # cached, because every request needs the label
            self._latest = (version, self._first if version == FIRST_VERSION else f"v{version}{self._end}")
        return self._latest[1]

    def salt(self, version: PolicyVersion) -> str:
        """Return the prefix-cache salt of requests under ``version``, which no other engine or run uses."""
        return f"v{version}-{self._salt}"

    def is_of(self, label: str | None, version: PolicyVersion) -> bool:
        """Return whether ``label`` is one of this engine's labels for ``version``."""
        return label == self.of(version) or (version == FIRST_VERSION and label in (self._start, self._start + GIVEN))

    def name_first(self, *, of_start: bool) -> None:
        """Choose the first version's label; with ``of_start`` it says that the server was started with its weights."""
        self._first = self._start if of_start else self._start + GIVEN
        self._latest = (FIRST_VERSION, self._first)

    def mark(self) -> str:
        """Return a new label that names no version, for weights that are unknown or about to change."""
        return f"{MARK}{secrets.token_hex(4)}{self._end}"

    def is_mark(self, label: str) -> bool:
        """Return whether :meth:`mark` of this engine made the label."""
        return label.startswith(MARK) and label.endswith(self._end)

    def version_of(self, label: str, since: PolicyVersion) -> PolicyVersion | None:
        """Return the version with this label if it is ``since``, or a later one that the server confirmed; else None.

        ``since`` is the version under which a request was sent, so its tokens cannot be older.
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


async def mark_process(
    server: LabelledServer, labels: WeightLabels, first: str | None, version: PolicyVersion | None = None
) -> str:
    """Make sure that the server shows a label which only its present process has, other than ``version``'s; return it.

    A label that april gave to this process will do. The label that the process had on connection (``first``) may return
    after a restart, so it is replaced by a :meth:`WeightLabels.mark`. A label that says "weights of the start" is
    replaced as well, because from now on the weights may be overwritten, and the run may die before it labels them.
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
    """Return whether the server was restarted after it had the label ``mark``; ``label`` is its present label.

    If ``mark`` is None, the former label is unknown, so any label except the present version's counts as a restart.
    Otherwise only the label of a fresh process does, because a trainer may set labels of its own.
    """
    if label == mark or labels.is_of(label, labels.present):
        return False
    return mark is None or label in (START_LABEL, first)


async def require_base(
    server: LabelledServer, labels: WeightLabels, first: str | None, base: PolicyVersion
) -> None:
    """Label the server's model as version ``base``, on which the adapters are trained.

    Raises WeightsGone if the server was restarted and has another model.
    """
    of_start = base == FIRST_VERSION and start_is_known(first)
    if of_start:  # adapters leave the server's own weights unchanged
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
    """Return whether a server that showed ``first`` on connection would have the same weights after a restart.

    Servers show START_LABEL until other weights are loaded. A server without labels (None) is assumed to have the same.
    """
    return first in (None, START_LABEL) or is_of_start(first)


def is_of_start(label: str | None) -> bool:
    """Return whether april gives this label to the weights that a server was started with."""
    return label is not None and _OF_START.fullmatch(label) is not None


def is_ours(label: str | None) -> bool:
    """Return whether some run of april has given this label."""
    return label is not None and _OURS.fullmatch(label) is not None


def first_weights(label: str | None, *, present: bool) -> FirstWeights:
    """Return what a new run knows about weights with this label; ``present`` means the settings tell it to use them."""
    if present or start_is_known(label):
        return FirstWeights.KNOWN
    return FirstWeights.OTHERS if is_ours(label) else FirstWeights.UNVERIFIED


async def require_first_weights(
    server: LabelledServer, labels: WeightLabels, first: str | None, version: PolicyVersion
) -> None:
    """Raise WeightsGone if ``version`` is the first one and the server may have lost its weights in a restart."""
    if version == FIRST_VERSION and not start_is_known(first) and not labels.is_of(await server.label(), version):
        raise WeightsGone(
            f"its server was restarted, and had got weights ({quoted(first)}) before april connected"
        )


def spans_cover(spans: Sequence[Span], total: int) -> bool:
    """Return whether the spans cover ``total`` tokens without gaps or overlaps."""
    if not spans:
        return total == 0
    return spans[0].start == 0 and spans[-1].end == total and all(a.end == b.start for a, b in pairwise(spans))


def foreign_weights(attempt_id: str, sent_to: str, label: str, *, too_late: bool) -> EngineError:
    """Return the error for tokens of unexpected weights; ``too_late`` means that the caller may have some already."""
    error = WireError if too_late else EngineError
    return error(
        f"attempt {attempt_id} was sent to weights {sent_to}, but has tokens of weights {quoted(label)}: the server "
        "was restarted, or somebody else changes its weights; change them only through april"
    )
