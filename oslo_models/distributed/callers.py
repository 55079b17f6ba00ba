"""Reads the call stack: which function of torch, DeepSpeed or peft calls a model, a module or a shard.

These libraries do not announce themselves to a model, and they have no hook at these places. The guards depend on names
in the libraries, so each name is in this module. Functions called by a method look at the caller of that method.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from oslo_models.distributed.mesh import Axis, ParallelMesh

# torch ----------------------------------------------------------------------------------------------------------------


def object_under_construction(cls: str) -> Any:
    """Return the object under construction if its class is ``cls`` or a subclass of it; ``None`` if there is none."""
    frame = _constructor(cls)
    return None if frame is None else frame.f_locals["self"]


def _constructor(cls: str) -> FrameType | None:
    """Return the frame of the constructor of the class ``cls`` or a subclass of it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # The module of the constructor has the class name as a global. Check this first: reading f_locals is slow.
        if frame.f_code.co_name == "__init__" and cls in frame.f_globals:
            owner = frame.f_locals.get("self")
            if any(base.__name__ == cls for base in type(owner).__mro__):
                return frame
        frame = frame.f_back
    return None


def require_replicas_in_ddp(sharding: Any) -> None:
    """Raise ``ValueError`` if ``DistributedDataParallel`` or FSDP1 is being constructed around part of a model.

    Args:
        sharding: the `Sharding` of a parameter that the constructor reads.
    """
    refuse_fsdp1(sharding.name)
    ddp = object_under_construction("DistributedDataParallel")
    if ddp is not None and hasattr(ddp, "process_group"):
        require_replicas("DistributedDataParallel", ddp.process_group, sharding.name, sharding.mesh, sharding.replicas)


def require_replicas_in_zero(sharding: Any) -> None:
    """Raise ``ValueError`` if a ``ZeroRedundancyOptimizer`` is being constructed over ranks with different shards.

    Args:
        sharding: the `Sharding` of a parameter. The constructor calls its ``type`` method.
    """
    frame = _constructor("ZeroRedundancyOptimizer")
    if frame is None or "process_group" not in frame.f_locals:
        return
    if sharding.is_over_replicas:
        raise ValueError(
            f"ZeroRedundancyOptimizer would overwrite the experts of one replica with others: {sharding.name} is "
            f"sharded over {sharding.axis.size} ranks of several replicas. Give model.expert_parameters() a separate "
            "optimizer, and this one the other parameters"
        )
    group = frame.f_locals["process_group"]
    require_replicas("ZeroRedundancyOptimizer", group, sharding.name, sharding.mesh, sharding.replicas)


def require_replicas(wrapper: str, group: Any, what: str, mesh: ParallelMesh, replicas: Axis) -> None:
    """Raise ``ValueError`` if the process group of a wrapper contains ranks with different shards.

    Args:
        wrapper: the name of the wrapper.
        group: its process group; ``None`` for all ranks.
        what: the wrapped model or parameter.
        replicas: the ranks with the same shards.
    """
    ranks = dist.get_process_group_ranks(group)
    if set(ranks) <= set(replicas.ranks):
        return
    raise ValueError(
        f"{wrapper} over ranks {ranks} would overwrite the shards of one rank with other shards: ranks "
        f"{list(mesh.model.ranks)} hold {what} together ({_sizes(mesh)}), and its replicas are on ranks "
        f"{list(replicas.ranks)}. " + _OVER_REPLICAS.get(wrapper, "Pass their group")
    )


def _sizes(mesh: ParallelMesh) -> str:
    context = f", context_parallel_size={mesh.cp.size}" if mesh.cp.size > 1 else ""
    return f"tensor_parallel_size={mesh.tp.size}, pipeline_parallel_size={mesh.pp.size}{context}"


_OVER_REPLICAS = {
    "DistributedDataParallel": (
        "Wrap it over those: DistributedDataParallel(model.gpu_modules(), "
        "process_group=model.mpu.get_data_parallel_group()). transformers' Trainer and accelerate wrap over all ranks: "
        "use the classes of this library, `from oslo_models.integrations import Trainer, Accelerator`, and put "
        "`ParallelTrainerMixin` from there in front of the bases of a Trainer of your own"
    ),
    "ZeroRedundancyOptimizer": "Pass their group: process_group=model.mpu.get_data_parallel_group()",
}


