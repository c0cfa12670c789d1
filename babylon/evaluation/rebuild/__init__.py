"""Recorded windows as scenarios that any agent can play again.

``rebuild_fleet`` makes scenarios from a fleet's rows and ``rebuild_live`` from the live game's.
``recorded_windows`` reads the rows from Postgres.
"""
