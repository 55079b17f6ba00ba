"""CTRL: a decoder with sinusoidal positions, conditioned on control codes."""

from typing import Any

from transformers import CTRLConfig
from transformers.models.ctrl import modeling_ctrl as hf

from oslo_models.layers.entries import ColumnParallel, Norm, Plan, Replicated, RowParallel, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of, qkv
from oslo_models.modeling.heads import CLASSIFIER, LM_HEAD


class CTRLParallel(ParallelModel):
    """Sharding plan of the CTRL family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        block = {
            **qkv("multi_head_attention", heads, ("Wq", "Wk", "Wv")),
            "multi_head_attention.dense": RowParallel(heads),
            "ffn.0": ColumnParallel(),
            "ffn.2": RowParallel(),
            "layernorm1": Norm(),
            "layernorm2": Norm(),
        }
        return Plan(
            embed={"w": VocabParallel(), "pos_encoding": Replicated()},
            blocks={"h": block},
            head={"layernorm": Norm()},
            optional=("pos_encoding",),  # a buffer
        ).with_rules(disabled_after_first_stage={"d_model_size": 1}, embedding_dropouts=("dropout",))


class CTRLModel(CTRLParallel, hf.CTRLModel):
    pass


class CTRLLMHeadModel(CTRLParallel, hf.CTRLLMHeadModel):
    head_plan = LM_HEAD


class CTRLForSequenceClassification(CTRLParallel, hf.CTRLForSequenceClassification):
    head_plan = CLASSIFIER
