"""The adapter inside the real, unmodified slime and miles: ``python -m tests.adapters.real_slime --slime PATH``."""
