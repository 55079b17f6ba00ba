"""Mixins that make TRL's trainers work on the ranks of a sharded model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, ClassVar

import trl
from accelerate.utils import is_peft_model, set_seed
from torch import Tensor
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

from oslo_models.contracts import require
from oslo_models.distributed.object_exchange import broadcast_object, gather_objects
from oslo_models.distributed.rng import stable_hash
from oslo_models.integrations.accelerator import find_parallel_model
from oslo_models.integrations.trainer import ParallelTrainerMixin
from oslo_models.integrations.trl.head import find_on_mesh, use_sharded_head
from oslo_models.integrations.trl.refusals import check_trl_arguments
from oslo_models.integrations.trl.rollouts import generating_in_batch
from oslo_models.modeling.base import ParallelModel

require("integrations.trl.mixins", "integrations.trl.trainers")


class TRLMixin(ParallelTrainerMixin):
    """Common base of the TRL trainers: checks TRL's arguments, shards its LM head, and keeps TRL's loss scaling.

    Attributes:
        trl_class: the trainer of TRL below this mixin.
    """

    trl_class: ClassVar[type]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model = find_on_mesh(self.model)
        if model is not None and model.has_exact_rollouts:
            model.use_exact_rollouts()  # TRL may have added adapters
        self._use_sharded_heads()

    def _check_class(self) -> None:
        """Raise ``TypeError`` if another trainer of TRL stands between this class and its trainer of TRL."""
        of_trl = _trl_class(type(self))
        if of_trl is not self.trl_class:
            raise TypeError(
                f"TRL's {of_trl.__name__} was not tested with sharded models, and {type(self).__name__} derives from "
                f"it: derive it from TRL's {self.trl_class.__name__} alone"
            )

    def _check_arguments(self, model: Any) -> None:
        found = find_parallel_model(model)
        if found is not None:
            check_trl_arguments(_trl_class(type(self)).__name__, self.args, found)
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


class ReferencedMixin(TRLMixin):
    """Common base of the trainers that compare log-probabilities with a reference model."""

    _precompute_model_hash: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = arguments(self.trl_class, self, args, kwargs)
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


class GeneratingMixin(TRLMixin):
    """Common base of the trainers that generate completions.

    Attributes:
        keeps_logprobs: whether TRL's trainer reads the log-probabilities of the rollout.
    """

    keeps_logprobs: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._parallel is not None:  # TRL has given each rank another seed; ranks of a replica need the same
            set_seed(self.args.seed + self.accelerator.process_index)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Generate completions, in the running batch where possible."""
        with generating_in_batch(self.model, self.keeps_logprobs) as logprobs:
            generated = super()._generate_single_turn(*args, **kwargs)
        if not logprobs:
            return generated
        completions, *rest = generated
        own = [row[: len(completion)] for row, completion in zip(logprobs, completions, strict=True)]
        return (completions, own, *rest[1:])

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate completions. All ranks of a replica get the completions of its first rank."""
        generated = super()._generate(*args, **kwargs)
        return generated if self._parallel is None else broadcast_object(self._mesh.model, generated)


class RewardedMixin(GeneratingMixin):
    """Common base of the trainers that generate completions and score them by reward functions."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = arguments(self.trl_class, self, args, kwargs)
        options = given.get("args")
        copies = options is not None and options.beta != 0.0 and _needs_reference(given)
        reference = _reference(given["model"]) if copies else None
        with _without_reference(options, copies):
            super().__init__(**given)
        if reference is not None:
            self._use_reference(reference)

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

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        """Gather the rewards of the first rank of each replica; TRL gathers the rewards of all ranks."""
        rewards: Tensor = super()._calculate_rewards(*args, **kwargs)
        return rewards if self._parallel is None else self._of_replicas(rewards)

    def _of_replicas(self, gathered: Tensor) -> Tensor:
        """Return the rows of the first rank of each replica."""
        first_ranks = broadcast_object(self._mesh.model, self._mesh.dp.ranks)
        of_ranks = gathered.view(self._mesh.world.size, -1, *gathered.shape[1:])
        return of_ranks[list(first_ranks)].flatten(0, 1)


def with_names(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Return a function of TRL that finds other objects under some of its global names.

    Raises:
        RuntimeError: the function does not use a name.
    """
    own: Any = function
    code = own.__code__
    if missing := sorted(names.keys() - set(code.co_names)):
        raise RuntimeError(
            f"{own.__qualname__} of trl {trl.__version__} does not call {', '.join(missing)}, as oslo_models "
            "expects: use an older trl, or another trainer"
        )
    return FunctionType(code, {**own.__globals__, **names}, own.__name__, own.__defaults__, own.__closure__)


def _trl_class(cls: type) -> type:
    return next(base for base in cls.__mro__ if base.__module__.startswith("trl."))


def arguments(cls: type, trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
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
