"""The modules of LoRA adapters around sharded layers, as subclasses of those of ``peft``.

Around a layer with sharded outputs, A is replicated and B has the layer's sharded outputs. Around one with sharded
inputs, A has the layer's sharded inputs and B is replicated. So A and B are parallel linear layers themselves. Around
one that takes and returns full tensors, whatever of its weight a rank has, both are replicated.
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
from oslo_models.layers.linear import SumReplicatedGrad
from oslo_models.layers.vocab_parallel import VocabParallelLogits, vocab_parallel_embedding
from oslo_models.modeling.quantizing import is_quantized
from oslo_models.sharding.layout import Layout


class ReplicatedDropout(nn.Dropout):
    """A dropout of the input of a layer with sharded outputs: every rank draws the same mask."""

    stream: ShardedRngStream

    def forward(self, x: Tensor) -> Tensor:
        self.stream.leave()  # the adapted layer, which is called first, has entered its sharded region
        return super().forward(x)


class ShardedDropout(nn.Dropout):
    """A dropout of the input of a layer with sharded inputs: every rank draws a mask of its own."""

    stream: ShardedRngStream

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        self.stream.enter()
        try:
            return super().forward(x)
        finally:
            self.stream.leave()


class ParallelLoraLinear(LoraLinear):
    """LoRA on a sharded linear layer: its update of the weight, too, is that of the shard."""

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """As of ``peft``. Raises ``ValueError`` if the weight is quantised, which a shard cannot be again."""
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
    """An adapter of a layer the gradient of whose output is summed over the ranks; a mixin before ``peft``'s class."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        base: Any = self.get_base_layer()  # type: ignore[operator]
        with base.shared_later():
            output = super().forward(*args, **kwargs)
        with without_override():
            shared: Tensor = base.share(output)
        return shared


class LatentLoraLinear(_AddsBeforeSharing, LoraLinear):
    """LoRA on a projection to a latent."""


class InnerLoraLinear(_AddsBeforeSharing, ParallelLoraLinear):
    """LoRA on a row-parallel layer between sharded ones."""


class SharingIA3Linear(_AddsBeforeSharing, IA3Linear):
    """IA3 on either."""


class _ParallelLoraEmbedding(LoraEmbedding):
    def get_delta_weight(self, adapter: str) -> Tensor:
        with without_override():
            return super().get_delta_weight(adapter)


class VocabParallelLoraEmbedding(_ParallelLoraEmbedding):
    """LoRA on an embedding with a sharded vocabulary: each rank has the columns of A of its rows."""

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
    """DoRA's magnitudes of the outputs of a sharded layer; a mixin before the class of ``peft``.

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
        """The norms of the rows of ``weight + scaling * lora_weight``, ``[local outputs]``, over all inputs.

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
            product: Tensor = lora_B.weight @ lora_A.weight  # not by their forward, which communicates
        return product

    def forward(self, x: Tensor, *, base_layer: Any, base_result: Any = None, **kwargs: Any) -> Any:
        if base_result is None:  # after a dropout, of which the result of the adapted layer knows nothing
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
