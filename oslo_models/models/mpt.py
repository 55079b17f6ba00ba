"""MPT: query, key and value side by side, biases of ALiBi in place of positions."""

from typing import Any

from transformers.models.mpt import modeling_mpt as hf

from oslo_models.layout import Units
from oslo_models.models.base import ParallelModel
from oslo_models.models.family import DECODER, family
from oslo_models.plan import Column, Norm, Plan, Replicated, Row, Vocab

HEADS = {**DECODER, "ForTokenClassification": {"classifier": Replicated()}}


class MptParallel(ParallelModel):
    """How every model of the MPT family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = Units(config.n_heads, config.d_model // config.n_heads)
        block = {
            "norm_1": Norm(),
            "attn.Wqkv": Column(heads, heads, heads),
            "attn.out_proj": Row(heads),
            "norm_2": Norm(),
            "ffn.up_proj": Column(),
            "ffn.down_proj": Row(),
        }
        return Plan(
            embed={"wte": Vocab()},
            blocks={"blocks": block},
            head={"norm_f": Norm()},
            local={"attn.n_heads": heads.local_count},
            per_head={"attn.position_bias": heads},
        )


globals().update(family(MptParallel, hf, HEADS))
