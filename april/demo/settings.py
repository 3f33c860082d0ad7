"""What the demo runs: four ways to schedule the same rollouts, from the same start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from april.config.settings import Config, SamplingConfig
from april.core.types import Refill
from april.demo import task

MODES = ("sync", "april", "refill", "quorum")
"""Wait for all; N' = 2N as in the paper; a constant number of samples in flight; N' = 1.5N with a group quorum."""
OVER_SAMPLING = {"april": 2.0, "quorum": 1.5}
"""N' / N where it is not 1."""
EMBEDDED = "transformers"
ON_SERVER = {"steps": 12, "seeds": 1, "held_out": 256, "held_out_between": 64, "evaluate_every": 4}
"""What is smaller on a server, which shares two cores with the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Sizes of the demo."""

    groups: int = 8
    """N: prompt groups per step."""
    samples: int = 8
    """n: responses per prompt."""
    steps: int = 40
    """Training steps per mode and seed."""
    seeds: int = 3
    held_out: int = 2048
    """Held-out prompts at the start and at the end."""
    held_out_between: int = 256
    """Held-out prompts every ``evaluate_every`` steps, for the picture."""
    evaluate_every: int = 10
    group_quorum: float = 0.5
    """Of the mode ``quorum``; the others wait for whole groups."""
    learning_rate: float = 7e-4
    """Peak; it falls linearly to zero over the steps, as usual."""
    engine: str = EMBEDDED
    """Embedded, or the kind of server at ``url``: vllm or sglang."""
    url: str | None = None

    @classmethod
    def on(cls, engine: str, url: str | None = None, **sizes: int | None) -> DemoSettings:
        """The settings for an engine, smaller for a server, with those ``sizes`` that are not None."""
        usual = {} if engine == EMBEDDED else ON_SERVER
        changed: Any = usual | {name: size for name, size in sizes.items() if size is not None}
        return cls(engine=engine, url=url, **changed)

    @property
    def embedded(self) -> bool:
        """The engine is in this process."""
        return self.engine == EMBEDDED

    @property
    def slots(self) -> int:
        """Decode slots, the same in every mode: what sync has in flight."""
        return self.groups * self.samples

    def config(self, mode: str, seed: int) -> Config:
        """april's configuration of one mode."""
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
