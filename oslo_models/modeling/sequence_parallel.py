"""Applies sequence parallelism (`layers.token_parts`) to a model."""

from __future__ import annotations

from torch import nn

from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.layers import activation_products as activation_products  # registers rules for parts
from oslo_models.layers import activation_shapes as activation_shapes
from oslo_models.layers.kinds import ShardedModule, become
from oslo_models.layers.token_parts import TokenParts, TokenwiseModule, gathered_inputs
from oslo_models.modeling.apply_plan import named_entries
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
