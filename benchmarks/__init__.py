"""Benchmarks, run with ``python -m benchmarks.NAME``. docs/benchmarks.md holds the figures."""
