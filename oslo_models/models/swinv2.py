"""Swin V2: Swin with attention to directions, biases computed from the distance of patches, and post-layer norms."""

from transformers import Swinv2Config
from transformers.models.swinv2 import modeling_swinv2 as hf

from oslo_models.layers.entries import ColumnParallel, Entries, LocalAttributes, Norm, Replicated, RowParallel
from oslo_models.modeling.blocks import QUERY_KEY_VALUE, qkv
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.swin import SwinParallel
from oslo_models.sharding.layout import EvenSplit


class Swinv2Parallel(SwinParallel):
    """Sharding plan of the Swin V2 family."""

    @classmethod
    def block(cls, heads: EvenSplit) -> Entries:
        local = {"num_attention_heads": heads.local_count, "all_head_size": heads.local_extent}
        by_head = ColumnParallel(EvenSplit(heads.count))
        return {
            "attention.self": LocalAttributes(local),
            "attention.self.logit_scale": by_head,
            "attention.self.continuous_position_bias_mlp.0": Replicated(),
            "attention.self.continuous_position_bias_mlp.2": by_head,
            **qkv("attention.self", heads, QUERY_KEY_VALUE),
            "attention.output.dense": RowParallel(heads),
            "layernorm_before": Norm(),
            "intermediate.dense": ColumnParallel(),
            "output.dense": RowParallel(),
            "layernorm_after": Norm(),
        }


class Swinv2Model(Swinv2Parallel, hf.Swinv2Model):
    pass


class Swinv2ForMaskedImageModeling(Swinv2Parallel, hf.Swinv2ForMaskedImageModeling):
    head_plan = {"decoder": Replicated()}


class Swinv2ForImageClassification(Swinv2Parallel, hf.Swinv2ForImageClassification):
    head_plan = CLASSIFIER
