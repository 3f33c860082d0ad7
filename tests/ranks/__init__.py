"""A trainer of several ranks under torchrun, held to one process that gets the same batches: ``make test-ranks``."""
