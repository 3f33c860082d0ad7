"""What partial rollouts do to what is learned: many small trainings, matched by seed, and the page made of them.

``design.toml`` says what is run and what would refute what is claimed; it was written before anything ran.
"""
