"""The dataset: built from trained windows, and replayed."""
