"""Our trainer beside its peers: ``python -m benchmarks.trainer``, explained in docs/benchmarks.md.

``cases`` makes the logged windows, ``models`` the policies, ``contenders`` trains one with the
other, each in a process of its own (``worker``), in turn (``rounds``); ``flops`` counts what has to
be computed, ``report`` prints. ``cuda`` measures on a GPU, where the peers do not run.
"""
