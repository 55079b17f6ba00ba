"""Layers divided over the tp axis; they know nothing of architectures."""
