"""`Accelerator`: a subclass of accelerate's that counts the replicas of a parallel model as processes."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.data_loader import SeedableRandomSampler, get_sampler
from accelerate.utils import DistributedType, recursively_apply
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from oslo_models.distributed.collectives import MAX, all_gather, all_reduce
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.distributed.object_exchange import gather_objects
from oslo_models.integrations.scheduler import ReplicaScheduler
from oslo_models.integrations.stages import autocast_micro_batches
from oslo_models.modeling.base import ParallelModel

MODEL_FOLDER = "model"
"""Folder for a model's checkpoint inside a checkpoint of `Accelerator.save_state`. Further models get a number."""


def find_parallel_model(module: Any) -> ParallelModel | None:
    """Return the first `ParallelModel` inside ``module`` on several ranks, through any wrappers."""
    modules = module.modules() if isinstance(module, nn.Module) else ()
    models = (each for each in modules if isinstance(each, ParallelModel) and each.mesh is not None)
    return next((model for model in models if model.mesh.world.size > 1), None)


class Accelerator(accelerate.Accelerator):
    """accelerate's ``Accelerator`` for a model of this library on several ranks. Without such a model, nothing changes.

    ``num_processes`` and ``process_index`` count replicas. All ranks of a replica get the same batches, and ``gather``,
    ``gather_for_metrics`` and ``reduce`` count each replica once. ``is_main_process`` is true on rank 0.

    Args:
        *args, **kwargs: the arguments of accelerate's ``Accelerator``.
        cpu: compute on the CPU; default: ``True`` without CUDA.
    """

    parallel_model: ParallelModel | None = None
    """The last prepared parallel model. A model for evaluation only does not replace an earlier one."""
    _models: list[Any]
    _optimizers: list[Any]
    flag_tensor: Tensor | None

    def __init__(self, *args: Any, cpu: bool | None = None, **kwargs: Any) -> None:
        super().__init__(*args, cpu=not torch.cuda.is_available() if cpu is None else cpu, **kwargs)

    @property
    def mesh(self) -> ParallelMesh | None:
        """The mesh of the parallel model."""
        return None if self.parallel_model is None else self.parallel_model.mesh

    def use_model(self, module: Any, evaluation_mode: bool = False) -> None:
        """Adopt the mesh of a parallel model. `prepare` calls it for its arguments. Other objects have no effect.

        Args:
            evaluation_mode: the model is not trained, for example a reference model.

        Raises:
            ValueError: accelerate is configured for another number of processes, another device or another kind of
                parallelism, or has already prepared data loaders that give each rank another batch.
        """
        model = find_parallel_model(module)
        if model is None or model is self.parallel_model:
            return
        assert model.mesh is not None
        self._check_setting(model.mesh)
        if self.mesh is None and self._dataloaders and model.is_model_parallelized():
            raise ValueError(
                "data loaders were prepared before the parallel model, so each rank would get another batch: prepare "
                "the model first, or all in one call, prepare(model, optimizer, loader)"
            )
        if self.mesh is not None and self.mesh.dp.ranks != model.mesh.dp.ranks:
            raise ValueError(
                f"this rank has the replicas {self.mesh.dp.ranks} of one model and {model.mesh.dp.ranks} of another: "
                "pass the same tensor_parallel_size and pipeline_parallel_size for all models"
            )
        if self.parallel_model is None or not evaluation_mode:
            self.parallel_model = model

    def _check_setting(self, mesh: ParallelMesh) -> None:
        """Raise ``ValueError`` unless accelerate uses the mesh's processes and device, without other parallelism."""
        state = self.state
        if state.num_processes != mesh.world.size:
            raise ValueError(
                f"accelerate sees {state.num_processes} process(es) of {mesh.world.size}: start the script with "
                "torchrun, and on CPUs pass TrainingArguments(use_cpu=True) or Accelerator(cpu=True)"
            )
        if self.device.type != mesh.device.type:
            cpu = mesh.device.type == "cpu"
            raise ValueError(
                f"accelerate computes on {self.device.type} and the model is on {mesh.device.type}: pass "
                f"TrainingArguments(use_cpu={cpu}) or Accelerator(cpu={cpu})"
            )
        others = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM)
        if state.distributed_type in others or state.parallelism_config is not None:
            what = "parallelism_config" if state.parallelism_config is not None else state.distributed_type.value
            raise ValueError(
                f"the model is distributed already (tensor_parallel_size={mesh.tp.size}, pipeline_parallel_size="
                f"{mesh.pp.size}), and {what} configures accelerate to distribute it again: leave it out, or, with "
                "both sizes 1, use accelerate's own Accelerator"
            )

    # Processes are replicas -------------------------------------------------------------------------------------------

    @property
    def num_processes(self) -> int:
        """Number of replicas."""
        return super().num_processes if self.mesh is None else self.mesh.dp.size

    @property
    def process_index(self) -> int:
        """Index of this rank's replica."""
        return super().process_index if self.mesh is None else self.mesh.dp.rank

    @property
    def is_last_process(self) -> bool:
        """True for the last rank only."""
        return self.state.is_last_process

    @property
    def dispatch_batches(self) -> bool | None:
        """Always ``False`` with a parallel model: dispatching would give each rank another part of a batch."""
        return super().dispatch_batches if self.mesh is None else False

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """Split the inputs between the replicas."""
        replicas = copy.copy(accelerate.PartialState())  # the state object is shared by all users; the copy is not
        replicas.__dict__.update(num_processes=self.num_processes, process_index=self.process_index)
        return replicas.split_between_processes(inputs, apply_padding=apply_padding)

    # Preparation ------------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects as accelerate does. Wrap a parallel model in DDP over its data-parallel group."""
        for each in args:
            self.use_model(each)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare a model as accelerate does. Wrap a parallel model in DDP over its data-parallel group.

        A process group of one process needs no DDP, whose buckets would be a second copy of the gradients.
        """
        self.use_model(model, evaluation_mode)
        parallel = find_parallel_model(model)
        if parallel is None:
            replicated = self.distributed_type in (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
            alone = replicated and super().num_processes == 1
            return super().prepare_model(model, device_placement, evaluation_mode or alone)
        assert parallel.mesh is not None
        first_time = not getattr(model, "_is_accelerate_prepared", False)
        prepared = super().prepare_model(model, device_placement, evaluation_mode=True)  # evaluation: no DDP wrapper
        if first_time and self.native_amp and parallel.is_pipeline_parallelized():
            autocast_micro_batches(prepared, self.autocast)
        trains = any(param.requires_grad for param in model.parameters()) or parallel.is_pipeline_parallelized()
        if evaluation_mode or not trains or parallel.mesh.dp.size == 1 or isinstance(model, DistributedDataParallel):
            return prepared
        options = {} if self.ddp_handler is None else self.ddp_handler.to_kwargs()
        if parallel.is_pipeline_parallelized():  # the call returns a loop, in which DDP would find no parameters
            options["find_unused_parameters"] = False
        wrapped: Any = DistributedDataParallel(prepared, process_group=parallel.mesh.dp.group, **options)
        if self.ddp_handler is not None:
            self.ddp_handler.register_comm_hook(wrapped)
        self._models[self._models.index(model)] = wrapped
        wrapped._is_accelerate_prepared = True
        return wrapped

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a data loader with the same batches in the same order on all ranks of a replica."""
        if self.mesh is not None and super().dispatch_batches:
            raise ValueError("dispatch_batches=True gives each rank another part of a batch: leave it out")
        if self.mesh is None or getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, *args, **kwargs)
        sampler = get_sampler(data_loader)
        generator = getattr(sampler, "generator", None)
        loader = super().prepare_data_loader(data_loader, *args, **kwargs)
        if not hasattr(sampler, "generator") or isinstance(get_sampler(loader), SeedableRandomSampler):
            return loader
        # With one process, accelerate lets each rank choose the order. Otherwise it gives the sampler a generator that
        # is in no checkpoint. The default generator is in the checkpoint; rank 0 sets it at the start of an epoch.
        sampler.generator = loader.synchronized_generator = generator
        loader.rng_types = ["torch" if generator is None else "generator"]
        return loader

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler that takes one step for the batch of each replica."""
        if self.mesh is None or getattr(scheduler, "_is_accelerate_prepared", False):
            return super().prepare_scheduler(scheduler)
        prepared = super().prepare_scheduler(scheduler)
        repeats = 1 if self.split_batches else self.mesh.dp.size
        own = ReplicaScheduler(scheduler, prepared.optimizers, prepared.step_with_optimizer, repeats)
        self._schedulers[-1] = own
        return own

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Any:
        """Clip by the gradient norm of the full model, also if a whole pipeline stage has no gradients."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        model = self.parallel_model
        if model is None or {id(param) for param in given} != {id(param) for param in model.parameters()}:
            return super().clip_grad_norm_(given, max_norm, norm_type)
        self.unscale_gradients()
        return model.clip_grad_norm_(max_norm, norm_type)

    # Communication between replicas -----------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all replicas along their first dimension. A collective of all ranks."""
        if self.mesh is None:
            return super().gather(tensor)
        dp = self.mesh.dp

        def gather_one(x: Tensor) -> Tensor:
            x = x[None] if x.ndim == 0 else x
            return x if dp.size == 1 else all_gather(dp, x, 0, [len(x)] * dp.size)

        return recursively_apply(gather_one, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather from all replicas, without the samples that pad the last batch."""
        if self.mesh is None or not (use_gather_object or _has_other_leaves(input_data)):
            return super().gather_for_metrics(input_data, use_gather_object)
        data = [item for part in gather_objects(self.mesh.dp, input_data) for item in part]
        remainder = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else -1
        return data[:remainder] if remainder > 0 else data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce over the replicas. ``scale`` has an effect on XLA only."""
        if self.mesh is None:
            return super().reduce(tensor, reduction, scale)
        dp = self.mesh.dp

        def reduce_one(x: Tensor) -> Tensor:
            if reduction == "none":
                return x.clone()
            total = all_reduce(dp, x.clone(), dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM)
            return total / dp.size if reduction == "mean" else total

        return recursively_apply(reduce_one, tensor, error_on_other_type=True)

    def check_trigger(self) -> bool:
        """Return whether any rank has called ``set_trigger`` since the last check. A collective of all ranks."""
        if self.mesh is None:
            return super().check_trigger()
        flag = torch.zeros((), device=self.device) if self.flag_tensor is None else self.flag_tensor.float()
        self.flag_tensor = None
        return bool(all_reduce(self.mesh.world, flag, MAX))

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Save the state as accelerate does. A parallel model and its optimizer go to a folder, one file per rank.

        The optimizer is saved last, so that `load_state` refuses the folder of an interrupted save.
        """
        pairs = self._models_with_optimizers()
        if not pairs:
            return super().save_state(output_dir, safe_serialization, **kwargs)
        models, optimizers = self._models, self._optimizers
        self._models, self._optimizers = [], []
        try:
            location = super().save_state(output_dir, safe_serialization, **kwargs)
        finally:
            self._models, self._optimizers = models, optimizers
        for number, (model, optimizer) in enumerate(pairs):
            folder = _model_folder(location, number)
            model.save_pretrained_with_parallel(folder)
            model.save_optimizer(optimizer, folder)
        return location

    def load_state(self, input_dir: Any = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Load a checkpoint of `save_state`, saved with the same parallel sizes."""
        pairs = self._models_with_optimizers()
        if not pairs:
            return super().load_state(input_dir, load_kwargs, **kwargs)
        models, optimizers = self._models, self._optimizers
        location: list[str] = []
        hook = self.register_load_state_pre_hook(lambda models, folder: location.append(folder))
        self._models, self._optimizers = [], []
        try:
            super().load_state(input_dir, load_kwargs, **kwargs)
        finally:
            hook.remove()
            self._models, self._optimizers = models, optimizers
        for number, (model, optimizer) in enumerate(pairs):
            folder = _model_folder(location[0], number)
            model.from_parallelized(folder)
            model.load_optimizer(optimizer, folder)

    def _models_with_optimizers(self) -> list[tuple[ParallelModel, Any]]:
        """Return the prepared parallel models, each with the optimizer of its parameters."""
        if self.mesh is None:
            return []
        pairs = []
        for module in self._models:
            model, own = find_parallel_model(module), {id(param) for param in module.parameters()}
            found = [each.optimizer for each in self._optimizers if own & _parameter_ids(each)]
            if model is None or len(found) != 1:
                raise ValueError(
                    f"save_state and load_state need one optimizer for each parallel model, and the prepared "
                    f"{type(module).__name__} has {len(found)}: prepare it with its optimizer, or save it by "
                    "model.save_pretrained_with_parallel"
                )
            pairs.append((model, found[0]))
        return pairs

    def save_model(self, model: nn.Module, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint that transformers can load. A parallel model is merged. A collective of all ranks."""
        parallel = find_parallel_model(model)
        if parallel is None:
            super().save_model(model, save_directory, *args, **kwargs)
        else:
            parallel.save_pretrained_with_parallel(save_directory, save_with_merging=True)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return the state dict of a model. Raise ``ValueError`` for a sharded model."""
        parallel = find_parallel_model(model)
        if parallel is None or not parallel.is_model_parallelized():
            return super().get_state_dict(model, unwrap)
        raise ValueError(
            "get_state_dict of a sharded model would return the shards of this rank: call "
            "model.save_pretrained_with_parallel(directory, save_with_merging=True) or accelerator.save_model"
        )


def _has_other_leaves(data: Any) -> bool:
    """Return whether nested lists, tuples and dictionaries have leaves other than tensors."""
    try:
        recursively_apply(lambda x: x, data, error_on_other_type=True)
    except TypeError:
        return True
    return False


def _parameter_ids(optimizer: Any) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def _model_folder(location: Any, number: int) -> Path:
    return Path(location) / (f"{MODEL_FOLDER}_{number}" if number else MODEL_FOLDER)
