"""Applies context parallelism (`layers.context_parts`) to a model, and refuses what does not support it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from oslo_models.distributed.callers import object_under_construction
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.layers.blockwise_attention import TORCH_ATTENTION
from oslo_models.layers.context_parts import ContextParts
from oslo_models.layers.context_rules import LocalTokensModule
from oslo_models.layers.kinds import ShardedModule, become
from oslo_models.modeling.apply_plan import named_entries, uses_dropout
from oslo_models.sharding.plan import Entries, Plan

ATTENTION = (*TORCH_ATTENTION, "eager")
"""Attention implementations that compute parts of the tokens."""


TOKENWISE = ("BloomGelu",)
"""Names of module classes that compute each token alone, by an autograd function of their own."""


def divide_context(model: Any, plan: Plan, prefix: str, head: Entries, mesh: ParallelMesh) -> ContextParts:
    """Divide the tokens over the cp axis in the blocks of a model. Return their state.

    With sharded layers, hidden states are gathered at the end of a stack, because each rank has a part of the
    vocabulary. Without, the head and the loss read parts too.

    Args:
        prefix: the path of the plan's base model in ``model``.
        head: the entries of the task head.

    Raises:
        ValueError: the attention implementation does not compute parts.
    """
    check_attention_implementation(model, mesh.cp.size)
    parts = ContextParts(mesh.cp, mesh.device, uses_dropout(model))
    for stack in plan.blocks:
        blocks = list(model.get_submodule(prefix + stack).children())
        for block in blocks:
            parts.watch(block, gathers=mesh.tp.size > 1 and block is blocks[-1])
    entries = named_entries(model, plan, prefix, head)
    experts = {id(module) for name, module in model.named_modules() if name in entries and entries[name].stacks_experts}

    def prepare(module: nn.Module) -> None:
        is_tokenwise = isinstance(module, ShardedModule) or id(module) in experts or type(module).__name__ in TOKENWISE
        if is_tokenwise and not isinstance(module, LocalTokensModule):
            become(module, LocalTokensModule).context_parts = parts

    parts.prepare = prepare
    return parts


def check_attention_implementation(model: nn.Module, size: int) -> None:
    """Raise ``ValueError`` if the attention of a part of the model does not compute parts of the tokens."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part.config._attn_implementation not in (*ATTENTION, None):
            raise ValueError(
                f"context_parallel_size={size} does not support attn_implementation="
                f"{part.config._attn_implementation!r}: use one of {', '.join(map(repr, ATTENTION))}"
            )


def check_context_wrappers(model: Any) -> None:
    """Check that a call of a model with divided tokens is supported.

    Raises:
        ValueError: a wrapper or an option does not support context parallelism.
    """
    modules, size = list(nn.Module.modules(model)), model.mesh.cp.size
    check_attention_implementation(model, size)
    reasons = {
        "FSDP2": any(isinstance(module, FSDPModule) for module in modules)
        and "its hooks at a block do not know which tokens a rank holds",
        "torch.compile of blocks": any(getattr(module, "_compiled_call_impl", None) is not None for module in modules)
        and "compiled code takes whole hidden states",
    }
    for name, reason in reasons.items():
        if reason:
            raise ValueError(
                f"context_parallel_size={size} cannot be used with {name}: {reason}; leave one of them out"
            )


def refuse_deepspeed_with_context(size: int) -> None:
    """Raise ``ValueError`` if a ``DeepSpeedEngine`` is being constructed."""
    if object_under_construction("DeepSpeedEngine") is not None:
        raise ValueError(
            f"context_parallel_size={size} cannot be used with DeepSpeed: leave it out, or use DistributedDataParallel "
            "or torch's ZeroRedundancyOptimizer"
        )
