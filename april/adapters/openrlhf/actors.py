"""OpenRLHF's classes with april in them, for Ray; importing this module imports OpenRLHF.

They stand in a module of their own so that Ray's workers find them by name: april must be installed on every node.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from april.adapters.openrlhf.arguments import config_of
from april.adapters.openrlhf.framework import find, undecorated
from april.adapters.openrlhf.prompts import CarryingLoader
from april.adapters.openrlhf.rollouts import Rollouts
from april.engines.vllm.actor import ACTOR_CALLS, ActorSide
from april.errors import RolloutError

SamplesGenerator: Any = find("openrlhf.trainer.ppo_utils.samples_generator.SamplesGenerator")
PPOTrainer: Any = undecorated("openrlhf.trainer.ppo_trainer.PPOTrainer")
PPOTrainerAsync: Any = undecorated("openrlhf.trainer.ppo_trainer_async.PPOTrainerAsync")
GenerateSamplesActor: Any = undecorated("openrlhf.trainer.ppo_trainer_async.GenerateSamplesActor")
RolloutRayActor: Any = undecorated("openrlhf.trainer.ray.vllm_engine.RolloutRayActor")


class GeneratesByApril:
    """Before a SamplesGenerator: training batches come from april; evaluations, and all else, are OpenRLHF's."""

    args: Any
    _process_response_into_experience: Any
    april: Rollouts | None = None
    """None: everything is OpenRLHF's."""

    def _generate_vllm(
        self, dataloader_iter: Any, num_prompts: int, dynamic_filtering: Any, **generate_kwargs: Any
    ) -> Any:
        training = dataloader_iter is getattr(self, "_dataloader_iter", None)
        if self.april is None or not training:
            base: Any = super()
            return base._generate_vllm(dataloader_iter, num_prompts, dynamic_filtering, **generate_kwargs)
        if num_prompts != self.args.rollout.batch_size:
            raise RolloutError(f"OpenRLHF asked for {num_prompts} prompts and not for --rollout.batch_size of them")
        responses, drawn, ended = self.april.next(dataloader_iter)
        return [self._process_response_into_experience(r, **generate_kwargs) for r in responses], drawn, ended


class AprilSamplesGenerator(GeneratesByApril, SamplesGenerator):  # type: ignore[misc]
    """OpenRLHF's generator with april's training batches."""


class WithApril:
    """Before a class that makes a ``samples_generator`` and has a ``prompts_dataloader``."""

    samples_generator: Any
    prompts_dataloader: Any
    april: Rollouts | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _show_log()
        stock = self.samples_generator
        config = config_of(stock.args, stock.args.april)
        self.april = rollouts = Rollouts(stock.args, config, stock.tokenizer, stock.vllm_engines)
        self.prompts_dataloader = CarryingLoader(self.prompts_dataloader, rollouts.save, rollouts.load)
        self.samples_generator = AprilSamplesGenerator(
            stock.strategy, self.prompts_dataloader, stock.eval_dataloader, stock.tokenizer, stock.vllm_engines
        )
        self.samples_generator.april = rollouts

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().fit(*args, **kwargs)  # type: ignore[misc]
        finally:
            if self.april is not None:
                self.april.close()


class AprilPPOTrainer(WithApril, PPOTrainer):  # type: ignore[misc]
    """The synchronous trainer."""


class AprilGenerateSamplesActor(WithApril, GenerateSamplesActor):  # type: ignore[misc]
    """The half of the asynchronous trainer that generates."""


class AprilPPOTrainerAsync(PPOTrainerAsync):  # type: ignore[misc]
    """The asynchronous trainer; its other half, TrainingActor, is OpenRLHF's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # its __init__ takes the class from its module, here in this actor's process
        its_module: Any = sys.modules[PPOTrainerAsync.__module__]
        its_module.GenerateSamplesActor = as_actor(AprilGenerateSamplesActor)
        super().__init__(*args, **kwargs)


class AprilRolloutRayActor(RolloutRayActor):  # type: ignore[misc]
    """The engine's actor, with april's side of the wire; what OpenRLHF calls is as it was."""

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        await super().__init__(*args, **kwargs)
        self._april = ActorSide(self.llm)
        self._pushes = 0

    async def update_weight(self, name: str, dtype: Any, shape: Any, empty_cache: bool = False) -> Any:
        """One parameter from the trainer; the last one of a transfer comes with ``empty_cache``."""
        self._april.require_idle()
        result = await super().update_weight(name, dtype, shape, empty_cache)
        self._pushes += bool(empty_cache)
        return result

    async def update_weight_cuda_ipc(
        self, name: str, dtype: Any, shape: Any, ipc_handles: Any, empty_cache: bool = False
    ) -> Any:
        """The same, between processes on one GPU."""
        self._april.require_idle()
        result = await super().update_weight_cuda_ipc(name, dtype, shape, ipc_handles, empty_cache)
        self._pushes += bool(empty_cache)
        return result

    def april_capabilities(self) -> Any:
        """See :class:`april.engines.vllm.actor.ActorSide`, as for those that follow."""
        return self._april.capabilities()

    async def april_generate(self, ask: Any) -> Any:
        return await self._april.generate(ask)

    async def april_abort(self, attempt_ids: Any) -> None:
        await self._april.abort(attempt_ids)

    async def april_update_weights(self, version: Any, life: Any = None) -> Any:
        return await self._april.update_weights(version, life)

    async def april_health(self) -> Any:
        return await self._april.health()

    def april_pushes(self) -> int:
        """Complete transfers of weights by the trainer, ever."""
        return self._pushes

    async def april_judge(self, query: str, prompt: str, label: Any) -> Any:
        """The reward of one response; raises what the function or the server raised."""
        executor = self.executor
        fetch = executor._fetch_rewards_via_func if executor.reward_func else executor._fetch_rewards_via_http
        answers = await fetch([query], [prompt], [label])
        return answers[0] if answers else None


def as_actor(cls: type) -> Any:
    """A Ray actor class of it, as OpenRLHF's decorator makes one."""
    remote = find("ray.remote")
    if issubclass(cls, RolloutRayActor):
        return remote(max_concurrency=ACTOR_CALLS)(cls)
    return remote(cls)


def _show_log() -> None:
    """april's log into the actor's output, where OpenRLHF's is, unless somebody has set it up."""
    log = logging.getLogger("april")
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
