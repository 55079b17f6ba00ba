"""Fused operations: one file each, with a plain-torch reference. Knows nothing of ranks or models."""
