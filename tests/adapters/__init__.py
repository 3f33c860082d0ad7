"""The adapters: what can be tested without their trainers, and ``python -m tests.adapters``, the rest."""
