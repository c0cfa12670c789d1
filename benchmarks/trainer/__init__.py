"""Our trainer beside its peers: ``python -m benchmarks.trainer`` (what is measured: docs/benchmarks.md).

``cases`` makes the logged windows, ``models`` the policies, ``contenders`` trains one with the other,
each in a process of its own (``worker``), in turn (``rounds``); ``flops`` counts what has to be computed,
``report`` prints. ``cuda`` is the measurement on a GPU, where the peers do not run.
"""
