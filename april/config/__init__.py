"""Defines the configuration: settings of april and its engines, their command-line flags, and checks for mistakes."""

from __future__ import annotations

from april.config.settings import Config, SamplingConfig

__all__ = ["Config", "SamplingConfig"]
