"""TRL's experimental GKD, ORPO, CPO and online DPO trainers for models of this library on several ranks.

They compute their losses from full logits, which every rank gathers.
"""

from __future__ import annotations

import random
from typing import Any

from torch import Tensor
from trl.experimental import cpo, gkd, online_dpo, orpo

from oslo_models.distributed.object_exchange import broadcast_object
from oslo_models.integrations.accelerator import find_parallel_model
from oslo_models.integrations.trl.mixins import TRLMixin
from oslo_models.integrations.trl.rollouts import generating_in_batch


class OneReplicaMixin(TRLMixin):
    """Common base of the trainers whose losses are means over the rows of one process."""

    def _check_arguments(self, model: Any) -> None:
        super()._check_arguments(model)
        found = find_parallel_model(model)
        if found is not None and found.mesh is not None and found.mesh.dp.size > 1:
            raise ValueError(
                f"TRL's {self.trl_class.__name__} scales its loss by the rows of one process, and {found.mesh.dp.size} "
                "replicas of the model would train otherwise than one process with all rows: use as many "
                "tensor-parallel ranks as processes"
            )


class GKDTrainer(OneReplicaMixin, gkd.GKDTrainer):  # type: ignore[misc]
    """TRL's ``GKDTrainer`` for models of this library on several ranks; the sharded student itself generates.

    The teacher is a sharded or a full model. `DistillationTrainer` needs less memory.

    Raises:
        ValueError: pipeline stages, replicas, or an argument that does not work with a sharded model; on every rank.
    """

    trl_class = gkd.GKDTrainer

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Train on a batch. All ranks draw the same choice between given and generated completions."""
        if self._parallel is not None:
            random.setstate(broadcast_object(self._mesh.model, random.getstate()))
        loss: Tensor = super().training_step(*args, **kwargs)
        return loss


class ORPOTrainer(OneReplicaMixin, orpo.ORPOTrainer):  # type: ignore[misc]
    """TRL's ``ORPOTrainer`` for models of this library on several ranks.

    Raises:
        ValueError: pipeline stages, replicas, or an argument that does not work with a sharded model; on every rank.
    """

    trl_class = orpo.ORPOTrainer


class CPOTrainer(OneReplicaMixin, cpo.CPOTrainer):  # type: ignore[misc]
    """TRL's ``CPOTrainer``, also for SimPO, for models of this library on several ranks.

    Raises:
        ValueError: pipeline stages, replicas, or an argument that does not work with a sharded model; on every rank.
    """

    trl_class = cpo.CPOTrainer


class OnlineDPOTrainer(OneReplicaMixin, online_dpo.OnlineDPOTrainer):  # type: ignore[misc]
    """TRL's ``OnlineDPOTrainer`` for models of this library on several ranks; the sharded model itself generates.

    All ranks train on the rewards of the first rank. Without adapters and ``ref_model``, the reference is a copy of the
    model on the same ranks.

    Raises:
        ValueError: pipeline stages, replicas, or an argument that does not work with a sharded model; on every rank.
    """

    trl_class = online_dpo.OnlineDPOTrainer

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Train on a batch. Completions come from the running batch where possible."""
        with generating_in_batch(self.model):
            loss: Tensor = super().training_step(*args, **kwargs)
        return loss

    def _calculate_rewards_from_functions(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards_from_functions(*args, **kwargs)
        return rewards if self._parallel is None else broadcast_object(self._mesh.model, rewards)
