"""Benchmarks of oslo_models and its peers: ``python -m benchmarks --help``."""
