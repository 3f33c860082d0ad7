"""Subclasses of OpenRLHF's Ray actors that use april. Importing this module imports OpenRLHF.

Ray's workers import these classes by name, so april must be installed on every node.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import ray
from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor as EngineRayActor

from april.adapters.common.data_loader import CheckpointedLoader
from april.adapters.common.installed_trainer import undecorated_class
from april.adapters.openrlhf.arguments import config_of
from april.adapters.openrlhf.rollouts import OpenRLHFRollouts, TransferThread
from april.engines.vllm.actor import ACTOR_CALLS, EngineActor

BasePPOTrainer: Any = ppo_trainer.BasePPOTrainer
PPOTrainer: Any = undecorated_class(ppo_trainer.PPOTrainer)
PPOTrainerAsync: Any = undecorated_class(ppo_trainer_async.PPOTrainerAsync)
GenerateSamplesActor: Any = undecorated_class(ppo_trainer_async.GenerateSamplesActor)
TrainingActor: Any = undecorated_class(ppo_trainer_async.TrainingActor)
RolloutRayActor: Any = undecorated_class(EngineRayActor)


class GeneratesByApril:
    """Mixin for a SamplesGenerator that gets training batches from april and evaluations from OpenRLHF."""

    _process_response_into_experience: Any
    april: OpenRLHFRollouts | None = None
    """Source of training batches; None if OpenRLHF generates everything."""

    def _generate_vllm(
        self, dataloader_iter: Any, num_prompts: int, dynamic_filtering: Any, **generate_kwargs: Any
    ) -> Any:
        training = dataloader_iter is getattr(self, "_dataloader_iter", None)
        if self.april is None or not training:
            base: Any = super()
            return base._generate_vllm(dataloader_iter, num_prompts, dynamic_filtering, **generate_kwargs)
        responses, drawn, ended = self.april.next(dataloader_iter)
        return [self._process_response_into_experience(r, **generate_kwargs) for r in responses], drawn, ended


class AprilSamplesGenerator(GeneratesByApril, SamplesGenerator):  # type: ignore[misc]
    """OpenRLHF's generator, with training batches from april."""


class WithApril:
    """Mixin for trainer classes with a ``samples_generator`` and a ``prompts_dataloader``: april makes the batches."""

    samples_generator: Any
    prompts_dataloader: Any
    april: OpenRLHFRollouts | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _show_log()
        stock = self.samples_generator
        config = config_of(stock.args, stock.args.april)
        self.april = rollouts = OpenRLHFRollouts(stock.args, config, stock.tokenizer, stock.vllm_engines)
        self.prompts_dataloader = CheckpointedLoader(self.prompts_dataloader, rollouts.save, rollouts.load)
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
    """OpenRLHF's synchronous trainer with april."""

    def broadcast_to_vllm(self) -> None:
        """Broadcast the weights to the engines; continuous generation is paused for that time."""
        assert self.april is not None
        self.april.hand_over(super().broadcast_to_vllm)


class AprilGenerateSamplesActor(WithApril, GenerateSamplesActor):  # type: ignore[misc]
    """Generating actor of OpenRLHF's asynchronous trainer, with april."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.april is not None
        self._transfer = TransferThread(self.april.hand_over)
        if self.april.continuous:
            self._partial_rollout = True  # with this flag OpenRLHF locks the engines for evaluations only

    def april_begin_transfer(self) -> None:
        """Pause generation and return once weights may be written. Called by the training actor."""
        self._transfer.begin()

    def april_end_transfer(self, written: bool) -> None:
        """Resume generation after the transfer, which failed unless ``written``. Called by the training actor."""
        self._transfer.end(written=written)


class NotifiesGenerator(BasePPOTrainer):  # type: ignore[misc]
    """Base class of AprilTrainingActor that announces each weight transfer to the generating actor.

    OpenRLHF's TrainingActor.broadcast_to_vllm takes a lock against concurrent evaluations, then calls the method below.
    """

    april_generator: Any = None

    def broadcast_to_vllm(self) -> None:
        """Broadcast the weights while no engine has a request from april."""
        generator = self.april_generator
        if generator is None:
            super().broadcast_to_vllm()
            return
        ray.get(generator.april_begin_transfer.remote())
        written = False
        try:
            super().broadcast_to_vllm()
            written = True
        finally:
            ended = generator.april_end_transfer.remote(written)
            if written:
                ray.get(ended)


class AprilTrainingActor(TrainingActor, NotifiesGenerator):  # type: ignore[misc]
    """Training actor of OpenRLHF's asynchronous trainer, with april.

    Ray pickles methods inherited from a decorated class by value, which breaks ``super()`` in them, so this class
    defines them again.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def broadcast_to_vllm(self) -> None:
        """Broadcast the weights to the engines, holding OpenRLHF's lock."""
        super().broadcast_to_vllm()

    def april_set_generator(self, generator: Any) -> None:
        """Set the generating actor, to which every transfer is announced from now on."""
        self.april_generator = generator


