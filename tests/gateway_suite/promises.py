"""All promises of the suite."""

from __future__ import annotations

from tests.gateway_suite import answers, clients, conversations
from tests.gateway_suite.bench import Promise

_FOUND = (found for module in (answers, clients, conversations) for found in vars(module).values())
PROMISES = tuple(sorted((one for one in _FOUND if isinstance(one, Promise)), key=lambda one: one.number))
"""Every promise, by number."""
