"""Data quality: which of the game's rows can be trained on, and why the others cannot."""

from babylon.quality.validate import validate_window

__all__ = ["validate_window"]
