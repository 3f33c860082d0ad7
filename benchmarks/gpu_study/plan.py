"""What the study would take: april's own simulation of each arm, by what the design expects. Nothing here is measured.

Rollouts: the real core on virtual time, by the roofline of the GPU or by a decode step that the design names. Training:
the FLOPs of the passes at an assumed share of the GPU's peak. Evaluations: their responses at the engines' limit.
Checkpoints, starts of servers and the hand-over of weights are left out; so is all that learning does to lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from april.core.types import Refill
from april.engines.simulated.decode_cost import GPUS, DecodeCost, ModelSize, roofline
from april.simulate.run import measure
from april.simulate.workload import Placement, Schedule, Workload
from benchmarks.gpu_study.design import GpuDesign, GpuSizes
from benchmarks.study.training import Settings, config_of

STEPS, RAMP = 20, 5
TRAIN_SHARE = 0.3
"""Share of the peak FLOPS that training is taken to reach."""
FLOPS = {False: 6.0, True: 8.0}
"""Per parameter and token; with gradient checkpointing there is one more forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """Computed figures of the trainings of an arm.

    Attributes:
        trainings: how many.
        step_s: seconds of a step, with training.
        train_s: of these, of training.
        evaluation_s: of one evaluation; it is in the hours, not in the step.
        hours: of all these trainings, wall clock.
        gpu_hours: times the GPUs.
    """

    trainings: int
    step_s: float
    train_s: float
    evaluation_s: float
    hours: float
    gpu_hours: float


def cost_of(sizes: GpuSizes) -> DecodeCost:
    """Return the cost of a decode step of one engine."""
    expected = sizes.expected
    model = ModelSize(expected.parameters, expected.kv_bytes_per_token)
    cost = roofline(model, expected.gpu, memory_share=0.5 if sizes.gpus == 1 else 0.85)
    # a step that waits for the host costs the same whatever is in it
    return cost if expected.step_s is None else replace(cost, base_s=expected.step_s, per_sequence_s=0.0)


def workload_of(sizes: GpuSizes, settings: Settings) -> Workload:
    """Return what is simulated."""
    expected = sizes.expected
    work = Workload(
        measured_cost=cost_of(sizes), engines=max(1, sizes.servers), groups=settings.groups, samples=settings.samples,
        max_response_len=sizes.response_cap, prompt_len=expected.prompt_len, steps=STEPS, ramp=RAMP,
        max_staleness=config_of(settings, sizes).max_staleness, median_len=expected.median_len,
        sigma_between=expected.sigma_between, sigma_within=expected.sigma_within, seed=settings.seed,
    )  # fmt: skip
    tokens = settings.groups * settings.samples * (float(work.length_sample.mean()) + expected.prompt_len)
    flops = FLOPS[sizes.recompute] * expected.parameters * tokens
    seconds = flops / (sizes.trainers * GPUS[expected.gpu].flops_per_s * TRAIN_SHARE)
    # the engines rest while it trains, on whatever GPUs
    return replace(work, train_time=f"{seconds:.3f}", placement=Placement.COLOCATED)


def schedule_of(settings: Settings, sizes: GpuSizes) -> Schedule:
    """Return how an arm schedules its responses."""
    config = config_of(settings, sizes)
    return Schedule(
        over=round(settings.over_sampling * settings.groups), refill=Refill(config.refill),
        in_flight=settings.groups * settings.samples, quorum=float(config.group_quorum),
    )  # fmt: skip


def computed(design: GpuDesign, gpus: int) -> dict[str, Computed]:
    """Return figures by task and arm, in the order of the design."""
    arms: dict[str, list[Settings]] = {}
    for name, settings in design.of(gpus).items():
        arms.setdefault(name.rpartition("/")[0], []).append(settings)
    found = {}
    for arm, trainings in arms.items():
        sizes = design.tasks[trainings[0].task]
        work = workload_of(sizes, trainings[0])
        figures = measure(work, schedule_of(trainings[0], sizes))
        per_s = work.long_run_limit(trainings[0].groups * trainings[0].samples)
        evaluation_s = sizes.held_out_count * float(work.length_sample.mean()) / per_s
        evaluations = sum(1 + -(-s.steps // s.evaluate_every) for s in trainings)
        steps_s = sum(s.steps for s in trainings) * figures["step_s_mean"]
        hours = (steps_s + evaluations * evaluation_s) / 3600
        found[arm] = Computed(
            trainings=len(trainings), step_s=figures["step_s_mean"], train_s=work.train_s, evaluation_s=evaluation_s,
            hours=hours, gpu_hours=hours * gpus,
        )  # fmt: skip
    return found


def table(design: GpuDesign, gpus: int) -> list[str]:
    """Return the computed figures as lines of Markdown."""
    rows = computed(design, gpus)
    hours, gpu_hours = (sum(getattr(row, what) for row in rows.values()) for what in ("hours", "gpu_hours"))
    return [
        "|task, arm|trainings|seconds per step|of these training|seconds per evaluation|hours|GPU hours|",
        "|---|---|---|---|---|---|---|",
        *(
            f"|{arm.replace('/', ', ')}|{r.trainings}|{r.step_s:.1f}|{r.train_s:.1f}|{r.evaluation_s:.0f}|{r.hours:.1f}"
            f"|{r.gpu_hours:.0f}|"
            for arm, r in rows.items()
        ),
        f"|all|{sum(r.trainings for r in rows.values())}||||{hours:.1f}|{gpu_hours:.0f}|",
    ]
