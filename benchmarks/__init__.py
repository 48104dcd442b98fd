"""Paired measurements; ``python -m benchmarks NAME``."""
