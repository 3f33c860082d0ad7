"""Writes every event that the core handles to a file, and replays such files (see docs/report.md)."""
