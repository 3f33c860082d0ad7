"""AReaL's PPOTrainer and its executor of workflows with april's core behind training batches; the rest is AReaL's."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
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

from april.adapters.areal.rollouts import SERVERS, Prompts, Rollouts, Trajectory
from april.adapters.areal.settings import MAX_CONTEXT, config_of, objections
from april.beside import in_thread
from april.carrying_loader import KEY, CarryingLoader
from april.config.settings import Config
from april.core.attachments import Placed
from april.core.settings import EngineLimits
from april.core.tape import Int32
from april.core.types import DropReason
from april.engines.http.token_rows import narrowed
from april.engines.protocol import ROUTED_EXPERTS
from april.errors import CheckpointError, ConfigError, RolloutError
from april.processes.coordinator import calls
from april.processes.coordinator.media import placed_media
from april.processes.coordinator.messages import Result
from april.server_text import clean

log = logging.getLogger("april")

STOP_REASONS = ("stop", "tool_calls", "length")


class Engine:
    """Everything but ``agenerate`` is AReaL's.

    Args:
        inner: AReaL's RemoteInfEngine.
        pauses: how often weights may have changed so far.
    """

    def __init__(self, inner: Any, pauses: Callable[[], int]) -> None:
        self._inner, self._pauses = inner, pauses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def agenerate(self, req: Any) -> Any:
        """The response to a ModelRequest, with the version of the weights that wrote each token."""
        inner, session = self._inner, calls.CURRENT.get()
        if session is None:
            return await inner.agenerate(req)
        prompt, sampling = list(req.input_ids), req.gconfig
        room = min(sampling.max_tokens - len(prompt), sampling.max_new_tokens)
        if sampling.n_samples != 1:
            raise RolloutError(f"a request for {sampling.n_samples} samples: ask once per sample, with n_samples=1")
        if room <= 0:
            raise RolloutError(
                f"a prompt of {len(prompt)} tokens leaves no room for a response: max_tokens={sampling.max_tokens}, "
                f"max_new_tokens={sampling.max_new_tokens}"
            )
        if req.vision_msg_vllm:
            raise RolloutError("images in vLLM's chat format cannot be continued by token ids; use SGLang, or text")
        reason = "stop"
        began = time.perf_counter()

        async def send(token_ids: Int32, max_tokens: int) -> Result:
            nonlocal reason
            label, pauses = inner.get_version(), self._pauses()
            one = req.copy()
            one.input_ids, one.gconfig = token_ids.tolist(), sampling.new(max_new_tokens=max_tokens)
            if getattr(inner.config, "return_routed_experts", False):
                one.metadata = {**one.metadata, "return_routed_experts": True}
            made = await self._answer(one, label)
            if made.stop_reason in STOP_REASONS:
                reason = made.stop_reason
            tokens = np.asarray(made.output_tokens, np.int32)
            logprobs = np.asarray(made.output_logprobs, np.float32)
            experts = getattr(made, "routed_experts", None)
            extras = {} if experts is None or not len(tokens) else {ROUTED_EXPERTS: narrowed(experts, None)}
            unused = None
            if pauses != self._pauses() and len(tokens):
                # it ended after a pause, in which weights may have changed: nobody knows which wrote it
                unused, tokens, logprobs = (len(tokens), DropReason.UNKNOWN_WEIGHTS), tokens[:0], logprobs[:0]
                extras = {}
            aborted = made.stop_reason == "abort" or unused is not None
            # a server's own limit is not known here
            anywhere = bool(getattr(sampling, "stop", None)) or made.stop_reason in ("length", "tool_calls")
            return Result(
                offset=len(token_ids), tokens=tokens, logprobs=logprobs, label=label, aborted=aborted, unused=unused,
                stop_token_ids=tuple(getattr(sampling, "stop_token_ids", None) or ()), ends_anywhere=anywhere,
                extras=extras,
            )  # fmt: skip

        stands = getattr(req.processor, "image_token_id", None)
        banned: tuple[int, ...] = () if stands is None else (int(stands),)
        attached: tuple[Placed, ...] = ()
        if banned and req.image_data:
            attached = await in_thread(placed_media, prompt, {"image": req.image_data}, {"image": banned[0]})
        done = await calls.generate(
            session, send, prompt, room, sampling.temperature, attached=attached, banned_ids=banned
        )
        versions = np.full(len(prompt) + len(done.tokens), -1)
        for start, end, _, n in done.spans:
            versions[start:end] = n
        latency, experts_of_all = time.perf_counter() - began, done.extras.get(ROUTED_EXPERTS)
        return ModelResponse(
            input_tokens=prompt,
            input_images=req.image_data,
            output_tokens=done.tokens.tolist(),
            output_logprobs=done.logprobs.tolist(),
            output_versions=versions[len(prompt) :].tolist(),
            stop_reason="length" if done.by_length else reason,
            latency=latency,
            ttft=latency,
            tokenizer=req.tokenizer,
            processor=req.processor,
            **({} if experts_of_all is None else {"routed_experts": experts_of_all.astype(np.int32)}),
        )

    async def _answer(self, one: Any, label: int) -> Any:
        """Send one request, once: whether it is sent again is april's to say."""
        inner, address = self._inner, self._inner.choose_server()
        http = inner.backend.build_generation_request(one, with_lora=False, version=label)
        try:
            answer = await arequest_with_retry(
                session=await workflow_context.get_aiohttp_session(), addr=address, endpoint=http.endpoint,
                payload=http.payload, method=http.method, max_retries=1, timeout=inner.config.request_timeout,
            )  # fmt: skip
        except RuntimeError as error:
            # its text repeats the whole request
            raise RolloutError(f"server {address}: {clean(str(error).rpartition('Last error: ')[2])}") from None
        if not isinstance(answer, dict):
            raise RolloutError(f"server {address} gave a {type(answer).__name__} where JSON was expected")
        return inner.backend.parse_generation_response(answer)


