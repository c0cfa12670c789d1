"""Benchmark of the gateway; run ``python -m benchmarks.gateway``."""
