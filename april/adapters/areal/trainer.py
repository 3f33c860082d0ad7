"""Subclasses of AReaL's PPOTrainer and WorkflowExecutor that get training batches from april."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from areal import workflow_context
from areal.api import ModelResponse
from areal.infra.remote_inf_engine import GroupedRolloutWorkflow
from areal.infra.utils.http import arequest_with_retry
from areal.infra.workflow_executor import WorkflowExecutor, check_trajectory_format
from areal.trainer.rl_trainer import PPOTrainer as ArealPPOTrainer
from areal.utils import perf_tracer, stats_tracker
from areal.utils.data import concat_padded_tensors
from areal.utils.environ import is_single_controller
from areal.utils.recover import RecoverHandler

from april.adapters.areal.rollouts import CURRENT_LLM, ArealPrompts, ArealRollouts, Trajectory
from april.adapters.areal.settings import DECIDED, MAX_CONTEXT, NAME_PATTERN, config_of, refusals
from april.adapters.common.data_loader import KEY, CheckpointedLoader
from april.adapters.common.deliveries import closing_on_error
from april.adapters.common.placed_media import placed_media
from april.adapters.common.refusals import own_settings, refuse
from april.adapters.common.trainer_servers import ServerResult, TrainerServers
from april.concurrency.worker_threads import run_in_thread
from april.config.settings import Config
from april.core.attachments import Placed
from april.core.tape import Int32
from april.core.types import DropReason, FinishReason
from april.engines.http.token_rows import narrow_ids
from april.engines.protocol import ROUTED_EXPERTS
from april.errors import CheckpointError, ConfigError, RolloutError
from april.text.server_text import clean

log = logging.getLogger("april")

STOP_REASONS = ("stop", "tool_calls", "length")
PREFIX = f"april_{os.getenv('RANK', '0')}_"


@dataclass(slots=True)
class WorkflowCall:
    """A workflow's request and the stop reason of its latest response."""

    request: Any
    context: Context
    """Context variables of the workflow; AReaL's code reads them when it sends the request."""
    reason: str = "stop"


