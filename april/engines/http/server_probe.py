"""Connects to engine servers and finds out what they can do: the parts that all kinds of servers share."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from april.config.engines import AddressedEngineConfig, RoutingKey, ServerEngineConfig, key_of_variable, name_at
from april.core.engine_limits import UNKNOWN_LOGPROBS, Limit, LimitCode, unknown_eos
from april.core.sampling import LogprobKind
from april.engines.http.http_client import HttpClient, Reply, json_value
from april.engines.http.loaded_adapters import is_ours
from april.engines.http.token_rows import Routing
from april.engines.http.weight_labels import first_weights
from april.engines.http.wire import NotJson, error_text, read_json
from april.engines.protocol import Capabilities, Engine
from april.errors import ConfigError, EngineError
from april.text.server_text import clean

NO_TOKEN = 2**31 - 2
"""Token id outside every vocabulary; sent only where the server checks ids before the model sees them."""
_NARROW = {"temperature": 0.5, "top_p": 1e-6}
"""Sampling settings under which only the most likely token can be sampled, at a temperature other than 0 and 1."""
_SAME_LOGPROB = 0.02
"""Difference in nats below which two log-probabilities of one token count as equal; allows for half precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Results of probing one server. Each kind of server adds facts of its own."""

    url: str
    model: str
    """Name of the model at the server."""
    asked: str | None = None
    """Model name from the settings; None means the server's only model."""
    routing_key: RoutingKey = "off"
    """Setting ``engine.routing_key``."""
    software: str = ""
    """Version of the server's software, with its name if the engine kind does not say it."""
    label: str | None = None
    """Label of the present weights; None if the server has no labels."""
    paused: bool = False
    started_s: float | None = None
    """Time when the server's process began, in seconds since 1970; None if the server does not say."""
    capabilities: Capabilities
    """Capabilities of an engine in front of this server."""


def least(*limits: int | None) -> int | None:
    """Return the smallest known limit, or None if all are unknown."""
    return min((limit for limit in limits if limit is not None), default=None)


TRIES, AGAIN_S = 3, 0.1
"""Number of tries, and seconds between them, until the server itself answers. The whole run relies on the answer, so
a proxy's page or a passing error must not count as one."""
REFUSES = (401, 403, 404, 405)
"""Statuses by which a server, or a proxy in front of it, says that april cannot use a route."""


def model_files(root: Any, tokenizer: Any = None, ends: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the model's configuration files and its tokenizer's end tokens; empty unless ``root`` is on this machine.

    ``root`` is the model's directory; ``tokenizer`` is the tokenizer's, by default the same. ``ends`` are texts of
    further tokens at which the server stops; texts that are not among the tokenizer's added tokens are ignored.
    """
    found = [f for f in (_json_file(root, name) for name in ("config.json", "generation_config.json")) if f]
    # servers also stop at the tokenizer's EOS, which may differ from the model's, for example in a chat format
    return [*found, {"eos_token_id": _tokenizer_ends(tokenizer or root, ends)}] if found else []


def _json_file(root: Any, name: str) -> dict[str, Any]:
    try:
        found = json.loads((Path(str(root)) / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _tokenizer_ends(root: Any, ends: Collection[str]) -> list[int]:
    """Return the ids of the tokenizer's EOS and of ``ends``; texts that its files do not contain are ignored."""
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


def eos_of(files: Sequence[dict[str, Any]]) -> tuple[int, ...] | None:
    """Return the ids that end a response; None if the files do not say."""
    ids: set[int] = set()
    for file in files:
        text = file.get("text_config")
        for values in (file, text if isinstance(text, dict) else {}):
            eos = values.get("eos_token_id")
            ids.update(i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int))
    return tuple(sorted(ids)) or None