def refuse_fsdp1(what: str) -> None:
    """Raise ``ValueError`` if torch's first ``FullyShardedDataParallel`` is being constructed around shards.

    FSDP1 treats local shards as full parameters. Over all ranks it mixes shards of different ranks. Over replicas with
    different experts it mixes experts. Its ``clip_grad_norm_`` counts the shards of one rank only.

    Args:
        what: the wrapped model or parameter.
    """
    if object_under_construction("FullyShardedDataParallel") is not None:
        raise ValueError(
            f"FullyShardedDataParallel would take the shards of {what} for full parameters: use its successor, "
            'torch.distributed.fsdp.fully_shard(model, mesh=model.mesh.device_mesh["dp"]), with '
            "ignored_params=set(model.expert_parameters()), or DistributedDataParallel"
        )


def ignored_by_fully_shard() -> Collection[Any] | None:
    """Return the ``ignored_params`` of a ``fully_shard`` that lists parameters by this method, or ``None``."""
    caller = sys._getframe(2)
    return (caller.f_locals.get("ignored_params") or ()) if caller.f_code.co_name == "_get_managed_states" else None


def require_replicas_in_fully_shard(what: str, mesh: ParallelMesh) -> None:
    """Raise ``ValueError`` if ``fully_shard`` is on the call stack with ranks that hold different shards.

    Args:
        what: the sharded model or parameter.
    """
    frame = sys._getframe()
    while frame.f_code.co_name != "fully_shard":
        if frame.f_back is None:
            return
        frame = frame.f_back
    given = getattr(frame.f_locals.get("mesh"), "mesh", None)
    if given is not None:
        is_over_context(given, what, mesh)


def is_over_context(given: Tensor, what: str, mesh: ParallelMesh) -> bool:
    """Return whether ``fully_shard`` over these ranks includes those that divide tokens.

    Args:
        given: ranks of its mesh, in the dimensions of the mesh.
        what: the sharded model or parameter.

    Raises:
        ValueError: they are neither replicas nor all ranks with the same weights.
    """
    ranks = sorted(given.flatten().tolist())
    if set(ranks) <= set(mesh.dp.ranks):
        return False
    copies = sorted(replica + rank - mesh.world.rank for replica in mesh.dp.ranks for rank in mesh.cp.ranks)
    if mesh.cp.size > 1 and ranks == copies and given.dim() == 1:
        return True
    remedy = 'Pass them: fully_shard(model, mesh=model.mesh.device_mesh["dp"])'
    if mesh.cp.size > 1:
        remedy += ", or the ranks that divide their tokens too: fully_shard(model, mesh=model.mesh.dp_cp_mesh)"
    raise ValueError(
        f"fully_shard over ranks {given.tolist()} would mix the shards of different ranks: ranks "
        f"{list(mesh.model.ranks)} hold {what} together ({_sizes(mesh)}), and its replicas are on ranks "
        f"{list(mesh.dp.ranks)}. {remedy}"
    )


def fully_sharded_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield the owner, name and ranks of each parameter that ``fully_shard`` of this module has sharded.

    Outside of `fully_shard`'s own state, only sharded parameters name their ranks, and modules have full ones while
    they run.
    """
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    for param in (param for group in groups if group is not None for param in group.fsdp_params):
        owners, ranks = param._module_info, param.sharded_param.device_mesh.mesh
        yield owners.module, owners.param_name, ranks
        for owner, name in zip(owners.shared_modules, owners.shared_param_names, strict=True):
            yield owner, name, ranks


def is_of_fully_shard(hook: Any) -> bool:
    """Return whether ``fully_shard`` has registered a hook of a module."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def state_dict_options() -> StateDictOptions | None:
    """Return the options that ``torch.distributed.checkpoint.state_dict`` is checking, if it is on the call stack.

    torch does not pass its options to the model, but its check lists the parameters of each module.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_verify_options":
            options = frame.f_locals.get("options")
            if isinstance(options, StateDictOptions):
                return options
        frame = frame.f_back
    return None


def computes_initial_bounds() -> bool:
    """Return whether ``torch.nn.init`` reads the sizes of a parameter. Called by the override of the size."""
    return sys._getframe(3).f_code is _FANS


_FANS = nn.init._calculate_fan_in_and_fan_out.__code__


def is_read_by_ddp() -> bool:
    """Return whether ``DistributedDataParallel`` reads an attribute of a parameter. Called by its override."""
    return sys._getframe(3).f_globals.get("__name__") == "torch.nn.parallel.distributed"


def is_called_by_operation() -> bool:
    """Return whether the call is a step of an operation that a layer called with its shard.

    Examples are a graph of torch.compile's debugging backend "eager" and the backward pass of grouped expert products,
    which is Python code in transformers 5.17.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith("<eval_with_key>") or code.co_name == "_grouped_mm_fallback_backward":
            return True
        frame = frame.f_back
    return False


