"""The design of the study, read from ``design.toml``: which trainings, in which order, and what is claimed of them."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from benchmarks.study.training import Settings

DESIGN = Path(__file__).with_name("design.toml")


class Sizes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trainings of one task."""

    steps: int
    groups: int
    samples: int
    learning_rate: float
    evaluate_every: int
    train_time: float
    """Of an update, in decode steps, where generation goes on meanwhile."""
    warm_up_steps: int | None = None
    early: int
    """Step of sync whose reward is the first target of decode steps."""
    late: int
    """Step of sync whose reward is the second one."""
    core_seconds: float
    """CPU seconds of a training step, measured, the mean over all arms; the budget is made of them."""
    task: str | None = None
    """The task that these trainings are of; None means the one of this name."""
    first_seed: int | None = None
    """None means the design's."""


class Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Trainings that belong together: every combination of what is listed, for every seed.

    Attributes:
        what: for the page.
        tasks, arms, losses, delays, rates, minibatches: what is combined; rates are factors of the task's.
        seeds: number of seeds, from the task's first.
        steps: instead of the task's; a prefix of a training is one, as the rate is constant.
        token_mean: see :class:`Trainer`.
        noise, as_long_as: see :class:`Settings`.
    """

    what: str
    tasks: list[str]
    arms: list[str]
    losses: list[str]
    delays: tuple[int, ...] = (0,)
    rates: tuple[float, ...] = (1.0,)
    minibatches: tuple[int, ...] = (1,)
    seeds: int
    steps: int | None = None
    token_mean: bool = True
    noise: float = 0.0
    as_long_as: int = 0


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """What trainings that differ in nothing but their seed have in common; a combination of what a block lists."""

    task: str
    arm: str
    loss: str
    delay: int = 0
    rate: float = 1.0
    minibatches: int = 1
    token_mean: bool = True
    noise: float = 0.0
    as_long_as: int = 0


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A claim, and when it counts as refuted; see ``claims.py`` for the kinds.

    Attributes:
        id: short name.
        says: the claim in words.
        fails_if: when it does not hold, in words.
        kind: how that is computed.
        task: of these trainings.
        arm: name of the trainings.
        against: what it is paired with.
        limit: the number in ``fails_if``.
        of: what ``cheaper`` counts, a figure of the evaluations.
    """

    id: str
    says: str
    fails_if: str
    kind: str
    task: str
    arm: str = ""
    against: str = "sync"
    limit: float
    of: str = "decode_steps"


class Design(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of it."""

    first_seed: int
    margin: float
    budget_core_hours: float
    recommended: str
    """Loss of the arms, where none is named."""
    tasks: dict[str, Sizes]
    arms: dict[str, dict[str, Any]]
    """What an arm changes in :class:`Settings`."""
    blocks: list[Block]
    claims: list[Claim]

    def trainings(self) -> dict[str, Settings]:
        """Return all trainings by name, in the order in which they are run, each once."""
        found: dict[str, Settings] = {}
        for block in self.blocks:
            for offset in range(block.seeds):
                for kind in _kinds(block):
                    settings = self._settings(block, kind, offset)
                    name = f"{self.named(kind)}/{settings.seed}"
                    if found.setdefault(name, settings) != settings:
                        raise ValueError(f"design: {name} stands for two trainings: {found[name]} and {settings}")
        return found

    def kinds(self) -> dict[str, Kind]:
        """Return all kinds of trainings by name."""
        return {self.named(kind): kind for block in self.blocks for kind in _kinds(block)}

    def _settings(self, block: Block, kind: Kind, offset: int) -> Settings:
        sizes = self.tasks[kind.task]
        seed = offset + (self.first_seed if sizes.first_seed is None else sizes.first_seed)
        settings = Settings(
            task=sizes.task or kind.task, seed=seed, steps=block.steps or sizes.steps, groups=sizes.groups,
            samples=sizes.samples, loss=kind.loss, learning_rate=kind.rate * sizes.learning_rate, delay=kind.delay,
            minibatches=kind.minibatches, token_mean=kind.token_mean, evaluate_every=sizes.evaluate_every,
            warm_up_steps=sizes.warm_up_steps, noise=kind.noise, as_long_as=kind.as_long_as,
        )  # fmt: skip
        change = dict(self.arms[kind.arm])
        if "generation" in change.get("april", {}):
            change["train_time"] = sizes.train_time
        return msgspec.structs.replace(settings, **change)

    def named(self, kind: Kind) -> str:
        """Return the name of trainings that differ in nothing but their seed."""
        parts = [kind.arm]
        parts += [kind.loss] if kind.loss != self.recommended else []
        parts += [f"delay{kind.delay}"] if kind.delay else []
        parts += [f"rate{kind.rate:g}"] if kind.rate != 1.0 else []
        parts += [f"minibatches{kind.minibatches}"] if kind.minibatches != 1 else []
        parts += [] if kind.token_mean else ["samplemean"]
        parts += ["noise"] if kind.noise else []
        return f"{kind.task}/{'-'.join(parts)}"

    def sync_of(self, kind: Kind) -> str:
        """Return which synchronous trainings a kind is paired with: of its rate and mean; for those, the plain ones."""
        own = Kind(task=kind.task, arm="sync", loss=self.recommended, rate=kind.rate, token_mean=kind.token_mean)
        return self.named(Kind(task=kind.task, arm="sync", loss=self.recommended) if kind == own else own)

    def core_hours(self) -> float:
        """Return what all trainings cost, by their steps."""
        seconds = sum(s.steps * self.tasks[s.task].core_seconds for s in self.trainings().values())
        return seconds / 3600


def _kinds(block: Block) -> Iterator[Kind]:
    for task, arm, loss, delay, rate, minibatches in itertools.product(
        block.tasks, block.arms, block.losses, block.delays, block.rates, block.minibatches
    ):
        yield Kind(
            task=task, arm=arm, loss=loss, delay=delay, rate=rate, minibatches=minibatches, token_mean=block.token_mean,
            noise=block.noise, as_long_as=block.as_long_as,
        )  # fmt: skip


def read(path: Path = DESIGN) -> Design:
    """Return a design; msgspec.ValidationError or ValueError says what is wrong with it."""
    return checked(msgspec.convert(tomllib.loads(path.read_text("utf-8")), Design))


AnyDesign = TypeVar("AnyDesign", bound=Design)


def checked(design: AnyDesign) -> AnyDesign:
    """Return the design; ValueError if it claims something of trainings that no block runs."""
    design.trainings()  # which refuses a name that stands for two
    named = design.kinds()
    for claim in design.claims:
        for arm in filter(None, (claim.arm, claim.against)):
            if claim.kind != "guard" and f"{claim.task}/{arm}" not in named:
                raise ValueError(f"design: claim {claim.id} names {claim.task}/{arm}, which no block runs")
    return design
