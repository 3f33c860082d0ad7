"""Shows runs to people: the progress line and exporters while a run works, ``april watch`` and ``april report``."""
