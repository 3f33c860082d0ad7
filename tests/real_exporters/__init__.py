"""The exporters against the real packages, in an environment of their own: ``python -m tests.real_exporters``."""
