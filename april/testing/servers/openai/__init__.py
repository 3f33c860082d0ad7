"""Fake servers with the OpenAI completions route."""
