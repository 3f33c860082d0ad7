"""Records of runs: every event that the core was given, in a file, and how to run them again (see docs/report.md)."""
