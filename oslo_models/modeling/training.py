"""`TrainableModel`: the methods for training a model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from typing_extensions import Self

from oslo_kernels.language import wide
from oslo_models.checkpoint import optimizer as optimizers
from oslo_models.distributed.callers import (
    ignored_by_fully_shard,
    object_under_construction,
    refuse_fsdp1,
    require_replicas,
    require_replicas_in_fully_shard,
    state_dict_options,
)
from oslo_models.distributed.collectives import all_reduce
from oslo_models.distributed.mesh import Axis, ParallelMesh, check_size
from oslo_models.distributed.sharded_tensor import Sharding, local_tensor, mark_buffer, mark_parameter
from oslo_models.layers.token_division import TokenDivision
from oslo_models.modeling.attention_choice import AttentionChoice, check_attention
from oslo_models.modeling.matrix_optimizer import matrix_optimizer
from oslo_models.modeling.token_division import refuse_deepspeed
from oslo_models.pipeline.pipeline import Pipeline
from oslo_models.pipeline.stage import Stage
from oslo_models.sharding.layout import Layout


def enable_checkpointing(model: Any, kwargs: dict[str, Any] | None = None, **options: Any) -> None:
    """Compute blocks again in the backward pass, by the method of the installed transformers.

    Args:
        kwargs: arguments of ``torch.utils.checkpoint.checkpoint``; by default, it is not reentrant.
        options: ``every_n_layers``, ``offload``.
    """
    renamed = getattr(model, "activation_checkpointing_enable", None)  # transformers 5.24
    (renamed or model.gradient_checkpointing_enable)(kwargs or {"use_reentrant": False}, **options)


class TrainableModel(PreTrainedModel):
    """The methods of `ParallelModel` for training."""

    mesh: ParallelMesh | None = None
    pipeline: Pipeline | None = None
    stage: Stage | None = None
    micro_batch_size: int = 1
    layouts: dict[str, Layout]
    token_division: TokenDivision | None = None
    _attention_choice: AttentionChoice | None = None

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = checkpoint, *args: Any, **kwargs: Any
    ) -> None:
        """Like transformers' method. Parts of the tokens pass through the function."""
        if self.token_division is not None:
            gradient_checkpointing_func = self.token_division.checkpointing(gradient_checkpointing_func)
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, *args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Like ``nn.Module.train``. Also selects the attention of the mode, unless the user has named one."""
        super().train(mode)
        if self._attention_choice is not None:
            self._attention_choice.select(mode)
        return self

    def set_attn_implementation(self, attn_implementation: str | dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Like transformers' method. The attention then stays the same in training and evaluation.

        Raises:
            ValueError: ``"oslo_models_blockwise"`` for a model that does not support it.
        """
        super().set_attn_implementation(attn_implementation, *args, **kwargs)
        self._attention_choice = None
        check_attention(self)

    def gpu_modules(self) -> nn.Module:
        """Return this rank's module, to wrap with DDP, FSDP or DeepSpeed."""
        return self

    def gpu_parameters(self) -> Iterator[nn.Parameter]:
        """Return this rank's parameters, for the optimizer."""
        return self.gpu_modules().parameters()

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Like ``nn.Module.named_modules``.

        Raises:
            ValueError: ``DistributedDataParallel`` is being constructed over ranks with different shards, which it
                would overwrite with the shards of its first rank. Or ``FullyShardedDataParallel`` is being constructed.
        """
        mesh = self.mesh
        if not torch.compiler.is_compiling() and mesh is not None and (mesh.is_sharded or mesh.cp.size > 1):
            refuse_fsdp1(f"this {type(self).__name__}")
            _require_replicas(self, mesh, prefix)
        return super().named_modules(memo, prefix, remove_duplicate)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Like ``nn.Module.named_parameters``.

        Raises:
            ValueError: the caller is ``torch.distributed.checkpoint.state_dict`` with ``full_state_dict=True``, which
                would return shards as full tensors: torch gathers ``DTensor`` only. Or DeepSpeed's engine, if experts
                are sharded over replicas, or divided tokens. Or ``fully_shard`` over ranks with different
                shards.
        """
        if not recurse and self.mesh is not None and (self.mesh.is_sharded or self.mesh.cp.size > 1):
            if self.mesh.is_sharded:
                _refuse_full_state_dict(self)
            if ignored_by_fully_shard() is not None:
                require_replicas_in_fully_shard(f"one {type(self).__name__}", self.mesh)
        if recurse and self.mesh is not None and self.mesh.has_experts_over_replicas:
            _refuse_deepspeed()
        if recurse and self.token_division is not None:
            refuse_deepspeed(self.token_division)
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of experts that are sharded over data-parallel replicas, if any.

        ``backward`` averages their gradients over all replicas, so they must not be averaged again. Wrappers that treat
        all replicas alike have to ignore them: ``fully_shard(..., ignored_params=...)``.
        """
        return map(self.get_parameter, _experts_over_replicas(self))

    def set_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the number of rows per micro-batch (pipeline parallelism only)."""
        check_size("micro_batch_size", micro_batch_size)
        self.micro_batch_size = micro_batch_size

    def train_batch(self, **batch: Any) -> Tensor:
        """Run the forward and backward pass of a batch, in micro-batches under pipeline parallelism.

        Returns:
            The detached loss of the full batch, on every rank.
        """
        if self.pipeline is None:
            loss = self(**batch).loss
            loss.backward()
            return loss.detach()
        losses = []
        for output in self(**batch):
            output.loss.backward()
            losses.append(output.loss.detach())
        return torch.stack(losses).sum()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over the full model is at most ``max_norm``. This is a collective.

        Each element of the full model counts once, whether sharded or replicated. Gradients that FSDP2 shards over
        replicas, or over ranks that divide tokens, are included.

        Returns:
            The norm before clipping, the same on all ranks of the model.
        """
        grads = {name: param.grad for name, param in self.named_parameters() if param.grad is not None}
        local = [grad.to_local() if isinstance(grad, DTensor) else local_tensor(grad) for grad in grads.values()]
        device = local[0].device if local else None
        highest = norm_type == float("inf")

        def sum_of(names: Iterable[str]) -> Tensor:
            """Return this rank's contribution to the norm: a sum of powers, or a maximum."""
            total = torch.zeros((), dtype=torch.float64, device=device)
            counted = [part for name in names for part in self._counted(name, grads[name])]
            for parts in _by_dtype(part for part in counted if part.numel()):  # FSDP2 leaves ranks without a row
                # one kernel launch on a GPU
                norms = torch._foreach_norm(parts, norm_type, dtype=wide(parts[0].dtype))
                powers = torch.stack(norms).double()
                total = torch.maximum(total, powers.amax()) if highest else total + (powers**norm_type).sum()
            return total

        over_replicas = grads.keys() & set(_experts_over_replicas(self))
        by_axes: dict[tuple[Axis, ...], list[str]] = {(): []}
        for name in grads:  # in the order of all ranks
            if name not in over_replicas:
                by_axes.setdefault(_axes_of_fsdp(self.mesh, grads[name]), []).append(name)
        total = sum_of(by_axes.pop(()))
        if self.mesh is not None:
            op = dist.ReduceOp.MAX if highest else dist.ReduceOp.SUM
            for axes, names in by_axes.items():
                of_shards = sum_of(names)
                for axis in axes:
                    all_reduce(axis, of_shards, op=op)
                total = torch.maximum(total, of_shards) if highest else total + of_shards
            if self.mesh.has_experts_over_replicas:
                of_experts = all_reduce(self.mesh.experts, sum_of(sorted(over_replicas)), op=op)
                if self.mesh.tp.rank == 0:  # count each expert once per model
                    total = torch.maximum(total, of_experts) if highest else total + of_experts
            all_reduce(self.mesh.weights, total, op=op)
        norm = total if highest else total ** (1.0 / norm_type)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parts in _by_dtype(local):
            torch._foreach_mul_(parts, scale.to(parts[0].dtype))
        return norm.to(local[0].dtype) if local else norm

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy on the same mesh, for example for ``torch.optim.swa_utils.AveragedModel``."""
        copied: Any = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        if self.mesh is not None:
            copied._mark_parameters()
        return copied

    def matrix_optimizer(
        self, cls: type[torch.optim.Optimizer], parameters: Iterable[nn.Parameter] | None = None, **options: Any
    ) -> torch.optim.Optimizer:
        """Construct an optimizer that needs whole matrices, such as ``torch.optim.Muon``, for this rank.

        The updates equal single-process updates, unlike updates computed from a shard alone. One rank of the
        tensor-parallel group updates each sharded matrix. It keeps the full matrix and its state. A step is a
        collective.

        Args:
            cls: the optimizer class.
            parameters: the parameters to optimize, ``model.parameters()`` by default. torch's Muon accepts matrices
                only.
            options: further arguments of ``cls``.

        Raises:
            ValueError: an element of ``parameters`` is not a parameter.
        """
        return matrix_optimizer(cls, self.parameters() if parameters is None else parameters, **options)

    def _mark_parameters(self) -> None:
        """Mark parameters with their sharding, and tell DeepSpeed which of them count in this rank's gradient norm.

        DeepSpeed counts a parameter in full or not at all, so partly shared key-value heads are counted repeatedly.
        """
        assert self.mesh is not None
        if over_replicas := _experts_over_replicas(self):
            self._ddp_params_and_buffers_to_ignore = over_replicas  # DistributedDataParallel's name for it
        full_names = {} if self.stage is None else self.stage.full_names
        named: Iterable[tuple[str, Any]] = self.named_parameters()
        for name, param in named:
            if name not in self.layouts:  # its layer was wrapped after marking, or it belongs to a wrapper
                continue
            counts = self.stage is None or self.stage.is_first_holder(name)
            if self.mesh.is_sharded:
                mark_parameter(param, Sharding(full_names.get(name, name), self.layouts[name], self.mesh, counts))
            param.ds_pipe_replicated = not counts
            param.model_parallel = counts and bool(
                self.layouts[name].owned_indices(self.mesh.rank_in(self.layouts[name]))
            )
        for name, _ in self.named_buffers() if self.mesh.tp.size > 1 else ():
            if name in self.layouts:
                owner, _, leaf = name.rpartition(".")
                sharding = Sharding(full_names.get(name, name), self.layouts[name], self.mesh)
                mark_buffer(self.get_submodule(owner), leaf, sharding)

    def _counted(self, name: str, grad: Tensor) -> list[Tensor]:
        """Return the slices of a gradient that count on this rank, so that each element counts once in the norm."""
        if self.mesh is None:
            return [grad]
        if self.stage is not None and not self.stage.is_first_holder(name):
            return []
        layout = self.layouts.get(name) or Layout(tuple(grad.shape))  # modules added later are replicated
        rank = self.mesh.rank_in(layout)
        if isinstance(grad, DTensor):
            sharded = any(placement.is_shard() for placement in grad.placements)
            if sharded and not layout.overlaps:  # each replica's shard counts in full or not at all
                return [grad.to_local()] if layout.owned_indices(rank) else []
            axes = _axes_of_fsdp(self.mesh, grad)
            grad = grad.full_tensor()
            if any(axis.rank for axis in axes):
                return []
        if layout.dim is None:
            return [local_tensor(grad)] if rank == 0 else []
        return [local_tensor(grad)[here] for _, here in layout.owned_indices(rank)]

    def save_optimizer(self, optimizer: torch.optim.Optimizer, save_directory: str | Path, **state: Any) -> None:
        """Save the optimizer and the random states of all ranks. This is a collective.

        The directory may also hold the model's checkpoint. In this case, save the model first. Like a checkpoint, the
        optimizer state is replaced atomically.

        Args:
            state: further values for `load_optimizer` to return, such as ``step=100`` or
                ``scheduler=scheduler.state_dict()``: numbers, strings, tensors, and lists and dictionaries of them.
                Each rank gets its own values back.

        Raises:
            ValueError: ``state`` holds values of other types.
            OSError: the directory cannot be written.
        """
        mesh = self.mesh or ParallelMesh()
        mesh.world.set_phase(f"saving the optimizer to {save_directory}")
        optimizers.save_optimizer(save_directory, optimizer, mesh, state)
        mesh.world.set_phase("after saving")

    def load_optimizer(self, optimizer: torch.optim.Optimizer, directory: str | Path) -> dict[str, Any]:
        """Resume from `save_optimizer` at the same parallel sizes. This is a collective. Call it last before training.

        Returns:
            The saved ``state``.

        Raises:
            FileNotFoundError: the directory has no optimizer state.
            ValueError: the state was saved at other parallel sizes or from another optimizer.
            OSError: a file is damaged (``CheckpointError``, which names the file).
        """
        mesh = self.mesh or ParallelMesh()
        mesh.world.set_phase(f"loading the optimizer from {directory}")
        state = optimizers.load_optimizer(directory, optimizer, mesh)
        mesh.world.set_phase("after loading")
        return state


def _axes_of_fsdp(mesh: ParallelMesh | None, grad: Tensor) -> tuple[Axis, ...]:
    """Return the axes over which FSDP2 shards a gradient; none for other gradients."""
    if mesh is None or not isinstance(grad, DTensor):
        return ()
    over_context = set(mesh.cp.ranks) <= set(grad.device_mesh.mesh.flatten().tolist())
    return (mesh.dp, mesh.cp) if mesh.cp.size > 1 and over_context else (mesh.dp,)


def _refuse_full_state_dict(model: TrainableModel) -> None:
    """Raise ``ValueError`` if torch is checking ``StateDictOptions`` that request full tensors."""
    options = state_dict_options()
    if options is not None and options.full_state_dict:
        raise ValueError(
            f"full_state_dict=True does not gather the shards of a {type(model).__name__}: leave it out for "
            "torch.distributed.checkpoint, which saves and loads shards at any sizes, or write a full "
            "checkpoint with save_pretrained_with_parallel(directory, save_with_merging=True)"
        )


def _require_replicas(model: TrainableModel, mesh: ParallelMesh, prefix: str) -> None:
    """Raise ``ValueError`` if ``DistributedDataParallel`` is being constructed over ranks with different shards.

    The constructor does not pass its process group to the module, but it calls ``named_modules`` before it broadcasts
    parameters. The process group can then be read from the call stack.
    """
    ddp = object_under_construction("DistributedDataParallel")
    if not hasattr(ddp, "parameters_to_ignore") or mesh.device_mesh is None:  # or its group is not set yet
        return
    _require_unaveraged_experts(model, prefix, ddp)
    names = (f"{prefix}.{name}" if prefix else name for name in model.layouts)
    if not all(name in ddp.parameters_to_ignore for name in names):
        require_replicas("DistributedDataParallel", ddp.process_group, f"one {type(model).__name__}", mesh, mesh.dp)


def _require_unaveraged_experts(model: TrainableModel, prefix: str, ddp: Any) -> None:
    """Raise ``ValueError`` if a ``DistributedDataParallel`` would treat different experts as copies."""
    names = [f"{prefix}.{name}" if prefix else name for name in _experts_over_replicas(model)]
    if missing := [name for name in names if name not in ddp.parameters_to_ignore]:
        raise ValueError(
            f"DistributedDataParallel would overwrite experts of one replica with others ({missing[0]}): "
            f"expert_parallel_size={model.mesh and model.mesh.expert_parallel_size} gives each of them some experts. "
            "Wrap model.gpu_modules() itself, or name them in the _ddp_params_and_buffers_to_ignore of the module "
            "around it: backward averages their gradients without DistributedDataParallel"
        )


def _refuse_deepspeed() -> None:
    """Raise ``ValueError`` if a ``DeepSpeedEngine`` is being constructed around experts over replicas."""
    if object_under_construction("DeepSpeedEngine") is not None:
        raise ValueError(
            "DeepSpeed would broadcast and average the experts of this model, but each replica has different experts: "
            "use an expert_parallel_size that divides tensor_parallel_size, or DistributedDataParallel"
        )


def _by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by dtype."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def _experts_over_replicas(model: TrainableModel) -> list[str]:
    """Return the names of `TrainableModel.expert_parameters`, or no names for other models."""
    mesh = model.mesh
    if mesh is None or not mesh.has_experts_over_replicas:
        return []
    over_replicas = {name for name, layout in model.layouts.items() if mesh.is_over_replicas(layout)}
    modules = nn.Module.named_modules(model)  # the model's own method calls this function
    names = (f"{path}.{leaf}" for path, module in modules for leaf in module._parameters)
    return [name for name in names if name in over_replicas]  # adapters may have renamed parameters
