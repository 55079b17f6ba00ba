"""BigBird-Pegasus: BART whose encoder attends to blocks drawn for all heads together; with these it is not divided."""

from dataclasses import replace
from typing import Any

from transformers import BigBirdPegasusConfig
from transformers.models.bigbird_pegasus import modeling_bigbird_pegasus as hf

from oslo_models.modeling.heads import CLASSIFICATION_HEAD, LM_HEAD, QA_OUTPUTS
from oslo_models.models.bart import BartParallel
from oslo_models.sharding.plan import ColumnParallel, Plan, Replicated, RowParallel


class BigBirdPegasusParallel(BartParallel):
    """How every model of the BigBird-Pegasus family divides."""

    before = ()
    after = ("layernorm_embedding",)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        if "encoder" not in cls.stacks:
            return plan
        block = plan.blocks["encoder.layers"]
        heads, whole = cls.heads(config, "encoder"), config.attention_type == "block_sparse"
        names = [f"self_attn.self.{name}" for name in ("query", "key", "value")]
        encoder = {
            **{name: Replicated() if whole else ColumnParallel(heads) for name in names},
            "self_attn.output": Replicated() if whole else RowParallel(heads),
            **{name: entry for name, entry in block.items() if not name.startswith("self_attn.")},
        }
        local = {} if whole else {"self_attn.self.all_head_size": heads.local_extent}
        blocks = {**plan.blocks, "encoder.layers": encoder}
        return replace(plan, blocks=blocks, local=local, whole=("encoder_attentions",) if whole else ())


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
