"""The embedded engine: torch inference for small models, with vLLM's wire fields."""
