"""Helpers that the adapters of several trainers use."""
