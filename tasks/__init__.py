"""Prefect tasks: one stage a file, each a thin typed wrapper around one ``babylon`` call."""
