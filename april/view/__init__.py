"""Seeing a run: the progress line and exporters while it works, ``april watch`` and ``april report`` on its record."""
