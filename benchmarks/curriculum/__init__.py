"""Learning on the levels of the curriculum, beside its baselines."""
