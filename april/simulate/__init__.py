"""``april simulate``: schedules compared on virtual time, before any GPU is used."""
