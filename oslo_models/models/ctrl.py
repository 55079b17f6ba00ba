"""CTRL: a decoder with positions of sines, told the kind of text by its first token."""

from typing import Any

from transformers import CTRLConfig
from transformers.models.ctrl import modeling_ctrl as hf

from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFIER, LM_HEAD
from oslo_models.sharding.layout import EvenSplit
from oslo_models.sharding.plan import ColumnParallel, Norm, Plan, Replicated, RowParallel, VocabParallel


class CTRLParallel(ParallelModel):
    """How every model of the CTRL family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = EvenSplit(config.n_head, config.n_embd // config.n_head)
        block = {
            **{f"multi_head_attention.{name}": ColumnParallel(heads) for name in ("Wq", "Wk", "Wv")},
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
            neutral={"d_model_size": 1},
            dropout=("dropout",),
        )


class CTRLModel(CTRLParallel, hf.CTRLModel):
    pass


class CTRLLMHeadModel(CTRLParallel, hf.CTRLLMHeadModel):
    head_plan = LM_HEAD


class CTRLForSequenceClassification(CTRLParallel, hf.CTRLForSequenceClassification):
    head_plan = CLASSIFIER
