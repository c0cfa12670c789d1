"""Populations: settings of an update that are tried side by side and evolve."""
