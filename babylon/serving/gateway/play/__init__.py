"""Trajectories, rewards and outcomes over HTTP, and the ownership of trajectories."""
