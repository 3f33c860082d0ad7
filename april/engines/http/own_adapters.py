"""The names under which a server has the adapters (LoRA) that april gave it; a version of the policy is one of them.

Invariant: no name is used twice, whatever failed: servers know cached keys, and adapters that they read again from
disk, by name. So a token's version is that of the name with which its request was sent.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from dataclasses import dataclass

from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.http.weight_labels import LabelOfBase, ReadingLabels, WeightLabels

KEEPS_ADAPTER = "%s keeps the adapter %s, which april has no use for: %s"
"""Warning of an adapter that could not be unloaded."""
_OURS = re.compile(r"^april-v\d+\.\d+-[0-9a-f]{6}\.\d+$")


def is_ours(name: str) -> bool:
    """Return whether april, in whatever process, has given this name to an adapter."""
    return _OURS.match(name) is not None


@dataclass(frozen=True, slots=True)
class Loaded:
    """An adapter as a server has it."""

    name: str
    path: str


class OwnAdapters:
    """The adapters that one engine has loaded into its server, and the model below them.

    Args:
        labels: of the engine; they are labels of that model, as no adapter changes it.
    """

    def __init__(self, labels: WeightLabels) -> None:
        self._labels = labels
        self._numbers = itertools.count(1)
        self._others: dict[str, Loaded] = {}
        """Loaded, or perhaps, and not those of the present version."""
        self._sent: dict[str, Loaded] = {}
        """The adapter with which each request was sent."""
        self.present: Loaded | None = None
        """That of the present version; None: the server's own model, or the adapter that it was started with."""
        self.base = FIRST_VERSION
        """The version whose whole weights the server has below all adapters."""

    def fresh(self, version: PolicyVersion, path: str) -> Loaded:
        """A name that no adapter has had, for one that is to be loaded; until :meth:`take` it may be there or not."""
        made = Loaded(f"april-{self._labels.of(version)}.{next(self._numbers)}", path)
        self._others[made.name] = made
        return made

    def take(self, adapter: Loaded | None, version: PolicyVersion) -> None:
        """Record what the version is: an adapter, or (None) whole weights of the server's model."""
        if self.present is not None:
            self._others[self.present.name] = self.present
        self.present = adapter
        if adapter is None:
            self.base = version
        else:
            del self._others[adapter.name]

    def send(self, attempt_id: str) -> str | None:
        """The name for a request that is sent now; None: that of the server's own model."""
        if self.present is None:
            return None
        self._sent[attempt_id] = self.present
        return self.present.name

    def idle(self, inside: Collection[str]) -> list[Loaded]:
        """Return those of no version that is still used; ``inside``: the attempts that have not ended."""
        self._sent = {attempt: adapter for attempt, adapter in self._sent.items() if attempt in inside}
        used = {adapter.name for adapter in self._sent.values()}
        return [adapter for adapter in self._others.values() if adapter.name not in used]

    def all(self) -> list[Loaded]:
        """Return all that the server may have."""
        return [*self._others.values(), *(() if self.present is None else (self.present,))]

    def gone(self, adapter: Loaded) -> None:
        """Record that the server does not have it any more."""
        self._others.pop(adapter.name, None)

    def paths(self, inside: Collection[str]) -> frozenset[str]:
        """The directories that the server may have to read again."""
        unused = {adapter.name for adapter in self.idle(inside)}
        kept = [a.path for a in self._others.values() if a.name not in unused]
        return frozenset([*kept, *(() if self.present is None else (self.present.path,))])

    @property
    def reading_labels(self) -> ReadingLabels:
        """The labels by which answers to requests that are sent now are read."""
        return self._labels if self.present is None else LabelOfBase(self._labels.of(self.base))
