"""A table of how the endpoint treats each field of a client's request body, and the reader that follows the table.

docs/agents.md has the same table.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from april.agents.chat import DISTRIBUTION, ChatRequest, RequestError

log = logging.getLogger("april")

CHAT, TEXT, RESPONSES, MESSAGES = "/chat/completions", "/completions", "/responses", "/messages"
EVERY = (CHAT, TEXT, RESPONSES, MESSAGES)
OPENAI = (CHAT, TEXT, RESPONSES)


class Rule(StrEnum):
    """How the endpoint treats a request field."""

    USED = "used"
    """The field changes the answer, or how the answer is sent."""
    PLAN = "plan"
    """The field changes the sampling distribution if the setting ``sampling_of_clients`` allows that."""
    IGNORED = "ignored"
    """The field is accepted and changes nothing; one line of the debug log names it."""
    REFUSED = "refused"
    """The field is refused, except with a value that changes nothing (``Fields.neutral``)."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Request fields that are treated alike.

    ``why`` says what the fields do, or why they do nothing. ``neutral`` has the values with which REFUSED fields are
    accepted, as they change nothing.
    """

    names: tuple[str, ...]
    routes: tuple[str, ...]
    rule: Rule
    why: str
    neutral: Mapping[str, Any] = field(default_factory=dict)


FIELDS = (
    Fields(("messages",), (CHAT, MESSAGES), Rule.USED, "the conversation"),
    Fields(("prompt",), (TEXT,), Rule.USED, "the text or the token ids to continue"),
    Fields(("input", "instructions"), (RESPONSES,), Rule.USED, "the conversation"),
    Fields(("system",), (MESSAGES,), Rule.USED, "the system message"),
    Fields(("tools",), (CHAT, RESPONSES, MESSAGES), Rule.USED, "the model is shown them; `strict` is ignored"),
    Fields(
        ("tool_choice",), (CHAT, RESPONSES, MESSAGES), Rule.USED,
        "`none` hides the tools; a call that is demanded is a constraint; `disable_parallel_tool_use` is ignored",
    ),
    Fields(("response_format",), (CHAT, TEXT), Rule.USED, "a JSON object or schema is a constraint"),
    Fields(
        ("text",), (RESPONSES,), Rule.USED, "a JSON object or schema in `format` is a constraint; the rest is ignored"
    ),
    Fields(
        ("output_config", "output_format"), (MESSAGES,), Rule.USED,
        "a JSON schema is a constraint; `effort` is ignored",
    ),
    Fields(("max_tokens",), (CHAT, TEXT, MESSAGES), Rule.USED, "limits the answer; `max_response_len` does, too"),
    Fields(("max_completion_tokens",), (CHAT,), Rule.USED, "the same, and goes before `max_tokens`"),
    Fields(("max_output_tokens",), (RESPONSES,), Rule.USED, "the same"),
    Fields(("stop",), OPENAI, Rule.USED, "instead of the configured stop strings"),
    Fields(("stop_sequences",), (MESSAGES,), Rule.USED, "the same"),
    Fields(("stream",), EVERY, Rule.USED, "the answer is sent as events once it is whole"),
    Fields(("stream_options",), (CHAT, TEXT), Rule.USED, "`include_usage` adds token counts; the rest is ignored"),
    Fields(("logprobs", "return_token_ids"), (CHAT, TEXT), Rule.USED, "adds these to the answer"),
    Fields(("model",), EVERY, Rule.USED, "the answer repeats the name; the policy answers under every name"),
    Fields(tuple(DISTRIBUTION), EVERY, Rule.PLAN, "`sampling_of_clients` decides; `seed` is always april's own"),
    Fields(
        ("parallel_tool_calls",), (CHAT, RESPONSES), Rule.IGNORED,
        "the model decides how many tools it calls at once; `constraints: enforce` lets a demanded call be one alone",
    ),
    Fields(
        ("reasoning_effort", "verbosity"), (CHAT,), Rule.IGNORED, "the `renderer` decides what the model is told"
    ),
    Fields(("reasoning",), (RESPONSES,), Rule.IGNORED, "the `renderer` decides what the model is told"),
    Fields(("thinking",), (MESSAGES,), Rule.IGNORED, "the `renderer` decides whether the model thinks"),
    Fields(
        ("truncation",), (RESPONSES,), Rule.IGNORED, "nothing is cut; a conversation that is too long is refused"
    ),
    Fields(
        ("context_management",), (MESSAGES,), Rule.IGNORED, "nothing is cut; the client shortens its history itself"
    ),
    Fields(("include", "max_tool_calls"), (RESPONSES,), Rule.IGNORED, "these concern tools that run at OpenAI"),
    Fields(("store",), (CHAT, RESPONSES), Rule.IGNORED, "nothing is stored"),
    Fields(("prediction",), (CHAT,), Rule.IGNORED, "it only saves time"),
    Fields(("cache_control", "betas"), (MESSAGES,), Rule.IGNORED, "the engine caches prefixes in any case"),
    Fields(
        (
            "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
            "prompt_cache_options", "client_metadata", "inference_geo", "speed",
        ),
        EVERY, Rule.IGNORED, "for the bills, caches and statistics of a provider",
    ),
    Fields(("n",), (CHAT, TEXT), Rule.REFUSED, "one answer per request", {"n": 1}),
    Fields(("best_of",), (TEXT,), Rule.REFUSED, "one answer per request", {"best_of": 1}),
    Fields(
        ("top_logprobs",), (CHAT, RESPONSES), Rule.REFUSED, "only the sampled tokens have log-probabilities",
        {"top_logprobs": 0},
    ),
    Fields(
        ("modalities", "audio"), (CHAT,), Rule.REFUSED, "answers are text", {"modalities": ["text"]},
    ),
    Fields(
        ("functions", "function_call"), (CHAT,), Rule.REFUSED, "use tools", {"functions": [], "function_call": "none"}
    ),
    Fields(
        ("web_search_options",), (CHAT,), Rule.REFUSED, "april runs no tools",
    ),
    Fields(("mcp_servers", "container"), (MESSAGES,), Rule.REFUSED, "april runs no tools", {"mcp_servers": []}),
    Fields(
        ("chat_template_kwargs",), (CHAT,), Rule.REFUSED, "give the scheduler a `renderer` with these settings",
        {"chat_template_kwargs": {}},
    ),
    Fields(("echo", "suffix"), (TEXT,), Rule.REFUSED, "the text is only continued", {"echo": False, "suffix": ""}),
    Fields(("background",), (RESPONSES,), Rule.REFUSED, "the answer is the response", {"background": False}),
    Fields(
        ("previous_response_id", "conversation", "prompt"), (RESPONSES,), Rule.REFUSED,
        "nothing is stored; send the whole conversation", {"previous_response_id": "", "conversation": ""},
    ),
)  # fmt: skip
"""Every field that april knows. A field that is in no row is refused as unknown."""
BY_ROUTE: Mapping[str, Mapping[str, Fields]] = {
    route: {name: row for row in FIELDS if route in row.routes for name in row.names} for route in EVERY
}
"""Rows of FIELDS, indexed by route and field name."""
MAX_STOP_STRINGS = 64
_named: set[tuple[str, str]] = set()
"""(route, field) of the ignored fields that the debug log has named."""


class RequestBody:
    """The fields of a request body. A dialect (API format) takes those that it uses; :meth:`request` checks others."""

    def __init__(self, body: Any, route: str) -> None:
        if not isinstance(body, dict):
            raise RequestError("the body must be a JSON object")
        self._unread: dict[str, Any] = {name: value for name, value in body.items() if value is not None}
        self._route = route

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Remove a field and return its value, which must be of this type; ``default`` if it is missing or null."""
        assert BY_ROUTE[self._route][name].rule in (Rule.USED, Rule.PLAN), name
        value = self._unread.pop(name, None)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(k.__name__ for k in kinds)
            raise RequestError(f"{name} must be {wanted}, got {json.dumps(value)[:100]}")
        return value

    def sampling(self, limit: Any, stops: str) -> dict[str, Any]:
        """Return the sampling settings of the client; see :attr:`ChatRequest.sampling`."""
        stop = self.take(stops, (str, list))
        stop = [stop] if isinstance(stop, str) else stop
        if stop is not None and not (len(stop) <= MAX_STOP_STRINGS and all(isinstance(s, str) for s in stop)):
            raise RequestError(f"{stops} must be a string or a list of up to {MAX_STOP_STRINGS} strings")
        found = {
            "max_tokens": limit,
            "temperature": self.take("temperature", (int, float)),
            "top_p": self.take("top_p", (int, float)),
            "stop": stop,
            **{name: self._unread.pop(name, None) for name in DISTRIBUTION if name not in ("temperature", "top_p")},
        }
        return {name: value for name, value in found.items() if value is not None}

    def request(self, **fields: Any) -> ChatRequest:
        """Return a ChatRequest with these fields, ``stream`` and ``model``; raises RequestError for refused fields.

        Fields that :meth:`take` has not removed are ignored or refused, as the table FIELDS says.
        """
        request = ChatRequest(stream=self.take("stream", bool, False), model=self.take("model", str, ""), **fields)
        unknown = []
        for name, value in self._unread.items():
            row = BY_ROUTE[self._route].get(name)
            if row is None:
                unknown.append(name)
            elif row.rule is Rule.REFUSED and (name not in row.neutral or row.neutral[name] != value):
                raise RequestError(f"{name}={json.dumps(value)[:100]} is not supported ({row.why}); leave it out")
            elif row.rule is Rule.IGNORED and (self._route, name) not in _named:
                _named.add((self._route, name))
                log.debug("%s: clients give %s, which april ignores: %s", self._route, name, row.why)
        if unknown:
            raise RequestError(f"unknown or unsupported parameters: {', '.join(sorted(unknown))}")
        return request
