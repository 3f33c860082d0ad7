"""One arm of the demo: one mode, one seed, from the warmed-up weights to the last training step."""

from __future__ import annotations

import copy
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from april.core.batch import Batch, DeliveredSample
from april.core.idle import Idle
from april.core.ledger import Ledger
from april.core.types import Prompt
from april.demo import task
from april.demo.exactness import StateDict, logprob_error, snapshot
from april.demo.grpo import GrpoBatch, GrpoTrainer
from april.demo.settings import DemoSettings
from april.demo.stage import set_up
from april.demo.witness import Witness
from april.driver.rewards import Response
from april.scheduler import RolloutScheduler

EVALUATION_SEED = 20_000
BETWEEN = (Idle.TRAINER, Idle.UPDATE, Idle.PAUSE, Idle.EVALUATION)
"""Places are empty because of these between two batches, not while one is generated."""
OnStep = Callable[[int, dict[str, float]], None]
"""Called with (steps done, figures of the last one)."""


@dataclass(slots=True, kw_only=True)
class ArmResult:
    """Everything measured in one arm; CPU seconds are those of this process, a server's own are not in them."""

    mode: str
    seed: int
    slots: int
    steps: int = 0
    decode_steps: int = 0
    generated_tokens: int = 0
    trained_tokens: int = 0
    reprefill_tokens: int = 0
    rollout_cpu_s: float = 0.0
    rollout_wall_s: float = 0.0
    train_cpu_s: float = 0.0
    stale_tokens: float = 0.0
    staleness: list[int] = field(default_factory=list)
    """of every delivered sample"""
    lengths: list[list[int]] = field(default_factory=list)
    """response lengths of each step"""
    group_spread: list[float] = field(default_factory=list)
    """coefficient of variation of the lengths of each group, as far as it was delivered"""
    training_reward: list[float] = field(default_factory=list)
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """(step, rollout CPU seconds so far, held-out reward)"""
    held_out: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    """reward of each held-out prompt at the end"""
    occupancy: list[int] = field(default_factory=list)
    """busy slots over time: of every decode step, on a server of every tick"""
    step_ends: list[int] = field(default_factory=list)
    """entries of ``occupancy`` at the end of each training step"""
    idle: list[str] = field(default_factory=list)
    """why slots were empty in most of the rollouts of each step, as :class:`april.core.idle.Idle` names it; "" if none
    were"""
    max_abs_logprob_error: float = 0.0
    compared_tokens: int = 0
    tokens: Ledger = field(default_factory=Ledger)
    prompts: Ledger = field(default_factory=Ledger)
    drawn: int = 0
    """prompts taken from the source, counted at the source"""
    witnessed: int = 0
    """tokens that left the engine, counted by the witness"""
    disagreements: int = 0
    """delivered tokens that differ from what the witness saw"""


def held_out_prompts(seed: int, count: int) -> list[Prompt]:
    """The first ``count`` held-out prompts of a seed."""
    return [Prompt(task.prompt_ids(seed, i, held_out=True)) for i in range(count)]


async def score(prompt: Prompt, response: Response) -> float:
    """The verifiable reward."""
    return task.reward(prompt.token_ids, response.tokens)


