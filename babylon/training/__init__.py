"""Training: GRPO, the backends that compute an update, and resuming it."""
