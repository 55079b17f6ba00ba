"""CTRL: a decoder with positions of sines, told the kind of text by its first token."""

from typing import Any

from transformers.models.ctrl import modeling_ctrl as hf

from oslo_models.layout import Units
from oslo_models.models.base import ParallelModel
from oslo_models.models.family import family
from oslo_models.plan import Column, Entries, Norm, Plan, Replicated, Row, Vocab

HEADS: dict[str, Entries] = {
    "Model": {},
    "LMHeadModel": {"lm_head": Vocab()},
    "ForSequenceClassification": {"classifier": Replicated()},
}


class CTRLParallel(ParallelModel):
    """How every model of the CTRL family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = Units(config.n_head, config.n_embd // config.n_head)
        block = {
            **{f"multi_head_attention.{name}": Column(heads) for name in ("Wq", "Wk", "Wv")},
            "multi_head_attention.dense": Row(heads),
            "ffn.0": Column(),
            "ffn.2": Row(),
            "layernorm1": Norm(),
            "layernorm2": Norm(),
        }
        return Plan(
            embed={"w": Vocab(), "pos_encoding": Replicated()},
            blocks={"h": block},
            head={"layernorm": Norm()},
            optional=("pos_encoding",),  # a buffer
            neutral={"d_model_size": 1},
            dropout=("dropout",),
        )


globals().update(family(CTRLParallel, hf, HEADS))
