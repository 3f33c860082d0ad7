"""What vLLM's ``/inference/v1/generate`` and SGLang's ``/generate`` say, byte by byte, with canned tokens.

The shapes are those of vLLM 0.32.0 and SGLang 0.5.20, as their servers sent them. Invariant: the tokens are
a function of the prompt's first token and of the number asked for, so that every client can check what it keeps.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np

from april.engines.protocol import Float32, Int32

VOCAB_SIZE = 151_936
LONGEST_ANSWER = 4_096
DISTINCT_ANSWERS = 64
"""Prompts whose first tokens are equal modulo this number get the same answer."""
JSON_HEADERS = {"Content-Type": "application/json"}
MODEL = "canned"
VLLM, SGLANG = "vllm", "sglang"
TOKENS_PER_EVENT = {VLLM: 1, SGLANG: 16}
"""vLLM streams every token; SGLang as its client asks, and april asks for 16."""
_SLOT = "<the id of the request>"
_USAGE_DETAILS = {"prompt_tokens_details": None, "completion_tokens_details": None}


def whole_reply(kind: str, request_id: str, prompt: list[int], count: int, label: str, finish: str) -> bytes:
    """The body of an answer without streaming; ``finish`` is length or abort."""
    return _fill(_whole(kind, answer_index(prompt[0]), len(prompt), count, label, finish), request_id)


def stream_events(kind: str, request_id: str, prompt: list[int], count: int, label: str) -> list[bytes]:
    """The events of a streamed answer, each as it leaves the server, the mark at the end included."""
    return [_fill(pieces, request_id) for pieces in _events(kind, answer_index(prompt[0]), len(prompt), count, label)]


def _fill(pieces: tuple[bytes, bytes], request_id: str) -> bytes:
    before, after = pieces
    return before + request_id.encode() + after if after else before


def _encode(body: dict[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"))


def _split(text: str) -> tuple[bytes, bytes]:
    before, _, after = text.partition(_SLOT)
    return before.encode(), after.encode()


@cache
def _whole(kind: str, index: int, prompt: int, count: int, label: str, finish: str) -> tuple[bytes, bytes]:
    ids, logprobs = answer_tokens(index, count).tolist(), answer_logprobs(index, count).tolist()
    if kind == SGLANG:
        return _split(_encode(_sglang(ids, logprobs, prompt, count, label, finish)))
    body = {
        "request_id": f"generate-tokens-{_SLOT}",
        "model": MODEL,
        "created": 1795256802,
        "usage": {**_usage(prompt, count), **_USAGE_DETAILS},
        "prompt_logprobs": None,
        "prompt_token_id_logprobs": None,
        "prompt_token_ids": None,
        "mm_placeholders": None,
        "metrics": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "output_mode": "tokens",
        "choices": [_vllm_choice(ids, logprobs, count, label, finish)],
    }
    return _split(_encode(body))


@cache
def _events(kind: str, index: int, prompt: int, count: int, label: str) -> list[tuple[bytes, bytes]]:
    ids, logprobs = answer_tokens(index, count).tolist(), answer_logprobs(index, count).tolist()
    size = TOKENS_PER_EVENT[kind]
    events = []
    for start in range(0, count, size):
        end = min(start + size, count)
        finish = "length" if end == count else None
        if kind == SGLANG:
            body = _sglang(ids[start:end], logprobs[start:end], prompt, end, label, finish)
        else:
            body = _vllm_event([_vllm_choice(ids[start:end], logprobs[start:end], count, label, finish)], None)
        events.append(_split(f"data: {_encode(body)}\n\n"))
    if kind == VLLM:
        events.append(_split(f"data: {_encode(_vllm_event([], _usage(prompt, count)))}\n\n"))
    events.append((b"data: [DONE]\n\n", b""))
    return events


def _usage(prompt: int, count: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + count, "completion_tokens": count}


def _vllm_event(choices: list[Any], usage: dict[str, int] | None) -> dict[str, Any]:
    return {"request_id": f"generate-tokens-{_SLOT}", "usage": usage, "output_mode": "tokens", "choices": choices}


def _vllm_choice(
    ids: list[int], logprobs: list[float], total: int, label: str, finish: str | None
) -> dict[str, Any]:
    content = []
    for token, logprob in zip(ids, logprobs, strict=True):
        scored = {"token_id": token, "logprob": logprob, "rank": 1}
        content.append({**scored, "top_logprobs": [scored]})
    return {
        "index": 0,
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": ids,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": label, "start": 0, "end": total}] if finish and total else None,
        "logprobs": {"content": content},
    }


def _sglang(
    ids: list[int], logprobs: list[float], prompt: int, total: int, label: str, finish: str | None
) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": _SLOT,
        "finish_reason": None,
        "prompt_tokens": prompt,
        "weight_version": label,
        "num_retractions": 0,
        "storage_prefetch_wait": 0.0,
        "storage_staging_wait": 0.0,
        "forward_entry_time": 1795256802.064544,
        "prefill_finished_time": 1795256802.0831141,
        "queue_time": 0.0003626400002758601,
        "input_token_logprobs": [],
        "output_token_logprobs": [[p, t, None] for p, t in zip(logprobs, ids, strict=True)],
        "output_token_logprobs_length": total,
        "reasoning_tokens": 0,
        "completion_tokens": total,
        "cached_tokens": 0,
        "cached_tokens_details": {"device": 0, "host": 0},
        "dp_rank": None,
    }
    if finish is not None:
        reason = {"type": "length", "length": total} if finish == "length" else {"type": "abort", "message": "Aborted"}
        meta["finish_reason"] = reason
        meta["weight_versions"] = [{"version": label, "start": 0, "end": total}] if total else []
        meta["response_sent_to_client_ts"] = 1795256802.0878954
    return {"text": "some text " * len(ids), "output_ids": ids, "meta_info": meta}


def answer_index(first_token: int) -> int:
    """Which of the distinct answers a prompt gets."""
    return first_token % DISTINCT_ANSWERS


@cache
def _stock(index: int) -> tuple[Int32, Float32]:
    rng = np.random.default_rng(index)
    tokens = rng.integers(1, VOCAB_SIZE, size=LONGEST_ANSWER, dtype=np.int32)
    # written as the shortest decimal of the float64, as an engine's JSON library does: 17 to 20 characters
    logprobs = -rng.gamma(0.3, 1.0, size=LONGEST_ANSWER).astype(np.float32)
    tokens.setflags(write=False)
    logprobs.setflags(write=False)
    return tokens, logprobs


def answer_tokens(first_token: int, count: int) -> Int32:
    """The tokens [count] int32 which the server sends; raises ValueError above ``LONGEST_ANSWER``."""
    _check_count(count)
    return _stock(answer_index(first_token))[0][:count]


def answer_logprobs(first_token: int, count: int) -> Float32:
    """Their log-probabilities [count] float32, nats, all <= 0."""
    _check_count(count)
    return _stock(answer_index(first_token))[1][:count]


def _check_count(count: int) -> None:
    if not 0 <= count <= LONGEST_ANSWER:
        raise ValueError(f"an answer has 0 to {LONGEST_ANSWER} tokens, not {count}; ask for fewer tokens")


def make_prompts(count: int, prompt_len: int, samples_per_prompt: int) -> list[Int32]:
    """``count`` requests' prompts, each [prompt_len] int32; ``samples_per_prompt`` neighbours share one array."""
    rng = np.random.default_rng(count)
    distinct = -(-count // samples_per_prompt)
    table = rng.integers(1, VOCAB_SIZE, size=(distinct, prompt_len), dtype=np.int32)
    return [table[i // samples_per_prompt] for i in range(count)]
