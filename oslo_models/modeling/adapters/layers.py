"""LoRA adapters of sharded layers, as subclasses of ``peft``'s modules.

On a layer with sharded outputs, A is replicated and B has the layer's sharded outputs. On a layer with sharded inputs,
A has the layer's sharded inputs and B is replicated. A and B are thus parallel linear layers themselves. On a layer
that takes and returns full tensors, A and B are both replicated, even if the layer's weight is sharded.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.ia3 import Linear as IA3Linear
from peft.tuners.lora import Embedding as LoraEmbedding
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.dora import DoraEmbeddingLayer, DoraLinearLayer
from torch import Tensor, nn

from oslo_models.distributed.autograd_collectives import copy_to
from oslo_models.distributed.collectives import all_reduce
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.rng import ShardedRngStream
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.layers.replicated_grads import SumReplicatedGrad
from oslo_models.layers.vocab_parallel import VocabParallelLogits, vocab_parallel_embedding
from oslo_models.modeling.adapters.rows import MixesRows
from oslo_models.modeling.quantizing import is_quantized
from oslo_models.sharding.layout import Layout


class ReplicatedDropout(nn.Dropout):
    """Input dropout for a layer with sharded outputs: every rank draws the same mask."""

    stream: ShardedRngStream

    def forward(self, x: Tensor) -> Tensor:
        self.stream.leave()  # the adapted layer ran first and entered its sharded region
        return super().forward(x)


class ShardedDropout(nn.Dropout):
    """Input dropout for a layer with sharded inputs: each rank draws a different mask."""

    stream: ShardedRngStream

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        self.stream.enter()
        try:
            return super().forward(x)
        finally:
            self.stream.leave()


class ParallelLoraLinear(MixesRows, LoraLinear):
    """LoRA on a sharded linear layer. Its weight update is a shard too."""

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """Merge the adapter. Raise ``ValueError`` if the weight is quantised, as a shard cannot be quantised again."""
        base: Any = self.get_base_layer()
        if is_quantized(base.weight):
            raise ValueError(
                f"an adapter is not merged into quantised weights ({type(base.weight).__name__}): save it, and merge "
                "it into a model of plain weights, such as dequantize=True loads of a quantised checkpoint"
            )
        super().merge(*args, **kwargs)

    def get_delta_weight(self, adapter: str) -> Tensor:
        with without_override():
            return super().get_delta_weight(adapter)


class ReplicatedLoraLinear(ParallelLoraLinear):
    """LoRA on a sharded layer that takes and returns full tensors."""

    def get_delta_weight(self, adapter: str) -> Tensor:
        base: Any = self.get_base_layer()
        own: Tensor = base.layouts["weight"].shard(super().get_delta_weight(adapter), base.tp.rank)
        return own


class _AddsBeforeSharing(nn.Module):
    """Adapter mixin for layers with an output gradient that is all-reduced across tensor-parallel ranks.

    The all-reduce then includes the adapter branch. The mixin precedes ``peft``'s class.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        base: Any = self.get_base_layer()  # type: ignore[operator]
        with base.shared_later():
            output = super().forward(*args, **kwargs)
        with without_override():
            shared: Tensor = base.share(output)
        return shared


class LatentLoraLinear(_AddsBeforeSharing, MixesRows, LoraLinear):
    """LoRA on a projection to a latent (`SharesOutput`)."""


class InnerLoraLinear(_AddsBeforeSharing, ParallelLoraLinear):
    """LoRA on a row-parallel layer with sharded layers after it (`InnerRowParallelLinear`)."""


class SharingIA3Linear(_AddsBeforeSharing, IA3Linear):
    """IA3 on a layer with a shared output."""


