"""Prefect blocks: named, shared secrets and targets, edited in the UI, as plain settings.

``blocks.load.load_blocks`` turns their names into overrides for ``babylon.settings``.
"""
