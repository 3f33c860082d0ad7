"""How servers are asked what they can do, whatever their kind."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from april.core.sampling import LogprobKind
from april.engines.http.http_client import HttpClient
from april.engines.http.server_json import NotJson, read_json
from april.engines.http.wire_errors import error_text
from april.engines.protocol import Capabilities
from april.errors import ConfigError

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
    """What one server was found to be, as it says it; each kind of server has facts of its own besides."""

    url: str
    model: str
    """As the server names it."""
    asked: str | None = None
    """The name in the settings; None: the server's only model."""
    software: str = ""
    """Version of what it runs, with a name where the engine's kind is none."""
    label: str | None = None
    """Of its present weights; None: the server has no labels."""
    paused: bool = False
    started_s: float | None = None
    """When its process began, seconds since 1970, if it says."""
    capabilities: Capabilities
    """Of an engine before it."""


def least(*limits: int | None) -> int | None:
    """Of those that are known."""
    return min((limit for limit in limits if limit is not None), default=None)


def longest_request(url: str, *limits: int | None) -> int:
    """Most tokens of prompt plus response; raises ConfigError if none of the limits is known."""
    longest = least(*limits)
    if longest is None:
        raise ConfigError(f"{url} does not say how long a request may be; set engine.max_len")
    return longest


async def get_json(client: HttpClient, *routes: str) -> Any:
    """What the first of the GET routes that is there says; None: none is.

    Raises ConfigError for what is no JSON.
    """
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
    """Whether a POST route is there: GET is not allowed on it, and nothing happens."""
    return (await client.call("GET", route, timeout_s=PROBE_S, retry=True)).status == 405


def probe_id() -> str:
    """A fresh request id."""
    return f"april-probe-{secrets.token_hex(10)}"


def model_files(root: Any, tokenizer: Any = None, ends: Collection[str] = ()) -> list[dict[str, Any]]:
    """The model's configuration files, if its directory is on this machine too; what its tokenizer adds is one more.

    Args:
        tokenizer: directory of the tokenizer; None: the model's.
        ends: texts of tokens at which the server stops if the tokenizer has added them.
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
    """Of which distribution log-probabilities are, seen from requests of one token.

    Args:
        one_token: (prompt, sampling) -> the token and its log-probability.
    """
    for start in range(3):
        prompt = [start * 7 + i for i in (3, 4, 5)]
        kind = _kind_seen(await one_token(prompt, {"temperature": 0.0}), await one_token(prompt, _NARROW))
        if kind is not LogprobKind.UNKNOWN:
            return kind
    return LogprobKind.UNKNOWN


def _kind_seen(greedy: tuple[int, float], narrow: tuple[int, float]) -> LogprobKind:
    """From the same token (id, nats) greedily and as _NARROW says.

    The second is that of the greedy request (raw), 0 (processed), or neither (temperature).
    """
    (token, raw), (other, said) = greedy, narrow
    if token != other or raw > -5 * _SAME_LOGPROB:
        return LogprobKind.UNKNOWN  # a near certain token looks the same in all of them
    if abs(said - raw) < _SAME_LOGPROB:
        return LogprobKind.RAW
    return LogprobKind.PROCESSED if said > -_SAME_LOGPROB else LogprobKind.TEMPERATURE
