"""TRL's distillation trainer for models of this library on several ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from trl.trainer import distillation_trainer

from oslo_models.contracts import require
from oslo_models.integrations.accelerator import find_parallel_model
from oslo_models.integrations.trl.head import vocabulary
from oslo_models.integrations.trl.mixins import GeneratingMixin, arguments, with_names
from oslo_models.layers.cross_entropy import VocabShard
from oslo_models.layers.divergence import Predictor, divergence
from oslo_models.layers.token_statistics import LogitScaling

require("integrations.trl.distillation")


class DistillationTrainer(GeneratingMixin, distillation_trainer.DistillationTrainer):  # type: ignore[misc]
    """TRL's ``DistillationTrainer`` for models of this library on several ranks; the sharded student itself generates.

    Batch sizes are per replica. All ranks of a replica train on the completions of its first rank. The teacher is a
    model of this library with the same ``tensor_parallel_size``: each rank compares its shards of both vocabularies.

    Raises:
        ValueError: pipeline stages, an argument that does not work with a sharded model, or a teacher that is not
            sharded like the student; on every rank.
    """

    trl_class = distillation_trainer.DistillationTrainer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = arguments(self.trl_class, self, args, kwargs)
        student, teacher = find_parallel_model(given["model"]), given.get("teacher_model")
        if student is not None:
            found = find_parallel_model(teacher)
            size = None if found is None or found.mesh is None else found.mesh.tp.size
            assert student.mesh is not None
            if size != student.mesh.tp.size:
                raise ValueError(
                    f"teacher_model of DistillationTrainer is {_described(teacher, size)}, and the student has "
                    f"tensor_parallel_size={student.mesh.tp.size}: load the teacher with from_pretrained_with_parallel "
                    "and the same sizes"
                )
        super().__init__(**given)

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute TRL's loss from the shards of both heads."""
        shard = None if self._parallel is None else vocabulary(self._parallel)
        if shard is None:
            return super()._compute_loss(*args, **kwargs)
        compute = distillation_trainer.DistillationTrainer._compute_loss
        return with_names(compute, _chunked_divergence_loss=partial(_loss, shard))(self, *args, **kwargs)


def _described(teacher: Any, size: int | None) -> str:
    if size is not None:
        return f"a model with tensor_parallel_size={size}"
    return repr(teacher) if teacher is None or isinstance(teacher, str) else f"a full {type(teacher).__name__}"


def _loss(
    shard: VocabShard,
    student_hidden_BKH: Tensor,
    teacher_hidden_BKH: Tensor,
    student_weight_vH: Tensor,
    teacher_weight_vH: Tensor,
    mask_BK: Tensor,
    beta: float,
    num_items_in_batch: Any = None,
    temperature: float = 1.0,
    **of_models: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the loss, the sum of the entropies and the number of tokens, as TRL's ``_chunked_divergence_loss``.

    Args:
        of_models: ``student_...`` and ``teacher_...``: ``lm_head_bias``, ``logit_scale``, ``final_logit_softcapping``.
    """
    is_valid_BK = mask_BK != 0

    def predictor(name: str, hidden_BKH: Tensor, weight_vH: Tensor) -> Predictor:
        softcap = of_models[f"{name}_final_logit_softcapping"]
        scaling = LogitScaling(of_models[f"{name}_logit_scale"], softcap, temperature)
        return Predictor(hidden_BKH[is_valid_BK], weight_vH, of_models[f"{name}_lm_head_bias"], scaling)

    student = predictor("student", student_hidden_BKH, student_weight_vH)
    found = divergence(student, predictor("teacher", teacher_hidden_BKH, teacher_weight_vH), shard, beta)
    count = is_valid_BK.sum()
    items = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return found.divergence.sum() / items, found.entropy.sum(), count
