"""vLLM servers behind the engine protocol."""
