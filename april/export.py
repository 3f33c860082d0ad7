"""Writes the metrics and a few responses of each batch to TensorBoard or W&B; see docs/report.md.

An exporter imports its package (tensorboard, wandb) only when it is created.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, Protocol, runtime_checkable

import numpy as np

from april.core.batch import Batch, DeliveredSample, rows_by_sample
from april.core.tape import Int32
from april.driver.detokenizer import Detokenizer
from april.text.install_command import require

PREFIX = "april/"
MAX_TEXT_CHARS = 1200
"""Maximum number of characters of a prompt or a response that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleText:
    """A response as text, with a few of its figures.

    Attributes:
        group, index: Numbers that identify the sample.
        reward: Reward of the response.
        tokens: Number of response tokens.
        age: Number of weight updates between the oldest token and the training of the response.
        cuts: Number of times that the response was interrupted and continued.
        finish: Finish reason.
        prompt, response: Text, special tokens included; the middle of a long text is left out.
    """

    group: int
    index: int
    reward: float
    tokens: int
    age: int
    cuts: int
    finish: str
    prompt: str
    response: str


COLUMNS = tuple(field.name for field in fields(SampleText))
"""Column names for a table of sample texts."""


@runtime_checkable
class Exporter(Protocol):
    """Logs the metrics of batches to a service; any object with these methods can be used."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of one batch under their own names; ``step`` is the number of the batch."""
        ...

    def log_texts(self, texts: Sequence[SampleText], step: int) -> None:
        """Log a few responses of the batch; an exporter that cannot show text does nothing."""
        ...

    def close(self) -> None:
        """Close the exporter's files and runs; nothing is logged after this."""
        ...


def named(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics with april's prefix in their names, so that services group them."""
    return {PREFIX + name: float(value) for name, value in metrics.items()}


class TensorBoard:
    """Writes scalars and texts to event files with TensorBoard's own writer; torch is not needed.

    Args:
        directory: Directory of the event files, such as ``runs/tensorboard``.

    Raises:
        ConfigError: tensorboard is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        require("april.export.TensorBoard", "tensorboard", extra=None)
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(os.fspath(directory))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log one scalar per metric."""
        self._add([{"tag": name, "simple_value": value} for name, value in named(metrics).items()], step)

    def log_texts(self, texts: Sequence[SampleText], step: int) -> None:
        """Log one text per response, indented so that it is not read as Markdown."""
        from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        values = []
        for number, text in enumerate(texts):
            words = (
                f"reward {text.reward:g}, {text.tokens} tokens, age {text.age}, cut {text.cuts} times, ended by "
                f"{text.finish}\n\nprompt:\n\n{_indented(text.prompt)}\n\nresponse:\n\n{_indented(text.response)}"
            )
            shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
            tensor = TensorProto(dtype=DT_STRING, string_val=[words.encode()], tensor_shape=shape)
            values.append({"tag": f"{PREFIX}sample_{number}", "tensor": tensor, "metadata": kind})
        self._add(values, step)

    def close(self) -> None:
        """Complete the event file."""
        self._writer.close()

    def _add(self, values: list[dict[str, Any]], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(**value) for value in values])
        now = datetime.now(UTC).timestamp()  # only for TensorBoard's time axis
        self._writer.add_event(Event(wall_time=now, step=step, summary=summary))
        self._writer.flush()


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())


class WandB:
    """Logs metrics and a table of texts to a run of Weights & Biases.

    If you started the run, the metrics are added to the row that you log next, so your steps do not change, and
    ``april/step`` is the x axis of april's charts. If you log with explicit steps (``step=``), which april cannot know,
    log :func:`april.export.named` of ``batch.metrics`` yourself instead of using this exporter.

    Args:
        run: Run to which april logs. None means the active run; if there is none, april starts a new run, which ends
            with the exporter.
        options: Arguments of ``wandb.init`` for a new run, such as ``project``.

    Raises:
        ConfigError: wandb is not installed.
    """

    def __init__(self, run: Any = None, **options: Any) -> None:
        require("april.export.WandB", "wandb", extra=None)
        import wandb

        run = wandb.run if run is None else run
        self._own = run is None
        self._run = wandb.init(**options) if run is None else run
        self._table = wandb.Table
        self._run.define_metric(f"{PREFIX}step")
        self._run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics as one row of the exporter's own run, or as part of the next row of your run."""
        self._run.log({**named(metrics), f"{PREFIX}step": step}, commit=self._own)

    def log_texts(self, texts: Sequence[SampleText], step: int) -> None:
        """Log a table per batch."""
        table = self._table(columns=list(COLUMNS), data=[[getattr(t, name) for name in COLUMNS] for t in texts])
        self._run.log({f"{PREFIX}sample_texts": table, f"{PREFIX}step": step}, commit=self._own)

    def close(self) -> None:
        """End the run if the exporter started it."""
        if self._own:
            self._run.finish()


def sample_texts(batch: Batch, tokenizer: Any, k: int = 4, *, longest: int = MAX_TEXT_CHARS) -> list[SampleText]:
    """Return ``k`` responses of a batch as text, from the lowest reward to the highest; the choice is deterministic.

    Args:
        batch: Whole batch, or a rank's share of it.
        tokenizer: Object with ``decode(ids, skip_special_tokens=False) -> str``.
        k: Maximum number of responses to return.
        longest: Maximum number of characters of a prompt or response; of a longer text, beginning and end are kept.

    Raises:
        ConfigError: the tokenizer has no suitable ``decode``.
        RolloutError: the tokenizer fails.
    """
    return texts_of(choose_samples(batch, k), Detokenizer(tokenizer), longest)


def choose_samples(batch: Batch, k: int) -> list[DeliveredSample]:
    """Return the first row of each of ``k`` samples of a batch, evenly spaced in the order of their rewards."""
    ordered = sorted((rows[0] for rows in rows_by_sample(batch.samples)), key=lambda s: (s.reward, s.id))
    k = min(k, len(ordered))
    if k <= 0:
        return []
    rows = np.linspace(0, len(ordered) - 1, k).round() if k > 1 else [len(ordered) // 2]
    return [ordered[int(row)] for row in rows]


def texts_of(
    samples: Sequence[DeliveredSample], detokenizer: Detokenizer, longest: int = MAX_TEXT_CHARS
) -> list[SampleText]:
    """Return the texts of samples."""
    return [
        SampleText(
            group=s.id.group, index=s.id.index, prompt=_text(s.prompt.token_ids, detokenizer, longest),
            response=_text(s.tokens, detokenizer, longest), reward=s.reward, tokens=len(s.tokens), age=s.staleness,
            cuts=s.resumes, finish=s.finish.value,
        )
        for s in samples
    ]  # fmt: skip


def _text(tokens: Int32, detokenizer: Detokenizer, longest: int) -> str:
    """Return the text of tokens, shortened in the middle; of a long sequence only the ends are decoded."""
    tail = longest // 3
    head = longest - tail
    first = last = tokens
    if len(tokens) > 2 * longest:
        first, last = tokens[:longest], tokens[len(tokens) - longest :]
    text = detokenizer.text(first.tolist())
    if first is tokens and len(text) <= longest:
        return text
    end = text if last is first else detokenizer.text(last.tolist())
    return f"{text[:head]} [... shortened, {len(tokens):,} tokens in all ...] {end[len(end) - tail :]}"
