"""Records every event that the core (april's scheduler state) handles in a file, and replays it (docs/report.md)."""
