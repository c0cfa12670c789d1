"""Scores of trajectories: rewards that need no model, and the judge."""