class ServerProbe:
    """Base class of probes. Its methods find out abilities in the same way for all kinds of servers.

    Such a method returns a value for the :class:`Capabilities`, and notes a :class:`Limit` if the server could do more
    when started differently.
    """

    files: Sequence[dict[str, Any]] = ()
    """Configuration files of the model, if they are on this machine."""
    served: ServedModel | None = None
    """Entry of the trained model in the server's list of models."""
    paused = False
    """True if somebody has paused the server, which then answers no request."""
    label: str | None = None
    """Label of the present weights."""

    def __init__(self, client: HttpClient, config: ServerEngineConfig) -> None:
        self.client, self.config, self._limits = client, config, list[Limit]()
        self.needs: dict[str, str] = {}
        """What the user should do to get an ability that the server lacks, indexed by field of the capabilities."""

    @staticmethod
    def new_id() -> str:
        """Return a fresh request id."""
        return f"april-probe-{secrets.token_hex(10)}"

    def note(self, limit: Limit, amiss: object = True) -> None:
        """Note ``limit`` if ``amiss`` is true."""
        if amiss:
            self._limits.append(limit)

    def lacks(
        self, amiss: object, code: LimitCode, consequence: str, remedy: str = "", *flags: str, server: str = ""
    ) -> bool:
        """Note a :class:`Limit` with these fields if ``amiss`` is true; return whether it is."""
        self.note(Limit(code, consequence, remedy, flags, server), amiss)
        return bool(amiss)

    def limits(self, *, takes_adapters: bool = False) -> tuple[Limit, ...]:
        """Return all noted limits, and those that follow from the server's adapters."""
        return (*self._limits, *(() if self.served is None else self.served.limits(takes_adapters=takes_adapters)))

    async def answer_of(self, method: str, route: str, is_own: Callable[[Reply], bool], body: Any = None) -> Reply:
        """Make a harmless call until ``is_own`` accepts the answer as the server's own. Raises EngineError after TRIES.

        Single calls have no timeout, as a cold server is slow at first; the caller limits the time of the whole probe.
        """
        for left in reversed(range(TRIES)):
            reply = await self.client.call(method, route, body, timeout_s=None, retry=method == "GET")
            if is_own(reply):
                return reply
            if left:
                await asyncio.sleep(AGAIN_S)
        self.client.require_ok(reply, route)
        raise EngineError(
            f"{self.client.url}{route} does not answer like a server of this engine.kind: status {reply.status}, "
            f"{error_text(reply.body)}; is there a proxy or another server in between?"
        )

    async def get_json(self, *routes: str, has: str = "") -> Any:
        """Return the JSON answer of the first GET route that exists; None if none does.

        ``has`` is a key that the answer must have. Raises ConfigError if the answer is not JSON, and EngineError for an
        error status, or if the answer seems to come from another server.
        """

        def is_own(reply: Reply) -> bool:
            said = json_value(reply) if reply.ok else None
            return reply.status in REFUSES or (isinstance(said, dict) and has in said if has else said is not None)

        for route in routes:
            reply = await self.answer_of("GET", route, is_own)
            if reply.status in (404, 405):
                continue
            self.client.require_ok(reply, route)
            try:
                return read_json(reply.body)
            except NotJson as error:
                raise ConfigError(
                    f"{self.client.url}{route} answered with invalid JSON ({error}); does engine.kind match this "
                    "server?"
                ) from None
        return None

    async def has_route(self, route: str) -> bool:
        """Return whether a POST route exists: then a GET, which has no effect, is answered with status 405."""
        return (await self.answer_of("GET", route, lambda reply: reply.status in REFUSES)).status == 405

    async def ask(self, route: str, body: dict[str, Any]) -> Reply:
        """Send a request without a timeout; the caller limits the time of the whole probe."""
        return await self.client.call("POST", route, body, timeout_s=None)

    def choose_model(self, models: Any) -> ServedModel:
        """Pick the trained model from the server's list of models. Raises ConfigError."""
        self.served = served = choose_model(self.client.url, models, self.config.model)
        return served

    def size_of_vocabulary(self, *sizes: object, danger: str = "") -> int:
        """Return the first known size. Raises ConfigError if none is known; ``danger`` is a part of its message."""
        size = next((size for size in sizes if isinstance(size, int)), None)
        if size is None:
            raise ConfigError(
                f"{self.client.url} does not report the size of its vocabulary{danger}; set engine.vocab_size "
                "(vocab_size of the model's config.json)"
            )
        return size

    async def vocabulary_in_refusal(self, route: str, body: dict[str, Any], words: str) -> int | None:
        """Send a request that can never run; return the number that the pattern ``words`` finds in its refusal."""
        reply = await self.ask(route, body)
        found = None if reply.ok else re.search(words, error_text(reply.body))
        return None if found is None else int(found[1])

    def ends(self) -> tuple[int, ...]:
        """Return the ids that end a response, from the settings or the model's files."""
        ids = self.config.eos_token_ids if self.config.eos_token_ids is not None else eos_of(self.files)
        self.note(unknown_eos(), ids is None)
        return ids or ()

    def logprobs(self, seen: LogprobKind, raw: Limit) -> LogprobKind:
        """Return the kind of log-probabilities from the settings, else ``seen``; note a limit for raw or unknown."""
        kind = seen if self.config.logprobs is None else LogprobKind(self.config.logprobs)
        self.note(raw, kind is LogprobKind.RAW)
        self.note(UNKNOWN_LOGPROBS, kind is LogprobKind.UNKNOWN)
        return kind

    def experts(self, said: Routing | None, seen: Routing | str, limit: Limit) -> Routing | None:
        """Return the shape of a token's routed experts; None if no reply has shown it.

        ``seen`` is the shape in a reply, or a text on what the user must do to get it, which is noted in ``needs``.
        ``said`` is the shape in the model's files; if known but not seen, and unless paused, ``limit`` is noted.
        """
        if isinstance(seen, Routing):
            return seen
        self.needs["extras"] = seen
        self.note(limit, said is not None and not self.paused)
        return None

    async def kind_of_logprobs(
        self, one_token: Callable[[list[int], dict[str, float]], Awaitable[tuple[int, float]]],
    ) -> LogprobKind:
        """Find out whether the server's log-probabilities include the temperature, or all sampling settings.

        ``one_token`` generates a token: it maps (prompt, sampling settings) to (token id, log-probability).
        """
        for start in range(3):
            prompt = [start * 7 + i for i in (3, 4, 5)]
            kind = _kind_seen(await one_token(prompt, {"temperature": 0.0}), await one_token(prompt, _NARROW))
            if kind is not LogprobKind.UNKNOWN:
                return kind
        return LogprobKind.UNKNOWN

    def common(self) -> dict[str, Any]:
        """Return the fields of :class:`ServerFacts` that are found out in the same way for all kinds of servers."""
        return {
            "url": self.client.url, "asked": self.config.model, "label": self.label, "paused": self.paused,
            "routing_key": self.config.routing_key,
        }  # fmt: skip

    def capabilities(
        self, *, context: int | None, places: int | None, bans: bool = True, **found: Any
    ) -> Capabilities:  # fmt: skip
        """Return the capabilities: ``found``, and those that are found out in the same way for all kinds of servers.

        ``context`` is the server's limit of tokens per request, and ``places`` its limit of concurrent requests (None
        if unknown). Raises ConfigError if neither the server nor the settings say how long a request may be.
        """
        longest = least(context, self.config.max_len)
        if longest is None:
            raise ConfigError(
                f"{self.client.url} does not report how long a request may be; set engine.max_len "
                "(trtllm-serve: its --max_seq_len)"
            )
        return Capabilities(
            max_context=longest, max_in_flight=least(places, self.config.max_in_flight), remote=True, bans=bans,
            verifies_weights=self.label is not None,
            first_weights=first_weights(self.label, present=self.config.first_weights == "present"),
            needs=self.needs, limits=self.limits(takes_adapters=found["adapters"] is not None),
            **{"constrains": True} | found,
        )  # fmt: skip


