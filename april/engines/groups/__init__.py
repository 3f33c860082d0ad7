"""Groups over which tensors travel: what the workers of engines and april's sender have in common."""
