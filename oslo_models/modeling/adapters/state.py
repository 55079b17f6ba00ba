"""Full tensors in state dicts of wrapped layers: saving gathers the shards, loading cuts them."""

from __future__ import annotations

from typing import Any

from torch import nn

from oslo_models.distributed.sharded_tensor import gather_shards, local_tensor
from oslo_models.layers.vocab_parallel import VocabParallelEmbedding, VocabParallelHead
from oslo_models.modeling.adapters.layouts import adapter_layouts, axis_of

_OVER_VOCABULARY = (VocabParallelEmbedding, VocabParallelHead)


def register_state_hooks(wrapper: nn.Module) -> None:
    """Make a ``peft`` wrapper's ``state_dict`` gather and its ``load_state_dict`` shard. Idempotent."""
    if "_has_state_hooks" not in vars(wrapper) and adapter_layouts(wrapper):
        vars(wrapper)["_has_state_hooks"] = True
        wrapper.register_state_dict_post_hook(_gather)
        wrapper.register_load_state_dict_pre_hook(_shard)


def _gather(wrapper: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Gather shards. This is a collective of the ranks that shard the module."""
    for leaf, layout in adapter_layouts(wrapper).items():
        if prefix + leaf in state and _is_saved(wrapper, leaf):
            state[prefix + leaf] = gather_shards(axis_of(wrapper, layout), local_tensor(state[prefix + leaf]), layout)


def _is_saved(wrapper: Any, leaf: str) -> bool:
    """Whether ``peft`` saves a parameter: adapter parameters, and weights of adapted embeddings and LM heads."""
    if not leaf.startswith(("base_layer.", "original_module.")):
        return True
    return leaf.startswith("base_layer.") and isinstance(wrapper.get_base_layer(), _OVER_VOCABULARY)


def _shard(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for leaf, layout in adapter_layouts(wrapper).items():
        full = state.get(prefix + leaf)
        if full is not None and tuple(full.shape) == layout.shape:
            state[prefix + leaf] = layout.shard(full, axis_of(wrapper, layout).rank).clone()
