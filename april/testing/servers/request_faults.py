"""What goes wrong with one request at a fake server."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RequestFault(StrEnum):
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
    """The answer to an aborted request has no tokens that were not sent before (SGLang before October 2025)."""
    UNASKED_ABORT = "unasked_abort"
    """The server aborts the request itself when it has ``after_tokens`` tokens."""
    TIMED_OUT = "timed_out"
    """The same with status 503: a plain answer is an HTTP error without the tokens."""
    RETRACTED = "retracted"
    """Out of memory: at ``after_tokens`` the request goes back to the queue, and stays there."""
    EXTRA_LOGPROBS = "extra_logprobs"
    WRONG_COUNT = "wrong_count"
    """It counts one token more than came."""
    NULL_LOGPROB = "null_logprob"
    NAN_LOGPROB = "nan_logprob"
    POSITIVE_LOGPROB = "positive_logprob"
    CLAMPED_LOGPROB = "clamped_logprob"
    """As which the server writes minus infinity: -9999 by vLLM, the smallest number of the type by SGLang."""
    OTHER_IDS = "other_ids"
    """Log-probabilities of other tokens than those of the answer (vLLM: only the token route says of which)."""
    UNKNOWN_TOKEN = "unknown_token"  # noqa: S105 - a token id, not a secret
    TRUNCATED = "truncated"
    """The JSON ends in the middle."""
    OTHER_RID = "other_rid"
    """The answer is that of another request."""
    GAP_IN_SPANS = "gap_in_spans"
    FOREIGN_LABEL = "foreign_label"
    """The weights have a name that april did not give them."""
    REPEATED_LAST = "repeated_last"
    """The last answer of an aborted request repeats the last token, and does not count it."""
    UNCOUNTED_LAST = "uncounted_last"
    """The answer to an aborted request has one token more than it counts."""
    SHRINKS = "shrinks"
    """The last event counts fewer tokens than came before."""
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
    SILENCE = "silence"
    """Nothing comes any more; the connection stays."""
    COMMENTS = "comments"
    """From ``after_tokens`` on a stream has comment lines and no token, a plain answer spaces; an abort ends it."""
    PINGS = "pings"
    """The same with events that have a name and no data."""
    EMPTY_EVENTS = "empty_events"
    """The same with events that have no token, and usage alone."""
    OTHER_PROMPT = "other_prompt"
    """It says that the prompt has one token less than were sent."""
    NAN_STOP = "nan_stop"
    """The model gave NaN: the last token is EOS, and it has stopped at a text that says so."""
    NO_DONE = "no_done"
    """The stream ends without its mark; nothing is lost."""
    TRICKLE = "trickle"
    """A stream comes byte by byte, each in a packet of its own; nothing is wrong with it."""
    BUSY = "busy"
    """Status 503."""
    LIMITED = "limited"
    """Status 429 with Retry-After."""
    REFUSED = "refused"
    """Status 400."""
    FAILS = "fails"
    """Status 500; by vLLM the connection is closed."""
    GIANT = "giant"
    """Status 500 with a body of 16 MiB."""
    REDIRECT = "redirect"


_NOT_BY_SGLANG = (RequestFault.ENGINE_DIES, RequestFault.SILENCE, RequestFault.TRICKLE, RequestFault.LIMITED,
                  RequestFault.REFUSED, RequestFault.GIANT)  # fmt: skip
_NOT_BY_VLLM = (RequestFault.TIMED_OUT, RequestFault.RETRACTED, RequestFault.OTHER_RID, RequestFault.UNCOUNTED_LAST,
                RequestFault.SHRINKS, RequestFault.SILENCE, RequestFault.NAN_STOP)  # fmt: skip
SGLANG_FAULTS = tuple(kind for kind in RequestFault if kind not in _NOT_BY_SGLANG)
VLLM_FAULTS = tuple(kind for kind in RequestFault if kind not in _NOT_BY_VLLM)
"""What the fake servers of that kind can do."""
AT_ONCE = (RequestFault.BUSY, RequestFault.LIMITED, RequestFault.REFUSED, RequestFault.FAILS, RequestFault.GIANT,
           RequestFault.REDIRECT)  # fmt: skip
"""The request is answered without being run."""
KEEPS_ALIVE = (RequestFault.COMMENTS, RequestFault.PINGS, RequestFault.EMPTY_EVENTS)
"""Signs of life without tokens."""


@dataclass(slots=True)
class PlannedFault:
    """``kind`` hits request number ``request`` (from 0, in the order of arrival; None: the next), ``times`` times."""

    kind: RequestFault
    request: int | None = None
    after_tokens: int = 0
    times: int = 1
