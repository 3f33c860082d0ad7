"""For every test: event loops that a stalled machine does not hurry."""

from __future__ import annotations

import asyncio

from steady_loop import SteadyPolicy

asyncio.set_event_loop_policy(SteadyPolicy())
