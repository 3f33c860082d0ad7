"""What is ``auto`` in the configuration: looking at a run, asking for better settings, taking them over."""
