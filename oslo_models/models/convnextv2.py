"""ConvNeXt V2: ConvNeXt with a norm over the channels of each MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import ConvNextV2Config
from transformers.models.convnextv2 import modeling_convnextv2 as hf

from oslo_models.distributed.autograd_collectives import copy_to, reduce_from
from oslo_models.layers.entries import HeadNorm
from oslo_models.layers.kinds import ShardedModule, shards
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.convnext import ConvNextParallel
from oslo_models.sharding.layout import EvenSplit, Layout


@dataclass(frozen=True)
class GlobalResponseNorm(HeadNorm):
    """Norm of sharded channels ``[rows, height, width, local channels]`` by the mean over the channels of all ranks."""

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout.sharded(shape, 3, (EvenSplit(shape[3]),), n)


@shards(GlobalResponseNorm)
class ParallelGlobalResponseNorm(ShardedModule):
    """Norm of the local channels. See `GlobalResponseNorm`."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
        total = copy_to(self.tp, reduce_from(self.tp, norms.sum(-1, keepdim=True)))
        scales = norms / (total / self.layouts["weight"].shape[3] + 1e-6)
        return self.weight * (x * scales) + self.bias + x


class ConvNextV2Parallel(ConvNextParallel):
    """Sharding plan of the ConvNeXt V2 family."""

    block = {**ConvNextParallel.block, "grn": GlobalResponseNorm()}


class ConvNextV2Model(ConvNextV2Parallel, hf.ConvNextV2Model):
    pass


class ConvNextV2ForImageClassification(ConvNextV2Parallel, hf.ConvNextV2ForImageClassification):
    head_plan = CLASSIFIER
