"""``april demo``: real reinforcement learning of a small language model on the CPU, three ways side by side."""
