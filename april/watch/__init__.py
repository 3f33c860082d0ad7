"""A run while it runs: the line of progress in ``next_batch``, ``april watch``, and who is told of batches."""
