"""Fleets of agents that play the game and record their play."""
