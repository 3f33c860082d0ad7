"""The two clients of ``client_cost``: april whole, and plain asyncio with aiohttp and msgspec, making the same calls.

The plain one has one task per request, as a user without a library would write it: april's bodies, april's typed
structs, arrays kept. It checks nothing and knows no version, no abort and no books. Both clients check, outside of what
is measured, that every array they kept is what the server sent.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np

import april
from april.config.engines import AprilEngineConfig, SglangEngineConfig, VllmEngineConfig
from april.core.sampling import SamplingParams, attempt_seed
from april.engines.protocol import Float32, Int32, Request
from april.engines.sglang import wire as sglang_wire
from april.engines.vllm import wire as vllm_wire
from benchmarks.canned_replies import (
    JSON_HEADERS,
    MODEL,
    TOKENS_PER_EVENT,
    VLLM,
    VOCAB_SIZE,
    answer_logprobs,
    answer_tokens,
    make_prompts,
)

SALT = "v0.0-000000"
"""The label of the first weights: as long as april's."""
Kept = list[tuple[Int32, Float32]]


class Round(msgspec.Struct, frozen=True):
    """One round: every request sent once. CPU of the whole process, all threads, in seconds."""

    cpu_s: float
    relay_s: float = 0.0
    """CPU of the process between client and server, if there is one."""


class ArmResult(msgspec.Struct, frozen=True):
    """One client process: its first round opens the connections, the others use them again."""

    arm: str
    requests: int
    rounds: list[Round]
    tokens_kept: int
    """Over all rounds, each token checked against what the server sends."""

    @property
    def pooled_us(self) -> list[float]:
        """CPU per request of each later round, microseconds."""
        return [one.cpu_s / self.requests * 1e6 for one in self.rounds[1:]]

    @property
    def relay_us(self) -> list[float]:
        """The same of the process between client and server."""
        return [one.relay_s / self.requests * 1e6 for one in self.rounds[1:]]


@contextmanager
def measured(rounds: list[Round], relay: int | None = None) -> Iterator[None]:
    """Append the cost of the block to ``rounds``; ``relay``: the process between client and server."""
    cpu, other = time.process_time(), cpu_of(relay)
    yield
    rounds.append(Round(time.process_time() - cpu, cpu_of(relay) - other))


def cpu_of(process: int | None) -> float:
    """CPU seconds of another process of this machine (Linux); 0 for none."""
    return 0.0 if process is None else time.clock_gettime((~process << 3) | 2)  # as clock_getcpuclockid(3) makes it


class Case(msgspec.Struct, frozen=True):
    """What a client process does: ``rounds`` times ``in_flight`` requests at once."""

    kind: str
    stream: bool
    in_flight: int
    response_tokens: int
    prompt_len: int
    rounds: int
    samples_per_prompt: int

    @property
    def route(self) -> str:
        """Where requests go."""
        return vllm_wire.TOKEN_ROUTE if self.kind == VLLM else "/generate"

    def prompts(self) -> list[Int32]:
        """One per request, each [prompt_len] int32."""
        return make_prompts(self.in_flight, self.prompt_len, self.samples_per_prompt)

    def body(self, request: Request) -> bytes:
        """What april sends."""
        if self.kind == VLLM:
            return vllm_wire.request_body(MODEL, request, stream=self.stream, priority=False, salt=SALT)
        interval = TOKENS_PER_EVENT[self.kind] if self.stream else None
        return sglang_wire.request_body(request, stream=self.stream, stream_interval=interval, seed=None, salt=SALT)


class _Pace(asyncio.Protocol):
    """Lets the server make its next step once this loop has found the events of the one before."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(b"GET /pace HTTP/1.1\r\n\r\n")

    def data_received(self, data: bytes) -> None:
        self._transport.write(b"n")


async def keep_pace(url: str) -> asyncio.BaseTransport:
    """Join the server's lock-step from the running loop."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    transport, _ = await asyncio.get_running_loop().create_connection(_Pace, address.hostname, address.port)
    return transport


# ---------------------------------------------------------------- plain


def run_bare(url: str, case: Case) -> ArmResult:
    """Raises RuntimeError when an array differs from what was sent."""
    return asyncio.run(_run_bare(url, case))


async def _run_bare(url: str, case: Case) -> ArmResult:
    prompts = case.prompts()
    costs: list[Round] = []
    total = 0
    pace = await keep_pace(url)
    async with open_session() as session:
        for number in range(case.rounds):
            gc.collect()
            with measured(costs):
                calls = (bare_call(session, url, case, number, i, prompt) for i, prompt in enumerate(prompts))
                kept = await asyncio.gather(*calls)
            total += check_kept(prompts, kept, case.response_tokens)
            del kept
    pace.close()
    return ArmResult("bare", case.in_flight, costs, total)


