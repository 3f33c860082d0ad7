"""The real vLLM and SGLang on this CPU, held to the conformance suite: ``make test-engines``."""
