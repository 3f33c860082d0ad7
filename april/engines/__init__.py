"""Engines generate tokens: one protocol for all, and one package or file per engine."""
