"""``april simulate`` and ``april plan``: compare schedules on virtual time, before any GPU is used."""

from __future__ import annotations

from enum import StrEnum


class Placement(StrEnum):
    """Placement of the trainer: on the engines' GPUs or on its own."""

    COLOCATED = "colocated"
    """Engines and trainer share GPUs; the engines pause while the trainer trains."""
    SEPARATE = "separate"
    """The trainer has GPUs of its own."""
