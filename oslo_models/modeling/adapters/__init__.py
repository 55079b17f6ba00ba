"""PEFT's adapters on sharded models. Only `adaptable` is imported with the models; the rest imports ``peft``."""
