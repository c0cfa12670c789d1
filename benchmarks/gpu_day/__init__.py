"""A day on a GPU in one command: tests, trainer, engine and the hour, as one table."""
