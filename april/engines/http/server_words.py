"""What a server's answer to a control call says: a call is done when the server says so in its own words.

A status of 200 says little: a proxy's page, a web site, an error in JSON and nothing at all come with it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from april.engines.http.http_client import HttpClient, Reply
from april.engines.http.server_json import NotJson, read_json
from april.engines.http.wire_errors import error_text
from april.errors import EngineError

Words = Callable[[Any], bool]
"""Whether an answer is the one with which a server says that it has done what it was asked."""


def words_of(reply: Reply) -> Any:
    """The JSON value of an answer; None: it is empty (or ``null``). What is no JSON is given back as its bytes."""
    if not reply.body.strip():
        return None
    try:
        return read_json(reply.body)
    except NotJson:
        return reply.body


def says(key: str, value: bool | str) -> Words:
    """An object that has this value under this key."""
    return lambda said: isinstance(said, dict) and type(said.get(key)) is type(value) and said[key] == value


def nothing(said: Any) -> bool:
    """An empty answer."""
    return said is None


def require_words(client: HttpClient, reply: Reply, route: str, *words: Words) -> None:
    """Raise the error that the answer means, unless its status is 200 and its body is one of ``words``.

    Raises:
        RequestRefused, EngineBusy, EngineError: another status, by kind.
        EngineError: status 200, and other words.
    """
    client.require_ok(reply, route)
    said = words_of(reply)
    if not any(word(said) for word in words):
        raise EngineError(
            f"{client.url}{route} answered 200, but not that it is done: {error_text(reply.body)}; is a proxy or "
            "another server in between?"
        )


def is_page(reply: Reply) -> bool:
    """Whether an answer is a page of a proxy or a web site, whatever its status."""
    return reply.body.lstrip()[:1] == b"<"


async def control(
    client: HttpClient, route: str, *words: Words, body: object = None, params: dict[str, str] | None = None
) -> None:
    """POST a control call that may be made twice, and is done when the server says one of ``words``.

    Raises as :func:`require_words`, and EngineUnreachable.
    """
    require_words(client, await client.call("POST", route, body, params=params, retry=True), route, *words)


def text_under(client: HttpClient, said: Any, key: str, route: str) -> str:
    """The text that an object has under this key; raises EngineError if there is none."""
    value = said.get(key) if isinstance(said, dict) else None
    if not isinstance(value, str):
        raise EngineError(f"{client.url}{route} does not say its {key}; is a proxy or another server in between?")
    return value
