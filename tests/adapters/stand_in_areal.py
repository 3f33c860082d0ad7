"""Stands in for AReaL and its servers: what april's adapter meets there, by the same names, without processes or HTTP.

Written from their contract: the trainer's loop and its recover checkpoint, the executor of workflows, the remote
engine. Servers know no time: a response ends at once, or ("held") when every request is ended.
"""

from __future__ import annotations

import asyncio
import copy
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from . import modules, tree

EOS = 1
GROUPS, SAMPLES, ROWS = 3, 2, 30


def config(folder: Path, **changes: Any) -> SimpleNamespace:
    """AReaL's PPOConfig, as far as april reads it; ``rollout__use_lora=True`` changes one value."""
    values: dict[str, Any] = {
        "train_dataset.batch_size": GROUPS, "dynamic_bs": False, "total_steps": 4,
        "gconfig.n_samples": SAMPLES, "gconfig.max_new_tokens": 40, "gconfig.max_tokens": 60,
        "gconfig.temperature": 1.0, "gconfig.top_p": 1.0, "gconfig.top_k": 10**8, "gconfig.greedy": False,
        "gconfig.frequency_penalty": 0.0, "gconfig.use_beam_search": False, "gconfig.stop_token_ids": [],
        "gconfig.ignore_eos": False,
        "actor._version": "v1", "actor.use_lora": False, "actor.recompute_logprob": False,
        "actor.use_decoupled_loss": True, "actor.rejection_sampling": SimpleNamespace(level="token", action="clamp"),
        "actor.scheduling_strategy": SimpleNamespace(type="separation", target=None),
        "rollout._version": "v1", "rollout.use_lora": False, "rollout.return_routed_experts": False,
        "rollout.backend": "sglang:d1", "rollout.max_head_offpolicyness": 2, "rollout.max_concurrent_rollouts": 20,
        "rollout.scheduling_strategy": SimpleNamespace(type="separation", target=None),
        "rollout.agent": SimpleNamespace(mode="inline"), "rollout.request_timeout": 60.0,
        "rollout.check_trajectory_format": False, "rollout.dump_to_file": False,
        "recover.experiment_name": "e", "recover.trial_name": "t", "recover.fileroot": str(folder),
    }  # fmt: skip
    root = tree(values, changes)
    root.gconfig.new = lambda **new: SimpleNamespace(**{**vars(root.gconfig), "n_samples": 1, **new})
    return root


