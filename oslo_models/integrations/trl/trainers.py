"""TRL's SFT, DPO, reward, GRPO and RLOO trainers for models of this library on several ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from trl.trainer import dpo_trainer, grpo_trainer, reward_trainer, rloo_trainer, sft_trainer

from oslo_models.integrations.training_arguments import divides_loss_by_items
from oslo_models.integrations.trl.head import find_on_mesh
from oslo_models.integrations.trl.mixins import ReferencedMixin, RewardedMixin, TRLMixin, with_names


class SFTTrainer(TRLMixin, sft_trainer.SFTTrainer):  # type: ignore[misc]
    """TRL's ``SFTTrainer`` for models of this library on several ranks. Batch sizes are per replica.

    On pipeline stages, the model computes the same loss for each micro-batch. Only the last stage has logits, so
    entropy and token accuracy are not logged.

    Raises:
        ValueError: an argument does not work with a sharded model or with stages; on every rank.
    """

    trl_class = sft_trainer.SFTTrainer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model = self._staged
        if model is None:
            return
        if getattr(self, "aux_loss_enabled", False):
            raise ValueError(
                f"router_aux_loss_coef={self.router_aux_loss_coef}: on pipeline stages, the auxiliary loss would be of "
                "micro-batches; set router_aux_loss_coef=0.0, or load the model with pipeline_parallel_size=1"
            )
        if not divides_loss_by_items(type(model)):
            raise ValueError(
                f"{type(model).__name__} on pipeline stages computes a mean over its own batch, and TRL's SFTTrainer "
                "divides by the tokens of all batches of a step: load the model with pipeline_parallel_size=1"
            )

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Train on a batch. On stages, count its tokens, which TRL counts in `compute_loss`."""
        if self._staged is not None:
            ids, mask = inputs["input_ids"], inputs.get("attention_mask")
            own = ids.new_tensor(ids.numel()) if mask is None else mask.sum()
            self._total_train_tokens += self.accelerator.gather_for_metrics(own).sum().item()
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the trained tokens. On stages, no call of `compute_loss` sets them in evaluation."""
        if self._staged is not None and not self.model.training:
            self._metrics["eval"]["num_tokens"] = [self._total_train_tokens]
        super().log(logs, *args, **kwargs)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute TRL's loss. On stages, the model computes it: the negative log-likelihood of the labels."""
        if self._staged is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        items = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        outputs = model(**{**inputs, "use_cache": False}, **items)
        loss = outputs["loss"]
        if items and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


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

    After ``model.use_exact_rollouts()``, the importance ratio compares each token with its log-probability in the
    rollout. It is exactly 1 in the first update.

    Raises:
        ValueError: pipeline stages, or an argument that does not work with a sharded model; on every rank.
    """

    trl_class = grpo_trainer.GRPOTrainer
    keeps_logprobs = True

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        """Generate and score. With exact rollouts, TRL's old log-probabilities are the ones of the rollout.

        Raises:
            RuntimeError: the rollout recorded no log-probabilities, since ``generate`` or a method of the trainer was
                replaced.
        """
        batch = super()._generate_and_score_completions(*args, **kwargs)
        model = find_on_mesh(self.model)
        if model is None or not model.has_exact_rollouts:
            return batch
        if batch.get("sampling_per_token_logps") is None:
            name = type(self).__name__
            replaced = "model.generate" if "generate" in vars(model) else f"{name}._generate_single_turn"
            raise RuntimeError(
                f"{replaced} was replaced and records no log-probabilities, which use_exact_rollouts() compares with: "
                "remove the replacement, or train without use_exact_rollouts()"
            )
        batch["old_per_token_logps"] = batch["sampling_per_token_logps"]
        return batch


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
