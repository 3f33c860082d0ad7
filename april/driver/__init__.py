"""The only asyncio in the house above the engines: executes commands, turns what happens into events."""
