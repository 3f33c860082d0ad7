"""The pure state machine: events in, commands out. No asyncio, network, disk, clock or randomness of its own."""
