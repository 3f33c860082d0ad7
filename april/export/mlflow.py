"""MLflow: metrics, and a table of texts, in a run of yours or one of april's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from april.export.exporter import PREFIX, named
from april.export.texts import COLUMNS, SampleText
from april.extras import require

AT_ONCE = 1000
"""Metrics that MLflow takes in one call."""


class MLflow:
    """Logs to a run; what a name may not have there (as in an engine's address) becomes an underscore.

    Args:
        run_id: None: that of the active run, or else of a new one, which ends with the exporter.
        experiment: of a new one; it is made if it is not there.
        run_name: of a new one.

    Raises:
        ConfigError: mlflow is not installed.
    """

    def __init__(self, run_id: str | None = None, *, experiment: str = "april", run_name: str | None = None) -> None:
        require("april.export.MLflow", "mlflow", extra=None)
        import mlflow

        # by a client, as an active run is one thread's, and that of the exporter is another one
        self._client = mlflow.MlflowClient()
        self._metric = mlflow.entities.Metric
        active = mlflow.active_run() if run_id is None else None
        self._own = run_id is None and active is None
        if self._own:
            there = self._client.get_experiment_by_name(experiment)
            of = self._client.create_experiment(experiment) if there is None else there.experiment_id
            run_id = self._client.create_run(of, run_name=run_name).info.run_id
        self.run_id = str(run_id if active is None else active.info.run_id)
        """Where it logs."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """All of them at once."""
        now = int(datetime.now(UTC).timestamp() * 1000)  # the axis of dates; nothing is decided by it
        values = [self._metric(_name(name), value, now, step) for name, value in named(metrics).items()]
        for first in range(0, len(values), AT_ONCE):
            self._client.log_batch(self.run_id, metrics=values[first : first + AT_ONCE])

    def log_texts(self, texts: Sequence[SampleText], step: int) -> None:
        """A table ``april/sample_texts.json`` that grows."""
        columns = {name: [getattr(text, name) for text in texts] for name in COLUMNS}
        self._client.log_table(self.run_id, {"step": [step] * len(texts), **columns}, f"{PREFIX}sample_texts.json")

    def close(self) -> None:
        """Ends the run if it is april's."""
        if self._own:
            self._client.set_terminated(self.run_id)


def _name(name: str) -> str:
    return "/".join(part for part in re.sub(r"[^\w\-. /]", "_", name).split("/") if part.strip("."))
