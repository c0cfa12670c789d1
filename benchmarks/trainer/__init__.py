"""Our trainer beside its peers: ``python -m benchmarks.trainer``; see docs/benchmarks/trainer.md.

``cases`` makes the logged windows and ``models`` the policies. Each trainer of ``contenders`` runs
in a process of its own (``worker``), one after another (``rounds``). ``flops`` counts the necessary
operations, ``report`` prints. ``cuda`` measures on a GPU, where the peers do not run.
"""
