"""Rewards, one in each file."""
