"""`ParallelTrainerMixin`: trains a parallel model with any subclass of transformers' Trainer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers.trainer_callback import TrainerControl
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from oslo_models.checkpoint.filenames import MANIFEST, OPTIMIZER, with_variant
from oslo_models.contracts import require
from oslo_models.distributed.collectives import MAX, all_reduce, broadcast
from oslo_models.distributed.object_exchange import agree, broadcast_object
from oslo_models.distributed.watchdog import user_call
from oslo_models.integrations import trainers_of_trl
from oslo_models.integrations.accelerator import Accelerator, find_parallel_model
from oslo_models.integrations.stages import EvaluationStages, TrainingStages, broadcast_tensors, division
from oslo_models.integrations.training_arguments import check_training_arguments, divides_loss_by_items
from oslo_models.modeling.base import ParallelModel

STATE = "trainer_state.json"
"""Last file of a checkpoint. A checkpoint without it comes from an interrupted save."""


if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class ParallelTrainerMixin(_Base):
    """Mixin for subclasses of transformers' Trainer that trains a model of this library on several ranks.

    >>> class MyTrainer(ParallelTrainerMixin, transformers.Trainer): ...

    Batch sizes are per replica, as everywhere in Trainer. With pipeline stages, batches are divided into micro-batches.
    Training checkpoints have one file per rank; ``save_model`` writes a checkpoint that transformers can load. Without
    a model of this library, nothing changes.
    """

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, and make it count replicas."""
        require("integrations.trainer")
        self._check_arguments(self.model)
        super().create_accelerator_and_postprocess()
        # transformers creates the accelerator itself. Our subclass has no additional state, so its class can change.
        self.accelerator.__class__ = Accelerator
        self.gather_function = self.accelerator.gather_for_metrics
        self.accelerator.use_model(self.model)

    def call_model_init(self, trial: Any = None) -> Any:
        """Call ``model_init``, then check the new model and adopt its mesh."""
        model = super().call_model_init(trial)
        self._check_arguments(model)
        self.accelerator.use_model(model)
        return model

    def _check_arguments(self, model: nn.Module) -> None:
        """Check on all ranks that a parallel model supports the arguments of this trainer."""
        found = find_parallel_model(model)
        if found is not None:
            self._check_class()
            check_training_arguments(self.args, found)

    def _check_class(self) -> None:
        """Raise ``TypeError`` for TRL's trainers: they multiply by the full weight of the LM head."""
        of_trl = next((cls.__name__ for cls in type(self).__mro__ if cls.__module__.partition(".")[0] == "trl"), None)
        if of_trl is not None:
            raise TypeError(
                f"TRL's {of_trl} reads the weight of the LM head, and this rank has a shard of it: derive "
                f"{type(self).__name__} from one of oslo_models.integrations, which support this, in place of "
                f"ParallelTrainerMixin: {', '.join(trainers_of_trl())}. Other trainers of TRL were not tested with "
                "sharded models"
            )

    @property
    def _parallel(self) -> ParallelModel | None:
        """The parallel model, if it is on several ranks."""
        return find_parallel_model(self.model)

    @property
    def _mesh(self) -> Any:
        """The mesh of the parallel model."""
        return self._parallel.mesh if self._parallel is not None else None

    @property
    def _staged(self) -> ParallelModel | None:
        """The parallel model, if it has pipeline stages."""
        model = self._parallel
        return model if model is not None and model.is_pipeline_parallelized() else None

    def _validate_args(self) -> None:
        super()._validate_args()
        if self._parallel is not None and not divides_loss_by_items(type(self._parallel)):
            # transformers assumes that every forward with **kwargs divides its loss by the number of labels of all
            # replicas and accumulated batches. A mean over one batch would be scaled wrongly.
            self.model_accepts_loss_kwargs = False
        if self._staged is not None and self.compute_loss_func is not None:
            raise ValueError(
                "compute_loss_func needs logits, which only the last pipeline stage has: leave it out, so that the "
                "model computes its own loss, or load it with pipeline_parallel_size=1"
            )

    # Training ---------------------------------------------------------------------------------------------------------

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of rows per step over all replicas."""
        if self._parallel is None:
            return super().get_total_train_batch_size(args)
        return self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes

    def floating_point_ops(self, inputs: Any) -> float:
        """Return the operations of a batch, divided by the ranks of a replica."""
        total: float = super().floating_point_ops(inputs)
        return total if self._parallel is None else total / self._mesh.model.size

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """Return the next batches. All ranks of a replica get the batches of its first rank."""
        return super().get_batch_samples(map(self._share, epoch_iterator), *args, **kwargs)

    def _share(self, batch: Any) -> Any:
        """Return the batch of the first rank of this replica, because random collators may differ between ranks."""
        if self._parallel is None:
            return batch
        batch = {**batch} if isinstance(batch, Mapping) else batch  # of plain classes, whose tensors are found
        device = self._mesh.device
        return broadcast_tensors(self._mesh.model, send_to_device(batch, device), 0, device)

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Train on a batch. With pipeline stages, transformers' method runs for each micro-batch.

        Returns:
            The loss of the batch, on every stage.
        """
        if self._staged is None:
            return super().training_step(model, inputs, *args, **kwargs)
        losses = []
        with TrainingStages(model, self._staged) as stages:
            for _ in range(division(self._staged, inputs)[0]):
                losses.append(super().training_step(stages, dict(inputs), *args, **kwargs))
        loss = torch.stack(losses).sum()
        # Only the last stage has the scaled losses.
        return broadcast(self._mesh.pp, loss.double(), self._mesh.pp.size - 1).to(loss.dtype)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self._parallel is not None:
            self._agree_on_control(self.control)
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _agree_on_control(self, control: TrainerControl) -> None:
        """Share the requests of callbacks on any rank with all ranks, because saving and evaluating are collectives."""
        names = [name for name, value in vars(control).items() if name.startswith("should_") and value in (True, False)]
        flags = torch.tensor([float(getattr(control, name)) for name in names], device=self._mesh.device)
        for name, flag in zip(names, all_reduce(self._mesh.world, flags, MAX).tolist(), strict=True):
            setattr(control, name, bool(flag))

    def _user_call(self) -> AbstractContextManager[None]:
        """Return a context in which an error of callbacks, datasets or metrics on one rank ends all ranks."""
        return nullcontext() if self._parallel is None else user_call(self._mesh.world)

    # Evaluation -------------------------------------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as transformers does."""
        with self._user_call():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict as transformers does."""
        with self._user_call():
            return super().predict(*args, **kwargs)

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict a batch. With pipeline stages, every stage gets the output of the last stage."""
        if self._parallel is not None:
            inputs = self._share(inputs)
        called: Any = model if self._staged is None else EvaluationStages(model, self._staged)
        return super().prediction_step(called, inputs, *args, **kwargs)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Search hyperparameters as transformers does. Raise ``ValueError`` for a parallel model."""
        if self._parallel is None:
            return super().hyperparameter_search(*args, **kwargs)
        raise ValueError(
            "hyperparameter_search would run trials on each rank of a sharded model: run it around torchrun"
        )

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self._parallel is None:
            super()._save_checkpoint(model, trial)
            return
        folder = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with agree(self._mesh.world, f"saving {folder}"):
            if self.args.should_save:  # marks the checkpoint as incomplete until the file is written again
                (folder / STATE).unlink(missing_ok=True)
        with self._splitting():
            super()._save_checkpoint(model, trial)

    @contextmanager
    def _splitting(self) -> Iterator[None]:
        self._splits = True
        try:
            yield
        finally:
            self._splits = False

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save a checkpoint that transformers can load; inside a training checkpoint, save one file per rank.

        A collective of all ranks.
        """
        if self._parallel is None:
            super().save_model(output_dir, _internal_call)
            return
        folder = self.args.output_dir if output_dir is None else output_dir
        if _has_adapters(self.model):
            self.model.save_pretrained(folder)
        else:
            self._parallel.save_pretrained_with_parallel(folder, save_with_merging=not getattr(self, "_splits", False))
        with agree(self._mesh.world, f"saving to {folder}"):
            if self.args.should_save:
                tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
                if tokenizer is not None:
                    tokenizer.save_pretrained(folder)
                torch.save(self.args, Path(folder) / "training_args.bin")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._parallel is None:
            super()._save_optimizer_and_scheduler(output_dir)
        else:
            scheduler = self.lr_scheduler.state_dict()
            self._parallel.save_optimizer(_unwrap(self.optimizer), output_dir, scheduler=scheduler)

    def _save_rng_state(self, output_dir: str) -> None:
        if self._parallel is None:
            super()._save_rng_state(output_dir)
            return
        # transformers restores random states after it has skipped batches. All ranks write theirs before the checkpoint
        # is complete.
        with agree(self._mesh.world, f"saving random states to {output_dir}"):
            super()._save_rng_state(output_dir)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as transformers does. ``resume_from_checkpoint=True`` takes the last complete checkpoint."""
        if self._parallel is not None and resume_from_checkpoint is True:
            world = self._mesh.world
            last = last_complete_checkpoint(Path(self.args.output_dir)) if world.rank == 0 else None
            resume_from_checkpoint = broadcast_object(world, last)
            if resume_from_checkpoint is None:
                raise ValueError(f"{self.args.output_dir} has no complete checkpoint to resume from")
        with self._user_call():
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self._parallel is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        folder = Path(resume_from_checkpoint)
        with agree(self._mesh.world, f"resuming from {folder}"):
            if not _is_complete(folder):
                raise ValueError(
                    f"{folder} is not a complete checkpoint: it has no valid {STATE}, so the save may have been "
                    "interrupted; resume_from_checkpoint=True takes the last complete one"
                )
            if not (folder / with_variant(MANIFEST, OPTIMIZER)).is_file():
                raise ValueError(
                    f"{folder} has no optimizer state of a sharded model, as with save_only_model=True or without this "
                    "Trainer: load the model from there by from_pretrained_with_parallel, and do not resume"
                )
        if _has_adapters(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._parallel.from_parallelized(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._parallel is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            state = self._parallel.load_optimizer(_unwrap(self.optimizer), checkpoint)
            self.lr_scheduler.load_state_dict(state["scheduler"])

    def _load_best_model(self) -> None:
        if self._parallel is None or _has_adapters(self.model):
            super()._load_best_model()
        else:
            self._parallel.from_parallelized(self.state.best_model_checkpoint)


class Trainer(ParallelTrainerMixin, transformers.Trainer):
    """transformers' ``Trainer`` for models of this library on several ranks."""


class Seq2SeqTrainer(ParallelTrainerMixin, transformers.Seq2SeqTrainer):
    """transformers' ``Seq2SeqTrainer`` for models of this library on several ranks."""


def _has_adapters(model: nn.Module) -> bool:
    """Return whether the model has peft adapters. Checkpoints then have adapters in place of the model."""
    return bool(getattr(model, "peft_config", None))


def _unwrap(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _is_complete(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / STATE).read_text())
    except (OSError, ValueError):
        return False
    return True


def last_complete_checkpoint(directory: Path) -> str | None:
    """Return the complete checkpoint with the highest step."""
    steps = {}
    for path in directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = path.name.rpartition("-")[2]
        if step.isdecimal() and _is_complete(path):
            steps[int(step)] = str(path)
    return steps[max(steps)] if steps else None
