"""An arm of the demo: one mode, one seed, from the warmed-up weights to the last training step.

The modes are ways to schedule the same rollouts, from the same start. Every delivered token is checked: a witness
keeps those of each attempt where they leave the engine (the scheduler never touches its copy), and each is recomputed
by a full forward pass under the weights of its stamp, which are kept for every version. A wrong stamp, a stale KV cache
or a lost token shows as a difference.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from april.config.settings import Config, SamplingConfig
from april.core.batch import Batch, DeliveredSample, rows_by_sample
from april.core.ledger import Ledger
from april.core.partial_buffer import Idle
from april.core.tape import SegmentKind
from april.core.types import Prompt, Refill
from april.demo import task
from april.demo.evaluation import evaluate_together
from april.demo.grpo import SEQUENCE, Trainer, response_logprobs
from april.demo.warmup import STEPS
from april.driver.rewards import Response
from april.engines.protocol import Chunk, Engine, Request
from april.engines.transformers.engine import TransformersEngine
from april.scheduler import RolloutScheduler
from april.testing.recording_engine import RecordingEngine

MAX_LEN = task.PROMPT_LENGTH + task.RESPONSE_CAP
BETWEEN = (Idle.TRAINER, Idle.UPDATE, Idle.PAUSE, Idle.EVALUATION)
"""Causes of empty places between two batches, not while one is generated."""
OnStep = Callable[[int, dict[str, float]], None]
"""Called with (steps done, figures of the last one)."""


MODES = ("sync", "april", "refill", "quorum")
"""Wait for all; N' = 2N as in the paper; a constant number of samples in flight; N' = 1.5N with a group quorum."""
SHOWN = MODES[:3]
"""Those of `april demo` where nobody asks for more."""
OVER_SAMPLING = {"april": 2.0, "quorum": 1.5}
"""N' / N where it is not 1."""
EMBEDDED = "transformers"


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
    engine: str = EMBEDDED
    """The embedded engine, or a kind of server: vllm or sglang."""

    @property
    def embedded(self) -> bool:
        """True if the engine is in this process."""
        return self.engine == EMBEDDED

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

    def config(self, mode: str, seed: int) -> Config:
        """Return april's configuration of one mode."""
        return Config(
            rollout_batch_size=self.groups,
            n_samples_per_prompt=self.samples,
            over_sampling_batch_size=int(OVER_SAMPLING.get(mode, 1.0) * self.groups),
            partial_rollout=mode != "sync",
            group_quorum=self.group_quorum if mode == "quorum" else 1.0,
            refill=Refill.SAMPLE if mode == "refill" else Refill.NONE,
            max_in_flight=self.slots,
            max_response_len=task.RESPONSE_CAP,
            sampling=SamplingConfig(temperature=1.0),
            seed=seed,
        )


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

    def __init__(self, settings: DemoSettings, model: PreTrainedModel, seed: int) -> None:
        self.engine = self._embedded = TransformersEngine(model, slots=settings.slots, max_len=MAX_LEN, seed=seed)
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


MakeStage = Callable[[DemoSettings, PreTrainedModel, int], Stage]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """An evaluation, and what had been spent until then."""

    step: int
    """Training steps."""
    decode_steps: int
    rollout_cpu_s: float
    reward: float
    """Expected reward of held-out prompts as they are drawn."""
    reward_long: float
    """The same of long prompts alone."""


@dataclass(slots=True, kw_only=True)
class ArmResult:
    """Everything measured in one arm; CPU seconds are those of this process, without those of a server."""

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
    """staleness of every delivered sample"""
    lengths: list[list[int]] = field(default_factory=list)
    """response lengths of each step"""
    group_spread: list[float] = field(default_factory=list)
    """coefficient of variation of the lengths of each group, as far as it was delivered"""
    curve: list[Point] = field(default_factory=list)
    """an entry per evaluation"""
    occupancy: list[int] = field(default_factory=list)
    """busy slots over time: at every decode step, on a server at every tick"""
    step_ends: list[int] = field(default_factory=list)
    """entries of ``occupancy`` at the end of each training step"""
    idle: list[str] = field(default_factory=list)
    """main cause of empty slots in the rollouts of each step, an :class:`april.core.run_times.Idle`; "" if none were"""
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

    def alter(self, request: Request, chunk: Chunk) -> Chunk:
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
                rows = self.handed_over[segment.attempt_id]
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


