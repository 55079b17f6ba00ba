"""BigBird-Pegasus: BART with block-sparse encoder attention, which is replicated because all heads share its
random blocks.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from transformers import BigBirdPegasusConfig
from transformers.models.bigbird_pegasus import modeling_bigbird_pegasus as hf

from oslo_models.layers.entries import LocalAttributes, Plan, Replicated, RowParallel
from oslo_models.modeling.blocks import QUERY_KEY_VALUE, qkv
from oslo_models.modeling.heads import CLASSIFICATION_HEAD, LM_HEAD, QA_OUTPUTS
from oslo_models.models.bart import BartParallel


class BigBirdPegasusParallel(BartParallel):
    """Sharding plan of the BigBird-Pegasus family."""

    embedding_norms = ()
    final_norms = ("layernorm_embedding",)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        if "encoder" not in cls.stacks:
            return plan
        block = plan.blocks["encoder.layers"]
        heads, replicated = cls.heads(config, "encoder"), config.attention_type == "block_sparse"
        projections = qkv("self_attn.self", heads, QUERY_KEY_VALUE)
        attention: dict[str, Replicated] = {**projections, "self_attn.output": RowParallel(heads)}
        if replicated:
            attention = dict.fromkeys(attention, Replicated())
        else:
            attention["self_attn.self"] = LocalAttributes({"all_head_size": heads.local_extent})
        rest = {name: entry for name, entry in block.items() if not name.startswith("self_attn.")}
        return replace(
            plan,
            blocks={**plan.blocks, "encoder.layers": {**attention, **rest}},
        )

    @classmethod
    def replicated_attentions(cls, config: Any) -> Collection[str]:
        return ("encoder_attentions",) if "encoder" in cls.stacks and config.attention_type == "block_sparse" else ()


class BigBirdPegasusModel(BigBirdPegasusParallel, hf.BigBirdPegasusModel):
    pass


class BigBirdPegasusForConditionalGeneration(BigBirdPegasusParallel, hf.BigBirdPegasusForConditionalGeneration):
    head_plan = LM_HEAD


class BigBirdPegasusForCausalLM(BigBirdPegasusParallel, hf.BigBirdPegasusForCausalLM):
    head_plan = LM_HEAD
    stacks = ("decoder",)


class BigBirdPegasusForSequenceClassification(BigBirdPegasusParallel, hf.BigBirdPegasusForSequenceClassification):
    head_plan = CLASSIFICATION_HEAD


class BigBirdPegasusForQuestionAnswering(BigBirdPegasusParallel, hf.BigBirdPegasusForQuestionAnswering):
    head_plan = QA_OUTPUTS
