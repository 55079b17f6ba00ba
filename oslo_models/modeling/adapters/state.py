"""State dictionaries of wrapped layers hold full tensors: shards are gathered when saved, and cut when loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_models.distributed.collectives import all_gather
from oslo_models.distributed.mesh import Axis
from oslo_models.modeling.adapters.layouts import adapter_layouts
from oslo_models.sharding.layout import Layout


def register_state_hooks(tuner: Any) -> None:
    """Let ``state_dict`` of a wrapped layer gather, and ``load_state_dict`` shard; once per layer."""
    if "has_state_hooks" not in vars(tuner) and adapter_layouts(tuner):
        vars(tuner)["has_state_hooks"] = True
        tuner.register_state_dict_post_hook(_gather)
        tuner.register_load_state_dict_pre_hook(_shard)


def _gather(tuner: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A collective of the ranks of the layer's axis."""
    base = tuner.get_base_layer()
    is_embedding = _is_vocabulary(base)
    for leaf, layout in adapter_layouts(tuner).items():
        key = prefix + leaf
        # peft saves an adapted embedding or head with the adapter, and no other layer
        if key in state and (is_embedding or not leaf.startswith("base_layer.")):
            state[key] = gather_shards(base.tp, state[key].detach(), layout)


def _shard(tuner: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    rank = tuner.get_base_layer().tp.rank
    for leaf, layout in adapter_layouts(tuner).items():
        full = state.get(prefix + leaf)
        if full is not None and tuple(full.shape) == layout.shape:
            state[prefix + leaf] = layout.shard(full, rank).clone()


def _is_vocabulary(layer: Any) -> bool:
    from oslo_models.layers.vocab_parallel import VocabParallelEmbedding, VocabParallelHead

    return isinstance(layer, (VocabParallelEmbedding, VocabParallelHead))


@torch.no_grad()
def gather_shards(axis: Axis, shard: Tensor, layout: Layout) -> Tensor:
    """The full tensor, bit for bit, on every rank of the axis."""
    if layout.dim is None or axis.size == 1:
        return shard
    sizes = [layout.local_shape(rank)[layout.dim] for rank in range(axis.size)]
    shards = all_gather(axis, shard, layout.dim, sizes).split(sizes, layout.dim)
    full = shard.new_empty(layout.shape)
    for rank, part in enumerate(shards):
        layout.write_shard(full, part, rank)
    return full
