"""Tree attention."""
