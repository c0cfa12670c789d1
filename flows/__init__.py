"""Prefect flows: composition only, one screen each.

Importing them changes nothing. Prefect reads its environment at its first import; the command line
prepares it before (``babylon.cli.flow_runs``), workers get it from ``babylon up``.
"""
