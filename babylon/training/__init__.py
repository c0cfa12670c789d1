"""Training: GRPO, the backends that compute an update, and resuming it."""

import babylon.core.openmp  # noqa: F401
