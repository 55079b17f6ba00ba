"""TRL's trainers for models sharded over ranks. Only this package imports ``trl``."""
