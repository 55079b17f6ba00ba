"""All measurements of one GPU by one command, in minutes: ``python -m benchmarks.rehearse``."""
