"""The wire format of the fake generate server, and what its clients share: bodies, expected answers, session.

Invariant: the answer to a prompt is a function of its first token and of the number of tokens asked for, so
that every client can check each array it keeps against :func:`answer_tokens` and :func:`answer_logprobs`.
"""

from __future__ import annotations

from functools import cache

import aiohttp
import msgspec
import numpy as np

from april.core.sampling import SamplingParams
from april.engines.protocol import Float32, Int32

VOCAB_SIZE = 151_936
LONGEST_ANSWER = 4_096
DISTINCT_ANSWERS = 64
"""Prompts whose first tokens are equal modulo this number get the same answer."""

JSON_HEADERS = {"Content-Type": "application/json"}


class WireSampling(msgspec.Struct, frozen=True):
    """Sampling part of a request body."""

    max_new_tokens: int
    temperature: float = 1.0
    seed: int | None = None


class GenerateBody(msgspec.Struct, frozen=True):
    """Body of POST /generate."""

    rid: str
    input_ids: list[int]
    sampling_params: WireSampling


class FinishReason(msgspec.Struct, frozen=True):
    """Why an answer ended: stop, length or abort."""

    type: str


class AnswerMeta(msgspec.Struct, frozen=True):
    """Which of the distinct answers it is, and its length in tokens."""

    answer: int
    completion_tokens: int


class GenerateReply(msgspec.Struct, frozen=True):
    """Answer to POST /generate; msgspec rejects null and NaN log-probabilities."""

    output_ids: list[int]
    output_logprobs: list[float]
    finish_reason: FinishReason
    meta: AnswerMeta


class AbortBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """Body of POST /abort_request: one id, or all."""

    rid: str = ""
    abort_all: bool = False


class ServerStats(msgspec.Struct, frozen=True):
    """Answer to GET /stats; every count but ``in_flight`` is since the start of the server."""

    in_flight: int
    peak_in_flight: int
    requests: int
    answers: int
    aborts: int
    releases: int
    tokens: int


_encoder = msgspec.json.Encoder()
_reply_decoder = msgspec.json.Decoder(GenerateReply)


def encode_body(body: GenerateBody | AbortBody | GenerateReply | ServerStats) -> bytes:
    """JSON bytes of a body."""
    return _encoder.encode(body)


def encode_generate(rid: str, token_ids: Int32, sampling: SamplingParams) -> bytes:
    """Request body for ``token_ids`` [T] int32."""
    wire = WireSampling(sampling.max_tokens, sampling.temperature, sampling.seed)
    return _encoder.encode(GenerateBody(rid, token_ids.tolist(), wire))


def decode_reply(raw: bytes) -> GenerateReply:
    """Typed reply; raises msgspec.MsgspecError (a ValueError) for anything else."""
    return _reply_decoder.decode(raw)


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


def make_prompts(
    count: int, prompt_len: int, samples_per_prompt: int = 1, vocab_size: int = VOCAB_SIZE
) -> list[Int32]:
    """``count`` requests' prompts, each [prompt_len] int32; ``samples_per_prompt`` neighbours share one array."""
    rng = np.random.default_rng(count)
    distinct = -(-count // samples_per_prompt)
    table = rng.integers(1, vocab_size, size=(distinct, prompt_len), dtype=np.int32)
    return [table[i // samples_per_prompt] for i in range(count)]


def open_session(url: str) -> aiohttp.ClientSession:
    """The session of every arm: no limit of connections, no time limit (a request waits for all others), and no proxy,
    cookie or compression that could make one arm differ from another.
    """
    return aiohttp.ClientSession(
        base_url=url,
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=600.0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None, sock_read=None),
        headers={"Accept-Encoding": "identity"},
        auto_decompress=False,
        trust_env=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )
