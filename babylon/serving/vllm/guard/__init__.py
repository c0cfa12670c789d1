"""A directory of its own for what runs in vLLM's Python, so that no other module is found there."""
