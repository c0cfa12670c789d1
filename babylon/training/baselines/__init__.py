"""Numeric baselines: agilerl's algorithms on the market, exported so that they play without it.

Only ``train.py`` and ``export.py`` import agilerl, when they run, in an environment of its own.
"""