class Arm:
    """Builds its own copy of the model, its stage and its scheduler; :meth:`run` does the rest.

    ``out`` is where weights for servers go.
    """

    def __init__(
        self, settings: DemoSettings, mode: str, seed: int, start: PreTrainedModel, out: Path = Path()
    ) -> None:
        self.settings = settings
        self.result = ArmResult(mode=mode, seed=seed, slots=settings.slots)
        self.model = copy.deepcopy(start)
        self.stage = set_up(settings, self.model, seed, out)
        self.witness = Witness(self.stage.engine)
        self.trainer = GrpoTrainer(
            self.model, learning_rate=settings.learning_rate, total_steps=settings.steps, rising_steps=2,
            token_mean=True,
        )  # fmt: skip
        self.weights: dict[int, StateDict] = {0: snapshot(self.model)}
        self.delivered: list[DeliveredSample] = []

    def run(self, start_rewards: NDArray[np.float64], on_step: OnStep) -> ArmResult:
        """Train; ``start_rewards`` are the held-out rewards of the common start."""
        r, s = self.result, self.settings
        r.curve.append((0, 0.0, float(start_rewards.mean())))
        config = s.config(r.mode, r.seed)
        with RolloutScheduler(config, prompts=self._prompts(), reward=score, engines=[self.witness]) as rollouts:
            for step in range(1, s.steps + 1):
                batch = self._rollout(rollouts)
                metrics = self._train(batch)
                rollouts.weight_update(self.stage.publish())
                self.weights[step] = snapshot(self.model)
                if step % s.evaluate_every == 0 and step < s.steps:
                    reward = float(self.evaluate(rollouts, s.held_out_between).mean())
                    r.curve.append((step, r.rollout_cpu_s, reward))
                on_step(step, metrics | dict(batch.metrics))
            r.held_out = self.evaluate(rollouts, s.held_out)
            r.curve.append((s.steps, r.rollout_cpu_s, float(r.held_out.mean())))
            rollouts.validate()
            books = rollouts.ledger()
        self.stage.close()
        r.group_spread = group_spread(self.delivered)
        r.tokens, r.prompts, r.witnessed = books["tokens"], books["prompts"], self.witness.tokens
        r.max_abs_logprob_error, r.compared_tokens = logprob_error(self.model, self.delivered, self.weights)
        return r

    def evaluate(self, rollouts: RolloutScheduler, count: int) -> NDArray[np.float64]:
        """Held-out rewards float64 [count], the same prompts and seeds in every mode."""
        self.witness.recording = False
        try:
            found = rollouts.evaluate(held_out_prompts(self.result.seed, count), seed=EVALUATION_SEED)
        finally:
            self.witness.recording = True
        rewards: NDArray[np.float64] = found.rewards[:, 0]
        return rewards

    def _prompts(self) -> Iterator[Prompt]:
        for index in itertools.count():
            self.result.drawn += 1
            yield Prompt(task.prompt_ids(self.result.seed, index))

    def _rollout(self, rollouts: RolloutScheduler) -> Batch:
        r = self.result
        self.stage.begin()
        cpu, wall = time.process_time(), time.perf_counter()
        batch = rollouts.next_batch()
        r.rollout_cpu_s += time.process_time() - cpu
        r.rollout_wall_s += time.perf_counter() - wall
        work = self.stage.end()
        r.decode_steps += work.decode_steps
        r.generated_tokens += work.generated_tokens
        r.occupancy += work.occupancy
        r.step_ends.append(len(r.occupancy))
        self._note(batch)
        return batch

    def _note(self, batch: Batch) -> None:
        r = self.result
        trained = batch.metrics["trained_tokens"]
        r.steps += 1
        r.trained_tokens += int(trained)
        r.stale_tokens += batch.off_policy_share * trained
        r.reprefill_tokens += int(batch.metrics["reprefill_tokens"])
        r.staleness += [sample.staleness for sample in batch.samples]
        r.lengths.append(batch.lengths.tolist())
        r.training_reward.append(float(batch.rewards.mean()))
        r.idle.append(why_empty(batch.metrics))
        r.disagreements += self.witness.disagreements(batch)
        self.delivered += batch.samples

    def _train(self, batch: Batch) -> dict[str, float]:
        cpu = time.process_time()
        metrics = self.trainer.update(grpo_batch(batch))
        self.result.train_cpu_s += time.process_time() - cpu
        return metrics


def why_empty(metrics: Mapping[str, float]) -> str:
    """What kept the most places empty while a batch was generated; "": nothing."""
    shares = {cause.value: metrics[f"idle_{cause}"] for cause in Idle if cause not in BETWEEN}
    cause = max(shares, key=lambda name: shares[name])
    return cause if shares[cause] > 0 else ""


def group_spread(samples: Iterable[DeliveredSample]) -> list[float]:
    """Coefficient of variation of the lengths of each group with two or more of ``samples``."""
    lengths: dict[int, list[int]] = defaultdict(list)
    for sample in samples:
        lengths[sample.id.group].append(len(sample.tokens))
    return [float(np.std(group) / np.mean(group)) for group in lengths.values() if len(group) > 1]


def grpo_batch(batch: Batch) -> GrpoBatch:
    """A delivered batch as the trainer's plain arrays."""
    return GrpoBatch(
        prompts=[s.prompt.token_ids for s in batch.samples],
        responses=[s.tokens for s in batch.samples],
        behaviour_logprobs=[s.logprobs for s in batch.samples],
        loss_masks=[s.loss_mask for s in batch.samples],
        rewards=batch.rewards,
        advantages=batch.advantages("grpo", epsilon=1e-4),
    )
