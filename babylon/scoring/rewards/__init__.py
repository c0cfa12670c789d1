"""Rewards, one a file."""
