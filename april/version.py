"""The version of april; it must be that of pyproject.toml."""

__version__ = "0.1.0"
