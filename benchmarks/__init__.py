"""Benchmarks, run with ``python -m benchmarks.NAME``. docs/benchmarks/ has the figures."""
