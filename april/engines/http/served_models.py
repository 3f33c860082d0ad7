"""Which of a server's models is trained: the only one, or the one that the settings name; never a guess.

A server lists an adapter (LoRA) beside the model that it was made for, as its ``parent``. A request without the
adapter's name is answered by that model, which nobody trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from april.engine_limits import Limit, LimitCode
from april.engines.http.http_client import HttpClient
from april.engines.http.server_json import NotJson, read_json
from april.errors import ConfigError, EngineError
from april.server_text import said

ROUTE = "/v1/models"
NAMES = 20
"""Most names in a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One entry of a server's list of models."""

    name: str
    base: str | None = None
    """The model for which it was made, of an adapter."""
    card: dict[str, Any]
    """All that the server says of it; of an adapter, of its base where that is listed."""
    adapters: tuple[str, ...] = ()
    """Those that the server has besides."""

    @property
    def limits(self) -> tuple[Limit, ...]:
        """What follows from adapters."""
        if self.base is not None:
            return (
                Limit(
                    LimitCode.ADAPTER,
                    f"Requests name the adapter {said(self.name)}, made for the model {said(self.base)}: whole weights "
                    "from a directory would change that model under it",
                    "hand a new adapter over with weight_update(transfer=...), or train merged weights and name "
                    f"{said(self.base)} in engine.model",
                ),
            )
        if self.adapters:
            named = f"Requests name the model {said(self.name)} itself, as engine.model says, and no adapter of it"
            return (Limit(LimitCode.UNUSED_ADAPTERS, f"{named} ({_listed(self.adapters)})"),)
        return ()


def chosen(url: str, answer: Any, name: str | None) -> ServedModel:
    """The model that the settings name, or the only one, out of what ``/v1/models`` has answered.

    Raises:
        ConfigError: there is none of this name, or no name and more than one to choose from.
    """
    listed = answer.get("data") if isinstance(answer, dict) else None
    cards = [c for c in listed if isinstance(c, dict) and "id" in c] if isinstance(listed, list) else []
    adapters = {str(c["id"]): str(c["parent"]) for c in cards if c.get("parent") not in (None, "", c["id"])}
    models = {str(c["id"]): c for c in cards if str(c["id"]) not in adapters}
    if name is None:
        # one model may have several names
        if adapters or len({c.get("root") or c["id"] for c in models.values()}) != 1:
            raise ConfigError(f"engine.model: {url} {_choice(models, adapters)}")
        name = next(iter(models))
    # SGLang also calls an adapter base:adapter
    found = next((a for a, base in adapters.items() if name in (a, f"{base}:{a}")), name)
    if found in adapters:
        base = adapters[found]
        own = next(c for c in cards if str(c["id"]) == found)
        return ServedModel(name=found, base=base, card=models.get(base, next(iter(models.values()), own)))
    if found not in models:
        shown = f"; it serves: {_listed([*models, *adapters])}" if cards else ", and lists none"
        raise ConfigError(f"engine.model: {url} has no model {name!r}{shown}")
    return ServedModel(name=found, card=models[found], adapters=tuple(adapters))


async def why_not_served(client: HttpClient, name: str | None) -> str:
    """What :func:`chosen` has against the server's present list; empty: nothing, or it shows none."""
    try:
        reply = await client.call("GET", ROUTE, retry=True)
        answer = read_json(reply.body) if reply.ok else None
    except (EngineError, NotJson):
        return ""
    if not isinstance(answer, dict) or not isinstance(answer.get("data"), list):
        return ""
    try:
        chosen(client.url, answer, name)
    except ConfigError as error:
        return str(error)
    return ""


def _choice(models: dict[str, Any], adapters: dict[str, str]) -> str:
    """What there is to choose from, and how to."""
    if not adapters:
        several = f"several models ({_listed(models)})" if models else "no model"
        return f"serves {several}; name the one that is trained"
    return (
        f"serves {_listed(models) or 'no model'} and the adapters (LoRA) {_listed(adapters)}, and a request that names "
        f"none is answered without them; set it to {said(next(iter(adapters)))} to train that adapter"
        + (f", or to {said(next(iter(models)))} to train the model itself" if models else "")
    )


def _listed(names: Any) -> str:
    return said(", ".join(list(names)[:NAMES]))
