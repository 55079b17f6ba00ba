"""Wav2Vec2-BERT: Conformer blocks on spectrograms. The convolutions are replicated on every rank."""

from typing import Any

from transformers import Wav2Vec2BertConfig
from transformers.models.wav2vec2_bert import modeling_wav2vec2_bert as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Norm, Plan, Replicated, RowParallel, SharedOutput
from oslo_models.modeling.blocks import heads_of, qkv
from oslo_models.models.wav2vec2 import (
    CLASSIFIER,
    FEATURES,
    FRAMES,
    SPEAKERS,
    Wav2Vec2Parallel,
)
from oslo_models.sharding.layout import EvenSplit


def half_mlp(name: str) -> Entries:
    """Return the plan of one of the two MLPs of a block, with its norm."""
    return {
        f"{name}_layer_norm": Norm(),
        f"{name}.intermediate_dense": ColumnParallel(),
        f"{name}.output_dense": RowParallel(),
    }


RELATIVE = ("self_attn.linear_pos", "self_attn.pos_bias_u", "self_attn.pos_bias_v", "self_attn.distance_embedding")
"""Modules and parameters of relative positions, which some configurations have."""
PADDING = "it sets padding frames to zero between the embedding and the blocks"


def conformer_block(config: Any) -> Entries:
    """Return the plan of a Conformer block: attention and a convolution between two MLPs."""
    heads = heads_of(config)
    linear, each = ColumnParallel(heads), ColumnParallel(EvenSplit(config.num_attention_heads))
    return {
        **half_mlp("ffn1"),
        "self_attn_layer_norm": Norm(),
        **qkv("self_attn", heads, ("linear_q", "linear_k", "linear_v")),
        "self_attn.linear_out": RowParallel(heads),
        **dict(zip(RELATIVE, (linear, each, each, SharedOutput()), strict=True)),
        "conv_module": Replicated(),
        **half_mlp("ffn2"),
        "final_layer_norm": Norm(),
    }


class Wav2Vec2BertParallel(Wav2Vec2Parallel):
    """Sharding plan of the Wav2Vec2-BERT family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        after = ("adapter", "intermediate_ffn")
        return Plan(
            embed={FEATURES: Norm(), "feature_projection.projection": Replicated(), "masked_spec_embed": Replicated()},
            blocks={"encoder.layers": conformer_block(config)},
            head=dict.fromkeys(after, Replicated()),
            optional=(*RELATIVE, *after, "masked_spec_embed", "layer_weights"),
        ).with_rules(single_stage_reason=PADDING)


class Wav2Vec2BertModel(Wav2Vec2BertParallel, hf.Wav2Vec2BertModel):
    pass


class Wav2Vec2BertForCTC(Wav2Vec2BertParallel, hf.Wav2Vec2BertForCTC):
    head_plan = {"lm_head": Replicated()}


class Wav2Vec2BertForSequenceClassification(Wav2Vec2BertParallel, hf.Wav2Vec2BertForSequenceClassification):
    head_plan = CLASSIFIER


class Wav2Vec2BertForAudioFrameClassification(Wav2Vec2BertParallel, hf.Wav2Vec2BertForAudioFrameClassification):
    head_plan = FRAMES
    loss_is_mean = False


class Wav2Vec2BertForXVector(Wav2Vec2BertParallel, hf.Wav2Vec2BertForXVector):
    head_plan = SPEAKERS
