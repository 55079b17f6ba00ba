"""Checks the arguments of the constructors; finds checkpoints and reads their configurations."""