class Server:
    """Answers of (row, sample's turn, tokens so far); every token names the weights that wrote it.

    Args:
        length_of: tokens of a whole response to a row.
        held: whether a request of (row, tokens so far) goes on until it is ended; then it has half of what is missing.
    """

    def __init__(self, length_of: Callable[[int], int], held: Callable[[int, int], bool]) -> None:
        self.length_of, self.held = length_of, held
        self.weights = 0
        self.made = self.ended = 0
        self.fails: list[Exception] = []
        """Raised by the next requests."""
        self.loop: asyncio.AbstractEventLoop | None = None
        self.live: dict[asyncio.Future[None], None] = {}
        self._awaited: tuple[int, threading.Event] = (0, threading.Event())

    def until_live(self, count: int) -> None:
        """Wait, in the trainer's thread, until so many requests run; raises TimeoutError after 60 s."""
        reached = threading.Event()
        self._awaited = (count, reached)
        if len(self.live) < count and not reached.wait(60.0):
            raise TimeoutError(f"{len(self.live)} of {count} requests run")

    async def answer(self, payload: dict[str, Any]) -> dict[str, Any]:
        if self.fails:
            raise self.fails.pop()
        self.loop = asyncio.get_running_loop()
        ids, room = payload["input_ids"], payload["max_new_tokens"]
        row, so_far = ids[1], len(ids) - 2
        missing = min(room, self.length_of(row) - so_far)
        weights, cut = self.weights, False
        if self.held(row, so_far):
            end = self.loop.create_future()
            self.live[end] = None
            if len(self.live) >= self._awaited[0]:
                self._awaited[1].set()
            await end
            missing, cut = max(1, missing // 2), True
        tokens = [100 + so_far + k for k in range(missing)]
        if not cut and so_far + missing >= self.length_of(row):
            tokens[-1] = EOS
        self.made += len(tokens)
        said: dict[str, Any] = {"tokens": tokens, "logprobs": [-1.0 - weights / 1000] * len(tokens)}
        if payload["experts"]:  # of each token that was read: it, its place, and the weights
            read = np.array([*ids, *tokens][:-1], np.int32)
            said["experts"] = np.stack((read, np.arange(len(read)), np.full(len(read), weights)), 1).astype(np.int32)
        return said | {"reason": "abort" if cut else "stop" if tokens[-1] == EOS else "length"}

    def end_all(self) -> None:
        def end() -> None:
            live, self.live = list(self.live), {}
            self.ended += len(live)
            for one in live:
                one.set_result(None)

        if self.loop is not None:
            self.loop.call_soon_threadsafe(end)


SERVER: list[Server] = []
"""That of this moment."""


class Backend:
    def build_generation_request(self, req: Any, with_lora: bool, version: int) -> Any:
        payload = {"input_ids": req.input_ids, "max_new_tokens": req.gconfig.max_new_tokens}
        payload |= {"experts": req.metadata.get("return_routed_experts", False)}
        return SimpleNamespace(endpoint="/generate", payload=payload, method="POST")

    def parse_generation_response(self, said: dict[str, Any]) -> Any:
        return SimpleNamespace(
            output_tokens=said["tokens"], output_logprobs=said["logprobs"], stop_reason=said["reason"],
            routed_experts=said.get("experts"),
        )


class RemoteInfEngine:
    def __init__(self, config: Any) -> None:
        self.config, self.backend, self.logger, self._version = config, Backend(), None, 0
        self.workflow_executor: Any = WorkflowExecutor(config, self)

    def get_version(self) -> int:
        return self._version

    def choose_server(self) -> str:
        return "here:1"

    async def agenerate(self, req: Any) -> Any:
        raise AssertionError("AReaL's own")

    def pause_generation(self) -> None:
        SERVER[-1].end_all()

    def continue_generation(self) -> None:
        pass


class RemoteEngine:
    """RemoteSGLangEngine: a shell around the other."""

    def __init__(self, config: Any) -> None:
        self._engine = RemoteInfEngine(config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def set_version(self, version: int) -> None:
        self._engine._version = version

    def prepare_batch(self, loader: Any, workflow: Any, accepts: Any, group_size: int) -> list[Any]:
        grouped = GroupedRolloutWorkflow(workflow, group_size, None) if group_size > 1 else workflow
        batch: list[Any] = self._engine.workflow_executor.prepare_batch(loader, grouped, accepts, False)
        return batch

    def pause(self) -> None:
        self._engine.workflow_executor.pause()

    def resume(self) -> None:
        self._engine.workflow_executor.resume()


class GroupedRolloutWorkflow:
    def __init__(self, workflow: Any, group_size: int, logger: Any) -> None:
        self.workflow = workflow


class WorkflowExecutor:
    def __init__(self, config: Any, inference_engine: Any, staleness_manager: Any = None) -> None:
        self.config, self.inference_engine, self.logger = config, inference_engine, None
        self._expected_trajectory_keys: set[str] | None = None
        self._task_id_generator = SimpleNamespace(next=iter(range(10**9)).__next__)
        self.paused = self.destroyed = False

    def initialize(self, logger: Any = None, train_data_parallel_size: int | None = None) -> None:
        pass

    def prepare_batch(
        self, dataloader: Any, workflow: Any, should_accept_fn: Any = None, dynamic_bs: bool = False
    ) -> Any:
        raise AssertionError("AReaL's own")

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def destroy(self) -> None:
        self.destroyed = True


class Loader:
    """A StatefulDataLoader; its order is by epoch, so that it is seen which one it believes in."""

    batch_size = GROUPS

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.at, self.epoch = rows, 0, 0
        self.sampler = self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows) // self.batch_size

    def __iter__(self) -> Iterator[Any]:
        rows = self.rows if self.epoch % 2 == 0 else self.rows[::-1]
        while self.at < len(rows):
            self.at += self.batch_size
            yield rows[self.at - self.batch_size : self.at]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert list(state) == ["at"]
        self.at = state["at"]


class RecoverHandler:
    @staticmethod
    def recover_info_path(experiment_name: str, trial_name: str, fileroot: str) -> str:
        return str(Path(fileroot) / experiment_name / trial_name / "recover_info")


class PPOTrainer:
    """AReaL's order of things: loader, servers, recovery; and in each step a batch, training, weights, checkpoint."""

    def __init__(self, config: Any, train_dataset: Any = None, valid_dataset: Any = None) -> None:
        self.config = config
        self.tokenizer = SimpleNamespace(eos_token_id=EOS, pad_token_id=0)
        self.actor_alloc = SimpleNamespace(parallel=SimpleNamespace(dp_size=1))
        self.train_dataloader = self._create_dataloader(train_dataset, config.train_dataset, 0, 1)
        self.rollout = self._init_rollout(config.rollout, is_eval=False)
        self.eval_rollout = self._init_rollout(config.rollout, is_eval=True)
        self.step = 0
        self.trained: list[Any] = []
        """A (rows, sample's versions) per trajectory of the batch, step by step."""
        info = Path(RecoverHandler.recover_info_path("e", "t", config.recover.fileroot)) / "info.json"
        self._info = info
        if info.is_file():
            saved = json.loads(info.read_text())
            self.train_dataloader.load_state_dict(saved["loader"])
            self.step = saved["step"]
            self.rollout.pause()
            SERVER[-1].weights = self.step
            self.rollout.resume()
            self.rollout.set_version(self.step)

    def _create_dataloader(self, dataset: Any, dataset_config: Any, rank: int, world_size: int) -> Any:
        return Loader(dataset)

    def _init_rollout(self, rollout_config: Any, is_eval: bool = False, lora_path: str | None = None) -> Any:
        return RemoteEngine(copy.copy(rollout_config))

    def train(
        self, workflow: Any, steps: int, dynamic_filter_fn: Any = None, *, while_training: Any = None, save: bool = True
    ) -> None:
        for _ in range(steps):
            batch = self.rollout.prepare_batch(
                self.train_dataloader, workflow, dynamic_filter_fn, self.config.gconfig.n_samples
            )
            self.trained.append(batch)
            if while_training is not None:
                while_training()
            self.rollout.pause()
            self.rollout.pause_generation()
            SERVER[-1].weights = self.step = self.step + 1
            self.rollout.continue_generation()
            self.rollout.set_version(self.step)
            if save:
                self._info.parent.mkdir(parents=True, exist_ok=True)
                self._info.write_text(json.dumps({"step": self.step, "loader": self.train_dataloader.state_dict()}))
            self.rollout.resume()

    def close(self) -> None:
        self.rollout.workflow_executor.destroy()


class Workflow:
    """One call per sample, as AReaL's RLVRWorkflow; ``fails``: what the next episodes raise or return instead."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.fails: dict[int, list[Any]] = {}
        self.reward: Callable[[int], float] = float
        self.answers: list[Any] = []

    async def arun_episode(self, engine: Any, data: Any) -> Any:
        row = data["row"]
        made = await engine.agenerate(request([50, row], self._config.gconfig.new()))
        self.answers.append(made)
        if self.fails.get(row):
            what = self.fails[row].pop()
            if isinstance(what, Exception):
                raise what
            return what
        prompt = len(made.input_tokens)
        parts = {
            "input_ids": made.input_tokens + made.output_tokens,
            "loss_mask": [0] * prompt + [1] * len(made.output_tokens),
            "logprobs": [0.0] * prompt + made.output_logprobs,
            "versions": [-1] * prompt + made.output_versions,
            "attention_mask": [True] * (prompt + len(made.output_tokens)),
        }
        return {k: torch.tensor([v]) for k, v in parts.items()} | {"rewards": torch.tensor([self.reward(row)])}


def request(input_ids: list[int], gconfig: Any) -> Any:
    made = SimpleNamespace(input_ids=input_ids, gconfig=gconfig, image_data=[], vision_msg_vllm=None, tokenizer=None)
    made.processor, made.metadata = None, {}
    made.copy = lambda: SimpleNamespace(**{k: v for k, v in vars(made).items() if k != "copy"})
    return made


def concat_padded_tensors(tensor_dicts: list[dict[str, Any]], pad_value: float = 0.0) -> dict[str, Any]:
    """Rows of all of them, padded to the longest."""
    if len({tuple(d) for d in tensor_dicts}) > 1:
        raise ValueError("different keys")
    joined = {}
    for key in tensor_dicts[0]:
        parts = [row for d in tensor_dicts for row in d[key]]
        joined[key] = torch.nn.utils.rnn.pad_sequence(parts, True) if parts[0].dim() else torch.stack(parts)
    return joined


async def arequest_with_retry(
    addr: str, endpoint: str, payload: Any = None, session: Any = None, method: str = "POST",
    max_retries: int | None = None, timeout: float | None = None, retry_delay: float = 1.0,  # noqa: ASYNC109
    verbose: bool = False,
) -> Any:  # fmt: skip
    assert max_retries == 1
    try:
        return await SERVER[-1].answer(payload)
    except OSError as error:
        raise RuntimeError(f"Failed after 1 retries each. Payload: {payload}. Last error: {error!r}") from None


def install(monkeypatch: pytest.MonkeyPatch, *, spmd: bool = True) -> dict[str, list[float]]:
    """Put the stand-in where AReaL would be; returns what is written to its statistics."""
    stats: dict[str, list[float]] = {}

    def scalar(**values: float) -> None:
        for name, value in values.items():
            stats.setdefault(name, []).append(float(value))

    async def session() -> None:
        return None

    context = {"WorkflowContext": SimpleNamespace, "set": lambda c: None, "get_aiohttp_session": session}
    contents: dict[str, dict[str, Any]] = {
        "areal": {"workflow_context": SimpleNamespace(**context)},
        "areal.api": {"ModelResponse": SimpleNamespace},
        "areal.infra.utils.http": {"arequest_with_retry": arequest_with_retry},
        "areal.infra.remote_inf_engine": {
            "GroupedRolloutWorkflow": GroupedRolloutWorkflow, "RemoteInfEngine": RemoteInfEngine,
        },
        "areal.infra.workflow_executor": {
            "WorkflowExecutor": WorkflowExecutor, "check_trajectory_format": lambda *a, **k: True,
        },
        "areal.trainer.rl_trainer": {"PPOTrainer": PPOTrainer},
        "areal.utils": {
            "perf_tracer": SimpleNamespace(register_task=lambda t: None, set_task_id=lambda t: None,
                                           trace_session_event=lambda *a, **k: None),
            "stats_tracker": SimpleNamespace(get=lambda name: SimpleNamespace(scalar=scalar)),
        },
        "areal.utils.data": {"concat_padded_tensors": concat_padded_tensors},
        "areal.utils.environ": {"is_single_controller": lambda: not spmd},
        "areal.utils.recover": {"RecoverHandler": RecoverHandler},
    }  # fmt: skip
    for name, module in modules(contents).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "april.adapters.areal.trainer", raising=False)
    return stats


def rows(count: int = ROWS) -> list[dict[str, Any]]:
    return [{"row": number, "messages": [{"role": "user", "content": f"row {number}"}]} for number in range(count)]
