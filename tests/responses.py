"""Responses read without a server: what a reader makes of an answer, and readers of each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from april.core.sampling import SamplingParams
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.http.response_reader import ResponseReader
from april.engines.http.response_stream import GenerateRoute
from april.engines.http.server_engine import Admission
from april.engines.http.weight_labels import WeightLabels
from april.engines.openai.wire import CompletionParser
from april.engines.protocol import AbortMeans, Chunk, Request
from april.engines.sglang.wire import ReplyParser
from april.engines.vllm.wire import TokenParser


def asked(attempt_id: str = "a", prompt: list[int] | None = None) -> Request:
    return Request(attempt_id=attempt_id, token_ids=np.array(prompt or [1], np.int32), sampling=SamplingParams(8))


def vllm_reader(labels: WeightLabels | None = None) -> ResponseReader:
    return ResponseReader(TokenParser(asked()), FIRST_VERSION, labels)


def sglang_reader(
    attempt_id: str = "a", version: PolicyVersion = FIRST_VERSION, *, incremental: bool = True,
    labels: WeightLabels | None = None,
) -> ResponseReader:  # fmt: skip
    return ResponseReader(ReplyParser(asked(attempt_id), incremental=incremental), version, labels)


def openai_reader(prompt: list[int] | None = None) -> ResponseReader:
    return ResponseReader(CompletionParser(asked(prompt=prompt)), FIRST_VERSION)


def route_of(
    client: Any, prepare: Callable[..., Any], means: AbortMeans = AbortMeans.BY_ID, **more: Any
) -> GenerateRoute:
    """A route of a server whose requests and readers ``prepare`` makes."""
    return GenerateRoute(
        client=client, route="/generate", prepare=prepare, abort_means=means, labels=WeightLabels(),
        **({"admission": Admission(), "marks_end": False} | more),
    )  # fmt: skip


def chunks_of(reader: ResponseReader, *payloads: bytes) -> list[Chunk]:
    """Read together; the last chunk has the finish once the server has said it; raises what was wrong."""
    reader.read(list(payloads))
    chunks = reader.take(last=reader.finish is not None)
    if reader.failure is not None:
        raise reader.failure
    return chunks
