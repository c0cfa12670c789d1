"""Data quality: the checks that accept a row of the game for training or reject it."""
