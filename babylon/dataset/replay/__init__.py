"""Offline replay: recorded windows as scenarios that any agent can play again.

``rebuild_fleet`` makes scenarios from a fleet's rows and ``rebuild_live`` from the live game's.
``recorded_windows`` reads rows from Postgres, ``dataset_reader`` from a dataset.
``counterfactual`` plays an agent in the place of a recorded one, and ``comparison`` reports the
difference.
"""
