"""Applies sequence parallelism (`layers.token_parts`) to a model, and refuses wrappers that do not support it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from oslo_models.distributed.callers import object_under_construction
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.layers import activation_products as activation_products  # registers rules for parts
from oslo_models.layers import activation_shapes as activation_shapes
from oslo_models.layers.kinds import ShardedModule, become
from oslo_models.layers.token_parts import TokenParts, TokenwiseModule, gathered_inputs
from oslo_models.modeling.apply_plan import named_entries
from oslo_models.sharding.pipeline_rules import ONE_F_ONE_B
from oslo_models.sharding.plan import Entries, Norm, Plan


def divide_tokens(model: nn.Module, plan: Plan, prefix: str, head: Entries, mesh: ParallelMesh) -> TokenParts:
    """Divide the tokens over the tp axis in the blocks of a model with sharded layers. Return their state.

    Args:
        prefix: the path of the plan's base model in ``model``.
        head: the entries of the task head.
    """
    tokens = TokenParts(mesh.tp)
    for stack in plan.blocks:
        for block in model.get_submodule(prefix + stack).children():
            for called in block if isinstance(block, nn.ModuleList) else (block,):  # Funnel has lists of layers
                tokens.watch(called)
    modules = dict(model.named_modules())
    for name, entry in named_entries(model, plan, prefix, head).items():
        if type(entry) is Norm and name in modules:
            become(modules[name], TokenwiseModule)
    for module in modules.values():
        if isinstance(module, ShardedModule) and module.returns_parts:
            module.token_parts = tokens
        elif isinstance(module, ShardedModule) and not module.takes_parts:
            module.register_forward_pre_hook(gathered_inputs, with_kwargs=True)
    return tokens


def check_wrappers(model: Any) -> None:
    """Check that a call of a model with divided tokens is supported.

    Raises:
        ValueError: a wrapper or an option does not support sequence parallelism.
    """
    modules = list(nn.Module.modules(model))
    reasons = {
        "FSDP2": any(isinstance(module, FSDPModule) for module in modules)
        and "its hooks at a block do not know which tokens a rank holds",
        "torch.compile of blocks": any(getattr(module, "_compiled_call_impl", None) is not None for module in modules)
        and "compiled code takes whole hidden states",
        f"schedule={model.schedule!r}": model.schedule != ONE_F_ONE_B
        and "the backward pass of linear layers gathers tokens",
    }
    for name, reason in reasons.items():
        if reason:
            raise ValueError(f"sequence_parallel=True cannot be used with {name}: {reason}; leave one of them out")


def refuse_deepspeed() -> None:
    """Raise ``ValueError`` if a ``DeepSpeedEngine`` is being constructed."""
    if object_under_construction("DeepSpeedEngine") is not None:
        raise ValueError(
            "sequence_parallel=True cannot be used with DeepSpeed: leave it out, or use DistributedDataParallel or "
            "torch's ZeroRedundancyOptimizer"
        )
