"""ModernBERT decoder: ModernBERT with causal attention, and separate query, key and value projections."""

from dataclasses import replace
from typing import Any

from transformers import ModernBertDecoderConfig
from transformers.models.modernbert_decoder import modeling_modernbert_decoder as hf

from oslo_models.layers.entries import Norm, Plan, Replicated, VocabParallel
from oslo_models.modeling.blocks import heads_of, qkv
from oslo_models.models.modernbert import ModernBertParallel


class ModernBertDecoderParallel(ModernBertParallel):
    """Sharding plan of the ModernBERT decoder family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        block = {name: entry for name, entry in plan.blocks["layers"].items() if name != "attn.Wqkv"}
        return replace(plan, blocks={"layers": {**block, **qkv("attn", heads_of(config))}})


class ModernBertDecoderModel(ModernBertDecoderParallel, hf.ModernBertDecoderModel):
    pass


class ModernBertDecoderForCausalLM(ModernBertDecoderParallel, hf.ModernBertDecoderForCausalLM):
    head_plan = {"lm_head.dense": Replicated(), "lm_head.norm": Norm(), "decoder": VocabParallel()}


class ModernBertDecoderForSequenceClassification(
    ModernBertDecoderParallel, hf.ModernBertDecoderForSequenceClassification
):
    head_plan = {"head.dense": Replicated(), "head.norm": Norm(), "classifier": Replicated()}
