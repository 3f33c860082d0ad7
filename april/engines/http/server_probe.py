"""The way in which servers are connected to and asked what they can do, whatever their kind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from april.config.engines import ServerEngineConfig, checked_key
from april.core.sampling import LogprobKind
from april.engine_limits import Limit, LimitCode
from april.engines.http.http_client import HttpClient
from april.engines.http.own_adapters import is_ours
from april.engines.http.wire import NotJson, error_text, read_json
from april.engines.protocol import Capabilities, Engine
from april.errors import ConfigError, EngineError
from april.server_text import clean

PROBE_S = 10.0
"""Longest wait for one answer while a server is probed."""
NO_TOKEN = 2**31 - 2
"""An id that no vocabulary has; sent only where the server checks it before the model sees it."""
_NARROW = {"temperature": 0.5, "top_p": 1e-6}
"""Sampling of which only the greedy token is left, at another temperature than the greedy request's."""
_SAME_LOGPROB = 0.02
"""Two log-probabilities of one token that are closer than this are of one distribution (nats; half precision)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """The facts about one server, as it says them; each kind of server has facts of its own besides."""

    url: str
    model: str
    """As the server names it."""
    asked: str | None = None
    """The name in the settings; None: the server's only model."""
    base: str | None = None
    """The model below, where ``model`` is an adapter."""
    software: str = ""
    """Version of what it runs, with a name where the engine's kind is none."""
    label: str | None = None
    """The label of its present weights; None if the server has no labels."""
    paused: bool = False
    started_s: float | None = None
    """The time when its process began, seconds since 1970, if it says."""
    capabilities: Capabilities
    """The capabilities of an engine before it."""


def least(*limits: int | None) -> int | None:
    """The least of those that are known."""
    return min((limit for limit in limits if limit is not None), default=None)


def longest_request(url: str, *limits: int | None) -> int:
    """Most tokens of prompt plus response; raises ConfigError if none of the limits is known."""
    longest = least(*limits)
    if longest is None:
        raise ConfigError(f"{url} does not say how long a request may be; set engine.max_len")
    return longest


async def get_json(client: HttpClient, *routes: str) -> Any:
    """Return the answer of the first GET route that is there; None if none is. Raises ConfigError for no JSON."""
    for route in routes:
        reply = await client.call("GET", route, timeout_s=PROBE_S, retry=True)
        if reply.status in (404, 405):
            continue
        client.require_ok(reply, route)
        try:
            return read_json(reply.body)
        except NotJson as error:
            raise ConfigError(
                f"{client.url}{route} answered what is no JSON ({error}); is engine.kind the kind of this server?"
            ) from None
    return None


async def has_route(client: HttpClient, route: str) -> bool:
    """Return whether a POST route is there: GET is not allowed on it, and nothing happens."""
    return (await client.call("GET", route, timeout_s=PROBE_S, retry=True)).status == 405


def probe_id() -> str:
    """A fresh request id."""
    return f"april-probe-{secrets.token_hex(10)}"


def model_files(root: Any, tokenizer: Any = None, ends: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the model's configuration files, if its directory is on this machine; its tokenizer's ends are one more.

    ``ends`` are texts of tokens at which the server stops if the tokenizer, by default the model's, has added them.
    """
    found = [f for f in (_json_file(root, name) for name in ("config.json", "generation_config.json")) if f]
    # servers stop at the tokenizer's EOS as well, which need not be the model's (that of a chat format, say)
    return [*found, {"eos_token_id": _tokenizer_ends(tokenizer or root, ends)}] if found else []


def _json_file(root: Any, name: str) -> dict[str, Any]:
    try:
        found = json.loads((Path(str(root)) / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _tokenizer_ends(root: Any, ends: Collection[str]) -> list[int]:
    """The ids of the tokenizer's EOS and of ``ends`` by its files; without those that are not there."""
    config = _json_file(root, "tokenizer_config.json")
    eos = config.get("eos_token")
    texts = {*ends, eos.get("content") if isinstance(eos, dict) else eos}
    decoder = config.get("added_tokens_decoder")
    named = list(decoder.items()) if isinstance(decoder, dict) else []
    if not named:
        added = _json_file(root, "tokenizer.json").get("added_tokens")
        named = [(t.get("id"), t) for t in added if isinstance(t, dict)] if isinstance(added, list) else []
    added_texts = ((number, token.get("content")) for number, token in named if isinstance(token, dict))
    return [
        int(number) for number, text in added_texts
        if isinstance(text, str) and text in texts and str(number).isdecimal()
    ]  # fmt: skip


def eos_of(files: list[dict[str, Any]]) -> tuple[int, ...] | None:
    """The ids that end a response; None: the files do not say."""
    ids: set[int] = set()
    for file in files:
        text = file.get("text_config")
        for values in (file, text if isinstance(text, dict) else {}):
            eos = values.get("eos_token_id")
            ids.update(i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int))
    return tuple(sorted(ids)) or None


