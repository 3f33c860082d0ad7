"""Agents that bring a client of their own: an endpoint per sample, over which partial rollouts cannot be seen."""