def open_session() -> aiohttp.ClientSession:
    """With the settings of april's."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
        headers={"Accept-Encoding": "identity"},
        trust_env=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        read_bufsize=1 << 18,
    )


async def bare_call(
    session: aiohttp.ClientSession, url: str, case: Case, number: int, index: int, prompt: Int32
) -> tuple[Int32, Float32]:
    """One request; tokens int32 [T] and log-probabilities float32 [T] of its answer."""
    sampling = SamplingParams(case.response_tokens, seed=attempt_seed(number, index, 0, 0))
    body = case.body(Request(attempt_id=attempt_id(number, index), token_ids=prompt, sampling=sampling))
    read = _read_vllm if case.kind == VLLM else _read_sglang
    tokens: list[int] = []
    logprobs: list[float] = []
    async with session.post(url + case.route, data=body, headers=JSON_HEADERS, allow_redirects=False) as response:
        if response.status != 200:
            raise RuntimeError(f"request {index} was answered {response.status}: {await response.read()!r}")
        if not case.stream:
            read(await response.read(), tokens, logprobs)
        else:
            rest = b""
            async for piece in response.content.iter_any():
                *events, rest = (rest + piece).split(b"\n\n")
                for event in events:
                    if event != b"data: [DONE]":
                        read(event[6:], tokens, logprobs)
    return np.array(tokens, dtype=np.int32), np.array(logprobs, dtype=np.float32)


def attempt_id(number: int, index: int) -> str:
    """As long as april's."""
    return f"{number:016x}{index:016x}"


def _read_vllm(payload: bytes, tokens: list[int], logprobs: list[float]) -> None:
    for choice in vllm_wire.TokenParser.decoder.decode(payload).choices or ():
        tokens += choice.token_ids or ()
        if choice.logprobs is not None:
            logprobs += [scored.logprob for scored in choice.logprobs.content or ()]


def _read_sglang(payload: bytes, tokens: list[int], logprobs: list[float]) -> None:
    reply = sglang_wire.ReplyParser.decoder.decode(payload)
    tokens += reply.output_ids
    if reply.meta_info is not None:
        logprobs += [scored.logprob for scored in reply.meta_info.output_token_logprobs]


# ---------------------------------------------------------------- april


class Relay(msgspec.Struct, frozen=True):
    """A process of april's before the server: its address, its number, and how often it hands tokens over."""

    url: str
    pid: int
    interval_s: float


def run_april(url: str, case: Case, relay: Relay | None = None) -> ArmResult:
    """``RolloutScheduler`` with the configured engine; one ``next_batch`` per round. Raises as :func:`run_bare`."""
    groups = case.in_flight // case.samples_per_prompt
    config = april.Config(
        rollout_batch_size=groups,
        n_samples_per_prompt=case.samples_per_prompt,
        max_response_len=case.response_tokens,
        engine=engine_config(url, case)
        if relay is None
        else AprilEngineConfig(urls=(relay.url,), interval_s=relay.interval_s),
    )
    costs: list[Round] = []
    total = 0
    with april.RolloutScheduler(config, prompts=prompts_of(case, case.rounds), reward=None) as scheduler:
        # it must answer on the loop that reads the streams
        pace = scheduler._thread.run(partial(keep_pace, url)) if relay is None else None
        for number in range(case.rounds):
            if number:
                scheduler.weight_update(transfer=lambda: None)  # commits the batch before; not measured
            gc.collect()
            with measured(costs, None if relay is None else relay.pid):
                batch = scheduler.next_batch()
            kept: Kept = [(sample.tokens, sample.logprobs) for sample in batch.samples]
            total += check_kept([sample.prompt.token_ids for sample in batch.samples], kept, case.response_tokens)
            del batch, kept
        if pace is not None:
            scheduler._thread.call(pace.close)
    return ArmResult("april" if relay is None else "relay", case.in_flight, costs, total)


def engine_config(url: str, case: Case) -> VllmEngineConfig | SglangEngineConfig:
    """vLLM streams where tokens may not be lost; SGLang where its server does it well."""
    common: dict[str, Any] = {"urls": (url,), "vocab_size": VOCAB_SIZE, "eos_token_ids": ()}
    common["first_weights"] = "present"  # those of the turn before
    common["logprobs"] = "processed"  # a canned server cannot be asked for their kind
    if case.kind == VLLM:
        return VllmEngineConfig(**common, max_token_loss=1 if case.stream else None)
    return SglangEngineConfig(**common)


def prompts_of(case: Case, rounds: int) -> Iterator[april.Prompt]:
    """The groups of all rounds."""
    arrays = case.prompts()[:: case.samples_per_prompt]
    for _ in range(rounds):
        for token_ids in arrays:
            yield april.Prompt(token_ids=token_ids)


def check_kept(prompts: list[Int32], kept: Kept, response_tokens: int) -> int:
    """Tokens kept; raises RuntimeError when one request's arrays are not what the server sends for its prompt."""
    if len(kept) != len(prompts):
        raise RuntimeError(f"{len(kept)} answers are kept for {len(prompts)} requests")
    for index, (prompt, (tokens, logprobs)) in enumerate(zip(prompts, kept, strict=True)):
        first = int(prompt[0])
        if tokens.dtype != np.int32 or logprobs.dtype != np.float32:
            raise RuntimeError(f"request {index}: kept as {tokens.dtype} and {logprobs.dtype}, not int32 and float32")
        if not np.array_equal(tokens, answer_tokens(first, response_tokens)):
            raise RuntimeError(f"request {index}: the tokens kept are not those sent")
        if not np.array_equal(logprobs, answer_logprobs(first, response_tokens)):
            raise RuntimeError(f"request {index}: the log-probabilities kept are not those sent")
    return sum(len(tokens) for tokens, _ in kept)
