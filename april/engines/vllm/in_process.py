"""Engine for a vLLM ``AsyncLLM`` object in this process, for trainers that own one (in a Ray actor, for example).

Pass it to the scheduler: ``RolloutScheduler(..., engines=[VllmInProcessEngine(async_llm)])``. vLLM is imported with the
first request, never when april is imported.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from april.concurrency.worker_threads import run_in_thread
from april.core.attachments import NO_EXTRAS, Attachment, Extras, collapsed, wrong_rows
from april.core.engine_limits import Limit, LimitCode, raw_logprobs, tied_embeddings
from april.core.sampling import LogprobKind
from april.core.versions import PolicyVersion
from april.engines.attachments import attachment_bytes
from april.engines.http.loop_relay import LoopRelay, result_from
from april.engines.http.response_reader import OTHER_PROCESSOR
from april.engines.http.token_rows import InvalidRows, Routing, experts_of_array
from april.engines.http.weight_labels import first_weights, foreign_weights
from april.engines.http.wire import empty_chunk, failure_of, float32_array, int32_array
from april.engines.openai.wire import NEVER, structured_outputs_of
from april.engines.protocol import ROUTED_EXPERTS, Capabilities, Chunk, EngineFinish, FirstWeights, Health, Request
from april.engines.vllm.kv_connectors import require_salts_kept_apart
from april.engines.vllm.plugin import BACKENDS
from april.engines.vllm.probe import EXPERTS_SETTING, LOGPROBS_MODES
from april.engines.vllm.transfer import Transfers
from april.errors import AttachmentError, ConfigError, EngineBusy, EngineError, WireError
from april.text.server_text import clean, quoted

T = TypeVar("T")

ABORT_AGAIN_S = 0.05
"""Seconds between aborts during a pause. One abort may miss a request that vLLM does not know yet."""
_UPDATES_END_ALL = Limit(
    LimitCode.UPDATES_END_ALL,
    "A weight update ends all requests of this vLLM object, also those of other users; april continues its own",
)
_TOKENS_AT_END = Limit(
    LimitCode.TOKENS_AT_END,
    "Tokens come only at the end of a request, so if vLLM dies, those of running requests are lost",
    "stream=True limits that loss",
)
_TIED_EMBEDDINGS = tied_embeddings("This AsyncLLM runs on a CPU:")
_RAW_LOGPROBS = raw_logprobs("create the AsyncLLM with logprobs_mode='processed_logprobs'")
_ADAPTER = Limit(
    LimitCode.ADAPTER,
    "Requests use an adapter, and full weights from a directory would replace the model under it",
    "load a new adapter with weight_update(transfer=...), or train merged weights with lora_request=False",
)
_REFUSED = "VLLMClientError"
"""Name of vLLM's error class for bad requests; older versions raise ValueError."""
_BETWEEN = "its last weight update failed, so its weights belong to no version; update them again"
_FINISHES = {finish.value: finish for finish in EngineFinish}


