"""PEFT adapters on sharded models. Models import only `adaptable`; the other modules import ``peft``."""
