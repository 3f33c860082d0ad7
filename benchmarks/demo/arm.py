"""An arm of the demo: one mode, one seed, from the warmed-up weights to the last training step.

The modes are ways to schedule the same rollouts, from the same start, in the loop of the study; here it runs in real
time. Every delivered token is checked: a witness keeps those of each attempt where they leave the engine (the scheduler
never touches its copy), and each is recomputed by a full forward pass under the weights of its stamp, which are kept
for every version. A wrong stamp, a stale KV cache or a lost token shows as a difference.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel

import april
from april.core.batch import Batch, DeliveredSample, rows_by_sample
from april.core.partial_buffer import IdleCause
from april.core.tape import SegmentKind
from april.engines.protocol import Chunk, Engine, Request
from april.engines.transformers.engine import TransformersEngine
from april.testing import Rollouts
from april.testing.recording_engine import RecordingEngine
from benchmarks.study import countdown
from benchmarks.study.evaluation import evaluate_together
from benchmarks.study.grpo import response_logprobs
from benchmarks.study.tasks import Task
from benchmarks.study.training import Evaluation, Outcome, Settings, Training
from benchmarks.study.warmup import STEPS

MAX_LEN = countdown.PROMPT_LENGTH + countdown.RESPONSE_CAP
BETWEEN = (IdleCause.TRAINER, IdleCause.UPDATE, IdleCause.PAUSE, IdleCause.EVALUATION)
"""Causes of empty places between two batches, not while one is generated."""
MODES = ("sync", "april", "refill", "quorum")
"""Wait for all; N' = 2N as in the paper; a constant number of samples in flight; N' = 1.5N with a group quorum."""
SHOWN = MODES[:3]
"""Those that run where nobody asks for more."""
OVER_SAMPLING = {"april": 2.0, "quorum": 1.5}
"""N' / N where it is not 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Sizes of the demo."""

    groups: int = 8
    """N: prompt groups per step."""
    samples: int = 8
    """n: responses per prompt."""
    steps: int = 80
    """Training steps per mode and seed."""
    seeds: int = 4
    evaluate_every: int = 5
    """Training steps between two evaluations on the held-out questions."""
    modes: tuple[str, ...] = SHOWN
    """Of MODES, sync among them."""
    group_quorum: float = 0.5
    """Quorum of the mode ``quorum``; the others wait for whole groups."""
    learning_rate: float = 7e-4
    """Constant, in every mode."""
    warm_up_steps: int = STEPS
    served: str = ""
    """Kind of the server that generates, vllm or sglang; empty: the embedded engine."""

    @property
    def slots(self) -> int:
        """Number of decode slots, the same in every mode: as many as sync has in flight."""
        return self.groups * self.samples

    @property
    def evaluated(self) -> list[int]:
        """Training steps before which, and after all of which, the held-out questions are asked."""
        return [*range(0, self.steps, self.evaluate_every), self.steps]

    @property
    def target_step(self) -> int:
        """Training step of sync whose reward the others have to reach: the last one evaluated in the first half."""
        return max(step for step in self.evaluated if 2 * step <= self.steps)

    def training(self, mode: str, seed: int) -> Settings:
        """Return the settings of one training."""
        own: dict[str, dict[str, Any]] = {
            "refill": {"refill": "sample"},
            "quorum": {"group_quorum": self.group_quorum},
        }
        return Settings(
            task="tail", seed=seed, steps=self.steps, groups=self.groups, samples=self.samples, loss="sequence",
            learning_rate=self.learning_rate, april=own.get(mode, {}), over_sampling=OVER_SAMPLING.get(mode, 1.0),
            evaluate_every=self.evaluate_every, warm_up_steps=self.warm_up_steps, served=self.served,
        )  # fmt: skip

    def trainings(self) -> dict[str, Settings]:
        """Return all of them, by MODE/SEED."""
        return {f"{mode}/{seed}": self.training(mode, seed) for seed in range(self.seeds) for mode in self.modes}


@dataclass(frozen=True, slots=True)
class Work:
    """Work between two moments."""

    decode_steps: int
    generated_tokens: int
    occupancy: list[int]
    """Busy slots over time, in equal parts of it."""


class Stage:
    """The engine of one arm and the way of new weights there: here embedded, it reads the trainer's model in place.

    Time is counted in decode steps. A stage on a server overrides all methods.
    """

    engine: Engine
    """Generates from the weights that were published last."""

    def __init__(self, settings: Settings, model: PreTrainedModel) -> None:
        self.engine = self._embedded = TransformersEngine(
            model, slots=settings.slots, max_len=MAX_LEN, seed=settings.seed
        )
        self._before: dict[str, float] = {}

    def publish(self) -> str | None:
        """Return the directory with the trainer's new weights, or None where they are read in place."""
        return None

    def begin(self) -> None:
        """Begin to count the work of a step."""
        self._before = self._embedded.stats.counters()
        self._embedded.stats.trace = []

    def end(self) -> Work:
        """Return the work since the step began."""
        stats = self._embedded.stats
        after, trace, stats.trace = stats.counters(), stats.trace or [], None
        steps, tokens = (int(after[name] - self._before[name]) for name in ("decode_steps", "generated_tokens"))
        return Work(steps, tokens, [busy for _, busy in trace])

    def close(self) -> None:
        """End the arm; the scheduler has closed the engine."""


