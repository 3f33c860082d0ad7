"""The design of the study on GPUs: that of ``benchmarks/study`` with models, questions and machines in its tasks."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from benchmarks.study.design import DESIGN as STUDY
from benchmarks.study.design import Design, Sizes, checked
from benchmarks.study.training import Settings

DESIGN = Path(__file__).with_name("design.toml")
ENGINES = ("transformers", "vllm", "sglang")


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A set of questions.

    Attributes:
        path: a name on the Hugging Face hub, or a file of JSON lines.
        config, split: of a data set on the hub.
        question: column of the question: text, or a list of messages. Dots go into nested columns.
        answer: column of the answer.
        marker: the answer is what stands behind the last of these; empty: all of it.
    """

    path: str
    config: str | None = None
    split: str = "train"
    question: str = "question"
    answer: str = "answer"
    marker: str = ""


class Expected(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is taken for granted where hours are computed; no training depends on it.

    Attributes:
        parameters, kv_bytes_per_token: of the model.
        step_s: seconds of a decode step, whatever its batch; None: by the roofline of the GPU.
        median_len, sigma_between, sigma_within: of the lognormal lengths of responses.
        prompt_len: tokens of a question.
        gpu: as april's cost model calls it.
    """

    parameters: float
    kv_bytes_per_token: int
    step_s: float | None = None
    median_len: float
    sigma_between: float
    sigma_within: float
    prompt_len: int
    gpu: str = "h100"


class GpuSizes(Sizes, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trainings of one task on GPUs.

    Attributes:
        gpus: all of them.
        servers: each has a GPU of its own; the trainer has the others. With one GPU they share it.
        model: name on the hub, or a directory.
        engine: one of ENGINES.
        thinking: of the chat template.
        questions: that are trained on.
        held_out: that are evaluated on; None: some are set aside.
        held_out_count: how many.
        held_out_seed: of the choice and the order of questions that are set aside.
        prompt_cap, response_cap: most tokens; longer questions are left out.
        tokens_at_once: most tokens, padding included, of a forward and backward pass.
        recompute: gradient checkpointing.
        dtype: what is computed in; weights and optimizer are float32.
        device: of the trainer.
        expected: see :class:`Expected`.
    """

    gpus: int
    servers: int = 0
    model: str
    engine: str
    thinking: bool = False
    questions: Source
    held_out: Source | None = None
    held_out_count: int
    held_out_seed: int = 0
    prompt_cap: int
    response_cap: int
    tokens_at_once: int
    recompute: bool = False
    dtype: str = "bfloat16"
    device: str = "cuda"
    expected: Expected
    train_time: float = 0.0
    core_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"design: engine {self.engine!r} must be one of {', '.join(ENGINES)}")
        if (self.engine == "transformers") != (self.servers == 0):
            raise ValueError(f"design: engine {self.engine!r} with {self.servers} servers")
        if self.trainers < 1:
            raise ValueError(f"design: {self.servers} servers leave no GPU of {self.gpus} to train on")

    @property
    def trainers(self) -> int:
        """GPUs, and ranks, that train."""
        return 1 if self.gpus == 1 else self.gpus - self.servers

    @property
    def max_len(self) -> int:
        """Most tokens of a question and its response."""
        return self.prompt_cap + self.response_cap


class GpuDesign(Design, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of it."""

    tasks: dict[str, GpuSizes]  # type: ignore[assignment]

    def of(self, gpus: int) -> dict[str, Settings]:
        """Return the trainings of a size by name.

        Raises:
            ValueError: there are none.
        """
        found = {name: s for name, s in self.trainings().items() if self.tasks[s.task].gpus == gpus}
        if not found:
            sizes = sorted({sizes.gpus for sizes in self.tasks.values()})
            raise ValueError(f"the design has no trainings for {gpus} GPUs, but for {', '.join(map(str, sizes))}")
        return found


def read(path: Path = DESIGN) -> GpuDesign:
    """Return a design; msgspec.ValidationError or ValueError says what is wrong with it.

    Arms are those of the study on CPUs, so that a name means the same in both.
    """
    study = tomllib.loads(STUDY.read_text("utf-8"))
    own = tomllib.loads(path.read_text("utf-8"))
    return checked(msgspec.convert(own | {"arms": study["arms"]}, GpuDesign))
