"""OpenRLHF's classes with april in them, for Ray; importing this module imports OpenRLHF.

They stand in a module of their own so that Ray's workers find them by name: april must be installed on every node.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from april.adapters.openrlhf.arguments import config_of
from april.adapters.openrlhf.framework import find, undecorated
from april.adapters.openrlhf.rollouts import Rollouts, TransferElsewhere
from april.carrying_loader import CarryingLoader
from april.engines.vllm.actor import ACTOR_CALLS, ActorSide
from april.errors import RolloutError

SamplesGenerator: Any = find("openrlhf.trainer.ppo_utils.samples_generator.SamplesGenerator")
PPOTrainer: Any = undecorated("openrlhf.trainer.ppo_trainer.PPOTrainer")
PPOTrainerAsync: Any = undecorated("openrlhf.trainer.ppo_trainer_async.PPOTrainerAsync")
GenerateSamplesActor: Any = undecorated("openrlhf.trainer.ppo_trainer_async.GenerateSamplesActor")
BasePPOTrainer: Any = find("openrlhf.trainer.ppo_trainer.BasePPOTrainer")
TrainingActor: Any = undecorated("openrlhf.trainer.ppo_trainer_async.TrainingActor")
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

    def broadcast_to_vllm(self) -> None:
        """OpenRLHF's; continuous generation is interrupted meanwhile."""
        assert self.april is not None
        self.april.hand_over(super().broadcast_to_vllm)


class AprilGenerateSamplesActor(WithApril, GenerateSamplesActor):  # type: ignore[misc]
    """The half of the asynchronous trainer that generates."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.april is not None
        self._transfer = TransferElsewhere(self.april.hand_over)
        if self.april.continuous:
            self._partial_rollout = True  # OpenRLHF's name for: the lock is for evaluations, and not for training

    def april_begin_transfer(self) -> None:
        """Called by the half that trains; returns when it may write weights into the engines."""
        self._transfer.begin()

    def april_end_transfer(self, written: bool) -> None:
        """Called by the half that trains, when it has or has not; returns when generation goes on."""
        self._transfer.end(written=written)


class TellsTheGenerator(BasePPOTrainer):  # type: ignore[misc]
    """Below TrainingActor, which holds its lock around the broadcast: evaluations and transfers exclude each other."""

    april_generator: Any = None
    """Handle of the half that generates; None: what it generates is over when the lock is free."""

    def broadcast_to_vllm(self) -> None:
        """OpenRLHF's, while no request of april's is at any engine."""
        generator, ray_get = self.april_generator, find("ray.get")
        if generator is None:
            super().broadcast_to_vllm()
            return
        ray_get(generator.april_begin_transfer.remote())
        written = False
        try:
            super().broadcast_to_vllm()
            written = True
        finally:
            ended = generator.april_end_transfer.remote(written)
            if written:
                ray_get(ended)


class AprilTrainingActor(TrainingActor, TellsTheGenerator):  # type: ignore[misc]
    """The half of the asynchronous trainer that trains.

    Ray sends by value what is inherited from a decorated class, and there super() does not know it; so what uses it is
    found here by name.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def broadcast_to_vllm(self) -> None:
        """OpenRLHF's, under its lock."""
        super().broadcast_to_vllm()

    def april_meets(self, generator: Any) -> None:
        """Let the half that generates hear of every transfer from now on."""
        self.april_generator = generator


class AprilPPOTrainerAsync(PPOTrainerAsync):  # type: ignore[misc]
    """The asynchronous trainer, whose halves are april's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # its __init__ takes the classes from its module, here in this actor's process
        its_module: Any = sys.modules[PPOTrainerAsync.__module__]
        its_module.GenerateSamplesActor = as_actor(AprilGenerateSamplesActor)
        its_module.TrainingActor = as_actor(AprilTrainingActor)
        super().__init__(*args, **kwargs)
        find("ray.get")(self.trainer_actor.april_meets.remote(self.generator_actor))


class AprilRolloutRayActor(RolloutRayActor):  # type: ignore[misc]
    """The engine's actor, with april's side of the wire; what OpenRLHF calls is as it was."""

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        await super().__init__(*args, **kwargs)
        self._april = ActorSide(self.llm)
        self._pushes = 0

    async def update_weight(self, name: str, dtype: Any, shape: Any, empty_cache: bool = False) -> Any:
        """Take one parameter from the trainer; the last one of a transfer comes with ``empty_cache``."""
        self._april.require_idle()
        result = await super().update_weight(name, dtype, shape, empty_cache)
        self._pushes += bool(empty_cache)
        return result

    async def update_weight_cuda_ipc(
        self, name: str, dtype: Any, shape: Any, ipc_handles: Any, empty_cache: bool = False
    ) -> Any:
        """Take one parameter between processes on one GPU."""
        self._april.require_idle()
        result = await super().update_weight_cuda_ipc(name, dtype, shape, ipc_handles, empty_cache)
        self._pushes += bool(empty_cache)
        return result

    def april_capabilities(self) -> Any:
        """Call :class:`april.engines.vllm.actor.ActorSide`, as the methods that follow do."""
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
    if issubclass(cls, GenerateSamplesActor):
        return remote(max_concurrency=2)(cls)  # it hears of transfers while it generates
    return remote(cls)


def _show_log() -> None:
    """april's log into the actor's output, where OpenRLHF's is, unless somebody has set it up."""
    log = logging.getLogger("april")
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
