"""Schedules rollouts as a pure state machine: it turns events into commands, without asyncio, I/O or a clock."""
