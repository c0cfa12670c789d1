"""The checks that a policy must pass before a route may name it."""
