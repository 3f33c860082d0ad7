"""``april demo``: real reinforcement learning of a small language model on the CPU, four ways side by side."""
