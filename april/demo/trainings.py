"""The trainings of the demo: in this process one after another, or side by side in others, with a thread each.

Invariant: in how many processes they run changes no result, but for seconds. Refill fills a free place as soon as it
can, so in which decode step it does may depend on what else the machine does, as it would in one process.
"""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from logging.handlers import QueueHandler
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch

from april.demo.arm import Arm, ArmResult, DemoSettings, MakeStage, OnStep, Stage
from april.demo.task import TAIL
from april.demo.warmup import build_model, load_weights, warm_up, weights_of
from april.errors import AprilError
from april.process_pool import process_pool, sigterm_unwinds, undisturbed

Begin = Callable[[str, int], OnStep]
"""Begin a phase of so many steps; the result is called with (steps done, figures)."""
LOOK_S = 0.2
"""Time between two looks at what other processes have reported."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where all modes of a seed begin: weights, and the CPU seconds of their warm-up."""

    seed: int
    weights: bytes
    cpu_s: float


@dataclass(slots=True)
class Trained:
    """Results by mode, in the order of the seeds."""

    arms: dict[str, list[ArmResult]]
    warm_up_cpu_s: float = 0.0


def make_start(settings: DemoSettings, seed: int, report: OnStep) -> Start:
    """Warm up."""
    cpu = time.process_time()
    model = warm_up(
        seed, lambda done, total, loss: report(done, {"loss": loss}), settings.warm_up_steps,
        for_servers=not settings.embedded, sizes=TAIL,
    )  # fmt: skip
    return Start(seed, weights_of(model), time.process_time() - cpu)


def run_arm(
    settings: DemoSettings, start: Start, mode: str, report: OnStep, make_stage: MakeStage = Stage
) -> ArmResult:
    """Train in one mode."""
    model = build_model(start.seed, for_servers=not settings.embedded)
    load_weights(model, start.weights)
    return Arm(settings, mode, start.seed, model, make_stage).run(report)


def one_after_another(settings: DemoSettings, begin: Begin, make_stage: MakeStage = Stage) -> Trained:
    """Run all of them here; with models this small a second thread of torch costs more than it gives."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    trained = Trained({mode: [] for mode in settings.modes})
    try:
        for seed in range(settings.seeds):
            start = make_start(settings, seed, begin(*_warm_up_of(settings, seed)))
            trained.warm_up_cpu_s += start.cpu_s
            for mode in settings.modes:
                report = begin(*_arm_of(settings, seed, mode))
                trained.arms[mode].append(run_arm(settings, start, mode, report, make_stage))
    finally:
        torch.set_num_threads(threads)
    return trained


def side_by_side(settings: DemoSettings, begin: Begin, processes: int) -> Trained:
    """Run as many at a time as there are processes; a mode begins when its start is there.

    Raises AprilError if one of the processes is ended.
    """
    messages: SimpleQueue[Any] = multiprocessing.get_context("spawn").SimpleQueue()
    phases: dict[str, OnStep] = {}
    found: list[ArmResult] = []
    trained = Trained({mode: [] for mode in settings.modes})

    def hear() -> None:
        while not messages.empty():
            message = messages.get()
            if isinstance(message, logging.LogRecord):
                logging.getLogger(message.name).callHandlers(message)
                continue
            (name, total), done, figures = message
            if name not in phases:
                phases[name] = begin(name, total)
            phases[name](done, figures)

    with sigterm_unwinds(), process_pool(processes, _set_up, messages) as submit:
        with undisturbed():
            running: set[Future[Any]] = {
                submit(_reporting, make_start, _warm_up_of(settings, seed), settings, seed)
                for seed in range(settings.seeds)
            }
        while running:
            ended, running = wait(running, LOOK_S, FIRST_COMPLETED)
            hear()
            for future in ended:
                result = _result(future)
                if isinstance(result, ArmResult):
                    found.append(result)
                    continue
                trained.warm_up_cpu_s += result.cpu_s
                with undisturbed():
                    running |= {
                        submit(_reporting, run_arm, _arm_of(settings, result.seed, mode), settings, result, mode)
                        for mode in settings.modes
                    }
    for arm in sorted(found, key=lambda arm: arm.seed):
        trained.arms[arm.mode].append(arm)
    return trained


def _warm_up_of(settings: DemoSettings, seed: int) -> tuple[str, int]:
    return f"seed {seed}: supervised warm-up", settings.warm_up_steps


def _arm_of(settings: DemoSettings, seed: int, mode: str) -> tuple[str, int]:
    return f"seed {seed}: {mode}", settings.steps


def _result(future: Future[Any]) -> Any:
    try:
        return future.result()
    except BrokenProcessPool:
        raise AprilError(
            "a process of the demo was ended from outside, perhaps for want of memory; --processes 1 needs less"
        ) from None


# ---------------------------------------------------------------- in another process

_messages: list[SimpleQueue[Any]] = []
"""Where this process reports, if it is one of those."""


class _Records(QueueHandler):
    """Sends log records to the first process, where the bars are."""

    def __init__(self, messages: SimpleQueue[Any]) -> None:
        super().__init__(messages)  # type: ignore[arg-type]  # what it lacks of a queue is not used
        self._messages = messages

    def enqueue(self, record: logging.LogRecord) -> None:
        """Send one."""
        self._messages.put(record)


def _set_up(messages: SimpleQueue[Any]) -> None:
    torch.set_num_threads(1)
    _messages.append(messages)
    logging.getLogger().addHandler(_Records(messages))


def _reporting(job: Callable[..., Any], phase: tuple[str, int], *arguments: Any) -> Any:
    return job(*arguments, lambda done, figures: _messages[0].put((phase, done, figures)))
