"""The embedded engine: torch inference for small models, with vLLM's wire fields."""

import babylon.core.openmp  # noqa: F401
