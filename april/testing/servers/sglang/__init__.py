"""A fake SGLang server, and a fake sglang-router."""
