"""SEW: Wav2Vec2 whose blocks see a pooled sequence."""

from typing import Any

from transformers import SEWConfig
from transformers.models.sew import modeling_sew as hf

from oslo_models.layers.entries import Norm, Plan, Replicated
from oslo_models.modeling.blocks import heads_of
from oslo_models.models.wav2vec2 import CLASSIFIER, Wav2Vec2Parallel, encoder_block


class SEWParallel(Wav2Vec2Parallel):
    """Sharding plan of the SEW family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return Plan(
            embed={
                "feature_extractor": Replicated(),
                "layer_norm": Norm(),
                "feature_projection": Replicated(),
                "masked_spec_embed": Replicated(),
                "encoder.pos_conv_embed": Replicated(),
                "encoder.layer_norm": Norm(),
            },
            blocks={"encoder.layers": encoder_block(heads_of(config))},
            head={"encoder.upsample": Replicated()},
            optional=("feature_projection", "masked_spec_embed", "layer_weights"),
        ).with_rules(single_stage_reason="the sequence is pooled before the blocks and upsampled after them")


class SEWModel(SEWParallel, hf.SEWModel):
    pass


class SEWForCTC(SEWParallel, hf.SEWForCTC):
    head_plan = {"lm_head": Replicated()}


class SEWForSequenceClassification(SEWParallel, hf.SEWForSequenceClassification):
    head_plan = CLASSIFIER
