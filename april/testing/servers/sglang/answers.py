"""How a fake SGLang server puts its answers together, quirks included."""

from __future__ import annotations

from typing import Any

from april.testing.servers.sglang.runs import FakeSglangRun


def answer(run: FakeSglangRun, *, label: str, incremental: bool, spans: bool) -> dict[str, Any]:
    """The next event of a stream, or the answer at the end: what has left the scheduler and not the server."""
    total = run.flushed
    start = run.sent if run.stream and incremental else 0
    meta: dict[str, Any] = {
        "id": run.name,
        "finish_reason": run.finish,
        "weight_version": label,
        "output_token_logprobs": scored(run, start, total),
        "output_token_logprobs_length": total,
        "completion_tokens": total,
    }
    ids = run.ids[start:total]
    if run.finish is not None and run.queue_abort:
        # the tokenizer answers: the last token once more, and all log-probabilities
        if run.stream and incremental and total:
            meta["output_token_logprobs"] += scored(run, 0, total)
            ids = [*ids, run.ids[total - 1]]
    else:
        meta |= {"prompt_tokens": len(run.prompt), "cached_tokens": 0, "num_retractions": 0, "dp_rank": None}
    if run.finish is not None and spans and total:
        meta["weight_versions"] = [
            {"version": name, "start": first, "end": min(end, total)} for name, first, end in run.spans if first < total
        ]
    return {"text": "", "output_ids": ids, "meta_info": meta}


def scored(run: FakeSglangRun, start: int, end: int) -> list[list[Any]]:
    return [[logprob, token, None] for logprob, token in zip(run.logprobs[start:end], run.ids[start:end], strict=True)]
