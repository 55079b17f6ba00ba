"""WavLM: Wav2Vec2 with gated biases of relative positions, which all blocks share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import WavLMConfig
from transformers.models.wavlm import modeling_wavlm as hf
from transformers.utils.output_capturing import _active_collector

from oslo_models.distributed.autograd_collectives import copy_to, reduce_from
from oslo_models.layers.entries import ColumnParallel, Entries, HeadNorm, Plan, Replicated
from oslo_models.layers.function_overrides import override_attributes
from oslo_models.layers.kinds import ShardedModule, ShardingContext, shards
from oslo_models.modeling.blocks import heads_of
from oslo_models.models.beit import SHARED_BIASES
from oslo_models.models.wav2vec2 import CLASSIFIER, FRAMES, SPEAKERS, Wav2Vec2Parallel
from oslo_models.sharding.layout import EvenSplit


@dataclass(frozen=True)
class GatedAttention(Replicated):
    """Attention with gated biases of relative positions. Its parameters need separate entries.

    Args:
        heads: the heads.
    """

    has_parameters: ClassVar[bool] = False
    heads: EvenSplit


@shards(GatedAttention)
class ParallelGatedAttention(ShardedModule):
    """Attention of the local heads. Each gate reads the features of its head in the hidden states.

    transformers' attention calls a function of torch that takes weights of all heads.
    """

    heads: EvenSplit
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    out_proj: nn.Module
    num_heads: int
    head_dim: int
    dropout: float

    def configure(self, entry: GatedAttention, context: ShardingContext) -> None:
        super().configure(entry, context)
        self.heads, self.num_heads = entry.heads, entry.heads.local_count(self.tp.size, self.tp.rank)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        own = copy_to(self.tp, hidden_states)[..., slice(*self.heads.ranges(self.tp.size)[self.tp.rank])]
        attend: Any = partial(self.attend, hidden_states)
        with override_attributes(self, {"torch_multi_head_self_attention": attend}):
            return super().forward(own, *args, **kwargs)

    def attend(self, x: Tensor, _: Tensor, mask: Tensor | None, bias: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the outputs ``[rows, positions, hidden]``, and the mean weights of all heads if they are recorded.

        Args:
            x: hidden states ``[rows, positions, hidden]``, replicated.
            mask: ``[rows, positions]``, 1 for positions without padding.
            bias: ``[rows * local heads, positions, positions]``.
        """
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (each(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in projections)
        scores = query * self.head_dim**-0.5 @ key.transpose(-2, -1) + bias.unflatten(0, (len(x), -1))
        if mask is not None:
            scores = scores.masked_fill(mask.ne(1)[:, None, None], float("-inf"))
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        output = self.out_proj((weights @ value).transpose(1, 2).flatten(2))
        if "attentions" not in (_active_collector.get() or ()):
            return output, None
        mean = reduce_from(self.tp, weights.sum(1, keepdim=True)) / self.heads.count
        return output, mean.expand(weights.shape)


class WavLMParallel(Wav2Vec2Parallel):
    """Sharding plan of the WavLM family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan, heads = super().plan(config), heads_of(config)
        by_head = ColumnParallel(replace(heads, width=1), dim=1)
        (block,) = plan.blocks.values()
        positions: Entries = {
            "attention": GatedAttention(heads),
            "attention.gru_rel_pos_const": by_head,
            "attention.gru_rel_pos_linear": HeadNorm(),
            "attention.rel_attn_embed": by_head,
        }
        return replace(
            plan,
            blocks={"encoder.layers": {**block, **positions}},
            optional=(*plan.optional, "attention.rel_attn_embed"),
        ).with_rules(single_stage_reason=SHARED_BIASES)


class WavLMModel(WavLMParallel, hf.WavLMModel):
    pass


class WavLMForCTC(WavLMParallel, hf.WavLMForCTC):
    head_plan = {"lm_head": Replicated()}


class WavLMForSequenceClassification(WavLMParallel, hf.WavLMForSequenceClassification):
    head_plan = CLASSIFIER


class WavLMForAudioFrameClassification(WavLMParallel, hf.WavLMForAudioFrameClassification):
    head_plan = FRAMES
    loss_is_mean = False


class WavLMForXVector(WavLMParallel, hf.WavLMForXVector):
    head_plan = SPEAKERS
