"""What goes wrong at a fake vLLM server, and how a right answer is made a wrong one."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class VllmFault(StrEnum):
    """What goes wrong with one request."""

    SERVER_DIES = "server_dies"
    """All connections break and the port closes, when the request has ``after_tokens`` tokens."""
    BREAK_OFF = "break_off"
    """The request's connection breaks when it has ``after_tokens`` tokens; the server goes on."""
    ENGINE_DIES = "engine_dies"
    """At ``after_tokens`` a stream gets an error line and then its mark, with status 200; a plain request a 500."""
    ABORT_NEVER_ENDS = "abort_never_ends"
    """Aborts are acknowledged, generation stops, and the answer never comes."""
    ABORT_UNSEEN = "abort_unseen"
    """The first abort does nothing, as if the request were not known yet."""
    LOST_PARTIAL = "lost_partial"
    """The answer to an aborted request has no tokens that were not sent before."""
    UNASKED_ABORT = "unasked_abort"
    """The server ends the request with "abort" itself when it has ``after_tokens`` tokens."""
    EXTRA_LOGPROBS = "extra_logprobs"
    WRONG_COUNT = "wrong_count"
    """The usage counts one token more than came."""
    NULL_LOGPROB = "null_logprob"
    NAN_LOGPROB = "nan_logprob"
    POSITIVE_LOGPROB = "positive_logprob"
    CLAMPED_LOGPROB = "clamped_logprob"
    """-9999, as which the server writes minus infinity."""
    OTHER_IDS = "other_ids"
    """Log-probabilities of other tokens than those of the answer (only the token route says of which)."""
    UNKNOWN_TOKEN = "unknown_token"  # noqa: S105 - a token id, not a secret
    TRUNCATED = "truncated"
    """The JSON ends in the middle."""
    GAP_IN_SPANS = "gap_in_spans"
    FOREIGN_LABEL = "foreign_label"
    """The weights have a name that april did not give them."""
    REPEATED_LAST = "repeated_last"
    """The last answer of an aborted request repeats the last token, and does not count it."""
    NO_FINISH = "no_finish"
    """The request ends without a finish reason."""
    EARLY_LENGTH = "early_length"
    """It ends with "length" at ``after_tokens`` (at least 1), and there is room."""
    EARLY_STOP = "early_stop"
    """It ends with "stop" at ``after_tokens`` (at least 1), and not by a stop token."""
    ENDS_TWICE = "ends_twice"
    """The end of a stream comes twice, the second time without tokens."""
    DOUBLED_EVENT = "doubled_event"
    """An event of a stream comes twice; a plain answer has its last token twice."""
    COMMENTS = "comments"
    """From ``after_tokens`` on a stream has comment lines and no token, a plain answer spaces; an abort ends it."""
    PINGS = "pings"
    """The same with events that have a name and no data."""
    EMPTY_EVENTS = "empty_events"
    """The same with events that have no token, and usage alone."""
    OTHER_PROMPT = "other_prompt"
    """The usage counts one prompt token less than were sent."""
    NO_DONE = "no_done"
    """The stream ends without its mark."""
    TRICKLE = "trickle"
    """A stream comes byte by byte, each in a packet of its own; nothing is wrong with it."""
    BUSY = "busy"
    """Status 503."""
    LIMITED = "limited"
    """Status 429 with Retry-After."""
    REFUSED = "refused"
    """Status 400."""
    FAILS = "fails"
    """Status 500, and the connection is closed."""
    GIANT = "giant"
    """Status 500 with a body of 16 MiB."""
    REDIRECT = "redirect"


AT_ONCE = (VllmFault.BUSY, VllmFault.LIMITED, VllmFault.REFUSED, VllmFault.FAILS, VllmFault.GIANT, VllmFault.REDIRECT)
"""The request is answered without being run."""
HARMLESS = (VllmFault.ABORT_UNSEEN, VllmFault.UNASKED_ABORT, VllmFault.TRICKLE)
"""After these april has every token that the server handed over, without an error."""
KEEPS_ALIVE = (VllmFault.COMMENTS, VllmFault.PINGS, VllmFault.EMPTY_EVENTS)
"""Signs of life without tokens."""


@dataclass(slots=True)
class PlannedVllmFault:
    """``kind`` hits request number ``request`` (from 0, in the order of arrival; None: the next), ``times`` times."""

    kind: VllmFault
    request: int | None = None
    after_tokens: int = 0
    times: int = 1


def spoiled_vllm(kind: VllmFault, answer: dict[str, Any], vocab_size: int, *, token_route: bool) -> dict[str, Any]:
    """A copy of an answer with tokens, made wrong."""
    answer = copy.deepcopy(answer)
    choice = answer["choices"][0]
    ids, last = choice["token_ids"], choice["finish_reason"] is not None
    scored: list[Any] = choice["logprobs"]["content" if token_route else "token_logprobs"]
    spans = choice.get("weight_versions") or []

    def say(logprob: float | None) -> None:
        if token_route:
            scored[-1]["logprob"] = logprob
        else:
            scored[-1] = logprob

    match kind:
        case VllmFault.EXTRA_LOGPROBS:
            scored.insert(0, copy.deepcopy(scored[0]))
        case VllmFault.NULL_LOGPROB:
            say(None)
        case VllmFault.NAN_LOGPROB:
            say(float("nan"))
        case VllmFault.POSITIVE_LOGPROB:
            say(0.5)
        case VllmFault.CLAMPED_LOGPROB:
            say(-9999.0)
        case VllmFault.DOUBLED_EVENT if answer.get("usage"):
            ids.append(ids[-1])
            scored.append(copy.deepcopy(scored[-1]))
        case VllmFault.OTHER_IDS if token_route:
            scored[-1]["token_id"] = (scored[-1]["token_id"] + 1) % vocab_size
        case VllmFault.UNKNOWN_TOKEN:
            ids[-1] = vocab_size
            if token_route:
                scored[-1]["token_id"] = vocab_size
        case VllmFault.GAP_IN_SPANS if spans:
            spans[0]["start"] = 1
        case VllmFault.FOREIGN_LABEL if spans:
            for span in spans:
                span["version"] = "step-7"
        case VllmFault.REPEATED_LAST if choice["finish_reason"] == "abort":
            ids.append(ids[-1])
            scored.append(copy.deepcopy(scored[-1]))
        case VllmFault.NO_FINISH if last:
            choice["finish_reason"] = None
    if kind is VllmFault.WRONG_COUNT and answer.get("usage"):
        answer["usage"]["completion_tokens"] += 1
    if kind is VllmFault.OTHER_PROMPT and answer.get("usage"):
        answer["usage"]["prompt_tokens"] -= 1
    return answer
