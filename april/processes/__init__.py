"""The scheduler in other processes: for the ranks of a trainer, and in an actor of Ray."""
