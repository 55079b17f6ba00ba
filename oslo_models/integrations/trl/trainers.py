"""TRL's SFT, DPO, reward, GRPO and RLOO trainers for models of this library on several ranks."""

from __future__ import annotations

from typing import Any

from trl.trainer import dpo_trainer, grpo_trainer, reward_trainer, rloo_trainer, sft_trainer

from oslo_models.integrations.trl.mixins import ReferencedMixin, RewardedMixin, TRLMixin, with_names


class SFTTrainer(TRLMixin, sft_trainer.SFTTrainer):  # type: ignore[misc]
    """TRL's ``SFTTrainer`` for models of this library on several ranks. Batch sizes are per replica.

    Raises:
        ValueError: pipeline stages, or an argument that does not work with a sharded model; on every rank.
    """

    trl_class = sft_trainer.SFTTrainer


class DPOTrainer(ReferencedMixin, dpo_trainer.DPOTrainer):  # type: ignore[misc]
    """TRL's ``DPOTrainer`` for models of this library on several ranks. Batch sizes are per replica.

    Without ``ref_model`` and adapters, the reference is a copy of the model on the same ranks.

    Raises:
        ValueError: pipeline stages, or an argument that does not work with a sharded model; on every rank.
    """

    trl_class = dpo_trainer.DPOTrainer


class RewardTrainer(TRLMixin, reward_trainer.RewardTrainer):  # type: ignore[misc]
    """TRL's ``RewardTrainer`` for sequence classifiers of this library on several ranks. Batch sizes are per replica.

    Raises:
        ValueError: pipeline stages, or an argument that does not work with a sharded model; on every rank.
    """

    trl_class = reward_trainer.RewardTrainer


class GRPOTrainer(RewardedMixin, grpo_trainer.GRPOTrainer):  # type: ignore[misc]
    """TRL's ``GRPOTrainer`` for models of this library on several ranks; the sharded model itself generates.

    Batch sizes are per replica, and ``generation_batch_size`` is ``per_device_train_batch_size * steps_per_generation``
    times the number of replicas. All ranks of a replica train on the completions and rewards of its first rank. Without
    adapters, the reference model for ``beta`` is a copy of the model on the same ranks.

    Raises:
        ValueError: pipeline stages, or an argument that does not work with a sharded model; on every rank.
    """

    trl_class = grpo_trainer.GRPOTrainer


class RLOOTrainer(RewardedMixin, rloo_trainer.RLOOTrainer):  # type: ignore[misc]
    """TRL's ``RLOOTrainer`` for models of this library on several ranks; see `GRPOTrainer`.

    Raises:
        ValueError: pipeline stages, or an argument that does not work with a sharded model; on every rank.
    """

    trl_class = rloo_trainer.RLOOTrainer

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        """Gather the KL divergences over replicas. TRL calls accelerate's function, which gathers over all ranks."""
        if self._parallel is None:
            return super()._generate_and_score_completions(*args, **kwargs)
        of_trl = rloo_trainer.RLOOTrainer._generate_and_score_completions
        return with_names(of_trl, gather=self.accelerator.gather)(self, *args, **kwargs)