def _kind_seen(greedy: tuple[int, float], narrow: tuple[int, float]) -> LogprobKind:
    """Return the kind, from the (token, log-probability) that greedy sampling gave and the one under ``_NARROW``.

    Raw log-probabilities ignore the sampling settings, so both are equal. Processed ones are 0 under ``_NARROW``, as
    ``top_p`` leaves one token. If only the temperature is applied, the second is neither equal nor 0.
    """
    (token, raw), (other, said) = greedy, narrow
    if token != other or raw > -5 * _SAME_LOGPROB:
        return LogprobKind.UNKNOWN  # an almost certain token has the same log-probability for every kind
    if abs(said - raw) < _SAME_LOGPROB:
        return LogprobKind.RAW
    return LogprobKind.PROCESSED if said > -_SAME_LOGPROB else LogprobKind.TEMPERATURE


ROUTE = "/v1/models"
NAMES = 20
"""Maximum number of names in a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Model or adapter in a server's list of models."""

    name: str
    base: str | None = None
    """Name of the base model if this is an adapter, else None."""
    card: dict[str, Any]
    """Entry in the server's list; for an adapter, the entry of its base model if the server lists it."""
    adapters: tuple[str, ...] = ()
    """Names of the adapters that the server also has."""

    def limits(self, *, takes_adapters: bool = False) -> tuple[Limit, ...]:
        """Return the limits that follow from adapters; ``takes_adapters`` means that april can load new ones."""
        if self.base is not None:
            how = "give a directory with a new adapter" if takes_adapters else (
                "load a new adapter with weight_update(transfer=...)"
            )  # fmt: skip
            return (
                Limit(
                    LimitCode.ADAPTERS_ONLY if takes_adapters else LimitCode.ADAPTER,
                    f"Requests use the adapter {clean(self.name)}, trained on the model {clean(self.base)}: full "
                    "weights from a directory would replace that model under the adapter",
                    f"{how}, or train merged weights and set engine.model to {clean(self.base)}",
                ),
            )
        if self.adapters:
            named = f"Requests use the model {clean(self.name)} itself, as engine.model says, and none of its adapters"
            return (Limit(LimitCode.UNUSED_ADAPTERS, f"{named} ({_listed(self.adapters)})"),)
        return ()


