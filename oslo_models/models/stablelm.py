"""StableLM: Llama with layer norms and optionally parallel residuals, with norms for each head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import StableLmConfig
from transformers.models.stablelm import modeling_stablelm as hf

from oslo_models.distributed.autograd_collectives import copy_to
from oslo_models.layers.kinds import ShardedModule, ShardingContext, shards
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import EvenSplit, GroupedHeads
from oslo_models.sharding.plan import Entries, Norm, Plan


@dataclass(frozen=True)
class HeadNorms(Norm):
    """List ``norms`` with one norm per head. Every rank holds all norms and applies them to its local heads.

    Args:
        heads: the split of the heads over the ranks.
    """

    heads: EvenSplit

    def covers_submodules(self) -> bool:
        return True


@shards(HeadNorms)
class HeadParallelNorms(ShardedModule):
    """Separate layer norm for each head. Input and output are ``[rows, local heads, positions, width]``.

    Every rank holds all norms. Gradients are zero except for the local heads, and are all-reduced.
    """

    heads: EvenSplit
    norms: nn.ModuleList

    def configure(self, entry: HeadNorms, context: ShardingContext) -> None:
        super().configure(entry, context)
        self.heads = entry.heads

    def forward(self, x: Tensor) -> Tensor:
        start, stop = self.heads.unit_ranges(self.tp.size)[self.tp.rank]
        norms: list[Any] = list(self.norms)
        leaves = [[getattr(norm, leaf) for norm in norms] for leaf in ("weight", "bias")]
        weights, biases = (None if params[0] is None else torch.stack(params) for params in leaves)
        if weights is not None:
            weights = copy_to(self.tp, weights)[start:stop, None]
        if biases is not None:
            biases = copy_to(self.tp, biases)[start:stop, None]
        normed = F.layer_norm(x, x.shape[-1:], eps=norms[0].eps)
        scaled = normed if weights is None else normed * weights
        return scaled if biases is None else scaled + biases


class StableLmParallel(LlamaParallel):
    """Sharding plan of the StableLM family."""

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        norms = {"self_attn.q_layernorm": HeadNorms(heads.query), "self_attn.k_layernorm": HeadNorms(heads.key_value)}
        return {**super().attention(config, heads), **(norms if config.qk_layernorm else {})}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return replace(super().plan(config), optional=("post_attention_layernorm",))


class StableLmModel(StableLmParallel, hf.StableLmModel):
    pass


class StableLmForCausalLM(StableLmParallel, hf.StableLmForCausalLM):
    head_plan = LM_HEAD


class StableLmForSequenceClassification(StableLmParallel, hf.StableLmForSequenceClassification):
    head_plan = SCORE


class StableLmForTokenClassification(StableLmParallel, hf.StableLmForTokenClassification):
    head_plan = SCORE