class AprilExecutor(WorkflowExecutor):  # type: ignore[misc]
    """Training batches come from april; ``submit``, ``wait`` and evaluations are as they were.

    Args:
        config: AReaL's of the servers.
        inference_engine: AReaL's RemoteInfEngine.
        april: april's, of this rank.
        ends: token ids that end a response.
        check: cross-check april's books after every event.
    """

    _expected_trajectory_keys: set[str] | None

    def __init__(
        self, config: Any, inference_engine: Any, april: Config, ends: Iterable[int] = (), *, check: bool = False
    ) -> None:
        super().__init__(config, inference_engine)
        self.april, self._ends, self._check = april, tuple(sorted(set(ends))), check
        self.rollouts: Rollouts | None = None
        """None: no batch was asked for yet."""
        self._pauses = 0
        """Times that weights may have changed."""
        self.saved: Path | None = None
        """State to go on from."""

    # ---------------------------------------------------------------- what AReaL calls

    def prepare_batch(
        self, dataloader: Any, workflow: Any, should_accept_fn: Callable[[Trajectory], bool] | None = None,
        dynamic_bs: bool = False,
    ) -> list[Trajectory]:  # fmt: skip
        """A trajectory per group, once a batch of them is ready; the arguments of the first call hold for all."""
        if dynamic_bs:
            raise ConfigError("dynamic_bs: april's batches are whole; set it to false")
        if self.rollouts is None:
            self.rollouts = self._open(dataloader, workflow, should_accept_fn)
        batch, delivery = self.rollouts.next_batch(self.inference_engine.get_version(), dataloader.batch_size)
        stats = stats_tracker.get("rollout")
        stats.scalar(**{f"april/{name}": value for name, value in delivery.metrics.items()})
        stats.scalar(**{f"april/dropped_{reason}": count for reason, count in self.rollouts.run.dropped.items()})
        if self.config.dump_to_file:
            for trajectory in batch:
                asyncio.run(self._dump_trajectory(trajectory, self._task_id_generator.next(), False))
        return batch

    def pause(self) -> None:
        """AReaL's pause; when it returns, no request of april's is at any server."""
        super().pause()
        if self.rollouts is not None:
            self.rollouts.run.pause()
        self._pauses += 1

    def resume(self) -> None:
        """AReaL's; april goes on under the weights that the servers have now."""
        if self.rollouts is not None:
            self.rollouts.run.resume(self.inference_engine.get_version())
        super().resume()

    def destroy(self) -> None:
        """AReaL's, and the end of what april holds."""
        if self.rollouts is not None:
            self.rollouts.close()
            self.rollouts = None
        super().destroy()

    # ---------------------------------------------------------------- the run

    def _open(self, loader: Any, workflow: Any, accepts: Callable[[Trajectory], bool] | None) -> Rollouts:
        if isinstance(workflow, GroupedRolloutWorkflow):
            workflow = workflow.workflow  # april counts the samples of a group
        engine = Engine(self.inference_engine, lambda: self._pauses)

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

        rollouts = Rollouts(
            self.april, EngineLimits(SERVERS, MAX_CONTEXT, None, self._ends), Prompts(loader), episode, self._join,
            None if accepts is None else self._counted(accepts), self._abort, check=self._check,
        )  # fmt: skip
        if self.saved is not None:
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
        """End all requests, and let new ones begin at once: none is sent before april says so."""
        self.inference_engine.pause_generation()
        self.inference_engine.continue_generation()


