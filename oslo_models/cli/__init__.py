"""The command line ``oslo-models``."""
