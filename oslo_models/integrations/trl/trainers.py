"""TRL's SFT, DPO, reward, GRPO and RLOO trainers for models of this library on several ranks."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import trl
from accelerate.utils import is_peft_model, set_seed
from torch import Tensor
from trl.trainer import dpo_trainer, grpo_trainer, reward_trainer, rloo_trainer, sft_trainer
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

from oslo_models.contracts import require
from oslo_models.distributed.object_exchange import broadcast_object, gather_objects
from oslo_models.distributed.rng import stable_hash
from oslo_models.integrations.accelerator import find_parallel_model
from oslo_models.integrations.trainer import ParallelTrainerMixin
from oslo_models.integrations.training_arguments import divides_loss_by_items
from oslo_models.integrations.trl.head import use_sharded_head
from oslo_models.integrations.trl.refusals import check_trl_arguments
from oslo_models.modeling.base import ParallelModel

require("integrations.trl")


class _TRLMixin(ParallelTrainerMixin):
    """Common base of the TRL trainers: checks TRL's arguments, shards its LM head, and keeps TRL's loss scaling."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._use_sharded_heads()

    def _check_class(self) -> None:
        """Accept the class: the trainers in this module support sharded heads."""

    def _check_arguments(self, model: Any) -> None:
        found = find_parallel_model(model)
        if found is not None:
            of_trl = next(cls for cls in type(self).__mro__ if cls.__module__.startswith("trl."))
            check_trl_arguments(of_trl.__name__, self.args, found)
        super()._check_arguments(model)

    def _validate_args(self) -> None:
        accepts = self.model_accepts_loss_kwargs
        super()._validate_args()
        self.model_accepts_loss_kwargs = accepts  # TRL divides by the number of labels, not the model

    def _use_sharded_heads(self) -> None:
        """Make the models compute TRL's fields from their shards of the LM head."""
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None:
                use_sharded_head(model, getattr(self, "temperature", 1.0))


class SFTTrainer(_TRLMixin, sft_trainer.SFTTrainer):  # type: ignore[misc]
    """TRL's ``SFTTrainer`` for models of this library on several ranks. Batch sizes are per replica.

    On pipeline stages, the model computes the same loss for each micro-batch. Only the last stage has logits, so
    entropy and token accuracy are not logged.

    Raises:
        ValueError: an argument does not work with a sharded model or with stages; on every rank.
    """

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


class DPOTrainer(_TRLMixin, dpo_trainer.DPOTrainer):  # type: ignore[misc]
    """TRL's ``DPOTrainer`` for models of this library on several ranks. Batch sizes are per replica.

    Without ``ref_model`` and adapters, the reference is a copy of the model on the same ranks.

    Raises:
        ValueError: pipeline stages, or an argument that does not work with a sharded model; on every rank.
    """

    _precompute_model_hash: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _arguments(dpo_trainer.DPOTrainer, self, args, kwargs)
        options = given.get("args")
        precomputes = options is not None and options.precompute_ref_log_probs
        if given.get("ref_model") is None and not precomputes and _needs_reference(given):
            given["ref_model"] = _reference(given["model"])
        super().__init__(**given)

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """Precompute reference log-probabilities. The hash in the file name covers the shards of all ranks.

        TRL's constructor calls this method too.

        Raises:
            ValueError: the dataset is in memory, so each process would look for the file in a separate folder.
        """
        self._use_sharded_heads()
        if self._parallel is not None:
            if not getattr(dataset, "cache_files", True):
                raise ValueError(
                    f"precompute_ref_log_probs=True stores its results beside the {name} dataset, which is in memory: "
                    "pass one that was loaded from files (datasets.load_dataset, or load_from_disk after "
                    "save_to_disk), or leave it out"
                )
            hashes = gather_objects(self._mesh.model, self._precompute_model_hash)
            self._precompute_model_hash = str(stable_hash(*hashes))
        return super()._precompute_ref_logps(dataset, name, batch_size)


class RewardTrainer(_TRLMixin, reward_trainer.RewardTrainer):  # type: ignore[misc]
    """TRL's ``RewardTrainer`` for sequence classifiers of this library on several ranks. Batch sizes are per replica.

    Raises:
        ValueError: pipeline stages, or an argument that does not work with a sharded model; on every rank.
    """


