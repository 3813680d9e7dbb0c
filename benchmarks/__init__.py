"""Measurements that anyone can repeat; their results are committed in `results/`."""