class _ParallelLoraEmbedding(LoraEmbedding):
    def forward(self, x: Tensor, *args: Any, adapter_names: Any = None, **kwargs: Any) -> Tensor:
        if len({*(adapter_names or ())}) > 1:  # `peft` would compute them in another order on each rank
            raise ValueError(
                f"adapter_names={adapter_names!r}: a sharded embedding has one adapter at a time. Pass equal names, or "
                "leave the embedding out of target_modules"
            )
        embedded: Tensor = super().forward(x, *args, adapter_names=adapter_names, **kwargs)
        return embedded

    def get_delta_weight(self, adapter: str) -> Tensor:
        with without_override():
            return super().get_delta_weight(adapter)


class VocabParallelLoraEmbedding(_ParallelLoraEmbedding):
    """LoRA on an embedding with a sharded vocabulary: A is sharded by columns, one per local row of the embedding."""

    def _embed(self, input: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
        base: Any = self.get_base_layer()
        with without_override():
            return vocab_parallel_embedding(base.tp, input, weight, base.layouts["weight"], base.padding_idx)


class FeatureParallelLoraEmbedding(_ParallelLoraEmbedding):
    """LoRA on an embedding with sharded features (a table of biases per head): A is replicated, B is sharded."""

    def _embed(self, input: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
        base: Any = self.get_base_layer()
        with without_override():
            return copy_to(base.tp, F.embedding(input, weight, base.padding_idx))


class _ParallelDora(nn.Module):
    """Mixin for DoRA's output magnitudes of a sharded layer. It precedes ``peft``'s class.

    Source: Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", 2024.

    Attributes:
        tp: the axis over which the adapted layer is sharded.
        layout: the layout of the magnitudes, if they are sharded.
    """

    tp: Axis
    layout: Layout | None
    fan_in_fan_out: bool
    weight: nn.Parameter

    @torch.no_grad()
    def get_weight_norm(
        self, weight: Tensor, lora_weight: Tensor, scaling: float, adapter_name: str | None = None
    ) -> Tensor:
        """Return the row norms of ``weight + scaling * lora_weight`` over all inputs, ``[local outputs]``.

        Args:
            weight: ``[local outputs, local inputs]``, transposed if ``fan_in_fan_out``.
            lora_weight: ``[local outputs, local inputs]``.
        """
        if is_quantized(weight):
            weight = weight.dequantize()
        with without_override():
            adapted = (weight.T if self.fan_in_fan_out else weight) + scaling * lora_weight
            norms = torch.linalg.vector_norm(adapted, dim=1).to(weight.dtype)
        return norms if self.layout is not None else all_reduce(self.tp, norms.square()).sqrt()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.layout is None or not self.layout.overlaps:
            return super().forward(*args, **kwargs)
        attributes = vars(self)
        attributes["weight"] = SumReplicatedGrad.apply(self.weight, self.tp, self.layout)  # hides the parameter
        try:
            return super().forward(*args, **kwargs)
        finally:
            del attributes["weight"]


class ParallelDoraLinear(_ParallelDora, DoraLinearLayer):
    """DoRA on a sharded linear layer."""

    def get_lora_weight(self, lora_A: Any, lora_B: Any, adapter_name: str | None = None) -> Tensor:
        with without_override():
            product: Tensor = lora_B.weight @ lora_A.weight  # their forward would communicate
        return product

    def forward(self, x: Tensor, *, base_layer: Any, base_result: Any = None, **kwargs: Any) -> Any:
        if base_result is None:  # a dropout changed x after the adapted layer ran
            base_result = base_layer(x)
        if not isinstance(base_result, VocabParallelLogits):
            return super().forward(x, base_layer=base_layer, base_result=base_result, **kwargs)
        vocab, local = base_result.vocab, base_result.local()
        return VocabParallelLogits.from_local(
            super().forward(x, base_layer=base_layer, base_result=local, **kwargs), self.tp, vocab
        )


class ParallelDoraEmbedding(_ParallelDora, DoraEmbeddingLayer):
    """DoRA on a sharded embedding."""

    def get_lora_weight(self, lora_A: Any, lora_B: Any, adapter_name: str | None = None) -> Tensor:
        with without_override():
            product: Tensor = super().get_lora_weight(lora_A, lora_B, adapter_name)
        return product