def choose_model(url: str, answer: Any, name: str | None) -> ServedModel:
    """Pick the configured model, or the only one, from an answer of ``/v1/models``. Raises ConfigError."""
    listed = answer.get("data") if isinstance(answer, dict) else None
    entries = listed if isinstance(listed, list) else []
    cards = [c for c in entries if isinstance(c, dict) and isinstance(c.get("id"), str)]
    adapters = {
        c["id"]: str(c["parent"]) for c in cards
        if c.get("parent") not in (None, "", c["id"]) and (c["id"] == name or not is_ours(c["id"]))
    }  # fmt: skip
    models = {c["id"]: c for c in cards if c["id"] not in adapters and not is_ours(c["id"])}
    if name is None:
        # one model may be listed under several names
        if adapters or len({str(c.get("root") or c["id"]) for c in models.values()}) != 1:
            raise ConfigError(f"engine.model: {url} {_choice(models, adapters)}")
        name = next(iter(models))
    # SGLang also accepts base:adapter as the name of an adapter
    found = next((a for a, base in adapters.items() if name in (a, f"{base}:{a}")), name)
    if found in adapters:
        base = adapters[found]
        own = next(c for c in cards if c["id"] == found)
        return ServedModel(name=found, base=base, card=models.get(base, next(iter(models.values()), own)))
    if found not in models:
        shown = f"; it serves: {_listed([*models, *adapters])}" if cards else ", and lists none"
        raise ConfigError(f"engine.model: {url} has no model {name!r}{shown}")
    return ServedModel(name=found, card=models[found], adapters=tuple(adapters))


async def _listed_models(client: HttpClient) -> Any:
    """Return the server's answer with its list of models; None if it shows no list."""
    try:
        reply = await client.call("GET", ROUTE, retry=True)
        answer = read_json(reply.body) if reply.ok else None
    except (EngineError, NotJson):
        return None
    return answer if isinstance(answer, dict) and isinstance(answer.get("data"), list) else None


async def is_listed(client: HttpClient, name: str) -> bool | None:
    """Return whether the server lists a model or adapter of this name; None if it shows no list."""
    answer = await _listed_models(client)
    return None if answer is None else any(isinstance(c, dict) and c.get("id") == name for c in answer["data"])


async def why_not_served(client: HttpClient, name: str | None) -> str:
    """Return the error of :func:`choose_model` for the server's present list; empty without an error or a list."""
    answer = await _listed_models(client)
    try:
        if answer is not None:
            choose_model(client.url, answer, name)
    except ConfigError as error:
        return str(error)
    return ""


def _choice(models: dict[str, Any], adapters: dict[str, str]) -> str:
    """Return the message part that lists the models and adapters, and says how to choose."""
    if not adapters:
        several = f"several models ({_listed(models)})" if models else "no model"
        return f"serves {several}; set it to the one that is trained"
    return (
        f"serves {_listed(models) or 'no model'} and the adapters (LoRA) {_listed(adapters)}, and answers a request "
        f"that names no adapter without one; set it to {clean(next(iter(adapters)))} to train that adapter"
        + (f", or to {clean(next(iter(models)))} to train the model itself" if models else "")
    )


def _listed(names: Any) -> str:
    return clean(", ".join(list(names)[:NAMES]))


E = TypeVar("E", bound=Engine)


async def connect_all(config: AddressedEngineConfig, connect: Callable[[HttpClient], Awaitable[E]]) -> list[E]:
    """Call ``connect`` for all configured servers concurrently; if one fails, close all of them.

    Raises:
        ConfigError: ``connect`` raised it, or the environment variable of the API key is not set.
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
                f"{client.url} has not reported its features within {config.probe_timeout_s:g} s; is it overloaded or "
                "paused? If it is only slow at first, raise engine.probe_timeout_s"
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


def client_of(url: str, config: AddressedEngineConfig) -> HttpClient:
    """Make the client of one server from the configuration. Raises ConfigError like :func:`api_key`."""
    return HttpClient(
        url, name=name_at(url), api_key=api_key(config), connect_timeout_s=config.connect_timeout_s
    )


def api_key(config: AddressedEngineConfig) -> str | None:
    """Return the API key, from the environment if the configuration names a variable. Raises ConfigError if unset."""
    if config.api_key_env is None:
        return None if config.api_key is None else config.api_key.get_secret_value()
    return key_of_variable(config.api_key_env, "engine.api_key_env")
