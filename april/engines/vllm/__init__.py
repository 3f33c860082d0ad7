"""Engines for vLLM: as a server, as an object in this process, or in a Ray actor."""
