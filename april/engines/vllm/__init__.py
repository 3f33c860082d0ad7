"""vLLM: servers, an object in this process, an actor."""
