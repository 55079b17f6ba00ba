"""Fused operations, one per file, each with a reference in plain torch. They know nothing of ranks or models."""
