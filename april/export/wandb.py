"""Weights & Biases: metrics and a table of texts, in a run of yours or one of april's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from april.export.exporter import PREFIX, named
from april.export.texts import COLUMNS, SampleText, row_of
from april.extras import require


class WandB:
    """Logs to a run.

    In a run of yours the metrics join the row that is written next, so your steps stay as they are, and ``april/step``
    is the axis of april's charts. If you log with steps of your own (``step=``), log :func:`april.export.named` of
    ``batch.metrics`` yourself: only you know the row.

    Args:
        run: None: the one that is active, or else a new one, which ends with the exporter.
        options: of ``wandb.init``, for a new one: ``project`` and so on.

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
        """One row of its own run, or part of one of yours."""
        self._run.log({**named(metrics), f"{PREFIX}step": step}, commit=self._own)

    def log_texts(self, texts: Sequence[SampleText], step: int) -> None:
        """A table per batch."""
        table = self._table(columns=list(COLUMNS), data=[row_of(text) for text in texts])
        self._run.log({f"{PREFIX}sample_texts": table, f"{PREFIX}step": step}, commit=self._own)

    def close(self) -> None:
        """Ends the run if it is april's."""
        if self._own:
            self._run.finish()