class _RewardedMixin(_TRLMixin):
    """Common base of the trainers that generate completions and score them by reward functions."""

    _trl_class: type

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _arguments(self._trl_class, self, args, kwargs)
        options = given.get("args")
        copies = options is not None and options.beta != 0.0 and _needs_reference(given)
        reference = _reference(given["model"]) if copies else None
        with _without_reference(options, copies):
            super().__init__(**given)
        if reference is not None:
            self._use_reference(reference)
        if self._parallel is not None:  # TRL has given each rank another seed; ranks of a replica need the same
            set_seed(self.args.seed + self.accelerator.process_index)

    def _use_reference(self, reference: Any) -> None:
        """Set up the reference model as TRL sets up a reference model that it loads."""
        self.beta, self.ref_model = self.args.beta, reference
        if self.args.disable_dropout:
            disable_dropout_in_model(reference)
        add_fused_lm_head(reference, temperature=self.temperature)
        self._use_sharded_heads()
        self.ref_model = self.accelerator.prepare_model(reference, evaluation_mode=True)
        if self.args.sync_ref_model:
            self.add_callback(SyncRefModelCallback(ref_model=self.ref_model, accelerator=self.accelerator))

    def _check_arguments(self, model: Any) -> None:
        super()._check_arguments(model)
        found = find_parallel_model(model)
        if found is not None and found.mesh is not None:
            self._count_replicas(found.mesh.dp.size)

    def _count_replicas(self, replicas: int) -> None:
        """Set the generation batch size by the number of replicas. TRL's arguments have counted all ranks."""
        args = self.args
        args.generation_batch_size = args.per_device_train_batch_size * replicas * args.steps_per_generation
        of_batch = "per_device_train_batch_size * steps_per_generation"
        sizes = {of_batch: (args.generation_batch_size, args.num_generations)}
        if args.do_eval and args.eval_strategy != "no":
            rows = args.per_device_eval_batch_size * replicas
            sizes["per_device_eval_batch_size"] = rows, args.num_generations_eval or args.num_generations
        for what, (rows, generations) in sizes.items():
            if rows % generations:
                raise ValueError(
                    f"{what} times {replicas} replica(s) of the model is {rows}, which is not a multiple of the "
                    f"{generations} generations of a prompt: change one of them"
                )

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate completions. All ranks of a replica get the completions of its first rank."""
        generated = super()._generate(*args, **kwargs)
        return generated if self._parallel is None else broadcast_object(self._mesh.model, generated)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        """Gather the rewards of the first rank of each replica; TRL gathers the rewards of all ranks."""
        rewards: Tensor = super()._calculate_rewards(*args, **kwargs)
        return rewards if self._parallel is None else self._of_replicas(rewards)

    def _of_replicas(self, gathered: Tensor) -> Tensor:
        """Return the rows of the first rank of each replica."""
        first_ranks = broadcast_object(self._mesh.model, self._mesh.dp.ranks)
        of_ranks = gathered.view(self._mesh.world.size, -1, *gathered.shape[1:])
        return of_ranks[list(first_ranks)].flatten(0, 1)


class GRPOTrainer(_RewardedMixin, grpo_trainer.GRPOTrainer):  # type: ignore[misc]
    """TRL's ``GRPOTrainer`` for models of this library on several ranks; the sharded model itself generates.

    Batch sizes are per replica, and ``generation_batch_size`` is ``per_device_train_batch_size * steps_per_generation``
    times the number of replicas. All ranks of a replica train on the completions and rewards of its first rank. Without
    adapters, the reference model for ``beta`` is a copy of the model on the same ranks.

    Raises:
        ValueError: pipeline stages, or an argument that does not work with a sharded model; on every rank.
    """

    _trl_class = grpo_trainer.GRPOTrainer


class RLOOTrainer(_RewardedMixin, rloo_trainer.RLOOTrainer):  # type: ignore[misc]
    """TRL's ``RLOOTrainer`` for models of this library on several ranks; see `GRPOTrainer`.

    Raises:
        ValueError: pipeline stages, or an argument that does not work with a sharded model; on every rank.
    """

    _trl_class = rloo_trainer.RLOOTrainer

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        """Gather the KL divergences over replicas. TRL calls accelerate's function, which gathers over all ranks."""
        if self._parallel is None:
            return super()._generate_and_score_completions(*args, **kwargs)
        of_trl = rloo_trainer.RLOOTrainer._generate_and_score_completions
        if "gather" not in of_trl.__code__.co_names:
            raise RuntimeError(
                f"trl {trl.__version__} gathers KL divergences in another way than oslo_models expects: use "
                "GRPOTrainer, or an older trl"
            )
        names = {**of_trl.__globals__, "gather": self.accelerator.gather}
        own = FunctionType(of_trl.__code__, names, of_trl.__name__, of_trl.__defaults__, of_trl.__closure__)
        return own(self, *args, **kwargs)


def _arguments(cls: type, trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a constructor by name."""
    given = inspect.signature(cls.__init__).bind(trainer, *args, **kwargs).arguments  # type: ignore[misc]
    del given["self"]
    return given


def _needs_reference(given: dict[str, Any]) -> bool:
    """Return whether a parallel model needs a separate reference model.

    A model with adapters does not: with its adapters disabled, it is the reference.
    """
    model = given["model"]
    return find_parallel_model(model) is not None and not is_peft_model(model) and given.get("peft_config") is None


def _reference(model: ParallelModel) -> ParallelModel:
    """Return a copy of a model on the same ranks, with frozen parameters."""
    return copy.deepcopy(model).eval().requires_grad_(False)


@contextmanager
def _without_reference(args: Any, applies: bool) -> Iterator[None]:
    """Keep TRL from loading a full reference model from the hub on each rank."""
    if not applies:
        yield
        return
    before = {name: getattr(args, name) for name in ("beta", "sync_ref_model")}
    args.beta, args.sync_ref_model = 0.0, False
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(args, name, value)
