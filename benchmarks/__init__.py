"""Measurements that are quoted, each runnable: `python -m benchmarks.NAME`."""
