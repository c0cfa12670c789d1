"""The embedded engine: small torch inference with vLLM's wire fields."""
