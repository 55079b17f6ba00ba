"""Everything worth knowing about one GPU, measured by one command in minutes: ``python -m benchmarks.rehearse``."""