async def score(prompt: Prompt, response: Response) -> float:
    """Return the verifiable reward."""
    return task.reward(prompt.token_ids, response.tokens)


class Arm:
    """Builds its own copy of the model, its stage and its scheduler; :meth:`run` does the rest."""

    def __init__(
        self, settings: DemoSettings, mode: str, seed: int, start: PreTrainedModel, make_stage: MakeStage = Stage
    ) -> None:
        self.settings = settings
        self.result = ArmResult(mode=mode, seed=seed, slots=settings.slots)
        self.model = copy.deepcopy(start)
        self.stage = make_stage(settings, self.model, seed)
        self.witness = Witness(self.stage.engine)
        self.trainer = Trainer(self.model, SEQUENCE, learning_rate=settings.learning_rate)
        self.held_out = task.questions(task.TAIL)
        self.weights: dict[int, StateDict] = {0: snapshot(self.model)}
        self.delivered: list[DeliveredSample] = []

    def run(self, on_step: OnStep) -> ArmResult:
        """Train."""
        r, s = self.result, self.settings
        self._evaluate(0)
        config = s.config(r.mode, r.seed)
        with RolloutScheduler(config, prompts=self._prompts(), reward=score, engines=[self.witness]) as rollouts:
            for step in range(1, s.steps + 1):
                batch = self._rollout(rollouts)
                metrics = self._train(batch)
                rollouts.weight_update(self.stage.publish())
                self.weights[step] = snapshot(self.model)
                if step in s.evaluated:
                    self._evaluate(step)
                on_step(step, metrics | dict(batch.metrics))
            rollouts.validate()
            books = rollouts.ledger()
        self.stage.close()
        r.group_spread = group_spread(self.delivered)
        r.tokens, r.prompts, r.witnessed = books["tokens"], books["prompts"], self.witness.recorded_tokens
        r.max_abs_logprob_error, r.compared_tokens = logprob_error(self.model, self.delivered, self.weights)
        return r

    def _evaluate(self, step: int) -> None:
        """Ask the held-out questions of the trainer's own weights: no engine is asked, and nothing of it is counted."""
        r, found = self.result, evaluate_together(self.model, self.held_out)
        r.curve.append(
            Point(
                step=step, decode_steps=r.decode_steps, rollout_cpu_s=r.rollout_cpu_s, reward=found["reward"],
                reward_long=found["long"],
            )
        )  # fmt: skip

    def _prompts(self) -> Iterator[Prompt]:
        for index in itertools.count():
            self.result.drawn += 1
            yield Prompt(task.prompt_ids(self.result.seed, index, sizes=task.TAIL))

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
        samples = rows_by_sample(batch.samples)
        r.staleness += [max(row.staleness for row in rows) for rows in samples]
        r.lengths.append([sum(len(row.tokens) for row in rows) for rows in samples])
        r.idle.append(why_empty(batch.metrics))
        r.disagreements += self.witness.disagreements(batch)
        self.delivered += batch.samples

    def _train(self, batch: Batch) -> dict[str, float]:
        cpu = time.process_time()
        metrics = self.trainer.update(batch)
        self.result.train_cpu_s += time.process_time() - cpu
        return metrics


def why_empty(metrics: Mapping[str, float]) -> str:
    """Return the cause that kept the most places empty while a batch was generated; "" if none did."""
    shares = {cause.value: metrics[f"idle_{cause}"] for cause in Idle if cause not in BETWEEN}
    cause = max(shares, key=lambda name: shares[name])
    return cause if shares[cause] > 0 else ""


def group_spread(samples: Iterable[DeliveredSample]) -> list[float]:
    """Return the coefficient of variation of the lengths of each group with two or more of ``samples``."""
    lengths: dict[int, list[int]] = defaultdict(list)
    for rows in rows_by_sample(list(samples)):
        lengths[rows[0].id.group].append(sum(len(row.tokens) for row in rows))
    return [float(np.std(group) / np.mean(group)) for group in lengths.values() if len(group) > 1]
