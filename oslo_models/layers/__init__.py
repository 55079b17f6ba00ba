"""Layers sharded over the tp axis, independent of architectures."""
