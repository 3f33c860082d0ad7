"""What goes wrong at a fake SGLang server, and how a right answer is made a wrong one."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class SglangFault(StrEnum):
    """What goes wrong with one request."""

    SERVER_DIES = "server_dies"
    """All connections break and the port closes, when the request has ``after_tokens`` tokens."""
    BREAK_OFF = "break_off"
    """The request's connection breaks when it has ``after_tokens`` tokens; the server goes on."""
    ABORT_NEVER_ENDS = "abort_never_ends"
    """Aborts are acknowledged, generation stops, and the answer never comes."""
    ABORT_UNSEEN = "abort_unseen"
    """The first abort does nothing, as if the request were not known yet."""
    LOST_PARTIAL = "lost_partial"
    """The answer to an aborted request has no tokens that were not sent before (servers before October 2025)."""
    UNASKED_ABORT = "unasked_abort"
    """The server aborts the request itself when it has ``after_tokens`` tokens."""
    TIMED_OUT = "timed_out"
    """The same with status 503: a plain answer is an HTTP error without the tokens."""
    RETRACTED = "retracted"
    """Out of memory: at ``after_tokens`` the request goes back to the queue, and stays there."""
    EXTRA_LOGPROBS = "extra_logprobs"
    WRONG_COUNT = "wrong_count"
    NULL_LOGPROB = "null_logprob"
    NAN_LOGPROB = "nan_logprob"
    POSITIVE_LOGPROB = "positive_logprob"
    CLAMPED_LOGPROB = "clamped_logprob"
    """The smallest number of the type, as which the server writes minus infinity."""
    OTHER_IDS = "other_ids"
    """Log-probabilities of other tokens than those of the answer."""
    UNKNOWN_TOKEN = "unknown_token"  # noqa: S105 - a token id, not a secret
    TRUNCATED = "truncated"
    """The JSON ends in the middle."""
    OTHER_RID = "other_rid"
    """The answer is that of another request."""
    GAP_IN_SPANS = "gap_in_spans"
    FOREIGN_LABEL = "foreign_label"
    """The weights have a name that april did not give them."""
    REPEATED_LAST = "repeated_last"
    """The event of an abort repeats the last token."""
    UNCOUNTED_LAST = "uncounted_last"
    """The answer to an aborted request has one token more than it counts."""
    SHRINKS = "shrinks"
    """The last event counts fewer tokens than came before."""
    NO_FINISH = "no_finish"
    """The stream ends without a finish reason; a plain answer has none."""
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
    """It counts one prompt token less than were sent."""
    NAN_STOP = "nan_stop"
    """The model gave NaN: the last token is EOS, and it has stopped at a text that says so."""
    NO_DONE = "no_done"
    """The stream ends without its mark; nothing is lost."""
    BUSY = "busy"
    FAILS = "fails"
    """Status 500."""
    REDIRECT = "redirect"


AT_ONCE = (SglangFault.BUSY, SglangFault.FAILS, SglangFault.REDIRECT)
"""The request is answered without being run."""
HARMLESS = (SglangFault.ABORT_UNSEEN, SglangFault.REPEATED_LAST, SglangFault.NO_DONE, SglangFault.UNASKED_ABORT,
            SglangFault.RETRACTED)  # fmt: skip
"""After these april has every token that the server handed over, without an error."""
KEEPS_ALIVE = (SglangFault.COMMENTS, SglangFault.PINGS, SglangFault.EMPTY_EVENTS)
"""Signs of life without tokens."""


@dataclass(slots=True)
class PlannedFault:
    """``kind`` hits request number ``request`` (from 0, in the order of arrival; None: the next), ``times`` times."""

    kind: SglangFault
    request: int | None = None
    after_tokens: int = 0
    times: int = 1


def spoiled(kind: SglangFault, answer: dict[str, Any], vocab_size: int, *, streamed: bool) -> dict[str, Any]:
    """A copy of an answer with tokens, made wrong."""
    answer = copy.deepcopy(answer)
    meta = answer["meta_info"]
    scored, ids = meta["output_token_logprobs"], answer["output_ids"]
    last = meta["finish_reason"] is not None
    match kind:
        case SglangFault.EXTRA_LOGPROBS:
            scored.insert(0, list(scored[0]))
        case SglangFault.WRONG_COUNT:
            meta["completion_tokens"] += 1
        case SglangFault.NULL_LOGPROB:
            scored[-1][0] = None
        case SglangFault.NAN_LOGPROB:
            scored[-1][0] = float("nan")
        case SglangFault.POSITIVE_LOGPROB:
            scored[-1][0] = 0.5
        case SglangFault.CLAMPED_LOGPROB:
            scored[-1][0] = -3.4028234663852886e38
        case SglangFault.DOUBLED_EVENT if last and not streamed:
            ids.append(ids[-1])
            scored.append(list(scored[-1]))
        case SglangFault.OTHER_PROMPT if "prompt_tokens" in meta:
            meta["prompt_tokens"] -= 1
        case SglangFault.OTHER_IDS:
            scored[-1][1] = (scored[-1][1] + 1) % vocab_size
        case SglangFault.UNKNOWN_TOKEN:
            ids[-1] = scored[-1][1] = vocab_size
        case SglangFault.OTHER_RID:
            meta["id"] = "another"
        case SglangFault.GAP_IN_SPANS if last:
            meta["weight_versions"][0]["start"] = 1
        case SglangFault.FOREIGN_LABEL:
            meta["weight_version"] = "step-7"
            for span in meta.get("weight_versions", []):
                span["version"] = "step-7"
        case SglangFault.UNCOUNTED_LAST if last:
            ids.append(3)
            scored.append([-1.0, 3, None])
        case SglangFault.REPEATED_LAST if last:
            ids.append(ids[-1])
        case SglangFault.SHRINKS if last:
            meta["completion_tokens"] -= 1
        case SglangFault.NO_FINISH if last:
            meta["finish_reason"] = None
    return answer
