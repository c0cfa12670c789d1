"""Offline replay: recorded windows as scenarios that anybody can play again.

``observed`` is what a fleet records of a market so that it can be replayed; ``rebuild`` makes
scenarios of a fleet's rows, ``live`` of the live game's; ``windows`` and ``files`` fetch the rows
from Postgres and from a dataset; ``play`` lets an agent play in the place of a recorded one.
"""
