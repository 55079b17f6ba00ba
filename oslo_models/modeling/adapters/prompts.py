"""Prompt tuning, p-tuning and prefix tuning of a sharded model. Every rank holds the full prompt encoder."""

from __future__ import annotations

from typing import Any

from peft import PeftType
from torch import Tensor, nn

from oslo_models.distributed.autograd_collectives import copy_to
from oslo_models.distributed.rng import synchronize
from oslo_models.pipeline.sharded_model import ShardedModel
from oslo_models.sharding.layout import GroupedHeads

_SUPPORTED = (PeftType.PROMPT_TUNING, PeftType.P_TUNING, PeftType.PREFIX_TUNING)


class FullVocabulary(nn.Module):
    """Presents sharded token embeddings with the size of the full vocabulary.

    Attributes:
        num_embeddings: the size of the full vocabulary.
    """

    def __init__(self, embeddings: nn.Module, num_embeddings: int) -> None:
        super().__init__()
        self._embeddings = (embeddings,)  # a tuple hides the embedding from nn.Module
        self.num_embeddings = num_embeddings

    @property
    def weight(self) -> Tensor:
        """This rank's shard. ``peft`` reads only its device."""
        weight: Any = self._embeddings[0].weight
        return weight

    def forward(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self._embeddings[0](ids)
        return embedded


def vocabulary_for_prompts(model: ShardedModel, peft_model: Any, name: str) -> FullVocabulary:
    """Return the token embeddings that ``peft`` uses to build the prompt encoder ``name``.

    Raises:
        ValueError: the model has several pipeline stages, or the type of prompt learning is not supported.
    """
    kind = peft_model.peft_config[name].peft_type
    if model.is_pipeline_parallelized():
        raise ValueError(
            f"{kind.value} does not work with pipeline_parallel_size > 1: prompts belong to the first stage alone. Use "
            "pipeline_parallel_size=1, or LoRA"
        )
    if kind not in _SUPPORTED:
        supported = ", ".join(each.value for each in _SUPPORTED)
        raise ValueError(f"{kind.value} does not work on a sharded model; supported prompts: {supported}")
    synchronize(model.mesh.tp, model.mesh.device)  # every rank draws the same prompt encoder
    embeddings = model.get_input_embeddings()
    layouts = getattr(embeddings, "layouts", {})
    shape = layouts["weight"].shape if "weight" in layouts else embeddings.weight.shape
    return FullVocabulary(embeddings, shape[0])


def local_heads(model: ShardedModel, cache: Any) -> Any:
    """Restrict a cache of learned keys and values ``[rows, heads, tokens, width]`` to this rank's heads, in place."""
    tp, config = model.mesh.tp, model.config.get_text_config(decoder=True)
    if tp.size == 1 or model.plan(model.config).max_ranks() is None:  # every rank computes all heads
        return cache
    for layer in getattr(cache, "self_attention_cache", cache).layers:
        heads = layer.keys.shape[1]
        ranges = GroupedHeads(config.num_attention_heads, heads, 1).head_ranges(tp.size)
        start, stop = ranges[tp.rank][1]
        # each rank computes the gradient of its local heads only
        layer.keys, layer.values = (copy_to(tp, x)[:, start:stop] for x in (layer.keys, layer.values))
    return cache
