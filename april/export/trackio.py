"""trackio: metrics and a table of texts in a local dashboard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from april.export.exporter import PREFIX, named
from april.export.texts import COLUMNS, SampleText, row_of
from april.extras import require


class Trackio:
    """Logs to a run of its own, which ends with the exporter.

    Args:
        project: its name.
        options: of ``trackio.init``: ``name``, ``config`` and so on. Without ``space_id`` all stays on this machine.

    Raises:
        ConfigError: trackio is not installed.
    """

    def __init__(self, project: str = "april", **options: Any) -> None:
        require("april.export.Trackio", "trackio", extra=None)
        import trackio

        self._run = trackio.init(project=project, **options)
        self._table = trackio.Table

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One row."""
        self._run.log(named(metrics), step=step)

    def log_texts(self, texts: Sequence[SampleText], step: int) -> None:
        """A table per batch."""
        table = self._table(columns=list(COLUMNS), data=[row_of(text) for text in texts])
        self._run.log({f"{PREFIX}sample_texts": table}, step=step)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()
