"""What oslo_models costs and gains beside its peers: ``python -m benchmarks --help``."""
