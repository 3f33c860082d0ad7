"""Engines across processes: april's server for any engine object (``april.serve``), and the client engine."""
