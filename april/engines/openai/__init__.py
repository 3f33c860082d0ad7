"""Servers with the OpenAI completions route that take and give token ids."""
