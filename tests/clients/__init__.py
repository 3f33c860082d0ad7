"""Clients and harnesses as people run them, before april's endpoint: ``python -m tests.clients``."""
