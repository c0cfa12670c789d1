"""Fleets of agents that play the game and record it."""
