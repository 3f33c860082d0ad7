"""Runs the trainings of a design that have not been run yet: one file for each, written whole or not at all.

Invariants: a training that is there is never run again; which other trainings ran, how many at a time and how often it
was interrupted changes no outcome.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import multiprocessing
import os
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from april.serialization.state_file import write_atomic
from benchmarks.study.training import Outcome, Settings, train

Say = Callable[[str], None]
Train = Callable[[Settings, Any, Any], Outcome]
"""Train the start of a task: (settings, task, model)."""
NICE = 19
"""Priority of the workers: the lowest."""
COSTS = "costs.jsonl"
"""Name and CPU seconds of each training; no outcome depends on them."""
MADE_WITH = "made_with.jsonl"
"""Versions of what each start of the runner ran with."""
PACKAGES = ("april-rl", "torch", "transformers", "numpy", "reasoning-gym", "vllm", "sglang", "datasets")


class Cost(msgspec.Struct, frozen=True):
    """What a training, or a start, has cost."""

    name: str
    cpu_s: float
    wall_s: float


def outcome_path(out: Path, name: str) -> Path:
    """Return where the outcome of a training is."""
    return out / "runs" / f"{name.replace('/', '--')}.json"


def start_path(out: Path, settings: Settings) -> Path:
    """Return where the weights are from which all trainings of a task and a seed begin."""
    short = "" if settings.warm_up_steps is None else f"--{settings.warm_up_steps}"
    return out / "starts" / f"{settings.task}--{settings.seed}{short}.safetensors"


def missing(out: Path, trainings: Mapping[str, Settings], kind: type[Outcome] = Outcome) -> dict[str, Settings]:
    """Return the trainings without an outcome.

    Raises:
        ValueError: an outcome is of other settings; it is never overwritten.
    """
    left = {}
    for name, settings in trainings.items():
        path = outcome_path(out, name)
        if not path.exists():
            left[name] = settings
        elif (found := msgspec.json.decode(path.read_bytes(), type=kind).settings) != settings:
            raise ValueError(f"{path} was made with other settings, {found}; take another directory")
    return left


# ---------------------------------------------------------------- in a worker


def quiet_worker(nice: int) -> None:
    """Take one thread and a low priority."""
    import torch

    torch.set_num_threads(1)
    os.nice(max(0, nice - os.nice(0)))


def make_start(out: Path, settings: Settings) -> Cost:
    """Write the common start of a task and a seed."""
    from benchmarks.study.tasks import TASKS
    from benchmarks.study.warmup import weights_of

    cpu, wall = time.process_time(), time.perf_counter()
    path = start_path(out, settings)
    model = TASKS[settings.task]().start(settings.seed, settings.warm_up_steps, bool(settings.served))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, weights_of(model))
    return Cost(f"start/{path.stem}", time.process_time() - cpu, time.perf_counter() - wall)


def make_outcome(out: Path, name: str, settings: Settings, train: Train = train) -> Cost:
    """Run a training and write its outcome."""
    from benchmarks.study.tasks import TASKS
    from benchmarks.study.warmup import load_weights

    cpu, wall = time.process_time(), time.perf_counter()
    task = TASKS[settings.task]()
    model = task.untrained(settings.seed, bool(settings.served))
    start = start_path(out, settings)
    weights = start.read_bytes()
    load_weights(model, weights, start)
    made_with = versions() | {"start": hashlib.sha256(weights).hexdigest()[:16]}
    outcome = msgspec.structs.replace(train(settings, task, model), made_with=made_with)
    path = outcome_path(out, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, msgspec.json.encode(outcome) + b"\n")
    return Cost(name, time.process_time() - cpu, time.perf_counter() - wall)


# ---------------------------------------------------------------- in the runner


@dataclass(slots=True)
class Runner:
    """Gives workers what is to do next.

    Attributes:
        out: directory of the results.
        trainings: all of them, in order.
        workers: processes; 0: all in this one.
        nice: their priority.
        say: is told a line per training.
        make: runs a training and writes its outcome.
        starts: whether a start is made before it, of :func:`make_start`.
        kind: of the outcomes.
    """

    out: Path
    trainings: Mapping[str, Settings]
    workers: int = 2
    say: Say = print
    nice: int = NICE
    make: Callable[[Path, str, Settings], Cost] = make_outcome
    starts: bool = True
    kind: type[Outcome] = Outcome
    left: dict[str, Settings] = field(default_factory=dict)
    """Trainings that nobody has begun."""
    making: set[Path] = field(default_factory=set)
    """Starts that somebody makes."""
    failed: list[str] = field(default_factory=list)
    """Sentences on trainings that failed; the others go on."""

    def run(self) -> bool:
        """Run everything that is missing; return whether nothing failed."""
        self.left = missing(self.out, self.trainings, self.kind)
        self.out.mkdir(parents=True, exist_ok=True)
        began, all_left = time.perf_counter(), dict(self.left)
        self.say(f"{len(self.trainings) - len(self.left)} of {len(self.trainings)} trainings are there")
        _append(self.out / MADE_WITH, versions())
        if not self.workers:
            while (job := self._next()) is not None:
                self._done(_called(job), job, began, all_left)
            return not self.failed
        context = multiprocessing.get_context("spawn")
        running: dict[Future[Cost], _Job] = {}
        with ProcessPoolExecutor(self.workers, context, quiet_worker, (self.nice,), max_tasks_per_child=40) as pool:
            try:
                while True:
                    while len(running) < self.workers and (job := self._next()) is not None:
                        running[pool.submit(job.call, *job.arguments)] = job
                    if not running:
                        return not self.failed
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        job = running.pop(future)
                        self._done(future.exception() or future.result(), job, began, all_left)
            except KeyboardInterrupt:
                # what a worker has not finished begins anew the next time
                for process in (pool._processes or {}).values():
                    process.terminate()
                raise

    def _next(self) -> _Job | None:
        """Return the first training whose start is there, or the first start that nobody makes."""
        for name, settings in self.left.items():
            start = start_path(self.out, settings)
            if not self.starts or (start.exists() and start not in self.making):
                del self.left[name]
                return _Job(self.make, (self.out, name, settings), name)
            if start not in self.making:
                self.making.add(start)
                return _Job(make_start, (self.out, settings), f"start {start.stem}", start)
        return None

    def _done(self, result: Cost | BaseException, job: _Job, began: float, all_left: Mapping[str, Settings]) -> None:
        if job.start is not None and not isinstance(result, BaseException):
            self.making.discard(job.start)  # else it stays there, so that nobody tries again
        if isinstance(result, BaseException):
            self.failed.append(f"{job.name}: {type(result).__name__}: {result}")
            self.say(f"FAILED {self.failed[-1]}")
            return
        _append(self.out / COSTS, result)
        if job.start is None:
            waiting = sum(s.steps for s in self.left.values())
            done = sum(s.steps for s in all_left.values()) - waiting
            hours = (time.perf_counter() - began) / max(1, done) * waiting / 3600
            there = len(self.trainings) - len(self.left)
            self.say(
                f"{time.strftime('%H:%M:%S')} [{there}/{len(self.trainings)}] {job.name}: {result.cpu_s:.0f} s of CPU, "
                f"{result.wall_s:.0f} s; {hours:.1f} h left"
            )


@dataclass(frozen=True, slots=True)
class _Job:
    call: Callable[..., Cost]
    arguments: tuple[Any, ...]
    name: str
    start: Path | None = None
    """The start that it makes."""


def _called(job: _Job) -> Cost | BaseException:
    try:
        return job.call(*job.arguments)
    except Exception as error:
        return error


def versions() -> dict[str, str]:
    """Return versions of what a training runs with; outcomes repeat exactly with the same ones on the same machine."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _append(path: Path, line: Any) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


