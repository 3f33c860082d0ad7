"""How the right answer of a fake vLLM server is made a wrong one."""

from __future__ import annotations

import copy
from typing import Any

from april.testing.servers.request_faults import RequestFault

HARMLESS = (RequestFault.ABORT_UNSEEN, RequestFault.UNASKED_ABORT, RequestFault.TRICKLE)
"""After these april has every token that the server handed over, without an error."""


def spoiled_vllm(kind: RequestFault, answer: dict[str, Any], vocab_size: int, *, token_route: bool) -> dict[str, Any]:
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
        case RequestFault.EXTRA_LOGPROBS:
            scored.insert(0, copy.deepcopy(scored[0]))
        case RequestFault.NULL_LOGPROB:
            say(None)
        case RequestFault.NAN_LOGPROB:
            say(float("nan"))
        case RequestFault.POSITIVE_LOGPROB:
            say(0.5)
        case RequestFault.CLAMPED_LOGPROB:
            say(-9999.0)
        case RequestFault.DOUBLED_EVENT if answer.get("usage"):
            ids.append(ids[-1])
            scored.append(copy.deepcopy(scored[-1]))
        case RequestFault.OTHER_IDS if token_route:
            scored[-1]["token_id"] = (scored[-1]["token_id"] + 1) % vocab_size
        case RequestFault.UNKNOWN_TOKEN:
            ids[-1] = vocab_size
            if token_route:
                scored[-1]["token_id"] = vocab_size
        case RequestFault.GAP_IN_SPANS if spans:
            spans[0]["start"] = 1
        case RequestFault.FOREIGN_LABEL if spans:
            for span in spans:
                span["version"] = "step-7"
        case RequestFault.REPEATED_LAST if choice["finish_reason"] == "abort":
            ids.append(ids[-1])
            scored.append(copy.deepcopy(scored[-1]))
        case RequestFault.NO_FINISH if last:
            choice["finish_reason"] = None
    if kind is RequestFault.WRONG_COUNT and answer.get("usage"):
        answer["usage"]["completion_tokens"] += 1
    if kind is RequestFault.OTHER_PROMPT and answer.get("usage"):
        answer["usage"]["prompt_tokens"] -= 1
    return answer