class WorkflowEngine:
    """Engine that april gives to workflows: ``agenerate`` goes through april, other calls go to AReaL's engine.

    ``inner`` is AReaL's RemoteInfEngine. ``pauses`` returns how often the weights may have changed so far, and
    ``end_all`` ends every request at every server. ``ends`` are the token ids that end a response.
    """

    def __init__(
        self, inner: Any, pauses: Callable[[], int], end_all: Callable[[], None], ends: Sequence[int],
        extras: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._inner, self._pauses = inner, pauses
        # a single engine, since AReaL itself balances requests over its servers
        self.servers = TrainerServers(
            "areal", self._ask, lambda: run_in_thread(end_all), max_context=MAX_CONTEXT, eos_token_ids=ends,
            attachments=("image",), extras=extras,
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def agenerate(self, req: Any) -> Any:
        """Return the response to a ModelRequest, with the weight version of each token."""
        inner, llm = self._inner, CURRENT_LLM.get()
        if llm is None:
            return await inner.agenerate(req)
        prompt, sampling = list(req.input_ids), req.gconfig
        room = min(sampling.max_tokens - len(prompt), sampling.max_new_tokens)
        if sampling.n_samples != 1:
            raise RolloutError(
                f"a request for {sampling.n_samples} samples: a workflow must ask once per sample, with n_samples=1"
            )
        if room <= 0:
            raise RolloutError(
                f"a prompt of {len(prompt)} tokens leaves no room for a response: max_tokens={sampling.max_tokens}, "
                f"max_new_tokens={sampling.max_new_tokens}"
            )
        if req.vision_msg_vllm:
            raise RolloutError("images in vLLM's chat format cannot be continued by token ids; use SGLang, or text")
        began = time.perf_counter()
        image_id: int | None = getattr(req.processor, "image_token_id", None)
        attached: tuple[Placed, ...] = ()
        if image_id is not None and req.image_data:
            attached = await run_in_thread(placed_media, prompt, {"image": req.image_data}, {"image": image_id})
        # images whose position is unknown are sent to the servers, but april does not track them
        banned = () if image_id is None or (image_id in prompt and not attached) else (int(image_id),)
        asked = self.servers.requests[llm.sample_id] = WorkflowCall(req, copy_context())
        done = await llm.forward(
            prompt,
            {
                "max_tokens": room, "temperature": sampling.temperature,
                "stop_token_ids": tuple(getattr(sampling, "stop_token_ids", None) or ()),
                "banned_ids": banned,
            },
            attached,
        )  # fmt: skip
        latency, experts = time.perf_counter() - began, done.extras.get(ROUTED_EXPERTS)
        return ModelResponse(
            input_tokens=prompt,
            input_images=req.image_data,
            output_tokens=done.tokens.tolist(),
            output_logprobs=done.logprobs.tolist(),
            output_versions=done.versions[:, 1].tolist(),
            stop_reason="length" if done.finish is FinishReason.LENGTH else asked.reason,
            latency=latency,
            ttft=latency,
            tokenizer=req.tokenizer,
            processor=req.processor,
            **({} if experts is None else {"routed_experts": experts.astype(np.int32)}),
        )

    async def _ask(self, asked: WorkflowCall, token_ids: Int32, max_tokens: int) -> ServerResult:
        inner, sampling = self._inner, asked.request.gconfig
        label, pauses = inner.get_version(), self._pauses()
        one = asked.request.copy()
        one.input_ids, one.gconfig = token_ids.tolist(), sampling.new(max_new_tokens=max_tokens)
        if getattr(inner.config, "return_routed_experts", False):
            one.metadata = {**one.metadata, "return_routed_experts": True}
        made = await asyncio.get_running_loop().create_task(self._answer(one, label), context=asked.context)
        if made.stop_reason in STOP_REASONS:
            asked.reason = made.stop_reason
        tokens = np.asarray(made.output_tokens, np.int32)
        logprobs = np.asarray(made.output_logprobs, np.float32)
        experts = getattr(made, "routed_experts", None)
        unused = None
        if pauses != self._pauses() and len(tokens):
            # weights may have changed during the request, so the version of these tokens is unknown
            unused, tokens, logprobs = (len(tokens), DropReason.UNKNOWN_WEIGHTS), tokens[:0], logprobs[:0]
        return ServerResult(
            tokens=tokens, logprobs=logprobs, label=label, unused=unused,
            aborted=made.stop_reason == "abort" or unused is not None,
            # the last token does not show these ends: stop strings, tool calls, and the server's own token limit
            own_end=bool(getattr(sampling, "stop", None)) or made.stop_reason in ("length", "tool_calls"),
            extras={} if experts is None or not len(tokens) else {ROUTED_EXPERTS: narrow_ids(experts, None)},
        )  # fmt: skip

    async def _answer(self, one: Any, label: int) -> Any:
        """Send one HTTP request without retries, since april decides about retries."""
        inner, address = self._inner, self._inner.choose_server()
        http = inner.backend.build_generation_request(one, with_lora=False, version=label)
        try:
            answer = await arequest_with_retry(
                session=await workflow_context.get_aiohttp_session(), addr=address, endpoint=http.endpoint,
                payload=http.payload, method=http.method, max_retries=1, timeout=inner.config.request_timeout,
            )  # fmt: skip
        except RuntimeError as error:
            # keep the cause only: AReaL's text repeats the whole request
            raise RolloutError(f"server {address}: {clean(str(error).rpartition('Last error: ')[2])}") from None
        if not isinstance(answer, dict):
            raise RolloutError(f"server {address} returned a {type(answer).__name__} instead of JSON")
        return inner.backend.parse_generation_response(answer)


class AprilExecutor(WorkflowExecutor):  # type: ignore[misc]
    """Workflow executor whose training batches come from april; ``submit``, ``wait`` and evaluations stay AReaL's.

    ``april`` has april's settings for this rank, and ``ends`` are the token ids that end a response.
    """

    _expected_trajectory_keys: set[str] | None

    def __init__(
        self, config: Any, inference_engine: Any, april: Config, ends: Iterable[int] = (), *, check: bool = False
    ) -> None:
        super().__init__(config, inference_engine)
        self.april, self._ends, self._check = april, tuple(sorted(set(ends))), check
        self.rollouts: ArealRollouts | None = None
        self._pauses = 0
        """Number of pauses so far; weights may change in each."""
        self.saved: Path | None = None
        """File from which the rollouts are restored when they start; None for a fresh run."""

    # ---------------------------------------------------------------- methods that AReaL calls

    def prepare_batch(
        self, dataloader: Any, workflow: Any, should_accept_fn: Callable[[Trajectory], bool] | None = None,
        dynamic_bs: bool = False,
    ) -> list[Trajectory]:  # fmt: skip
        """Return one trajectory per group. The whole run uses loader, workflow and filter of the first call."""
        if dynamic_bs:
            raise ConfigError("dynamic_bs: april's batches always have the configured size; set it to false")
        if self.rollouts is None:
            self.rollouts = self._open(dataloader, workflow, should_accept_fn)
        batch, metrics = self.rollouts.next_batch(self.inference_engine.get_version())
        stats_tracker.get("rollout").scalar(**{f"april/{name}": value for name, value in metrics.items()})
        if self.config.dump_to_file:
            for trajectory in batch:
                asyncio.run(self._dump_trajectory(trajectory, self._task_id_generator.next(), False))
        return batch

    def pause(self) -> None:
        """Pause generation and end april's requests at all servers."""
        super().pause()
        if self.rollouts is not None:
            self.rollouts.pause()
        self._pauses += 1

    def resume(self) -> None:
        """Resume generation with the weights that the servers hold now."""
        if self.rollouts is not None:
            self.rollouts.resume(self.inference_engine.get_version())
        super().resume()

    def destroy(self) -> None:
        """Close april's rollouts and destroy the executor."""
        if self.rollouts is not None:
            self.rollouts.close()
            self.rollouts = None
        super().destroy()

    # ---------------------------------------------------------------- opening the rollouts

    def _open(self, loader: Any, workflow: Any, accepts: Callable[[Trajectory], bool] | None) -> ArealRollouts:
        if isinstance(workflow, GroupedRolloutWorkflow):
            workflow = workflow.workflow  # the single-sample workflow, since april itself runs the samples of a group
        engine = WorkflowEngine(self.inference_engine, lambda: self._pauses, self._abort, self._ends, self.april.extras)

        async def episode(row: Any) -> Trajectory | None:
            task = self._task_id_generator.next()
            perf_tracer.register_task(task)
            perf_tracer.set_task_id(task)
            workflow_context.set(workflow_context.WorkflowContext(is_eval=False, task_id=task))
            status = "failed"
            try:
                made = _tensors(await workflow.arun_episode(engine, row))
                status = "rejected" if made is None else "accepted"
                return made
            finally:
                perf_tracer.trace_session_event("mark_finalized", task_id=task, status=status)

        rollouts = ArealRollouts(
            self.april, engine.servers, self._abort, ArealPrompts(loader), episode, self._join,
            None if accepts is None else self._counted(accepts), check=self._check,
        )  # fmt: skip
        if self.saved is not None:
            with closing_on_error(rollouts.close):
                rollouts.restore(self.saved)
        return rollouts

    def _join(self, trajectories: list[Trajectory]) -> Trajectory:
        joined: Trajectory = concat_padded_tensors(trajectories)
        if self.config.check_trajectory_format:
            check_trajectory_format(joined, expected_keys=self._expected_trajectory_keys, logger=self.logger)
            self._expected_trajectory_keys = self._expected_trajectory_keys or set(joined)
        return joined

    def _counted(self, accepts: Callable[[Trajectory], bool]) -> Callable[[Trajectory], bool]:
        def accept(trajectory: Trajectory) -> bool:
            verdict = bool(accepts(trajectory))
            stats_tracker.get("rollout").scalar(**{"accepted" if verdict else "rejected": 1})
            return verdict

        return accept

    def _abort(self) -> None:
        """End all requests. The servers accept new requests at once; april decides when to send any."""
        self.inference_engine.pause_generation()
        self.inference_engine.continue_generation()


def _tensors(trajectory: Any) -> Trajectory | None:
    """Return a workflow's result as one dict of tensors, also if it holds interactions of AReaL's OpenAI client."""
    if trajectory is None:
        return None
    if not isinstance(trajectory, dict) or not trajectory:
        raise RolloutError(f"a workflow returned {type(trajectory).__name__} instead of a dict of tensors")
    if all(hasattr(part, "to_tensor_dict") for part in trajectory.values()):
        made: Trajectory = concat_padded_tensors([part.to_tensor_dict() for part in trajectory.values()])
        return made
    return trajectory


class PPOTrainer(ArealPPOTrainer):  # type: ignore[misc]
    """AReaL's trainer with april's rollouts, for SPMD mode.

    Args:
        config, train_dataset, valid_dataset: as for AReaL's trainer.
        april: mapping of april's own settings.

    Raises:
        ConfigError: april does not support this configuration. It is raised before anything starts.
    """

    def __init__(
        self, config: Any, train_dataset: Any = None, valid_dataset: Any = None, *,
        april: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if is_single_controller():
            raise ConfigError(
                "AReaL's single-controller mode runs workflows in its own processes, which april's core cannot reach; "
                "start the run in SPMD mode: AREAL_SPMD_MODE=1, python3 -m areal.infra.launcher.local train.py"
            )
        self._april_settings = april or {}
        refuse(refusals(config, own_settings(april, "AReaL", DECIDED, pattern=NAME_PATTERN)))
        self._april: AprilExecutor | None = None
        self._april_files: list[Path] = []
        super().__init__(config, train_dataset=train_dataset, valid_dataset=valid_dataset)

    def _create_dataloader(self, dataset: Any, dataset_config: Any, rank: int, world_size: int) -> Any:
        loader = super()._create_dataloader(dataset, dataset_config, rank, world_size)
        if dataset_config is self.config.train_dataset:
            return CheckpointedLoader(loader, self._with_april, self._load_april)
        return loader

    def _init_rollout(self, rollout_config: Any, is_eval: bool = False, lora_path: str | None = None) -> Any:
        engine = super()._init_rollout(rollout_config, is_eval=is_eval, lora_path=lora_path)
        if is_eval:
            return engine
        inner, ranks = engine._engine, self.actor_alloc.parallel.dp_size
        april = config_of(self.config, self._april_settings, groups=self.train_dataloader.batch_size, ranks=ranks)
        executor = AprilExecutor(
            inner.config, inner, april, self._ends(), check=bool(self._april_settings.get("check", False))
        )
        inner.workflow_executor.destroy()
        executor.initialize(logger=inner.logger, train_data_parallel_size=ranks)
        inner.workflow_executor = self._april = executor
        log.info("april: generation %s, N=%d, %s", april.generation, april.rollout_batch_size, april.refill)
        return engine

    def _ends(self) -> list[int]:
        """Return the token ids that end a response, by the same rule as AReaL's workflows."""
        sampling, tokenizer = self.config.gconfig, self.tokenizer
        if sampling.ignore_eos:
            return list(sampling.stop_token_ids)
        own = (tokenizer.eos_token_id, tokenizer.pad_token_id)
        return [*sampling.stop_token_ids, *(token for token in own if token is not None)]

    # ---------------------------------------------------------------- AReaL's recover checkpoint

    def _folder(self) -> Path:
        recover = self.config.recover
        return Path(RecoverHandler.recover_info_path(recover.experiment_name, recover.trial_name, recover.fileroot))

    def _with_april(self, loader_state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Write april's state beside AReaL's; keep the previous file too, because AReaL's last checkpoint names it."""
        if self._april is None or self._april.rollouts is None:
            return {**loader_state(), KEY: ""}
        folder = self._folder()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{PREFIX}{uuid.uuid4().hex}.msgpack"
        theirs = self._april.rollouts.save(path, loader_state)
        self._april_files.append(path)
        while len(self._april_files) > 2:
            self._april_files.pop(0).unlink(missing_ok=True)
        return {**theirs, KEY: path.name}

    def _load_april(self, name: str | None) -> None:
        if name is None:
            log.warning(
                "AReaL's recover checkpoint was saved without april: unfinished responses are lost, and their prompts "
                "are not used again in this epoch"
            )
        if not name:  # april had no rollouts yet when the checkpoint was saved
            return
        path = self._folder() / name
        if path.parent != self._folder() or not path.is_file():
            raise CheckpointError(f"AReaL's recover checkpoint needs april's state {path}, which does not exist")
        assert self._april is not None
        self._april.saved = path
        for old in self._folder().glob(f"{PREFIX}*"):
            if old != path:
                old.unlink()
        self._april_files.append(path)
