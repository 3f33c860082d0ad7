"""One training: an arm of the design on one task with one seed, from the common start to its last evaluation.

april's own scheduler, core and embedded engine, on virtual time. The outcome is a function of the settings alone: it
counts decode steps and tokens, and holds no seconds.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
from transformers import PreTrainedModel

import april
from april.config.settings import SamplingConfig
from april.core.types import GenerationMode
from april.driver.rewards import Response
from april.testing import Rollouts, rollouts, run_virtual
from benchmarks.study.clockwork import TimedEngine
from benchmarks.study.evaluation import evaluate
from benchmarks.study.grpo import Noise, Trainer
from benchmarks.study.losses import LOSSES
from benchmarks.study.tasks import Task

DIGITS = 5
"""Of the figures that are kept."""
QUARTERLY = ("ess_response", "staleness", "batch_reward", "length", "longest", "taught")
"""Effective sample size of the responses; of the batch: mean age of its tokens, mean reward, mean and longest response,
share of the responses with an advantage that is not 0."""

PER_RESPONSE = ("kl_response", "kl_response_far", "weight_response", "weight_effective")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a training depends on, but its task's code and the versions of the packages."""

    task: str
    seed: int
    steps: int
    groups: int
    """N."""
    samples: int
    """n."""
    loss: str
    learning_rate: float
    april: dict[str, Any] = {}
    """Settings of april, beyond those of synchronous training."""
    over_sampling: float = 1.0
    """N' / N."""
    delay: int = 0
    """Batches between the one that is fetched and the one that is trained: a clean staleness of every token."""
    minibatches: int = 1
    token_mean: bool = True
    evaluate_every: int = 5
    train_time: float = 0.0
    """Virtual seconds of an update, in decode steps: of meaning where generation goes on meanwhile."""
    warm_up_steps: int | None = None
    """Of the start; None means the task's own."""
    noise: float = 0.0
    """KL divergence in nats per token of a noise on the sampled log-probabilities, as an engine in bfloat16 has it."""
    as_long_as: int = 0
    """The weight of a response also counts noise alone, of as many tokens as it lacks to this number."""
    served: str = ""
    """Kind of the server that generates, vllm or sglang, for which the model has another shape; empty: none does."""

    @property
    def slots(self) -> int:
        """Number of samples in flight: as many as synchronous training has."""
        return self.groups * self.samples


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An evaluation, and what had been spent until then."""

    step: int
    decode_steps: int
    trained_tokens: int
    reward: float
    long: float
    """Of the long prompts alone."""
    passes: int | None = None
    """Decode steps and prefills; None where they were not counted."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a training; lists of numbers have an entry per training step."""

    settings: Settings
    evaluations: list[Evaluation]
    kl_k3: list[float]
    ess_token: list[float]
    kl_response: list[float] = []
    """KL divergence in nats per response, by the k3 estimator; empty where it was not kept."""
    kl_response_far: list[float] = []
    """The same without the tokens whose log ratio is within the dead zone."""
    weight_response: list[float] = []
    """Mean weight of the loss over the trained tokens."""
    weight_effective: list[float] = []
    """Effective sample size of these weights as a share of the tokens; empty where it was not kept."""
    quarters: dict[str, list[float]]
    """Means over each quarter of the training steps, of what QUARTERLY names."""
    old_share: float
    """Share of all trained tokens that are of older weights."""
    staleness_max: int
    places: float
    """Mean number of samples in flight, over decode steps."""
    made_with: dict[str, str] = {}
    """Versions of the packages, and ``start``, the begin of the SHA-256 of the weights from which it began."""


def train(settings: Settings, task: Task, start: PreTrainedModel) -> Outcome:
    """Train ``start`` in place, on virtual time, and return what came of it."""
    return run_virtual(Training(settings, task, start).run(), limit_s=1e12)


class Capped(Protocol):
    """A task, as april's configuration needs it."""

    @property
    def response_cap(self) -> int:
        """Most tokens of a response, EOS included."""


def config_of(settings: Settings, task: Capped, **others: Any) -> april.Config:
    """Return april's configuration: synchronous, unless the settings say otherwise; ``others`` are set as well."""
    chosen: dict[str, Any] = {
        "rollout_batch_size": settings.groups,
        "n_samples_per_prompt": settings.samples,
        "over_sampling_batch_size": round(settings.over_sampling * settings.groups),
        "partial_rollout": bool(settings.april) or settings.over_sampling > 1.0,
        "max_in_flight": settings.groups * settings.samples,
        "max_response_len": task.response_cap,
        "sampling": SamplingConfig(temperature=1.0),
        "seed": settings.seed,
    }
    if settings.delay:
        chosen["max_staleness"] = settings.delay
    return april.Config(**(chosen | settings.april | others))


