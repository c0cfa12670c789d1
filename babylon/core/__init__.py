"""Records, settings, errors, windows and artifacts that every other package uses."""
