"""Offline replay of recorded windows (``babylon.evaluation.rebuild``) by any agent.

``dataset_reader`` reads them from a dataset. ``counterfactual`` plays an agent in the place of a
recorded one, and ``comparison`` reports the difference.
"""
