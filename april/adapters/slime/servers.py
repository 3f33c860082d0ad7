"""The SGLang servers behind slime's router, what they call their weights, and whether these are new."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from april.core.versions import PolicyVersion
from april.engines.http.http_client import HttpClient
from april.engines.http.wire import NotJson, read_json
from april.engines.sglang.router import router_workers
from april.errors import EngineError

UNLABELLED = (None, "default")
"""Labels of weights that nobody has labelled."""
NAMED_VERSIONS = 1000
"""So many are remembered by name."""


class Weights:
    """Whose weights the servers have: the trainer labels them when it updates them, or every rollout has new ones.

    Args:
        router: address of slime's router; None: there are no servers to ask.
        relabels: april writes labels of its own, over the trainer's.
        rollout_id: that of the first rollout.
    """

    def __init__(self, router: str | None, rollout_id: int, *, relabels: bool) -> None:
        self._router, self._relabels = router, relabels
        self._last_id = rollout_id
        self._given: int | None = None
        self.names: dict[PolicyVersion, tuple[str, int]] = {}
        """What slime calls the weights of a version, and the rollout that began under it."""
        self.urls, self._seen = self._ask()
        self._said, self._known = self._seen, self._seen
        self.labelled = any(label not in UNLABELLED for label in self._seen)
        """The trainer labels them, so the same label means the same weights."""

    def updated(self, rollout_id: int, given: int | None) -> bool:
        """Whether the trainer has updated them since the last rollout; ``urls`` are looked up anew.

        ``given``: their version, where the trainer says it; else the servers' labels tell.
        """
        self.look()
        if given is not None:
            self._said = (str(given),)
        last, self._last_id, before, self._given = self._last_id, rollout_id, self._given, given
        if rollout_id == last:
            return False
        if given is not None:
            return given != before
        return not self.labelled or self._seen != self._known

    def look(self) -> None:
        """Ask the servers for their labels, and the router for the servers."""
        self.urls, self._seen = self._ask()
        self._said = self._seen
        self.labelled |= any(label not in (*UNLABELLED, *self._known) for label in self._seen)

    def are_served(self) -> bool:
        """Whether no server is paused; one that does not answer is."""
        return asyncio.run(_all_ready(self.urls))

    @property
    def next_rollout(self) -> int:
        """That after the last one."""
        return self._last_id + 1

    def name(self, version: PolicyVersion, rollout_id: int) -> None:
        """What the servers had when they were last asked is ``version``, and april's engines know it."""
        named = [label for label in self._said if label not in UNLABELLED]
        self.names[version] = (str(named[0] if named else rollout_id), rollout_id)
        for old in sorted(self.names)[:-NAMED_VERSIONS]:
            del self.names[old]
        self._known = self._ask()[1] if self._relabels else self._seen

    def _ask(self) -> tuple[tuple[str, ...], tuple[str | None, ...]]:
        return ((), ()) if self._router is None else asyncio.run(servers_behind(self._router))


async def servers_behind(router: str) -> tuple[tuple[str, ...], tuple[str | None, ...]]:
    """Addresses of the router's servers, sorted, and the labels of their weights.

    Raises:
        ConfigError, EngineError: there is no router, or it has no servers.
    """
    client = HttpClient(router, name="the router")
    try:
        urls = tuple(sorted(await router_workers(client)))
    finally:
        await client.close()
    if not urls:
        raise EngineError(f"the router {router} has no workers yet; slime starts them before it asks for a rollout")
    return urls, tuple(await asyncio.gather(*map(_label, urls)))


async def _all_ready(urls: Sequence[str]) -> bool:
    return all(await asyncio.gather(*map(_ready, urls)))


async def _ready(url: str) -> bool:
    client = HttpClient(url, name=url)
    try:
        return (await client.call("GET", "/ready", timeout_s=10.0)).ok
    except EngineError:
        return False
    finally:
        await client.close()


async def _label(url: str) -> str | None:
    """Of a server's weights; None: it does not say, or is not there."""
    client = HttpClient(url, name=url)
    try:
        for route in ("/model_info", "/get_model_info"):
            reply = await client.call("GET", route, timeout_s=10.0, retry=True)
            if reply.ok:
                said = read_json(reply.body)
                label = said.get("weight_version") if isinstance(said, dict) else None
                return None if label is None else str(label)
        return None
    except (EngineError, NotJson):
        return None
    finally:
        await client.close()