class AprilPPOTrainerAsync(PPOTrainerAsync):  # type: ignore[misc]
    """OpenRLHF's asynchronous trainer, with april's subclasses of its generating and training actors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # the base class looks up its actor classes in ppo_trainer_async
        ppo_trainer_async.GenerateSamplesActor = as_actor(AprilGenerateSamplesActor)
        ppo_trainer_async.TrainingActor = as_actor(AprilTrainingActor)
        super().__init__(*args, **kwargs)
        ray.get(self.trainer_actor.april_set_generator.remote(self.generator_actor))


class AprilRolloutRayActor(RolloutRayActor):  # type: ignore[misc]
    """OpenRLHF's engine actor with methods for april added; the methods that OpenRLHF calls keep their behaviour."""

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        await super().__init__(*args, **kwargs)
        self._april = EngineActor(self.llm)
        self._pushes = 0

    async def update_weight(self, name: str, dtype: Any, shape: Any, empty_cache: bool = False) -> Any:
        """Receive one parameter from the trainer; ``empty_cache`` marks the last parameter of a transfer."""
        self._april.require_idle()
        result = await super().update_weight(name, dtype, shape, empty_cache)
        self._pushes += bool(empty_cache)
        return result

    async def update_weight_cuda_ipc(
        self, name: str, dtype: Any, shape: Any, ipc_handles: Any, empty_cache: bool = False
    ) -> Any:
        """Receive one parameter from a process on the same GPU, through CUDA IPC."""
        self._april.require_idle()
        result = await super().update_weight_cuda_ipc(name, dtype, shape, ipc_handles, empty_cache)
        self._pushes += bool(empty_cache)
        return result

    def april_capabilities(self) -> Any:
        """Return the engine's capabilities. This method and the next four only call april's ``EngineActor``."""
        return self._april.capabilities()

    async def april_generate(self, ask: Any) -> Any:
        return await self._april.generate(ask)

    async def april_abort(self, attempt_ids: Any) -> None:
        await self._april.abort(attempt_ids)

    async def april_update_weights(self, version: Any, life: Any = "") -> Any:
        return await self._april.update_weights(version, life)

    async def april_health(self) -> Any:
        return await self._april.health()

    def april_pushes(self) -> int:
        """Return the number of weight transfers that the trainer has completed."""
        return self._pushes

    async def april_judge(self, query: str, prompt: str, label: Any) -> Any:
        """Return the reward of one response, from OpenRLHF's reward function or server, whose errors are raised."""
        executor = self.executor
        fetch = executor._fetch_rewards_via_func if executor.reward_func else executor._fetch_rewards_via_http
        answers = await fetch([query], [prompt], [label])
        return answers[0] if answers else None


def as_actor(cls: type) -> Any:
    """Turn a class into a Ray actor class, as OpenRLHF's decorator does."""
    if issubclass(cls, RolloutRayActor):
        return ray.remote(max_concurrency=ACTOR_CALLS)(cls)
    if issubclass(cls, GenerateSamplesActor):
        return ray.remote(max_concurrency=2)(cls)  # a transfer is announced to this actor while it generates
    return ray.remote(cls)


def _show_log() -> None:
    """Print april's log to the actor's output, unless logging is already configured."""
    log = logging.getLogger("april")
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
