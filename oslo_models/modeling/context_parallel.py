"""Applies context parallelism (`layers.context_parts`) to a model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache

from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.layers.blockwise_attention import TORCH_ATTENTION
from oslo_models.layers.context_experts import ContextExperts
from oslo_models.layers.context_mixers import DividedMixer, MixerDivision
from oslo_models.layers.context_parts import ContextParts
from oslo_models.layers.context_rules import LocalTokensModule
from oslo_models.layers.experts import ParallelExperts
from oslo_models.layers.kinds import ShardedModule, become
from oslo_models.layers.local_attributes import LocalAttributes
from oslo_models.modeling.apply_plan import named_entries, uses_dropout
from oslo_models.modeling.token_division import check_wrappers
from oslo_models.sharding.plan import Entries, Plan

ATTENTION = (*TORCH_ATTENTION, "eager")
"""Attention implementations that compute parts of the tokens."""


CACHED_KEYS = (
    *("DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer"),
    *("StaticLayer", "StaticSlidingWindowLayer", "StaticIndexedLayer", "DummyLayer"),
)
"""Classes of transformers' cache layers that divided prompts can fill: neither quantised ones nor states."""

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
        ValueError: the attention implementation does not compute parts; or the mixers of blocks cannot be divided.
    """
    parts = ContextParts(mesh.cp, mesh.tp, mesh.device, uses_dropout(model))
    check_attention_implementation(model, parts)
    entries = named_entries(model, plan, prefix, head)
    _divide_mixers(model, entries, mesh, parts)
    for stack in plan.blocks:
        blocks = list(model.get_submodule(prefix + stack).children())
        for block in blocks:
            parts.watch(block, gathers=mesh.tp.size > 1 and block is blocks[-1])
    for name, module in model.named_modules():
        if name in entries and entries[name].stacks_experts:
            module._computes_single_tokens = True  # copies of the model keep it
        if isinstance(module, ParallelExperts) and mesh.has_experts_over_replicas:
            become(module, ContextExperts).context_parts = parts

    def prepare(module: nn.Module) -> None:
        is_tokenwise = isinstance(module, ShardedModule) or type(module).__name__ in TOKENWISE
        is_tokenwise = is_tokenwise or bool(vars(module).get("_computes_single_tokens"))
        if is_tokenwise and not isinstance(module, (DividedMixer, LocalTokensModule)):
            become(module, LocalTokensModule).context_parts = parts

    parts.prepare = prepare
    if model.config.is_encoder_decoder and (encoder := model.get_encoder()) is not model:
        parts.watch_encoder(encoder, partial(divides_prompts, model, parts))
    return parts


def _divide_mixers(model: Any, entries: Entries, mesh: ParallelMesh, parts: ContextParts) -> None:
    """Divide the heads or channels of the mixers of all blocks."""
    for name, module in model.named_modules():
        entry = entries.get(name)
        if not isinstance(entry, LocalAttributes) or not entry.convolution or not hasattr(module, entry.convolution):
            continue
        division = MixerDivision(module, name, entries, model.layouts, mesh, parts)
        become(module, DividedMixer).division = division


def divides_prompts(model: Any, parts: ContextParts, caches: Sequence[Any] = ()) -> bool:
    """Return whether calls without gradients divide long prompts. Otherwise each rank computes all tokens.

    Args:
        caches: caches that the call fills.
    """
    try:
        check_wrappers(model, parts)
        check_attention_implementation(model, parts)
    except ValueError:
        return False
    return all(_holds_keys(cache) for cache in caches)


def _holds_keys(cache: Any) -> bool:
    """Return whether a cache holds keys and values as attention computes them."""
    if isinstance(cache, EncoderDecoderCache):
        return _holds_keys(cache.self_attention_cache)
    if type(cache) not in (DynamicCache, StaticCache) or cache.offloading:
        return False
    classes = {cache.layer_class_to_replicate, *map(type, cache.layers)} - {None}
    return all(cls.__module__ == DynamicCache.__module__ and cls.__name__ in CACHED_KEYS for cls in classes)


def check_attention_implementation(model: Any, parts: ContextParts) -> None:
    """Raise ``ValueError`` if the attention of a part of the model does not compute parts of the tokens."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part.config._attn_implementation not in (*ATTENTION, None):
            raise ValueError(
                f"{parts.option} does not support attn_implementation={part.config._attn_implementation!r}: use one of "
                f"{', '.join(map(repr, ATTENTION))}"
            )