def _tensors(trajectory: Any) -> Trajectory | None:
    """Return a workflow's result as a dict of tensors; interactions of AReaL's OpenAI client are turned into one."""
    if trajectory is None:
        return None
    if not isinstance(trajectory, dict) or not trajectory:
        raise RolloutError(f"a workflow returned {type(trajectory).__name__} where a dict of tensors was expected")
    if all(hasattr(part, "to_tensor_dict") for part in trajectory.values()):
        made: Trajectory = concat_padded_tensors([part.to_tensor_dict() for part in trajectory.values()])
        return made
    return trajectory


class PPOTrainer(ArealPPOTrainer):  # type: ignore[misc]
    """AReaL's trainer, in SPMD mode, with april's rollouts.

    Args:
        config, train_dataset, valid_dataset: as AReaL's.
        april: april's own settings, by name.

    Raises:
        ConfigError: what speaks against this configuration, in one sentence, before anything is started.
    """

    def __init__(
        self, config: Any, train_dataset: Any = None, valid_dataset: Any = None, *,
        april: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if is_single_controller():
            raise ConfigError(
                "AReaL's single-controller mode runs workflows in processes of its own, which april's core does not "
                "reach; start the run in SPMD mode: AREAL_SPMD_MODE=1, python3 -m areal.infra.launcher.local train.py"
            )
        self._april_settings = dict(april or {})
        for sentence in objections(config, self._april_settings):
            raise ConfigError(sentence)
        self._april: AprilExecutor | None = None
        self._april_files: list[Path] = []
        super().__init__(config, train_dataset=train_dataset, valid_dataset=valid_dataset)

    def _create_dataloader(self, dataset: Any, dataset_config: Any, rank: int, world_size: int) -> Any:
        loader = super()._create_dataloader(dataset, dataset_config, rank, world_size)
        if dataset_config is self.config.train_dataset:
            return CarryingLoader(loader, self._with_april, self._load_april)
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
        """Token ids that end a response, as AReaL's workflows have them."""
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
        """april's state beside AReaL's, in a file of its own name; the one before is kept until AReaL's is written."""
        if self._april is None or self._april.rollouts is None:
            return {**loader_state(), KEY: ""}
        folder = self._folder()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{_prefix()}{uuid.uuid4().hex}.msgpack"
        self._april.rollouts.save(path)
        self._april_files.append(path)
        while len(self._april_files) > 2:
            self._april_files.pop(0).unlink(missing_ok=True)
        return {**loader_state(), KEY: path.name}

    def _load_april(self, name: str | None) -> None:
        if name is None:
            log.warning(
                "AReaL's recover checkpoint was saved without april: what was unfinished then is lost, and its prompts "
                "are not asked again in this epoch"
            )
        if not name:
            return
        path = self._folder() / name
        if path.parent != self._folder() or not path.is_file():
            raise CheckpointError(f"AReaL's recover checkpoint needs april's state {path}, and it is not there")
        assert self._april is not None
        self._april.saved = path
        for old in self._folder().glob(f"{_prefix()}*"):
            if old != path:
                old.unlink()
        self._april_files.append(path)


def _prefix() -> str:
    """Return the prefix of this rank's files."""
    return f"april_{os.getenv('RANK', '0')}_"
