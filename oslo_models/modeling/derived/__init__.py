"""Derives plans for models of architectures without a written plan."""
