"""Checkpoints of every format, in and out: the one place that reads and writes them."""