MakeStage = Callable[[Settings, PreTrainedModel], Stage]


class Point(Evaluation, frozen=True, kw_only=True, array_like=True):
    """An evaluation, and the CPU seconds that rollouts had taken until then."""

    rollout_cpu_s: float = 0.0


class Measured(msgspec.Struct, kw_only=True):
    """What is measured in an arm alone; CPU seconds are those of this process, without those of a server."""

    decode_steps: int = 0
    generated_tokens: int = 0
    trained_tokens: int = 0
    reprefill_tokens: int = 0
    rollout_cpu_s: float = 0.0
    rollout_wall_s: float = 0.0
    train_cpu_s: float = 0.0
    stale_tokens: float = 0.0
    staleness: list[int] = []
    """staleness of every delivered sample"""
    lengths: list[list[int]] = []
    """response lengths of each step"""
    group_spread: list[float] = []
    """coefficient of variation of the lengths of each group, as far as it was delivered"""
    occupancy: list[int] = []
    """busy slots over time: at every decode step, on a server at every tick"""
    step_ends: list[int] = []
    """entries of ``occupancy`` at the end of each training step"""
    idle: list[str] = []
    """main cause of empty slots in the rollouts of each step, an :class:`april.core.run_times.Idle`; "" if none were"""
    max_abs_logprob_error: float = 0.0
    compared_tokens: int = 0
    tokens: dict[str, Any] = {}
    prompts: dict[str, Any] = {}
    """The two ledgers."""
    drawn: int = 0
    """prompts taken from the source, counted at the source"""
    witnessed: int = 0
    """tokens that left the engine, counted by the witness"""
    disagreements: int = 0
    """delivered tokens that differ from what the witness saw"""


class ArmOutcome(Outcome, frozen=True, kw_only=True):
    """What came of an arm."""

    evaluations: list[Point]  # type: ignore[assignment]
    measured: Measured


# ---------------------------------------------------------------- exactness

StateDict = Mapping[str, torch.Tensor]


def snapshot(model: PreTrainedModel) -> StateDict:
    """Return a copy of the present weights."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def logprob_error(
    model: PreTrainedModel, samples: Sequence[DeliveredSample], weights: Mapping[int, StateDict]
) -> tuple[float, int]:
    """Return (largest absolute difference in nats, tokens compared) over all generated tokens of ``samples``.

    ``weights[n]`` are the weights of version n; ``model`` gives the architecture and is not changed.
    """
    by_version: dict[int, list[DeliveredSample]] = defaultdict(list)
    for sample in samples:
        for n in {s.version.n for s in sample.segments if s.kind is SegmentKind.GENERATED}:
            by_version[n].append(sample)
    checker = copy.deepcopy(model)
    largest, compared = 0.0, 0
    for n, rows in sorted(by_version.items()):
        checker.load_state_dict(weights[n])
        recomputed = response_logprobs(checker, [s.prompt.token_ids for s in rows], [s.tokens for s in rows])
        for sample, fresh in zip(rows, recomputed, strict=True):
            stamped = (sample.versions[:, 1] == n) & (sample.loss_mask == 1)
            if stamped.any():
                # NaN must not pass: np.max propagates it
                largest = float(np.max([largest, np.abs(sample.logprobs[stamped] - fresh[stamped]).max()]))
                compared += int(stamped.sum())
    return largest, compared


class Witness(RecordingEngine):
    """An engine that keeps a copy of what passes through it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.recorded_tokens = 0
        """Number of tokens handed over."""

    def alter_chunk(self, request: Request, chunk: Chunk) -> Chunk:
        """Count the tokens."""
        self.recorded_tokens += len(chunk.tokens)
        return chunk

    def disagreements(self, batch: Batch) -> int:
        """Return the number of delivered tokens whose attempt handed over another token, log-probability or version."""
        wrong = 0
        for sample in batch.samples:
            used: dict[str, int] = {}
            for segment in sample.segments:
                if segment.kind is not SegmentKind.GENERATED:
                    continue
                rows = self.yielded[segment.attempt_id]
                tokens = np.concatenate([r.tokens for r in rows])
                logprobs = np.concatenate([r.logprobs for r in rows])
                versions = np.concatenate([np.full(len(r.tokens), r.version.n) for r in rows])
                start = used.get(segment.attempt_id, 0)
                used[segment.attempt_id] = stop = start + segment.count
                here = slice(segment.start, segment.start + segment.count)
                equal = (
                    (sample.tokens[here] == tokens[start:stop])
                    & (sample.logprobs[here] == logprobs[start:stop])
                    & (sample.versions[here, 1] == versions[start:stop])
                )
                wrong += int(segment.count - equal.sum())
        return wrong


