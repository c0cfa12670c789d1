"""Measurements that anyone can run: ``python -m benchmarks.NAME``; figures: docs/benchmarks.md."""
