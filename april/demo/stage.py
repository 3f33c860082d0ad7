"""What generates in an arm, how new weights get there, and what a step of rollouts cost by its own count."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedModel

from april.demo import task
from april.demo.settings import DemoSettings
from april.engines.protocol import Engine
from april.engines.transformers.engine import TransformersEngine
from april.errors import ConfigError

MAX_LEN = task.PROMPT_LENGTH + task.RESPONSE_CAP


@dataclass(frozen=True, slots=True)
class Work:
    """What was done between two moments."""

    decode_steps: int
    generated_tokens: int
    occupancy: list[int]
    """Busy slots over time, in equal parts of it."""


class Stage(Protocol):
    """Made for one arm, from the weights of its model."""

    @property
    def engine(self) -> Engine:
        """Generates from the weights that were published last."""
        ...

    def publish(self) -> str | None:
        """The trainer has new weights: the directory to load them from, or None where they are read in place."""
        ...

    def begin(self) -> None:
        """A step begins."""
        ...

    def end(self) -> Work:
        """What has been done since it began."""
        ...

    def close(self) -> None:
        """The arm is over."""
        ...


class Embedded:
    """The engine in this process, which reads the trainer's model in place; time is counted in decode steps."""

    def __init__(self, settings: DemoSettings, model: PreTrainedModel, seed: int) -> None:
        self._engine = TransformersEngine(model, slots=settings.slots, max_len=MAX_LEN, seed=seed)
        self._before: dict[str, float] = {}

    @property
    def engine(self) -> TransformersEngine:
        return self._engine

    def publish(self) -> None:
        return None

    def begin(self) -> None:
        self._before = self._engine.stats.counters()
        self._engine.stats.trace = []

    def end(self) -> Work:
        stats = self._engine.stats
        after, trace, stats.trace = stats.counters(), stats.trace or [], None
        steps, tokens = (int(after[name] - self._before[name]) for name in ("decode_steps", "generated_tokens"))
        return Work(steps, tokens, [busy for _, busy in trace])

    def close(self) -> None:
        """The scheduler closes the engine."""


def set_up(settings: DemoSettings, model: PreTrainedModel, seed: int, out: Path) -> Stage:
    """The stage that the settings name; servers load their weights from directories below ``out``."""
    if settings.embedded:
        return Embedded(settings, model, seed)
    if settings.url is None:
        raise ConfigError(
            f"april demo --engine {settings.engine} needs --url, the address of a server with the demo's model; "
            f"`make demo-{settings.engine}` starts one"
        )
    from april.demo.on_server import OnServer

    return OnServer(settings, model, out / "weights")
