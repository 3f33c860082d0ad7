"""``april simulate`` and ``april plan``: compare schedules on virtual time, before any GPU is used."""
