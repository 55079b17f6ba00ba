"""TRL's trainers for models sharded over ranks. Only this package imports ``trl``."""

from oslo_models.installed import require_first_version

require_first_version("trl")