def computes_in_layer(sharding: Any) -> bool:
    """Return whether model or wrapper code computes with a shard, as opposed to code that handles parameters.

    Model code is transformers' models, this library and the ``forward`` of the module that owns the parameter. torch's
    wrappers count too, since they communicate over the ranks passed to them. Parametrizations and other functions of
    ``torch.nn.utils`` that compute a weight from parameters do not count.
    """
    frame: FrameType | None = sys._getframe(2)
    is_outermost_of_torch = False
    while frame is not None:
        name, code = frame.f_globals.get("__name__", ""), frame.f_code
        if code.co_filename.startswith("<eval_with_key>"):  # torch.compile's graph, run operation by operation
            return True
        if code.co_name == "__torch_dispatch__":  # a mode below autograd, such as an operation counter
            return True
        if name.startswith(_REPARAMETRIZATIONS):
            return False
        if not is_outermost_of_torch and not _is_override(frame):
            if name.startswith(_MODEL_CODE) and not name.startswith(_AVERAGERS):
                return True
            is_outermost_of_torch = not name.startswith("torch.")
        if code.co_name in _OF_OWNER and _owns(frame.f_locals.get("self"), sharding):
            return True
        frame = frame.f_back
    return False


def _is_override(frame: FrameType) -> bool:
    """Return whether a frame belongs to a shard's override or to a mode of torch functions, such as a counter."""
    return frame.f_globals.get("__name__", "").startswith(_OF_SHARDS) or frame.f_code.co_name == "__torch_function__"


def computes_in_owner(sharding: Any) -> bool:
    """Return whether the ``forward`` of the module that owns the parameter is on the call stack."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "forward" and _owns(frame.f_locals.get("self"), sharding):
            return True
        frame = frame.f_back
    return False


def _owns(module: Any, sharding: Any) -> bool:
    parameters = module._parameters.values() if isinstance(module, nn.Module) else ()
    return any(getattr(param, "sharding", None) is sharding for param in parameters)


_OF_OWNER = ("forward", "_fill_padding_idx_with_zero")
_OF_SHARDS = ("oslo_models.distributed.sharded_tensor", "oslo_models.distributed.partial_norm")
_MODEL_CODE = (
    *("oslo_models.", "transformers.models.", "transformers.integrations.", "transformers_modules.", "peft."),
    *("torch.distributed.", "deepspeed."),
    # operations that layers call with local shards, and their backward passes
    *("oslo_kernels.", "apex.", "bitsandbytes.", "causal_conv1d.", "fla.", "flash_attn.", "kernels.", "liger_kernel."),
    *("mamba_ssm.", "torchao.", "triton."),
)
_REPARAMETRIZATIONS = ("torch.nn.utils.parametriz", "torch.nn.utils.spectral_norm", "torch.nn.utils.weight_norm")
_AVERAGERS = "torch.distributed.algorithms.model_averaging."


def calling_optimizer() -> str | None:
    """Return the class name of the optimizer with ``step`` on the call stack; ``None`` if there is none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "step" and isinstance(owner := frame.f_locals.get("self"), torch.optim.Optimizer):
            return type(owner).__name__
        frame = frame.f_back
    return None


# DeepSpeed ------------------------------------------------------------------------------------------------------------


def computes_in_deepspeed() -> bool:
    """Return whether DeepSpeed computes with a shard. DeepSpeed knows the sharded parameters and sums norms itself."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (_is_override(frame) or frame.f_globals.get("__name__", "").startswith("torch.")):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("deepspeed.")


# TRL ------------------------------------------------------------------------------------------------------------------


def computes_hash() -> bool:
    """Return whether TRL hashes the weights of a model, to name a dataset that it computes with them.

    Each rank hashes its shards. A rank finds its own dataset again with the same shards.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _is_override(frame):
        frame = frame.f_back
    names = None if frame is None else (frame.f_globals.get("__name__"), frame.f_code.co_name)
    return names == ("trl.trainer.utils", "hash_module")


# peft -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PeftCall:
    """Call of a function of ``peft``.

    Attributes:
        function: name of the function.
        arguments: its local variables.
        caller: name of the function that called it.
        arguments_of_caller: the local variables of that function.
    """

    function: str
    arguments: Mapping[str, Any]
    caller: str
    arguments_of_caller: Mapping[str, Any]


def peft_call() -> PeftCall | None:
    """Return the call of the function that called this method, if ``peft`` defines the function."""
    if "peft" not in sys.modules:
        return None
    frame = sys._getframe(2)
    outer = frame.f_back
    if outer is None or not str(frame.f_globals.get("__name__", "")).startswith("peft."):
        return None
    return PeftCall(frame.f_code.co_name, frame.f_locals, outer.f_code.co_name, outer.f_locals)