class Training:
    """The loop of every training on a small model: roll out, train, hand the weights over, and evaluate now and then.

    Args:
        settings: of the training.
        task: its prompts and rewards.
        model: trained in place.
    """

    def __init__(self, settings: Settings, task: Task, model: PreTrainedModel) -> None:
        self.settings, self.task, self.model = settings, task, model
        self.config = config_of(settings, task)
        self.trainer = Trainer(
            model, LOSSES[settings.loss], learning_rate=settings.learning_rate, minibatches=settings.minibatches,
            token_mean=settings.token_mean, seed=settings.seed, noise=Noise(settings.noise, settings.as_long_as),
        )  # fmt: skip
        self.evaluations: list[Evaluation] = []
        self._rows: list[dict[str, float]] = []
        self.trained_tokens = 0
        self._old_tokens = 0.0
        self.engine = self.make_engine()

    async def run(self) -> Outcome:
        """Train, and return what came of it."""
        settings = self.settings
        self.evaluate(0)
        waiting: list[april.Batch] = []
        async with rollouts(
            self.config, engines=[self.engine], prompts=self.prompts(), reward=self.reward, check=False
        ) as run:
            for step in range(1, settings.steps + 1):
                while len(waiting) <= settings.delay:
                    waiting.append(await self.roll_out(run))
                batch = waiting.pop(0)
                self.note(batch, self.update(batch))
                if settings.train_time:
                    await asyncio.sleep(settings.train_time)
                await self.hand_over(run, batch)
                if step % settings.evaluate_every == 0 or step == settings.steps:
                    self.evaluate(step)
            run.validate()
        return self.outcome(run)

    # ---------------------------------------------------------------- what differs where more is measured

    def make_engine(self) -> Any:
        """Return the engine: on virtual time, with weights of its own where it generates beside the trainer."""
        self._apart = self.config.generation is GenerationMode.CONTINUOUS
        self._timed = TimedEngine(
            self.model, apart=self._apart, slots=self.settings.slots, max_len=self.task.max_len, seed=self.settings.seed
        )
        return self._timed

    def prompts(self) -> Iterator[april.Prompt]:
        """Yield the prompts, without an end."""
        for index in itertools.count():
            yield april.Prompt(self.task.prompt(self.settings.seed, index))

    async def reward(self, prompt: april.Prompt, response: Response) -> float:
        """Return the task's reward."""
        return self.task.reward(prompt.token_ids, response.tokens)

    async def roll_out(self, run: Rollouts) -> april.Batch:
        """Return the next batch."""
        return await run.next_batch()

    def update(self, batch: april.Batch) -> dict[str, float]:
        """Train on a batch."""
        return self.trainer.update(batch)

    async def hand_over(self, run: Rollouts, batch: april.Batch) -> None:
        """Give the engine the new weights."""
        await run.weight_update(transfer=self._timed.hand_over if self._apart else None, trained=batch.id)

    def evaluate(self, step: int) -> None:
        """Evaluate the present weights."""
        found = evaluate(self.model, self.task, drafts=self.task.drafts)
        stats = self._timed.stats
        self.evaluations.append(
            Evaluation(
                step=step, decode_steps=stats.decode_steps, trained_tokens=self.trained_tokens,
                reward=round(found["reward"], DIGITS), long=round(found["long"], DIGITS),
                passes=stats.decode_steps + stats.prefill_batches,
            )
        )  # fmt: skip

    def note(self, batch: april.Batch, report: dict[str, float]) -> None:
        """Add a batch that was trained, and the trainer's report on it."""
        trained = int(batch.metrics["trained_tokens"])
        self.trained_tokens += trained
        self._old_tokens += batch.off_policy_share * trained
        lengths = batch.lengths
        self._rows.append(
            report
            | {
                "staleness": float(batch.metrics["staleness_mean"]),
                "staleness_max": float(batch.metrics["staleness_max"]),
                "batch_reward": float(batch.rewards.mean()),
                "length": float(lengths.mean()),
                "longest": float(lengths.max()),
            }
        )

    def places(self) -> float:
        """Return the mean number of samples in flight, over decode steps."""
        stats = self._timed.stats
        return stats.busy_slot_steps / max(1, stats.decode_steps)

    def outcome(self, run: Rollouts) -> Outcome:
        """Return all of it; the rollouts are closed."""
        return Outcome(**self.figures())

    def figures(self) -> dict[str, Any]:
        """Return what every outcome has."""
        return {
            "settings": self.settings, "evaluations": self.evaluations, **over_steps(self._rows),
            "old_share": round(self._old_tokens / max(1, self.trained_tokens), DIGITS),
            "places": round(self.places(), 2),
        }  # fmt: skip


def over_steps(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return what an outcome has of its training steps, of the figures of each."""

    def of(name: str) -> list[float]:
        return [row[name] for row in rows]

    return {
        "kl_k3": rounded(of("kl_k3")),
        "ess_token": rounded(of("ess_token")),
        **{name: rounded(of(name)) for name in PER_RESPONSE if name in rows[0]},
        "quarters": {name: rounded(quarter_means(of(name))) for name in QUARTERLY},
        "staleness_max": int(max(of("staleness_max"))),
    }


def rounded(values: Sequence[float]) -> list[float]:
    """Return values with as many digits as are of use."""
    return [float(f"{value:.3g}") for value in values]


def quarter_means(values: Sequence[float]) -> list[float]:
    """Return the mean of each quarter of a list, as equal in length as can be; fewer for fewer than four values."""
    return [float(part.mean()) for part in np.array_split(np.array(values), 4) if len(part)]
