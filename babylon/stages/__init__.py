"""The eight stages of a window, with its claim, its readiness and the removal of checkpoints."""
