"""What happened in a run, as a page: ``april report``."""
