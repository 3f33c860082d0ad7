"""Carries out the core's commands on an event loop and reports to the core, as events, what happens."""
