"""A client whose key stays out of messages, even where the server repeats it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from april.engines.http_client import CONTROL_TIMEOUT_S, HttpClient, Reply

_BLOT = b"<the key>"


class DiscreetClient(HttpClient):
    """An :class:`HttpClient` that blots the key out of answers that are errors, for those are quoted and logged."""

    def __init__(self, url: str, *, name: str, api_key: str | None = None, **options: Any) -> None:
        super().__init__(url, name=name, api_key=api_key, **options)
        self._key = (api_key or "").encode()

    async def call(
        self, method: str, route: str, body: Any = None, *, params: Mapping[str, str] | None = None,
        timeout_s: float | None = CONTROL_TIMEOUT_S, retry: bool = False,
    ) -> Reply:  # fmt: skip
        """As :meth:`HttpClient.call`."""
        return self._without_key(
            await super().call(method, route, body, params=params, timeout_s=timeout_s, retry=retry)
        )

    def require_ok(self, reply: Reply, route: str) -> None:
        """As :meth:`HttpClient.require_ok`."""
        super().require_ok(self._without_key(reply), route)

    def _without_key(self, reply: Reply) -> Reply:
        if reply.ok or not self._key or self._key not in reply.body:
            return reply
        return replace(reply, body=reply.body.replace(self._key, _BLOT))
