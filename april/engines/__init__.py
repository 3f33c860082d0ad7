"""How to generate: one protocol, one file per engine."""