class VllmInProcessEngine(Transfers):
    """Engine for one ``vllm.AsyncLLM`` (v1). april does not shut it down.

    An AsyncLLM belongs to the event loop on which it was made or first used. There are three cases:

    * It was made on a running loop: april's own loop sends calls to that loop, which must not be blocked meanwhile. Use
      the asynchronous scheduler there, or run that loop on a thread of its own.
    * It was made outside any loop and never used: it will belong to april's loop, and end with the scheduler.
    * ``loop`` is given: april sends calls to ``loop``.

    Its workers can receive weights (``weight_update(weights=...)``) if the AsyncLLM was made with
    ``weight_transfer_config={"backend": "april_gloo"}`` or ``"nccl"``.

    Args:
        async_llm: The AsyncLLM object.
        name: Short unique label.
        loop: Event loop of ``async_llm``; None means that april finds the loop itself.
        stream: True to stream all requests, which costs time and limits the loss of tokens if vLLM dies. If False, only
            requests that april may end early, at a stop string for example, are streamed.
        eos_token_ids: Ids that end every response; None means vLLM's own.
        lora_request: vLLM's ``LoRARequest`` of the trained adapter, sent with every request. False means that the model
            itself is trained, although the AsyncLLM was made with ``enable_lora``.

    Raises:
        ConfigError: The object is not an AsyncLLM, returns logits instead of log-probabilities, or was made with
            ``enable_lora`` while ``lora_request`` is None.
    """

    _abort_again_s = ABORT_AGAIN_S

    def __init__(
        self, async_llm: Any, *, name: str = "vllm", loop: asyncio.AbstractEventLoop | None = None,
        stream: bool = False, eos_token_ids: Sequence[int] | None = None, lora_request: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(name, _capabilities(async_llm, stream, eos_token_ids, lora_request))
        self._routing = _routing(async_llm) if _returns_experts(async_llm) else None
        self._lora_request = lora_request
        self._llm = async_llm
        self._loop = loop
        self._stream = stream
        self._by_priority = getattr(async_llm.vllm_config.scheduler_config, "policy", "fcfs") == "priority"
        self._labelled = False

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Run one request. Raises RequestRefused, EngineError, and EngineBusy if vLLM is full or paused by others."""
        async with self._admission.request(request.attempt_id) as admitted:
            version = self._version
            if not admitted:
                yield empty_chunk(version, EngineFinish.ABORT)
                return
            self._check(request)
            deltas = self._stream or request.stream
            prompt = await _prompt_of(request, salt=self._labels.salt(version))
            relay = LoopRelay(self._llm_loop(), lambda: self._outputs(request, prompt, deltas))
            finish, made = None, 0
            try:
                async for output in relay:
                    chunk = self._chunk(request, output, version)
                    finish, made = chunk.finish, made + len(chunk.tokens)
                    if finish is not None and request.extras and made:
                        chunk = replace(chunk, extras=self._rows(request, output.outputs[0], finish, made))
                    yield chunk
            except EngineError:
                raise
            except Exception as error:
                failure = self._failure(error)
                # vLLM 0.33 refuses requests that arrive while it is paused; older versions hold them until an abort
                if self._admission.is_open or not isinstance(failure, EngineBusy):
                    raise failure from error
                finish = EngineFinish.ABORT
                yield empty_chunk(version, finish)
            finally:
                await relay.close()
            if finish is None:
                raise EngineError(f"engine {self._name}: the output ended without a finish reason")

    def _failure(self, error: Exception) -> EngineError:
        """Convert an exception of vLLM to one of april's, by the HTTP status that newer versions of vLLM attach."""
        refused = isinstance(error, ValueError) or any(kind.__name__ == _REFUSED for kind in type(error).__mro__)
        status = getattr(error, "status_code", getattr(error, "http_status", None))
        if not isinstance(status, int):
            status = 400 if refused else 500
        text = f" refuses the request: {clean(error)}" if refused else f": {type(error).__name__}: {clean(error)}"
        return failure_of(status, f"engine {self._name}{text}")

    def _outputs(self, request: Request, prompt: dict[str, Any], deltas: bool) -> AsyncGenerator[Any, None]:
        # imported here, because april must work without vLLM
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        params = SamplingParams(
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop_token_ids=list(sampling.stop_token_ids) or None,
            seed=sampling.seed,
            logit_bias=dict.fromkeys(sampling.banned_ids, NEVER) or None,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if deltas else RequestOutputKind.FINAL_ONLY,
        )
        if sampling.grammar:
            from vllm.sampling_params import StructuredOutputsParams

            params.structured_outputs = StructuredOutputsParams(**structured_outputs_of(*sampling.demanded_form))
        options: dict[str, Any] = {"priority": request.priority} if self._by_priority else {}
        if self._lora_request:
            options["lora_request"] = self._lora_request
        outputs: AsyncGenerator[Any, None] = self._llm.generate(prompt, params, request.attempt_id, **options)
        return outputs

    def _chunk(self, request: Request, output: Any, version: PolicyVersion) -> Chunk:
        completion = output.outputs[0]
        if request.attached:
            self._require_expanded(request, getattr(output, "prompt_token_ids", None))
        tokens, entries = list(completion.token_ids), completion.logprobs
        if entries is None or len(entries) != len(tokens):
            count = "no" if entries is None else len(entries)
            raise WireError(f"engine {self._name}: {len(tokens)} tokens came with {count} log-probabilities")
        try:
            logprobs = [entry[token].logprob for token, entry in zip(tokens, entries, strict=True)]
        except KeyError as error:
            raise WireError(f"engine {self._name}: token {clean(error)} came without its log-probability") from None
        self._check_labels(request, getattr(completion, "weight_versions", None))
        finish = self._finish(completion.finish_reason)
        stopped_at = getattr(completion, "stop_reason", None) if finish is EngineFinish.STOP else None
        return Chunk(
            int32_array(tokens), float32_array(logprobs), version, finish, stopped_at,
            cached_tokens=getattr(output, "num_cached_tokens", None),
        )  # fmt: skip

    def _rows(self, request: Request, completion: Any, finish: EngineFinish, made: int) -> Extras:
        """Return the requested rows of routed experts, out of the rows that vLLM sends for the whole conversation."""
        given = getattr(completion, ROUTED_EXPERTS, None)
        if given is None and finish is EngineFinish.ABORT:
            return NO_EXTRAS
        try:
            rows = {} if given is None else {ROUTED_EXPERTS: experts_of_array(np.asarray(given), self._routing)}
        except InvalidRows as wrong:
            raise WireError(f"engine {self._name}: request {request.attempt_id} came with {wrong}") from None
        wanted = {name: found[request.extras_from :] for name, found in rows.items()}
        if wrong_ones := wrong_rows(wanted, request.extras, request.rows_wanted(made)):
            raise WireError(f"engine {self._name}: request {request.attempt_id} came with {wrong_ones}")
        return wanted

    def _require_expanded(self, request: Request, said: Sequence[int] | None) -> None:
        if said is not None and (
            len(said) != len(request.token_ids) or not np.array_equal(np.asarray(said), request.token_ids)
        ):
            raise WireError(
                f"engine {self._name} reads the prompt of attempt {request.attempt_id} as {len(said)} tokens, but it "
                f"has {len(request.token_ids)}; {OTHER_PROCESSOR}"
            )

    def _finish(self, reason: str | None) -> EngineFinish | None:
        if reason is not None and reason not in _FINISHES:
            raise EngineError(f"engine {self._name} ended the response for the reason {reason!r}")
        return None if reason is None else _FINISHES[reason]

    def _check_labels(self, request: Request, spans: Sequence[Any] | None) -> None:
        """Check that all tokens of the response have the same weight label: april's label, if april has set one."""
        labels = [span.version for span in spans or ()]
        if not self._labelled and labels and first_weights(labels[0], present=False) is FirstWeights.OTHERS:
            raise EngineError(
                f"engine {self._name} has weights that another run of april gave it (with the label "
                f"{quoted(labels[0])}); call weight_update before the first batch"
            )
        expected = self._labels.of(self._version) if self._labelled else labels[0] if labels else ""
        for label in labels:
            if label != expected:
                raise foreign_weights(request.attempt_id, expected, label, too_late=True)

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """Abort these attempts (None means all). vLLM ignores ids that it does not know yet, so aborts are repeated."""
        ids = self._to_abort(attempt_ids)
        if ids:
            await self._call_on_llm_loop(lambda: self._llm.abort(ids))

    async def pause(self) -> None:
        """Admit no new requests, abort all, also those of the AsyncLLM's other users, and wait for their ends."""
        self._admission.close()
        await self._call_on_llm_loop(lambda: self._llm.pause_generation(mode="abort", clear_cache=False))
        await super().pause()

    async def resume(self) -> None:
        """Resume vLLM, and admit requests again."""
        await self._call_on_llm_loop(self._llm.resume_generation)
        await super().resume()

    async def _load_whole(self, version: PolicyVersion, path: str | None) -> None:
        """Load weights from ``path`` if given, drop what was cached under the old weights, and label the new ones."""
        self.require_idle()
        self._why_incomplete = f"engine {self._name}: {_BETWEEN}"
        if path is not None:
            await self.forget_transfers()
            await self._on_workers("reload_weights", {"weights_path": path}, f"could not load {path}")
        if self._capabilities.attachments and hasattr(self._llm, "reset_encoder_cache"):
            # loading weights may empty the encoder cache of vLLM's workers, but never the one of its scheduler
            await self._call_on_llm_loop(self._llm.reset_encoder_cache)
        if await self._call_on_llm_loop(self._llm.reset_prefix_cache) is not True:
            raise EngineError(
                f"engine {self._name} could not reset its prefix cache, which holds keys and values of the old "
                "weights; does it have requests of other clients?"
            )
        if hasattr(self._llm, "update_weight_version"):
            label = self._labels.of(version)
            await self._call_on_llm_loop(lambda: self._llm.update_weight_version(label))
            if hasattr(self._llm, "get_weight_version"):
                shown = await self._call_on_llm_loop(self._llm.get_weight_version)
                if shown != label:
                    what = f"labels its weights {clean(shown, 64)} after april set {label}"
                    raise EngineError(f"engine {self._name} {what}")
            self._labelled = True

    sender_address = "127.0.0.1"

    async def ranks(self) -> int:
        parallel = self._llm.vllm_config.parallel_config
        return int(parallel.world_size) * int(parallel.data_parallel_size)

    def _other_clients_paused(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()  # the pause has already ended all other requests

    async def _transfer(self, call: str, arguments: dict[str, Any] | None = None) -> None:
        method = call.removeprefix("/")
        await self._on_workers(method, arguments or {}, f"failed {method}")

    async def _on_workers(self, method: str, arguments: dict[str, Any], failure: str) -> None:
        """Call a method of all workers. Raises EngineError, with ``failure`` in its text, unless each returns None."""
        results = await self._call_on_llm_loop(lambda: self._llm.collective_rpc(method, None, kwargs=arguments))
        if not results or any(result is not None for result in results):
            raise EngineError(f"engine {self._name} {failure}: its workers returned {clean(results)}")

    async def health(self) -> Health:
        """Return whether vLLM's engine is alive."""
        try:
            await self._call_on_llm_loop(self._llm.check_health)
        except Exception as error:
            return Health(ok=False, detail=f"{type(error).__name__}: {clean(error)}")
        return Health(ok=not self._why_incomplete, detail=self._why_incomplete)

    async def close(self) -> None:
        """Abort april's requests. The AsyncLLM keeps running until its owner shuts it down."""
        if self._closed:
            return
        self._closed = True
        if self._admission.inside:
            await self.abort()

    def _llm_loop(self) -> asyncio.AbstractEventLoop:
        """Return the AsyncLLM's event loop: as given, or the loop of its output handler, or the running loop."""
        loop = self._loop
        if loop is None:
            handler = getattr(self._llm, "output_handler", None)
            loop = asyncio.get_running_loop() if handler is None else handler.get_loop()
        if loop.is_closed():
            raise EngineError(
                f"engine {self._name}: the event loop of its AsyncLLM is closed (perhaps with the scheduler that used "
                "it first); create a new AsyncLLM, or one on a loop of its own"
            )
        if not loop.is_running():
            raise EngineError(
                f"engine {self._name}: the event loop of its AsyncLLM is not running, so it would never answer; keep "
                "it running on a thread of its own"
            )
        return loop

    async def _call_on_llm_loop(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a call of the AsyncLLM on its own loop; any error is raised as EngineError."""
        loop = self._llm_loop()
        try:
            return await result_from(loop, call())
        except (EngineError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise EngineError(f"engine {self._name}: {type(error).__name__}: {clean(error)}") from error


def _capabilities(llm: Any, stream: bool, eos_token_ids: Sequence[int] | None, lora_request: Any) -> Capabilities:
    try:
        config = llm.vllm_config
        model = config.model_config
        mode = str(getattr(model, "logprobs_mode", "raw_logprobs"))
        places = config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size
        vocab_size, max_context = int(model.get_vocab_size()), int(model.max_model_len)
        _ = llm.pause_generation, llm.resume_generation, llm.collective_rpc
    except AttributeError as error:
        raise ConfigError(
            f"VllmInProcessEngine takes an AsyncLLM object of vLLM 0.12 or newer, got {type(llm).__name__} "
            f"({clean(error)})"
        ) from None
    if mode not in LOGPROBS_MODES:
        raise ConfigError(
            f"vLLM was created with logprobs_mode={mode!r}, which returns no log-probabilities; use "
            "processed_logprobs, or raw_logprobs for temperature 1"
        )
    require_salts_kept_apart("the AsyncLLM", config, ())
    if lora_request is None and getattr(config, "lora_config", None) is not None:
        raise ConfigError(
            "vLLM was created with enable_lora, and the model itself answers a request without an adapter; give "
            "VllmInProcessEngine lora_request=LoRARequest(...) of the adapter that is trained, or lora_request=False "
            "to train the model itself"
        )
    tied = bool(getattr(getattr(model, "hf_config", None), "tie_word_embeddings", False))
    reloads = not (tied and getattr(getattr(config, "device_config", None), "device_type", None) == "cpu")
    kind = LOGPROBS_MODES[mode]
    limits = (
        (True, _UPDATES_END_ALL),
        (not stream, _TOKENS_AT_END),
        (kind is LogprobKind.RAW, _RAW_LOGPROBS),
        (not reloads, _TIED_EMBEDDINGS),
        (bool(lora_request), _ADAPTER),
    )
    return Capabilities(
        logprob_kind=kind, vocab_size=vocab_size, max_context=max_context, max_in_flight=places,
        eos_token_ids=_eos_ids(llm) if eos_token_ids is None else tuple(eos_token_ids),
        updates_from_disk=reloads and not lora_request, version_spans=False, streams=stream, own_weights=True,
        attachments=("image",) if getattr(model, "is_multimodal_model", False) else (), bans=True,
        constrains=not getattr(model, "skip_tokenizer_init", False),
        extras=(ROUTED_EXPERTS,) if _returns_experts(llm) else (),
        needs={} if _returns_experts(llm) else {"extras": "create the AsyncLLM with enable_return_routed_experts=True"},
        collective=_backends(llm) if not lora_request else (),
        limits=tuple(limit for amiss, limit in limits if amiss),
    )  # fmt: skip


def _returns_experts(llm: Any) -> bool:
    """Return whether the AsyncLLM returns the experts of tokens; vLLM 0.33 moved this setting to another config."""
    config = llm.vllm_config
    parts = (config.model_config, getattr(config, "aux_output_config", None))
    return any(getattr(part, EXPERTS_SETTING, False) is True for part in parts)


def _routing(llm: Any) -> Routing | None:
    """Return the shape of routed experts from the model configuration; None if the configuration lacks it."""
    model = llm.vllm_config.model_config
    try:
        experts = int(model.get_num_experts())
        return Routing(int(model.get_total_num_hidden_layers()), int(model.get_num_experts_per_tok()), experts)
    except AttributeError:
        return None


async def _prompt_of(request: Request, salt: str) -> dict[str, Any]:
    """Return the prompt in vLLM's form: images are not expanded to their tokens, and vLLM caches each by its digest.

    Only prompts with the same ``salt`` share entries of the prefix cache.
    """
    ids = collapsed(request.token_ids, request.attached).tolist()
    prompt: dict[str, Any] = {"prompt_token_ids": ids, "cache_salt": salt}
    if request.attached:
        attachments = [placed.attachment for placed in request.attached]
        prompt["multi_modal_data"] = {"image": await run_in_thread(_images, request.attempt_id, attachments)}
        prompt["multi_modal_uuids"] = {"image": [attachment.digest for attachment in attachments]}
    return prompt


def _images(attempt_id: str, attachments: Sequence[Attachment]) -> list[Any]:
    """Load images as RGB, like vLLM's server does."""
    # imported here, because text needs no Pillow
    from PIL import Image, UnidentifiedImageError

    images = []
    for attachment in attachments:
        try:
            images.append(Image.open(io.BytesIO(attachment_bytes(attachment))).convert("RGB"))
        except (AttachmentError, UnidentifiedImageError, OSError) as error:
            raise AttachmentError(f"attempt {attempt_id} cannot continue: {clean(error)}") from None
    return images


def _backends(llm: Any) -> tuple[str, ...]:
    """Return the back-ends for sending weights to the workers; empty if the workers may run on other machines."""
    config = llm.vllm_config
    asked = getattr(getattr(config, "weight_transfer_config", None), "backend", None)
    elsewhere = getattr(config.parallel_config, "distributed_executor_backend", None) == "ray"
    return (BACKENDS[asked],) if asked in BACKENDS and not elsewhere else ()


def _eos_ids(llm: Any) -> tuple[int, ...]:
    """Return the ids at which vLLM itself stops: the tokenizer's EOS and those in the model's generation config."""
    ids: set[int] = set()
    renderer = getattr(llm, "renderer", None)
    if renderer is not None and (eos := renderer.get_eos_token_id()) is not None:
        ids.add(int(eos))
    more = llm.vllm_config.model_config.try_get_generation_config().get("eos_token_id")
    if more is not None:
        ids.update(int(i) for i in np.atleast_1d(more))
    return tuple(sorted(ids))