async def vocabulary_in_refusal(client: HttpClient, route: str, body: dict[str, Any], words: str) -> int | None:
    """The number that ``words`` (a pattern) finds in the refusal of a request that can never run."""
    reply = await client.call("POST", route, body, timeout_s=PROBE_S)
    found = None if reply.ok else re.search(words, error_text(reply.body))
    return None if found is None else int(found[1])


async def kind_of_logprobs(
    one_token: Callable[[list[int], dict[str, float]], Awaitable[tuple[int, float]]],
) -> LogprobKind:
    """Tell of which distribution log-probabilities are; ``one_token``: (prompt, sampling) -> (id, nats)."""
    for start in range(3):
        prompt = [start * 7 + i for i in (3, 4, 5)]
        kind = _kind_seen(await one_token(prompt, {"temperature": 0.0}), await one_token(prompt, _NARROW))
        if kind is not LogprobKind.UNKNOWN:
            return kind
    return LogprobKind.UNKNOWN


def _kind_seen(greedy: tuple[int, float], narrow: tuple[int, float]) -> LogprobKind:
    """Compare the same token (id, nats) greedily and as _NARROW says.

    The second is that of the greedy request (raw), 0 (processed), or neither (temperature).
    """
    (token, raw), (other, said) = greedy, narrow
    if token != other or raw > -5 * _SAME_LOGPROB:
        return LogprobKind.UNKNOWN  # a near certain token looks the same in all of them
    if abs(said - raw) < _SAME_LOGPROB:
        return LogprobKind.RAW
    return LogprobKind.PROCESSED if said > -_SAME_LOGPROB else LogprobKind.TEMPERATURE


ROUTE = "/v1/models"
NAMES = 20
"""Most names in a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """An entry of a server's list of models."""

    name: str
    base: str | None = None
    """The model for which it was made, of an adapter."""
    card: dict[str, Any]
    """All that the server says of it; of an adapter, of its base where that is listed."""
    adapters: tuple[str, ...] = ()
    """The adapters that the server has besides."""

    def limits(self, *, takes_adapters: bool = False) -> tuple[Limit, ...]:
        """Return what follows from adapters; ``takes_adapters``: april can load new ones."""
        if self.base is not None:
            how = "give a directory with a new adapter" if takes_adapters else (
                "hand a new adapter over with weight_update(transfer=...)"
            )  # fmt: skip
            return (
                Limit(
                    LimitCode.ADAPTERS_ONLY if takes_adapters else LimitCode.ADAPTER,
                    f"Requests name the adapter {clean(self.name)}, made for the model {clean(self.base)}: whole "
                    "weights from a directory would change that model under it",
                    f"{how}, or train merged weights and name {clean(self.base)} in engine.model",
                ),
            )
        if self.adapters:
            named = f"Requests name the model {clean(self.name)} itself, as engine.model says, and no adapter of it"
            return (Limit(LimitCode.UNUSED_ADAPTERS, f"{named} ({_listed(self.adapters)})"),)
        return ()


