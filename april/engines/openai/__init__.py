"""Engines for servers with an OpenAI-compatible completions route that takes and returns token ids."""
