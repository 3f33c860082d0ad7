"""Executes the scheduling core's commands on an event loop, and reports their results to the core as events."""
