"""Settings that are ``auto``: when a run asks the simulation for better ones, and what becomes of the answer."""
