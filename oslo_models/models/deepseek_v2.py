"""DeepSeek-V2: Llama with multi-head latent attention, and shared and routed experts after the first blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DeepseekV2Config
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as hf

from oslo_models.distributed.autograd_collectives import copy_to
from oslo_models.distributed.sharded_tensor import layer_context
from oslo_models.layers.entries import ColumnParallel, Entries, LocalAttributes, Norm, Replicated, RowParallel
from oslo_models.layers.kinds import ShardedModule, ShardingContext, shards
from oslo_models.layers.linear import SharesOutput
from oslo_models.modeling.blocks import mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import EvenSplit, GroupedHeads


@dataclass(frozen=True)
class Latent(Replicated):
    """Replicated projection to a latent for all heads and to the rotary part of a key that all heads share.

    Args:
        rotary: size of the rotary part, the last output features.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1 (multi-head latent attention).
    """

    rotary: int


@shards(Latent, nn.Linear)
class LatentLinear(SharesOutput, ShardedModule, nn.Linear):
    """Replicated projection to a latent and to the rotary part of a key that the heads of all ranks share.

    The column-parallel projection after the latent all-reduces the gradient of the latent. The rotary part enters the
    local heads directly, so this layer all-reduces its gradient.
    """

    rotary: int

    def configure(self, entry: Latent, context: ShardingContext) -> None:
        super().configure(entry, context)
        self.rotary = entry.rotary

    def forward(self, x: Tensor) -> Tensor:
        with layer_context(self.weight):
            output = F.linear(x, self.weight, self.bias)
            return output if self._is_shared_later else self.share(output)

    def share(self, output: Tensor) -> Tensor:
        latent, rotary = output.split([self.out_features - self.rotary, self.rotary], dim=-1)
        return torch.cat((latent, copy_to(self.tp, rotary)), dim=-1)


class DeepseekV2Parallel(LlamaParallel):
    """Sharding plan of the DeepSeek-V2 family."""

    mlp = {**LlamaParallel.mlp, **mixture_of_experts(shared="shared_experts")}
    optional = (*mlp, "self_attn.q_proj", "self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.q_b_proj")

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        count = config.num_attention_heads
        query = EvenSplit(count, config.qk_nope_head_dim + config.qk_rope_head_dim)
        return {
            "self_attn": LocalAttributes({"num_heads": query.local_count}),
            "self_attn.q_proj": ColumnParallel(query),
            "self_attn.q_a_proj": Replicated(),
            "self_attn.q_a_layernorm": Norm(),
            "self_attn.q_b_proj": ColumnParallel(query),
            "self_attn.kv_a_proj_with_mqa": Latent(config.qk_rope_head_dim),
            "self_attn.kv_a_layernorm": Norm(),
            "self_attn.kv_b_proj": ColumnParallel(EvenSplit(count, config.qk_nope_head_dim + config.v_head_dim)),
            "self_attn.o_proj": RowParallel(EvenSplit(count, config.v_head_dim)),
        }


class DeepseekV2Model(DeepseekV2Parallel, hf.DeepseekV2Model):
    pass


class DeepseekV2ForCausalLM(DeepseekV2Parallel, hf.DeepseekV2ForCausalLM):
    head_plan = LM_HEAD


class DeepseekV2ForSequenceClassification(DeepseekV2Parallel, hf.DeepseekV2ForSequenceClassification):
    head_plan = SCORE
