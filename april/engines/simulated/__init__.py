"""A simulated engine: realistic timing, without a model."""
