"""Reproducible benchmarks; their results are committed in `results/`."""
