"""Names and tracks the adapters (LoRA) that april has loaded into a server; one of them serves new requests.

Invariant: no name is used twice, even after a failure, because servers use the name to look up cached keys and values
and to read an adapter from disk again. So the adapter name in a request tells the policy version of its tokens.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.http.http_client import HttpClient, Reply
from april.engines.http.weight_labels import WeightLabels
from april.engines.http.wire import error_text
from april.errors import EngineError

log = logging.getLogger("april")

LOAD_S = 300.0
"""Seconds for a server to load an adapter."""
UNLOAD_S = 10.0
_OURS = re.compile(r"^april-v\d+\.\d+-[0-9a-f]{6}\.\d+$")


def is_ours(name: str) -> bool:
    """Return whether april, in any process, has given this name to an adapter."""
    return _OURS.match(name) is not None


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """Name of an adapter at the server, and the directory that it was loaded from."""

    name: str
    path: str


async def unload_adapter(
    client: HttpClient, route: str, adapter: LoadedAdapter, is_gone: Callable[[Reply], Awaitable[bool]]
) -> bool:
    """Unload an adapter. If ``is_gone`` says that the server may still have it, log a warning and return False."""
    try:
        reply = await client.call("POST", route, {"lora_name": adapter.name}, timeout_s=UNLOAD_S, retry=True)
        if await is_gone(reply):
            return True
        why = f"it answered {reply.status}, {error_text(reply.body)}"
    except EngineError as error:
        why = str(error)
    log.warning("%s still has the adapter %s, which april no longer needs: %s", client.url, adapter.name, why)
    return False


class LoadedAdapters:
    """Tracks the adapters that one engine has loaded into its server, and the version of their base model.

    Args:
        labels: Weight labels of the engine. They name the base model, which adapters do not change.
    """

    def __init__(self, labels: WeightLabels) -> None:
        self._labels = labels
        self._numbers = itertools.count(1)
        self._others: dict[str, LoadedAdapter] = {}
        """Adapters other than the present one that the server has, or may have; indexed by name."""
        self._sent: dict[str, LoadedAdapter] = {}
        """Adapter that each request was sent with, indexed by attempt id."""
        self.present: LoadedAdapter | None = None
        """Adapter of the present version; None means the model or adapter that the server was started with."""
        self.base = FIRST_VERSION
        """Version of the base model's whole weights."""

    def new_adapter(self, version: PolicyVersion, path: str) -> LoadedAdapter:
        """Return a new adapter with an unused name. Until :meth:`set_present`, the server may have loaded it or not."""
        made = LoadedAdapter(f"april-{self._labels.of(version)}.{next(self._numbers)}", path)
        self._others[made.name] = made
        return made

    def set_present(self, adapter: LoadedAdapter | None, version: PolicyVersion) -> None:
        """Record what ``version`` consists of: an adapter, or (None) whole weights of the server's model."""
        if self.present is not None:
            self._others[self.present.name] = self.present
        self.present = adapter
        if adapter is None:
            self.base = version
        else:
            del self._others[adapter.name]

    def note_request(self, attempt_id: str) -> str | None:
        """Record a request as sent, and return its adapter name; None means the server's own model."""
        if self.present is None:
            return None
        self._sent[attempt_id] = self.present
        return self.present.name

    def unused(self, inside: Collection[str]) -> list[LoadedAdapter]:
        """Return the adapters that neither the present version nor a running attempt (in ``inside``) uses."""
        self._sent = {attempt: adapter for attempt, adapter in self._sent.items() if attempt in inside}
        used = {adapter.name for adapter in self._sent.values()}
        return [adapter for adapter in self._others.values() if adapter.name not in used]

    def all(self) -> list[LoadedAdapter]:
        return [*self._others.values(), *(() if self.present is None else (self.present,))]

    def note_unloaded(self, adapter: LoadedAdapter) -> None:
        self._others.pop(adapter.name, None)

    def paths(self, inside: Collection[str]) -> frozenset[str]:
        """Return the directories of the adapters in use, which the server may have to read again."""
        unused = {adapter.name for adapter in self.unused(inside)}
        kept = [a.path for a in self._others.values() if a.name not in unused]
        return frozenset([*kept, *(() if self.present is None else (self.present.path,))])

    @property
    def adapted_version(self) -> PolicyVersion | None:
        """Version of the base model if requests use an adapter that april has loaded, else None."""
        return None if self.present is None else self.base
