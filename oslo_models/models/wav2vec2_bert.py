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


class Wav2Vec2BertParallel(Wav2Vec2Parallel):
    """Sharding plan of the Wav2Vec2-BERT family."""

    def _initialized_whole(self) -> list[str]:
        """Return also the attentions: the range of the biases of relative positions depends on their full shape."""
        attentions = [name for name, module in self.named_modules() if hasattr(module, "pos_bias_u")]
        return [*super()._initialized_whole(), *attentions]

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads, each = heads_of(config), ColumnParallel(EvenSplit(config.num_attention_heads))
        relative: dict[str, Replicated] = {
            "self_attn.linear_pos": ColumnParallel(heads),
            "self_attn.pos_bias_u": each,
            "self_attn.pos_bias_v": each,
            "self_attn.distance_embedding": SharedOutput(),
        }
        block = {
            **half_mlp("ffn1"),
            "self_attn_layer_norm": Norm(),
            **qkv("self_attn", heads, ("linear_q", "linear_k", "linear_v")),
            "self_attn.linear_out": RowParallel(heads),
            **relative,
            "conv_module": Replicated(),
            **half_mlp("ffn2"),
            "final_layer_norm": Norm(),
        }
        after = ("adapter", "intermediate_ffn")
        return Plan(
            embed={FEATURES: Norm(), "feature_projection.projection": Replicated(), "masked_spec_embed": Replicated()},
            blocks={"encoder.layers": block},
            head=dict.fromkeys(after, Replicated()),
            optional=(*relative, *after, "masked_spec_embed", "layer_weights"),
        ).with_rules(single_stage_reason="it sets padding frames to zero between the embedding and the blocks")


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
