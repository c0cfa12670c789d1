"""Prefect blocks: named, shared secrets and targets, edited in the UI, as plain settings.

``babylon.blocks.load.load_blocks`` turns their names into overrides for ``babylon.core.settings``.
"""
