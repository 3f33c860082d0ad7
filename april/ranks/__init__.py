"""Many processes of one trainer, and one scheduler for them all; see docs/ranks.md."""
