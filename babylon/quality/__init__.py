"""Data quality: which of the game's rows can be trained on, and why the others cannot."""
