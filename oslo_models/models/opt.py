"""OPT: learned positions that count the padding out, embeddings that may be narrower than the blocks."""

from typing import Any

from transformers.models.opt import modeling_opt as hf

from oslo_models.layout import Units
from oslo_models.models.base import ParallelModel
from oslo_models.models.family import DECODER, family
from oslo_models.plan import Column, Norm, Plan, Replicated, Row, Vocab


class OPTParallel(ParallelModel):
    """How every model of the OPT family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = Units(config.num_attention_heads, config.hidden_size // config.num_attention_heads)
        block = {
            **{f"self_attn.{name}_proj": Column(heads) for name in "qkv"},
            "self_attn.out_proj": Row(heads),
            "self_attn_layer_norm": Norm(),
            "fc1": Column(),
            "fc2": Row(),
            "final_layer_norm": Norm(),
        }
        embed = {"embed_tokens": Vocab(), "embed_positions": Replicated(), "project_in": Replicated()}
        head = {"final_layer_norm": Norm(), "project_out": Replicated()}
        return Plan(
            embed={f"decoder.{name}": entry for name, entry in embed.items()},
            blocks={"decoder.layers": block},
            head={f"decoder.{name}": entry for name, entry in head.items()},
            local={"self_attn.num_heads": heads.local_count},
            optional=("decoder.project_in", "decoder.project_out", "final_layer_norm"),
        )


globals().update(family(OPTParallel, hf, DECODER))
