"""Validation of checkpoints on any task, by an evaluator of the user (``EVALUATOR``)."""
