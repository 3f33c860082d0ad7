"""One training: an arm of the design on one task with one seed, from the common start to its last evaluation.

april's own scheduler, core and embedded engine, on virtual time. The outcome is a function of the settings alone: it
counts decode steps and tokens, and holds no seconds.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
from transformers import PreTrainedModel

import april
from april.config.settings import SamplingConfig
from april.core.types import GenerationMode
from april.demo.evaluation import evaluate
from april.demo.grpo import Trainer
from april.driver.rewards import Response
from april.testing import rollouts, run_virtual
from benchmarks.study.clockwork import TimedEngine
from benchmarks.study.losses import LOSSES
from benchmarks.study.tasks import Task

DIGITS = 5
"""Of the figures that are kept."""
QUARTERLY = ("ess_response", "staleness", "batch_reward", "length", "longest", "taught")
"""Effective sample size of the responses; of the batch: mean age of its tokens, mean reward, mean and longest response,
share of the responses with an advantage that is not 0."""


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
    """What came of a training; ``kl_k3`` and ``ess_token`` have an entry per training step."""

    settings: Settings
    evaluations: list[Evaluation]
    kl_k3: list[float]
    ess_token: list[float]
    quarters: dict[str, list[float]]
    """Means over each quarter of the training steps, of what QUARTERLY names."""
    old_share: float
    """Share of all trained tokens that are of older weights."""
    staleness_max: int
    places: float
    """Mean number of samples in flight, over decode steps."""
    made_with: dict[str, str] = {}
    """Versions of the packages."""


OnStep = Callable[[int, float], None]
"""Called with (steps done, reward of the batch)."""


def train(settings: Settings, task: Task, start: PreTrainedModel, on_step: OnStep | None = None) -> Outcome:
    """Train ``start`` in place and return what came of it."""
    return run_virtual(_train(settings, task, start, on_step), limit_s=1e12)


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


async def _train(settings: Settings, task: Task, model: PreTrainedModel, on_step: OnStep | None) -> Outcome:
    config = config_of(settings, task)
    apart = config.generation is GenerationMode.CONTINUOUS
    slots = settings.groups * settings.samples
    engine = TimedEngine(model, apart=apart, slots=slots, max_len=task.max_len, seed=settings.seed)
    trainer = Trainer(
        model, LOSSES[settings.loss], learning_rate=settings.learning_rate, minibatches=settings.minibatches,
        token_mean=settings.token_mean, seed=settings.seed,
    )  # fmt: skip
    run = _Run(settings, task, model, engine)

    def prompts() -> Iterator[april.Prompt]:
        for index in itertools.count():
            yield april.Prompt(task.prompt(settings.seed, index))

    async def reward(prompt: april.Prompt, response: Response) -> float:
        return task.reward(prompt.token_ids, response.tokens)

    run.evaluate(0)
    waiting: list[april.Batch] = []
    async with rollouts(config, engines=[engine], prompts=prompts(), reward=reward, check=False) as april_run:
        for step in range(1, settings.steps + 1):
            while len(waiting) <= settings.delay:
                waiting.append(await april_run.next_batch())
            batch = waiting.pop(0)
            run.note(batch, trainer.update(batch))
            if settings.train_time:
                await asyncio.sleep(settings.train_time)
            await april_run.weight_update(transfer=engine.hand_over if apart else None, trained=batch.id)
            if step % settings.evaluate_every == 0 or step == settings.steps:
                run.evaluate(step)
            if on_step is not None:
                on_step(step, float(batch.rewards.mean()))
        april_run.validate()
    return run.outcome()


class _Run:
    """What is noted on the way."""

    def __init__(self, settings: Settings, task: Task, model: PreTrainedModel, engine: TimedEngine) -> None:
        self._settings, self._task, self._model, self._engine = settings, task, model, engine
        self._evaluations: list[Evaluation] = []
        self._rows: list[dict[str, float]] = []
        self._trained_tokens = 0
        self._old_tokens = 0.0

    def note(self, batch: april.Batch, report: dict[str, float]) -> None:
        """Add a batch and the trainer's report on it."""
        trained = int(batch.metrics["trained_tokens"])
        self._trained_tokens += trained
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

    def evaluate(self, step: int) -> None:
        """Evaluate the present weights."""
        found = evaluate(self._model, self._task, drafts=self._task.drafts)
        stats = self._engine.stats
        self._evaluations.append(
            Evaluation(
                step=step, decode_steps=stats.decode_steps, trained_tokens=self._trained_tokens,
                reward=round(found["reward"], DIGITS), long=round(found["long"], DIGITS),
                passes=stats.decode_steps + stats.prefill_batches,
            )
        )  # fmt: skip

    def outcome(self) -> Outcome:
        """Return all of it."""
        stats = self._engine.stats
        return Outcome(
            settings=self._settings, evaluations=self._evaluations, **over_steps(self._rows),
            old_share=round(self._old_tokens / max(1, self._trained_tokens), DIGITS),
            places=round(stats.busy_slot_steps / max(1, stats.decode_steps), 2),
        )  # fmt: skip


def over_steps(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return what an outcome has of its training steps, of the figures of each."""

    def of(name: str) -> list[float]:
        return [row[name] for row in rows]

    return {
        "kl_k3": rounded(of("kl_k3")),
        "ess_token": rounded(of("ess_token")),
        "quarters": {name: rounded(quarter_means(of(name))) for name in QUARTERLY},
        "staleness_max": int(max(of("staleness_max"))),
    }


def rounded(values: Sequence[float]) -> list[float]:
    """Return values with as many digits as are of use."""
    return [float(f"{value:.3g}") for value in values]


def quarter_means(values: Sequence[float]) -> list[float]:
    """Return the mean of each quarter of a list, as equal in length as can be; fewer for fewer than four values."""
    return [float(part.mean()) for part in np.array_split(np.array(values), 4) if len(part)]
