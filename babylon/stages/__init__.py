"""The stages of a window in order, and what claims, lists and retires their results."""
