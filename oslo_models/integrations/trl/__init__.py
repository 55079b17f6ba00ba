"""TRL's trainers for models that are sharded over ranks. Imports ``trl``; nothing else in the library does."""
