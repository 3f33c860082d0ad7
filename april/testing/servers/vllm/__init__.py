"""A fake vLLM server."""