# ---------------------------------------------------------------- results as one file


def gather(out: Path, trainings: Mapping[str, Settings], kind: type[Outcome] = Outcome) -> dict[str, Outcome]:
    """Return the outcomes that are there, by name, in the design's order.

    Raises:
        ValueError: one was made with other settings.
    """
    left = missing(out, trainings, kind)
    return {
        name: msgspec.json.decode(outcome_path(out, name).read_bytes(), type=kind)
        for name in trainings if name not in left
    }  # fmt: skip


def write_results(path: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Write outcomes as lines: name and outcome."""
    lines = (msgspec.json.encode([name, outcome]) for name, outcome in outcomes.items())
    write_atomic(path, b"".join(line + b"\n" for line in lines))


def read_results(path: Path) -> dict[str, Outcome]:
    """Return what was written; nothing where there is no file."""
    lines = path.read_bytes().splitlines() if path.exists() else ()
    return dict(msgspec.json.decode(line, type=tuple[str, Outcome]) for line in lines)


def take_over(outcomes: Mapping[str, Outcome], out: Path, trainings: Mapping[str, Settings]) -> int:
    """Put outcomes that a directory lacks into it; returns how many those are.

    Outcomes of other settings than those of ``trainings``, or of none of them, stay where they are.
    """
    left, taken = missing(out, trainings), 0
    for name, outcome in outcomes.items():
        if left.get(name) == outcome.settings:
            target = outcome_path(out, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(target, msgspec.json.encode(outcome) + b"\n")
            taken += 1
    return taken


def status(out: Path, trainings: Mapping[str, Settings], kind: type[Outcome] = Outcome) -> Iterable[str]:
    """Yield what is there, by task and arm, and what it has cost."""
    left = missing(out, trainings, kind)
    groups: dict[str, Counter[bool]] = defaultdict(Counter)
    for name in trainings:
        groups[name.rpartition("/")[0]][name not in left] += 1
    for arm, counts in groups.items():
        yield f"{arm}: {counts[True]} of {counts.total()}"
    costs = out / COSTS
    spent = 0.0
    if costs.exists():
        spent = sum(msgspec.json.decode(line, type=Cost).cpu_s for line in costs.read_bytes().splitlines())
    yield f"{len(trainings) - len(left)} of {len(trainings)} trainings, {spent / 3600:.2f} hours of CPU"
