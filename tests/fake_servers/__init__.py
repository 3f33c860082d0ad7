"""Fake vLLM, SGLang and OpenAI-compatible servers on loopback, for tests of the clients."""
