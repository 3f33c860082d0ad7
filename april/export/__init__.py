"""Exporters: the metrics of batches in TensorBoard, W&B, MLflow, trackio and Prometheus; see docs/watch.md.

Each needs its package when it is made, and not before.
"""

from april.export.exporter import Exporter, named
from april.export.mlflow import MLflow
from april.export.prometheus import Prometheus
from april.export.tensorboard import TensorBoard
from april.export.texts import SampleText, sample_texts
from april.export.trackio import Trackio
from april.export.wandb import WandB

__all__ = ["Exporter", "MLflow", "Prometheus", "SampleText", "TensorBoard", "Trackio", "WandB", "named", "sample_texts"]
