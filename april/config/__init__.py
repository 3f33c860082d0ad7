"""The configuration: settings, engines' settings, flags, and what is refused."""

from __future__ import annotations

from april.config.settings import Config, SamplingConfig

__all__ = ["Config", "SamplingConfig"]
