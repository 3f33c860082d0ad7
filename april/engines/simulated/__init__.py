"""A simulated engine: the timing of a real one, without a model."""
