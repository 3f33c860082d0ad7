"""How the right answer of a fake SGLang server is made a wrong one."""

from __future__ import annotations

import copy
from typing import Any

from april.testing.servers.request_faults import RequestFault


def spoiled(kind: RequestFault, answer: dict[str, Any], vocab_size: int, *, streamed: bool) -> dict[str, Any]:
    """A copy of an answer with tokens, made wrong."""
    answer = copy.deepcopy(answer)
    meta = answer["meta_info"]
    scored, ids = meta["output_token_logprobs"], answer["output_ids"]
    last = meta["finish_reason"] is not None
    match kind:
        case RequestFault.EXTRA_LOGPROBS:
            scored.insert(0, list(scored[0]))
        case RequestFault.WRONG_COUNT:
            meta["completion_tokens"] += 1
        case RequestFault.NULL_LOGPROB:
            scored[-1][0] = None
        case RequestFault.NAN_LOGPROB:
            scored[-1][0] = float("nan")
        case RequestFault.POSITIVE_LOGPROB:
            scored[-1][0] = 0.5
        case RequestFault.CLAMPED_LOGPROB:
            scored[-1][0] = -3.4028234663852886e38
        case RequestFault.DOUBLED_EVENT if last and not streamed:
            ids.append(ids[-1])
            scored.append(list(scored[-1]))
        case RequestFault.OTHER_PROMPT if "prompt_tokens" in meta:
            meta["prompt_tokens"] -= 1
        case RequestFault.OTHER_IDS:
            scored[-1][1] = (scored[-1][1] + 1) % vocab_size
        case RequestFault.UNKNOWN_TOKEN:
            ids[-1] = scored[-1][1] = vocab_size
        case RequestFault.OTHER_RID:
            meta["id"] = "another"
        case RequestFault.GAP_IN_SPANS if last:
            meta["weight_versions"][0]["start"] = 1
        case RequestFault.FOREIGN_LABEL:
            meta["weight_version"] = "step-7"
            for span in meta.get("weight_versions", []):
                span["version"] = "step-7"
        case RequestFault.UNCOUNTED_LAST if last:
            ids.append(3)
            scored.append([-1.0, 3, None])
        case RequestFault.REPEATED_LAST if last:
            ids.append(ids[-1])
        case RequestFault.SHRINKS if last:
            meta["completion_tokens"] -= 1
        case RequestFault.NO_FINISH if last:
            meta["finish_reason"] = None
    return answer
