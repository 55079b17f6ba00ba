"""CodeGen: GPT-J whose query, value and key lie side by side in four parts, as it was trained on four chips."""

from typing import Any

from transformers.models.codegen import modeling_codegen as hf

from oslo_models.layout import Units
from oslo_models.models.base import ParallelModel
from oslo_models.models.family import DECODER, family
from oslo_models.plan import Column, Norm, Plan, Row, Vocab


class CodeGenParallel(ParallelModel):
    """How every model of the CodeGen family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = Units(config.n_head // 4, config.n_embd // config.n_head)  # of each part
        block = {
            "ln_1": Norm(),
            "attn.qkv_proj": Column(*[heads] * 12),
            "attn.out_proj": Row(*[heads] * 4),
            "mlp.fc_in": Column(),
            "mlp.fc_out": Row(),
        }
        return Plan(
            embed={"wte": Vocab()},
            blocks={"h": block},
            head={"ln_f": Norm()},
            local={"attn.num_attention_heads": lambda n, rank: 4 * heads.local_count(n, rank)},
            dropout=("drop",),
        )


globals().update(family(CodeGenParallel, hf, DECODER))
