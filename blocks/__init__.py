"""Prefect blocks: named, shared secrets and targets, edited in the UI.

``babylon.blocks.load.settings_with`` turns their names into settings.
"""
