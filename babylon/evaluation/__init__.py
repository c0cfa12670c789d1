"""Comparison of two policies: in simulated worlds (arena) and on live agents (experiment)."""
