"""TRL's KTO trainer for models of this library on several ranks."""

from __future__ import annotations

from trl.trainer import kto_trainer

from oslo_models.contracts import require
from oslo_models.integrations.trl.mixins import ReferencedMixin

require("integrations.trl.kto")


class KTOTrainer(ReferencedMixin, kto_trainer.KTOTrainer):  # type: ignore[misc]
    """TRL's ``KTOTrainer`` for models of this library on several ranks. Batch sizes are per replica.

    Without ``ref_model`` and adapters, the reference is a copy of the model on the same ranks. The loss ``kto`` pairs
    prompts with completions of other rows in the same batch of a replica, as TRL does on each process.

    Raises:
        ValueError: pipeline stages, or an argument that does not work with a sharded model; on every rank.
    """

    trl_class = kto_trainer.KTOTrainer
