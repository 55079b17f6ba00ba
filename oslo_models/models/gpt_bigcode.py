"""GPT-BigCode (StarCoder): GPT-2 with one key-value head for all queries."""

from typing import Any

from transformers.models.gpt_bigcode import modeling_gpt_bigcode as hf

from oslo_models.layout import GroupedHeads
from oslo_models.models.base import ParallelModel
from oslo_models.models.family import DECODER, family
from oslo_models.plan import Column, Norm, Plan, Replicated, Row, Vocab

HEADS = {**DECODER, "ForTokenClassification": {"classifier": Replicated()}}


class GPTBigCodeParallel(ParallelModel):
    """How every model of the GPT-BigCode family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        count = config.n_head
        heads = GroupedHeads(count, 1 if config.multi_query else count, config.n_embd // count)
        one = Column(heads.query, heads.key_value, heads.key_value)
        block = {
            "ln_1": Norm(),
            "attn.c_attn": one if config.multi_query else Column(*heads.interleaved),
            "attn.c_proj": Row(heads.query),
            "ln_2": Norm(),
            "mlp.c_fc": Column(),
            "mlp.c_proj": Row(),
        }
        return Plan(
            embed={"wte": Vocab(), "wpe": Replicated()},
            blocks={"h": block},
            head={"ln_f": Norm()},
            local={
                "attn.num_heads": heads.query.local_count,
                "attn.embed_dim": heads.query.local_extent,
                "attn.num_key_value_groups": heads.local_ratio,
            },
            dropout=("drop",),
        )


globals().update(family(GPTBigCodeParallel, hf, HEADS))