# ---------------------------------------------------------------- the arm


class Arm(Training):
    """The study's training with the engine of a stage, where more is measured."""

    def __init__(self, settings: Settings, task: Task, model: PreTrainedModel, make_stage: MakeStage = Stage) -> None:
        self.measured = Measured()
        self.stage = make_stage(settings, model)
        self.witness = Witness(self.stage.engine)
        self.weights: dict[int, StateDict] = {0: snapshot(model)}
        self.delivered: list[DeliveredSample] = []
        super().__init__(settings, task, model)

    def make_engine(self) -> Engine:
        """Return the witness."""
        return self.witness

    def prompts(self) -> Iterator[april.Prompt]:
        """Count them."""
        for prompt in super().prompts():
            self.measured.drawn += 1
            yield prompt

    async def roll_out(self, run: Rollouts) -> Batch:
        """Measure it."""
        m = self.measured
        self.stage.begin()
        cpu, wall = time.process_time(), time.perf_counter()
        batch = await run.next_batch()
        m.rollout_cpu_s += time.process_time() - cpu
        m.rollout_wall_s += time.perf_counter() - wall
        work = self.stage.end()
        m.decode_steps += work.decode_steps
        m.generated_tokens += work.generated_tokens
        m.occupancy += work.occupancy
        m.step_ends.append(len(m.occupancy))
        return batch

    def update(self, batch: Batch) -> dict[str, float]:
        """Measure it."""
        cpu = time.process_time()
        report = super().update(batch)
        self.measured.train_cpu_s += time.process_time() - cpu
        return report

    async def hand_over(self, run: Rollouts, batch: Batch) -> None:
        """Publish the weights, and keep them."""
        await run.weight_update(self.stage.publish())
        self.weights[len(self.weights)] = snapshot(self.model)

    def evaluate(self, step: int) -> None:
        """Ask the held-out questions of the trainer's own weights: no engine is asked, and nothing of it is counted."""
        m, found = self.measured, evaluate_together(self.model, self.task)
        self.evaluations.append(
            Point(
                step=step, decode_steps=m.decode_steps, trained_tokens=self.trained_tokens, reward=found["reward"],
                long=found["long"], rollout_cpu_s=m.rollout_cpu_s,
            )
        )  # fmt: skip

    def note(self, batch: Batch, report: dict[str, float]) -> None:
        """Add what the figures of the demo need."""
        super().note(batch, report)
        m, trained = self.measured, batch.metrics["trained_tokens"]
        m.trained_tokens += int(trained)
        m.stale_tokens += batch.off_policy_share * trained
        m.reprefill_tokens += int(batch.metrics["reprefill_tokens"])
        samples = rows_by_sample(batch.samples)
        m.staleness += [max(row.staleness for row in rows) for rows in samples]
        m.lengths.append([sum(len(row.tokens) for row in rows) for rows in samples])
        m.idle.append(why_empty(batch.metrics))
        m.disagreements += self.witness.disagreements(batch)
        self.delivered += batch.samples

    def places(self) -> float:
        """Return the mean number of busy slots."""
        return float(np.mean(self.measured.occupancy))

    def outcome(self, run: Rollouts) -> ArmOutcome:
        """Check every token, and return all of it."""
        self.stage.close()
        m, books = self.measured, run.ledger()
        m.group_spread = group_spread(self.delivered)
        m.tokens, m.prompts = (books[name].as_dict() for name in ("tokens", "prompts"))
        m.witnessed = self.witness.recorded_tokens
        m.max_abs_logprob_error, m.compared_tokens = logprob_error(self.model, self.delivered, self.weights)
        return ArmOutcome(**self.figures(), measured=m)


def train_arm(settings: Settings, task: Task, start: PreTrainedModel, make_stage: MakeStage = Stage) -> Outcome:
    """Train ``start`` in place, in real time, and return what came of it."""
    return asyncio.run(Arm(settings, task, start, make_stage).run())


def why_empty(metrics: Mapping[str, float]) -> str:
    """Return the cause that kept the most places empty while a batch was generated; "" if none did."""
    shares = {cause.value: metrics[f"idle_{cause}"] for cause in IdleCause if cause not in BETWEEN}
    cause = max(shares, key=lambda name: shares[name])
    return cause if shares[cause] > 0 else ""


def group_spread(samples: Iterable[DeliveredSample]) -> list[float]:
    """Return the coefficient of variation of the lengths of each group with two or more of ``samples``."""
    lengths: dict[int, list[int]] = defaultdict(list)
    for rows in rows_by_sample(list(samples)):
        lengths[rows[0].id.group].append(sum(len(row.tokens) for row in rows))
    return [float(np.std(group) / np.mean(group)) for group in lengths.values() if len(group) > 1]