def choose_model(url: str, answer: Any, name: str | None) -> ServedModel:
    """Pick the model that the settings name, or the only one, from an answer of ``/v1/models``; raises ConfigError."""
    listed = answer.get("data") if isinstance(answer, dict) else None
    cards = [c for c in listed if isinstance(c, dict) and "id" in c] if isinstance(listed, list) else []
    adapters = {
        str(c["id"]): str(c["parent"]) for c in cards
        if c.get("parent") not in (None, "", c["id"]) and (c["id"] == name or not is_ours(str(c["id"])))
    }  # fmt: skip
    models = {str(c["id"]): c for c in cards if str(c["id"]) not in adapters and not is_ours(str(c["id"]))}
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


async def is_listed(client: HttpClient, name: str) -> bool | None:
    """Return whether the server lists a model or adapter of this name; None: it shows no list."""
    try:
        reply = await client.call("GET", ROUTE, retry=True)
        answer = read_json(reply.body) if reply.ok else None
    except (EngineError, NotJson):
        return None
    listed = answer.get("data") if isinstance(answer, dict) else None
    return any(isinstance(c, dict) and c.get("id") == name for c in listed) if isinstance(listed, list) else None


async def why_not_served(client: HttpClient, name: str | None) -> str:
    """Return what :func:`choose_model` has against the server's present list; empty: nothing, or it shows none."""
    try:
        reply = await client.call("GET", ROUTE, retry=True)
        answer = read_json(reply.body) if reply.ok else None
    except (EngineError, NotJson):
        return ""
    if not isinstance(answer, dict) or not isinstance(answer.get("data"), list):
        return ""
    try:
        choose_model(client.url, answer, name)
    except ConfigError as error:
        return str(error)
    return ""


def _choice(models: dict[str, Any], adapters: dict[str, str]) -> str:
    """Return what there is to choose from, and how to."""
    if not adapters:
        several = f"several models ({_listed(models)})" if models else "no model"
        return f"serves {several}; name the one that is trained"
    return (
        f"serves {_listed(models) or 'no model'} and the adapters (LoRA) {_listed(adapters)}, and a request that names "
        f"none is answered without them; set it to {clean(next(iter(adapters)))} to train that adapter"
        + (f", or to {clean(next(iter(models)))} to train the model itself" if models else "")
    )


def _listed(names: Any) -> str:
    return clean(", ".join(list(names)[:NAMES]))


E = TypeVar("E", bound=Engine)


async def connect_all(config: ServerEngineConfig, connect: Callable[[HttpClient], Awaitable[E]]) -> list[E]:
    """Call ``connect`` for all configured servers at once; when one fails, the others are closed again.

    Raises:
        ConfigError: as ``connect`` does, or the environment variable with the key is not set.
        EngineError: a server could not be asked; the message names it.
    """
    clients = [client_of(url, config) for url in config.urls]

    async def one(client: HttpClient) -> E:
        limit = asyncio.timeout(config.probe_timeout_s)
        try:
            async with limit:
                return await connect(client)
        except TimeoutError:
            if not limit.expired():
                raise
            raise EngineError(
                f"{client.url} has not said in {config.probe_timeout_s:g} s what it can do; is it overloaded or paused?"
            ) from None

    try:
        results = await asyncio.gather(*map(one, clients), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
    except BaseException:
        for client in clients:
            await client.close()
        raise
    return [r for r in results if not isinstance(r, BaseException)]


def client_of(url: str, config: ServerEngineConfig) -> HttpClient:
    """Make a client of one server, as the configuration says; raises ConfigError as :func:`api_key`."""
    return HttpClient(
        url, name=urlsplit(url).netloc, api_key=api_key(config), connect_timeout_s=config.connect_timeout_s
    )


def api_key(config: ServerEngineConfig) -> str | None:
    """The key, from the environment where it is named there."""
    if config.api_key_env is None:
        return None if config.api_key is None else config.api_key.get_secret_value()
    key = os.environ.get(config.api_key_env)
    if not key:
        raise ConfigError(f"engine.api_key_env: the environment variable {config.api_key_env} is not set")
    return checked_key(key)
