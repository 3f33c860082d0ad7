"""Makes an engine from slime's custom generate function: april schedules calls, the function sends the requests.

The function's requests can be aborted only all at once (SGLang's ``abort_all``). slime trains on the sample that the
function returns; april copies the sample's tokens to count them and to record their policy versions.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import logging
import uuid
from collections.abc import AsyncGenerator, Collection, Sequence
from typing import Any

import numpy as np

from april.adapters.slime.framework import Framework
from april.adapters.slime.samples import Groups, Held
from april.core.sampling import LogprobKind
from april.core.types import Prompt, SampleId
from april.core.versions import PolicyVersion
from april.driver.llm import LLM
from april.driver.user_code import check_function
from april.engines.http.http_client import HttpClient, control, is_empty
from april.engines.http.server_engine import ServerEngine
from april.engines.http.wire import empty_chunk
from april.engines.protocol import Capabilities, Chunk, EngineFinish, Health, Request
from april.errors import EngineError, RequestRefused

log = logging.getLogger("april")

MAX_CONTEXT = 1 << 30
"""Context length that is never reached, because the function itself applies slime's limits."""


class FunctionEngine(ServerEngine):
    """Engine that answers each request by one call of ``function`` (see :class:`april.engines.protocol.Engine`).

    ``function`` is a coroutine function ``(args, sample, sampling_params[, evaluation]) -> sample``, like slime's
    ``generate``. The engine stores the latest state of each sample in ``samples``.
    """

    def __init__(
        self, args: Any, framework: Framework, function: Any, groups: Groups, samples: Held, urls: Sequence[str]
    ) -> None:
        if callable(function) and "evaluation" in inspect.signature(function).parameters:
            function = functools.partial(function, evaluation=False)
        check_function("--custom-generate-function-path", function, ("args", "sample", "sampling_params"))
        per_server = getattr(args, "sglang_server_concurrency", None)
        super().__init__("slime", Capabilities(
            logprob_kind=LogprobKind.UNKNOWN, vocab_size=2**31 - 1, max_context=MAX_CONTEXT,
            max_in_flight=per_server * len(urls) if per_server and urls else None,
            version_spans=False, streams=False, honours_seeds=False,
        ))  # fmt: skip
        self._args, self._framework, self._function = args, framework, function
        self._groups, self._samples = groups, samples
        self._fresh: Held = {}
        self._before: Held = {}
        """Samples as they were before their last call, in case april rejects the tokens of that call."""
        self.kept = (samples, self._fresh, self._before)
        self._urls = urls
        self._clients: list[HttpClient] = []
        self._calls: dict[str, asyncio.Task[Any]] = {}
        self._cancelled: set[str] = set()

    async def rollout(self, prompt: Prompt, llm: LLM) -> None:
        """Rollout function for this engine: makes a new sample and one request for it."""
        self._fresh[llm.sample_id] = self._groups.begin(prompt, llm.sample_id)
        await llm.generate()
        self._fresh.pop(llm.sample_id, None)
        self._before.pop(llm.sample_id, None)

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Call the function and yield a single chunk with all tokens that it added."""
        assert request.sample_key is not None
        key = SampleId(*request.sample_key)
        async with self._admission.request(request.attempt_id) as admitted:
            if not admitted:
                yield empty_chunk(self._version, EngineFinish.ABORT)
                return
            known = self._state_with(key, request.response_offset)
            before = known.response_length
            # the function gets a copy, because a call that fails may leave its sample half changed
            call = asyncio.ensure_future(self._framework.on_its_loop(self._call(copy.deepcopy(known), key.index)))
            self._calls[request.attempt_id] = call
            try:
                sample = await call
            except asyncio.CancelledError:
                if request.attempt_id not in self._cancelled:
                    raise
                yield empty_chunk(self._version, EngineFinish.ABORT)
                return
            finally:
                del self._calls[request.attempt_id]
                self._cancelled.discard(request.attempt_id)
            self._before[key], self._samples[key] = known, sample
            yield self._chunk(sample, before)

    def _state_with(self, key: SampleId, offset: int) -> Any:
        """Return a sample with ``offset`` response tokens: its latest state, or the state before its last call."""
        for known in (self._samples.get(key), self._before.get(key)):
            if known is not None and known.response_length == offset:
                return known
        if offset:
            raise EngineError(
                f"the custom generate function has no state of sample {key} with the {offset} tokens that april has"
            )
        return copy.deepcopy(self._fresh[key])

    async def _call(self, sample: Any, index: int) -> Any:
        args = self._args
        params: dict[str, Any] = {
            "temperature": args.rollout_temperature, "top_p": args.rollout_top_p, "top_k": args.rollout_top_k,
            "max_new_tokens": args.rollout_max_response_len, "stop": args.rollout_stop,
            "stop_token_ids": args.rollout_stop_token_ids, "skip_special_tokens": args.rollout_skip_special_tokens,
            "no_stop_trim": True, "spaces_between_special_tokens": False,
        }  # fmt: skip
        if args.rollout_top_p != 1:
            params["custom_params"] = {"return_top_p_token_ids": True}
        if getattr(args, "sglang_enable_deterministic_inference", False):
            params["sampling_seed"] = args.rollout_seed + index
        for name in ("session_id", "routing_key"):
            if getattr(sample, name, "") is None:
                setattr(sample, name, str(uuid.uuid4()))
        sample = await self._function(args, sample, params)
        if isinstance(sample, list):
            raise RequestRefused(
                "the custom generate function returned several samples for one, but april has seen none of their "
                "requests and cannot count them; write it as a rollout function, april.rollout of --custom-config-path"
            )
        return sample

    def _chunk(self, sample: Any, before: int) -> Chunk:
        length = sample.response_length
        tokens = np.array(sample.tokens[len(sample.tokens) - length :][before:], np.int32)
        said = sample.rollout_log_probs
        logprobs = np.zeros(len(tokens), np.float32) if said is None else np.array(said[before:], np.float32)
        # truncation counts as STOP, because the length limit belongs to the function and not to april
        finish = EngineFinish.ABORT if sample.status is sample.Status.ABORTED else EngineFinish.STOP
        return Chunk(tokens, logprobs, self._version, finish)

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """End attempts (calls of the custom generate function); None means all.

        If every running attempt is to end, all requests at the servers are aborted, and the function gets their tokens.
        If only some are to end, their calls are cancelled and their tokens are lost.
        """
        asked = set(self._to_abort(attempt_ids)) & set(self._calls)
        if not asked:
            return
        if asked == set(self._calls):
            self._clients = self._clients or [HttpClient(url, name=self.name) for url in self._urls]
            await asyncio.gather(
                *(control(c, "/abort_request", is_empty, body={"abort_all": True}) for c in self._clients)
            )
        else:
            self._end(asked)

    def _end(self, attempt_ids: Collection[str]) -> None:
        for attempt in attempt_ids:
            self._cancelled.add(attempt)
            self._calls[attempt].cancel()

    async def pause(self) -> None:
        """End all calls. A call that does not end, for example in a tool, is cancelled and loses its tokens."""
        try:
            await super().pause()
        except EngineError as error:
            log.warning("%s; april ends the calls of the custom generate function, and their tokens are lost", error)
            self._end(list(self._calls))
            await self._admission.until_idle()

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        """Record the version of weights that slime has already updated. Raises EngineError if ``path`` is given."""
        if path is not None:
            raise EngineError("slime updates the weights of its servers itself")
        self.require_idle()
        self._labels.present = version

    async def health(self) -> Health:
        """Report the servers as healthy, because slime itself monitors them."""
        return Health(ok=True)

    async def close(self) -> None:
        """Cancel the calls in flight."""
        for call in self._calls.values():
            call.cancel()
        for client in self._clients:
            await client.close()
