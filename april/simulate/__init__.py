"""Compares schedules on virtual time, before any GPU is used (``april simulate`` and ``april plan``)."""

from __future__ import annotations

from enum import StrEnum


class Placement(StrEnum):
    """Placement of the trainer: on the GPUs of the engines or on its own GPUs."""

    COLOCATED = "colocated"
    """Engines and trainer share GPUs; the engines pause while the trainer trains."""
    SEPARATE = "separate"
    """The trainer has its own GPUs."""
